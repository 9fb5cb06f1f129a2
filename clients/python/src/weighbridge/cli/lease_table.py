"""Leases as people read them: the table, the queue with what each claim waits for, and who vacates for whom."""

import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from rich.console import Console
from weighbridge_proto.ledger.v1 import lease_pb2

from weighbridge.cli.tables import enum_word, plain_table
from weighbridge.happenings import asked_words, who
from weighbridge.sizes import all_bytes, format_size

SHORT_ID = 8
"""Digits of a lease's id in a table: enough to tell leases apart, and for `free`; --json has it whole."""

NO_MARKS: Mapping[str, str] = MappingProxyType({})

_HOW_THEY_ARE_IN_THE_WAY = {"EXCLUSIVE_USE": "There:", "LOADS_ONE_AT_A_TIME": "Loading:", "EARLIER_CLAIM": "Before it:"}
"""What the leases of a wait reason do, by its code; of all others they hold what is waited for."""


def print_leases(to: Console, leases: Sequence[lease_pb2.Lease], now_s: float | None = None) -> None:
    """The leases, what they are charged together, what the queued ones wait for, and why others are to end."""
    if not leases:
        to.print("No leases.")
        return
    notes = [", ".join(lease_notes(lease)) for lease in leases]
    table = plain_table(("lease", "state", "holder", "model"), ("charged", "bytes", "observed", "uses"))
    if any(notes):
        table.add_column("notes", overflow="fold")
    for lease, note in zip(leases, notes, strict=True):
        state = enum_word(lease_pb2.LeaseState, lease.state, "LEASE_STATE_") + (" (silent)" if lease.suspect else "")
        if lease.queue_position:
            state += f" ({lease.queue_position}.)"
        charged = all_bytes(lease.charge)
        table.add_row(
            lease.lease_id[:SHORT_ID],
            state,
            lease.holder.name,
            lease.purpose.model_name,
            format_size(charged),
            f"{charged:,}",
            format_size(all_bytes(lease.observed)) if lease.HasField("observed") else "",
            str(lease.uses),
            *([note] if any(notes) else []),
        )
    to.print(table)
    to.print(f"Committed together: {format_size(sum(all_bytes(lease.charge) for lease in leases))}")
    now_s = time.time() if now_s is None else now_s
    for line in (*ended_lines(leases), *silent_lines(leases), *vacating_lines(leases), *waiting_lines(leases, now_s)):
        to.print(line)


def lease_notes(lease: lease_pb2.Lease) -> Iterator[str]:
    """What most leases are not: in a word or two each."""
    if lease.pinned:
        yield "pinned"
    if lease.exclusive:
        yield "alone on its device"
    if lease.charge.optional_bytes:
        yield f"{format_size(lease.charge.optional_bytes)} optional"
    if lease.charge.spilled_bytes:
        yield f"{format_size(lease.charge.spilled_bytes)} spilled"
    if lease.replaces_lease_id:
        yield f"replaces {lease.replaces_lease_id[:SHORT_ID]}"
    if lease.queue_position and lease.level > lease.priority:
        yield f"raised to {enum_word(lease_pb2.Priority, lease.level, 'PRIORITY_')}"
    elif lease.priority not in (lease_pb2.PRIORITY_UNSPECIFIED, lease_pb2.PRIORITY_NORMAL):
        yield enum_word(lease_pb2.Priority, lease.priority, "PRIORITY_")


def waiting_lines(
    leases: Sequence[lease_pb2.Lease], now_s: float, marks: Mapping[str, str] = NO_MARKS
) -> Iterator[str]:
    """The queue in its order: who waits for how much and for how long, and beneath it what for.

    ``marks``: what holders are called here, by lease; else by a part of their id.
    """
    waiting = sorted((lease for lease in leases if lease.queue_position), key=lambda lease: lease.queue_position)
    for lease in waiting:
        since = max(0.0, now_s - lease.create_time.ToNanoseconds() / 1e9)
        wanted = asked_words(lease)
        comma = "," if "," in wanted else ""
        yield f"{lease.queue_position}. {who(lease)}: waits for {wanted}{comma} since {since:.0f} s"
        for reason in lease.wait_reasons:
            holders = ", ".join(_mark(lease_id, marks) for lease_id in reason.lease_ids)
            how = _HOW_THEY_ARE_IN_THE_WAY.get(reason.code, "Held by")
            yield f"   {reason.message}{f' {how} {holders}.' if holders else ''}"


def ended_lines(leases: Sequence[lease_pb2.Lease]) -> Iterator[str]:
    """Why each lease that has ended did."""
    for lease in leases:
        if lease.state == lease_pb2.LEASE_STATE_RELEASED and lease.end_reason.message:
            yield f"{lease.lease_id[:SHORT_ID]} has ended. {lease.end_reason.message}"


def silent_lines(leases: Sequence[lease_pb2.Lease]) -> Iterator[str]:
    """What becomes of each lease whose holder fell silent, and what a person can do."""
    for lease in leases:
        if not lease.suspect:
            continue
        mark = lease.lease_id[:SHORT_ID]
        keeps = "until all its processes have ended" if lease.processes_visible else "until it has ended its own engine"
        yield f"{mark} is silent. It keeps its bytes {keeps}; if you know that they have: weighbridge free {mark}"


def vacating_lines(leases: Sequence[lease_pb2.Lease], marks: Mapping[str, str] = NO_MARKS) -> Iterator[str]:
    """Why each lease that is vacating is to end: for whom, or because it was released."""
    for lease in leases:
        if lease.state == lease_pb2.LEASE_STATE_VACATING and lease.end_reason.message:
            yield f"{_mark(lease.lease_id, marks)} is vacating. {lease.end_reason.message}"


def _mark(lease_id: str, marks: Mapping[str, str]) -> str:
    return marks.get(lease_id, lease_id[:SHORT_ID])

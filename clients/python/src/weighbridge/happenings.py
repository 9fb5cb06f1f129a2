"""What happened to a lease, read off how it was and how it is. The ledger tells each change as the lease after it."""

from collections.abc import Iterator
from dataclasses import dataclass

from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge.sizes import all_bytes, format_size

REMEMBERED = 65_536
"""Leases whose last state is kept to compare with: far beyond what a ledger holds; released ones are let go."""


@dataclass(frozen=True)
class Happening:
    """One change in words.

    Attributes:
        word: what happened, in capitals: QUEUED, GRANTED, ACTIVE, ENGINE, RESIZED, SILENT, ATTACHED, VACATING,
            RELEASED, CEILINGS, or LISTED for what stands as a watch begins.
        who: the lease's holder and model; empty for the machine.
        text: the rest of the sentence.
    """

    word: str
    who: str
    text: str


class Happenings:
    """Remembers each lease as it was last seen."""

    def __init__(self) -> None:
        self._known: dict[str, lease_pb2.Lease] = {}

    def read(self, response: ledger_service_pb2.WatchResponse) -> Iterator[Happening]:
        """What ``response`` tells."""
        kind = response.WhichOneof("change")
        if kind == "snapshot":
            self._known = {lease.lease_id: lease for lease in response.snapshot.leases}
            yield Happening("CEILINGS", "", ceilings_words(response.snapshot.capacity))
            for lease in response.snapshot.leases:
                yield Happening("LISTED", who(lease), _standing(lease))
        elif kind == "capacity":
            yield Happening("CEILINGS", "", ceilings_words(response.capacity))
        elif kind == "lease":
            word, text = _change(self._known.get(response.lease.lease_id), response.lease)
            self._remember(response.lease)
            yield Happening(word, who(response.lease), text)

    def _remember(self, lease: lease_pb2.Lease) -> None:
        self._known.pop(lease.lease_id, None)
        if lease.state != lease_pb2.LEASE_STATE_RELEASED:
            self._known[lease.lease_id] = lease
            if len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]


def who(lease: lease_pb2.Lease) -> str:
    """Holder and model of a lease."""
    return " ".join(part for part in (lease.holder.name, lease.purpose.model_name) if part) or f"lease {lease.lease_id}"


def asked_bytes(lease: lease_pb2.Lease) -> int:
    """What a lease's claim requires, wherever it lives."""
    return lease.claim.host_bytes + sum(device.required_bytes for device in lease.claim.devices)


def ceilings_words(capacity: machine_pb2.Capacity) -> str:
    """What the machine allows in all."""
    total = capacity.total
    limit = f", limit {format_size(total.limit_bytes)}" if total.HasField("limit_bytes") else ""
    return f"{format_size(total.committed_bytes)} of {format_size(total.effective_bytes)} committed{limit}"


def _change(before: lease_pb2.Lease | None, lease: lease_pb2.Lease) -> tuple[str, str]:
    charged = format_size(all_bytes(lease.charge))
    state = lease.state
    if state == lease_pb2.LEASE_STATE_QUEUED:
        return "QUEUED", f"waits for {format_size(asked_bytes(lease))}"
    if state == lease_pb2.LEASE_STATE_RELEASED:
        back = f"{format_size(all_bytes(before.charge))} given back. " if before and before.HasField("charge") else ""
        return "RELEASED", f"{back}{lease.end_reason.message}".strip()
    if before is None or before.state != state:
        if state == lease_pb2.LEASE_STATE_GRANTED:
            spilled = lease.charge.spilled_bytes
            return "GRANTED", charged + (f", {format_size(spilled)} of it spilled to the host" if spilled else "")
        if state == lease_pb2.LEASE_STATE_VACATING:
            return "VACATING", f"{charged}. {lease.end_reason.message}".strip()
        return "ACTIVE", charged
    if lease.suspect and not before.suspect:
        return "SILENT", f"{charged} stay charged until its processes are known to be gone"
    if before.suspect and not lease.suspect:
        return "ATTACHED", charged
    if lease.charge != before.charge:
        return "RESIZED", f"{format_size(all_bytes(before.charge))} to {charged}"
    if len(lease.engine_processes) != len(before.engine_processes):
        pids = ", ".join(str(process.pid) for process in lease.engine_processes)
        return "ENGINE", f"process {pids}"
    if state == lease_pb2.LEASE_STATE_VACATING:
        return "VACATING", f"{charged} still held"
    return "ATTACHED", charged


def _standing(lease: lease_pb2.Lease) -> str:
    state = lease_pb2.LeaseState.Name(lease.state).removeprefix("LEASE_STATE_").lower()
    if lease.state == lease_pb2.LEASE_STATE_QUEUED:
        return f"{state}, waits for {format_size(asked_bytes(lease))}"
    return f"{state}{', silent' if lease.suspect else ''}, {format_size(all_bytes(lease.charge))}"

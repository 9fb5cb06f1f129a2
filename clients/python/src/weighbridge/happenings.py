"""What happened to a lease, in words.

The ledger tells each change as the lease after it, and what kind of change it was. In recordings that were made before
it told the kind, that is read off how the lease was and how it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge.sizes import all_bytes, format_size

_KIND_OF_STATE = {
    lease_pb2.LEASE_STATE_QUEUED: ledger_service_pb2.CHANGE_KIND_QUEUED,
    lease_pb2.LEASE_STATE_GRANTED: ledger_service_pb2.CHANGE_KIND_GRANTED,
    lease_pb2.LEASE_STATE_ACTIVE: ledger_service_pb2.CHANGE_KIND_ACTIVATED,
    lease_pb2.LEASE_STATE_VACATING: ledger_service_pb2.CHANGE_KIND_VACATING,
    lease_pb2.LEASE_STATE_RELEASED: ledger_service_pb2.CHANGE_KIND_RELEASED,
}
"""What has happened to a lease that was in another state before."""

REMEMBERED = 65_536
"""Leases whose last state is kept to compare with: far beyond what a ledger holds; released ones are let go."""


@dataclass(frozen=True)
class Happening:
    """One change in words.

    Attributes:
        word: what happened, in capitals: QUEUED, RECLAIMING, GRANTED, ACTIVE, ENGINE, LOADED, RESIZED, SILENT,
            ATTACHED, VACATING, OVERDUE, RELEASED, CEILINGS, or LISTED for what stands as a watch begins.
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
            before = self._known.get(response.lease.lease_id)
            told = response.kind or _kind(before, response.lease)
            word, text = _change(told, before, response.lease)
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


def asked_words(lease: lease_pb2.Lease) -> str:
    """What a claim waits for: its bytes, and what else it asks for."""
    parts = [format_size(asked_bytes(lease))]
    optional = lease.claim.optional_host_bytes + sum(device.optional_bytes for device in lease.claim.devices)
    if optional:
        parts.append(f"{format_size(optional)} more if there is room")
    if lease.exclusive:
        parts.append("alone on its device")
    if lease.replaces_lease_id:
        parts.append("in place of a lease of its own")
    return ", ".join(parts)


def charge_words(lease: lease_pb2.Lease) -> str:
    """What a lease is charged, and what is to be known of that."""
    parts = [format_size(all_bytes(lease.charge))]
    if lease.charge.optional_bytes:
        parts.append(f"{format_size(lease.charge.optional_bytes)} of it optional")
    if lease.charge.spilled_bytes:
        parts.append(f"{format_size(lease.charge.spilled_bytes)} of it spilled to the host")
    if lease.exclusive:
        parts.append("alone on its device")
    return ", ".join(parts)


def ceilings_words(capacity: machine_pb2.Capacity) -> str:
    """What the machine allows in all."""
    total = capacity.total
    limit = f", limit {format_size(total.limit_bytes)}" if total.HasField("limit_bytes") else ""
    return f"{format_size(total.committed_bytes)} of {format_size(total.effective_bytes)} committed{limit}"


def _kind(before: lease_pb2.Lease | None, lease: lease_pb2.Lease) -> int:
    """The kind of a change that does not say it."""
    state = lease.state
    if before is None or before.state != state:
        return _KIND_OF_STATE.get(state, ledger_service_pb2.CHANGE_KIND_ACTIVATED)
    if lease.suspect and not before.suspect:
        return ledger_service_pb2.CHANGE_KIND_SUSPECTED
    if before.suspect and not lease.suspect:
        return ledger_service_pb2.CHANGE_KIND_ATTACHED
    if lease.charge != before.charge:
        return ledger_service_pb2.CHANGE_KIND_RESIZED
    if len(lease.engine_processes) != len(before.engine_processes):
        return ledger_service_pb2.CHANGE_KIND_ACTIVATED
    if state == lease_pb2.LEASE_STATE_ACTIVE:
        return ledger_service_pb2.CHANGE_KIND_ATTACHED
    if state == lease_pb2.LEASE_STATE_VACATING:
        return ledger_service_pb2.CHANGE_KIND_OVERDUE
    return _KIND_OF_STATE.get(state, ledger_service_pb2.CHANGE_KIND_ACTIVATED)


def _change(kind: int, before: lease_pb2.Lease | None, lease: lease_pb2.Lease) -> tuple[str, str]:
    charged = format_size(all_bytes(lease.charge))
    match kind:
        case ledger_service_pb2.CHANGE_KIND_QUEUED:
            return "QUEUED", f"waits for {asked_words(lease)}"
        case ledger_service_pb2.CHANGE_KIND_RECLAIMING:
            return "RECLAIMING", f"others were asked to make room for {format_size(asked_bytes(lease))}"
        case ledger_service_pb2.CHANGE_KIND_GRANTED:
            return "GRANTED", charge_words(lease)
        case ledger_service_pb2.CHANGE_KIND_LOADED:
            return "LOADED", charged
        case ledger_service_pb2.CHANGE_KIND_SUSPECTED:
            return "SILENT", f"{charged} stay charged until its processes are known to be gone"
        case ledger_service_pb2.CHANGE_KIND_ATTACHED:
            return "ATTACHED", charged
        case ledger_service_pb2.CHANGE_KIND_RESIZED:
            return "RESIZED", _resized_words(before, lease)
        case ledger_service_pb2.CHANGE_KIND_VACATING:
            return "VACATING", f"{charged}. {lease.end_reason.message}".strip()
        case ledger_service_pb2.CHANGE_KIND_OVERDUE:
            return "OVERDUE", f"{charged} still held. {lease.end_reason.message}".strip()
        case ledger_service_pb2.CHANGE_KIND_RELEASED:
            had = before is not None and before.HasField("charge")
            back = f"{format_size(all_bytes(before.charge))} given back. " if had and before is not None else ""
            return "RELEASED", f"{back}{lease.end_reason.message}".strip()
    if before is not None and before.state == lease.state:
        pids = ", ".join(str(process.pid) for process in lease.engine_processes)
        return "ENGINE", f"process {pids}"
    return "ACTIVE", charged


def _resized_words(before: lease_pb2.Lease | None, lease: lease_pb2.Lease) -> str:
    charged = format_size(all_bytes(lease.charge))
    parts = []
    if before is None or before.charge != lease.charge:
        parts.append(f"{format_size(all_bytes(before.charge))} to {charged}" if before is not None else charged)
    if before is not None and before.exclusive != lease.exclusive:
        parts.append("alone on its device" if lease.exclusive else "no longer alone on its device")
    return ", ".join(parts) or charged


def _standing(lease: lease_pb2.Lease) -> str:
    state = lease_pb2.LeaseState.Name(lease.state).removeprefix("LEASE_STATE_").lower()
    if lease.state == lease_pb2.LEASE_STATE_QUEUED:
        return f"{state}, waits for {asked_words(lease)}"
    return f"{state}{', silent' if lease.suspect else ''}, {charge_words(lease)}"

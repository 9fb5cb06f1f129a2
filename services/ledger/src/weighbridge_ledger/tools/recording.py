"""Playing recorded changes again: whether what the ledger told, step by step, keeps the rules of the book.

A recording is what ``weighbridge watch --json`` prints, one object a line. The database has no history, so this is the
one place where transitions, and not only states, can be looked at afterwards.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from google.protobuf.json_format import ParseDict, ParseError
from weighbridge_common.sizes import format_gib
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge_ledger.book import HOST
from weighbridge_ledger.book.states import GPU
from weighbridge_ledger.tools.audit import Finding

TOTAL = "total"

_ORDER = {
    lease_pb2.LEASE_STATE_QUEUED: 0,
    lease_pb2.LEASE_STATE_GRANTED: 1,
    lease_pb2.LEASE_STATE_ACTIVE: 2,
    lease_pb2.LEASE_STATE_VACATING: 3,
    lease_pb2.LEASE_STATE_RELEASED: 4,
}
_CHARGED = frozenset({1, 2, 3})

_RELEASED_KEPT = 100_000
"""Ended leases whose return would be noticed."""

_WHAT_IT_IS = "A recording is what `weighbridge watch --json` prints."


class RecordingError(Exception):
    """A line is no change of a ledger. The text says which."""


@dataclass(slots=True)
class Playback:
    """How far a recording has been played."""

    changes: int = 0
    epochs: list[str] = field(default_factory=list)
    gaps: int = 0
    """Places where the watch missed changes and began anew."""
    peaks: dict[str, int] = field(default_factory=dict)
    """The most that was ever charged, by pool; the sum over all is under TOTAL."""
    findings: list[Finding] = field(default_factory=list)
    _revision: int | None = None
    _charges: dict[str, dict[str, int]] = field(default_factory=dict)
    _reached: dict[str, int] = field(default_factory=dict)
    _ceilings: dict[str, int] = field(default_factory=dict)
    _has_shared_gpu: bool = False
    _exclusive_heeded: bool = False
    _there: dict[str, dict[str, None]] = field(default_factory=dict)
    """The leases on each device."""
    _alone: dict[str, None] = field(default_factory=dict)
    """The leases that have their devices to themselves."""
    _fence: int = 0
    _sums: dict[str, int] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """Whether every change kept the rules."""
        return not any(finding.is_fault for finding in self.findings)

    def gap(self) -> None:
        """Changes are missing here; a snapshot follows."""
        self.gaps += 1
        self._revision = None

    def play(self, change: pb.WatchResponse) -> None:
        """Take up one change."""
        self.changes += 1
        self._follow(change)
        kind = change.WhichOneof("change")
        if kind == "snapshot":
            self._take_ceilings(change.snapshot.capacity)
            self._charges, self._sums, self._there, self._alone = {}, {}, {}, {}
            for lease in change.snapshot.leases:
                # What stands was granted under whatever ceilings there were then: only a rise counts.
                self._step(lease, _charge(lease), change.revision, is_rise=False)
        elif kind == "capacity":
            self._take_ceilings(change.capacity)
        elif kind == "lease":
            self._step(change.lease, _charge(change.lease), change.revision, is_rise=True)

    def _follow(self, change: pb.WatchResponse) -> None:
        """Every change is told once, in order, under one epoch after the other."""
        at = f"{change.epoch}:{change.revision}"
        if not self.epochs or self.epochs[-1] != change.epoch:
            if self.epochs and self._revision is not None:
                self._fault("ORDER", "begins another run of the ledger without saying so.", at)
            self.epochs.append(change.epoch)
            self._revision = None
        is_snapshot = change.HasField("snapshot")
        if self._revision is not None and change.revision != self._revision + (not is_snapshot):
            self._fault("ORDER", f"follows {self._revision}: changes are missing, or told twice.", at)
        if self._revision is None and not is_snapshot and self.changes > 1:
            self._fault("ORDER", "follows a gap without a snapshot of how things stood.", at)
        self._revision = change.revision

    def _step(self, lease: lease_pb2.Lease, charge: dict[str, int], revision: int, *, is_rise: bool) -> None:
        order, before = _ORDER.get(lease.state, -1), self._reached.pop(lease.lease_id, -1)
        at = f"{lease.lease_id[:16]} at {revision}"
        if order < before:
            names = [_name(state) for state in (before, order)]
            self._fault(
                "STATE_BACK", f"went from {names[0]} back to {names[1]}: states are never walked backwards.", at
            )
        if bool(charge) != (order in _CHARGED):
            self._fault("CHARGE_STATE", f"is {_name(order)} and charged {format_gib(sum(charge.values()))}.", at)
        if order in _CHARGED and before < 1:
            if is_rise and lease.fence <= self._fence:
                self._fault("FENCE", f"was granted with the fence {lease.fence} after {self._fence}.", at)
            self._fence = max(self._fence, lease.fence)
        self._reached[lease.lease_id] = max(order, before)
        if len(self._reached) > _RELEASED_KEPT + len(self._charges):
            del self._reached[next(iter(self._reached))]
        self._recharge(lease.lease_id, charge, at, is_rise=is_rise)
        if lease.charge.optional_bytes > sum(charge.values()):
            self._fault("OPTIONAL", "has more optional bytes than it is charged.", at)
        self._move(lease, self._devices_of(lease) if charge else (), at, is_rise=is_rise)

    def _move(self, lease: lease_pb2.Lease, devices: tuple[str, ...], at: str, *, is_rise: bool) -> None:
        """Who is on which device, and whether somebody came to be beside a lease that is alone there (rule 26)."""
        of = lease.lease_id
        was_alone = of in self._alone
        self._alone.pop(of, None)
        if lease.exclusive and devices:
            self._alone[of] = None
        for device in [device for device, there in self._there.items() if of in there and device not in devices]:
            del self._there[device][of]
        for device in devices:
            there = self._there.setdefault(device, {})
            others = [other for other in there if other != of]
            joins = of not in there
            there[of] = None
            if not (is_rise and self._exclusive_heeded):
                continue
            if joins and any(other in self._alone for other in others):
                self._fault("NOT_ALONE", f"came to {device}, which another lease has to itself.", at)
            elif others and of in self._alone and (joins or not was_alone):
                self._fault("NOT_ALONE", f"was given {device} to itself, and {len(others)} more are there.", at)

    def _devices_of(self, lease: lease_pb2.Lease) -> tuple[str, ...]:
        cards = tuple(card.device_id for card in lease.charge.devices)
        return (GPU,) if self._has_shared_gpu and not cards and not lease.claim.cpu_only else cards

    def _recharge(self, lease_id: str, charge: dict[str, int], at: str, *, is_rise: bool) -> None:
        old = self._charges.pop(lease_id, {})
        if charge:
            self._charges[lease_id] = charge
        for pool in sorted({*old, *charge, TOTAL}):
            here = (sum(of.values()) if pool == TOTAL else of.get(pool, 0) for of in (old, charge))
            was, now = here
            held = self._sums[pool] = self._sums.get(pool, 0) + now - was
            self.peaks[pool] = max(self.peaks.get(pool, 0), held)
            ceiling = self._ceilings.get(pool)
            if is_rise and now > was and ceiling is not None and held > ceiling:
                text = f"raised what is charged on {pool} to {format_gib(held)}, above {format_gib(ceiling)}."
                self._fault("ABOVE_CEILING", text, at)

    def _take_ceilings(self, capacity: machine_pb2.Capacity) -> None:
        self._ceilings = {HOST: capacity.host.effective_bytes, TOTAL: capacity.total.effective_bytes}
        self._has_shared_gpu = capacity.pool == machine_pb2.POOL_KIND_UNIFIED
        self._exclusive_heeded = capacity.exclusive_heeded
        self._ceilings |= {card.device.device_id: card.ceiling.effective_bytes for card in capacity.devices}

    def _fault(self, code: str, message: str, subject: str) -> None:
        self.findings.append(Finding(code, message, subject))


def play(lines: Iterable[str]) -> Playback:
    """Play a recording to its end.

    Raises:
        RecordingError: a line is no change.
    """
    playback = Playback()
    for number, told in _read(lines):
        if "note" in told:
            if told["note"] != "LEDGER_AWAY":
                playback.gap()
            continue
        try:
            change = ParseDict(told, pb.WatchResponse(), ignore_unknown_fields=True)
        except (ParseError, TypeError, AttributeError) as error:
            raise RecordingError(f"Line {number} is no change of a ledger: {error}.") from error
        if not change.epoch:
            # Such as a line of the ledger's log, which is JSON too.
            raise RecordingError(f"Line {number} is no change of a ledger. {_WHAT_IT_IS}")
        playback.play(change)
    return playback


def _read(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, object]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
            if not isinstance(told, dict):
                raise ValueError("not an object")
            if "note" in told:
                told = {"note": str(told["note"]["reason"])}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RecordingError(f"Line {number} cannot be read ({error}). {_WHAT_IT_IS}") from error
        yield number, told


def _charge(lease: lease_pb2.Lease) -> dict[str, int]:
    charge = {HOST: lease.charge.host_bytes}
    for card in lease.charge.devices:
        charge[card.device_id] = charge.get(card.device_id, 0) + card.bytes
    return {pool: size for pool, size in charge.items() if size}


def _name(order: int) -> str:
    return next(
        (lease_pb2.LeaseState.Name(s).removeprefix("LEASE_STATE_") for s, o in _ORDER.items() if o == order), "?"
    )

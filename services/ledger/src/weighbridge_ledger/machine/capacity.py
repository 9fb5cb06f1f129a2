"""The capacity record: ceilings, what is committed beneath them, and what was measured. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weighbridge_ledger.machine.ceilings import Sharing, automatic_ceilings, ceilings_for, under_limit
from weighbridge_ledger.machine.external import NO_EXTERNAL_USE, ExternalUse
from weighbridge_ledger.machine.findings import Finding, messages
from weighbridge_ledger.machine.model import UNMEASURED, Device, LiveMemory, Machine, Source


@dataclass(frozen=True, slots=True)
class CeilingRecord:
    """One ceiling and what is beneath it. None: no limit; cannot be measured, or does not count."""

    automatic_bytes: int
    limit_bytes: int | None
    effective_bytes: int
    committed_bytes: int
    free_bytes: int | None
    external_bytes: int | None


@dataclass(frozen=True, slots=True)
class Committed:
    """What leases are charged: Σ on the host, Σ on each device."""

    host_bytes: int = 0
    devices: Mapping[str, int] = field(default_factory=dict)


NOTHING_COMMITTED = Committed()


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one machine can hold."""

    machine: Machine
    host: CeilingRecord
    devices: tuple[tuple[Device, CeilingRecord], ...]
    total: CeilingRecord
    spill_allowed: bool
    exclusive_heeded: bool
    notes: tuple[str, ...]
    measured_at: float | None


def assemble(
    machine: Machine,
    *,
    limit_bytes: int | None = None,
    allow_spill: bool | None = None,
    committed: Committed = NOTHING_COMMITTED,
    live: LiveMemory = UNMEASURED,
    external: ExternalUse = NO_EXTERNAL_USE,
    findings: tuple[Finding, ...] = (),
    remarks: tuple[str, ...] = (),
    sharing: Sharing = Sharing.AUTO,
) -> Capacity:
    """The capacity of a machine, automatic and under the person's limit, beside what is committed and measured.

    Live memory and external use count on a detected machine only. `findings` are those of the static readings; those
    of `live` are added, and `remarks` behind them.
    """
    automatic = automatic_ceilings(machine)
    ceilings = ceilings_for(machine, limit_bytes, allow_spill, sharing)
    limit = ceilings.limit_bytes
    if machine.source is not Source.DETECTED:
        live, external = UNMEASURED, NO_EXTERNAL_USE

    def record(automatic_bytes: int, committed_bytes: int, free: int | None, outside: int | None) -> CeilingRecord:
        return CeilingRecord(
            automatic_bytes, limit, under_limit(automatic_bytes, limit), committed_bytes, free, outside
        )

    host = record(automatic.host_bytes, committed.host_bytes, live.host_free_bytes, external.host_bytes)
    devices = tuple(
        (
            device,
            record(
                automatic.devices[device.device_id],
                committed.devices.get(device.device_id, 0),
                live.device(device.device_id).free_bytes,
                external.device_bytes(device.device_id),
            ),
        )
        for device in machine.devices
    )
    parts = (host, *(ceiling for _, ceiling in devices))
    total = record(
        automatic.total_bytes,
        # Every charge counts, also on a card that is gone: its bytes stay charged until its processes are.
        committed.host_bytes + sum(committed.devices.values()),
        _sum_of_known(tuple(part.free_bytes for part in parts)),
        _sum_of_known(tuple(part.external_bytes for part in parts)),
    )
    return Capacity(
        machine=machine,
        host=host,
        devices=devices,
        total=total,
        spill_allowed=ceilings.spill_allowed,
        exclusive_heeded=ceilings.exclusive_heeded,
        notes=(*messages((*findings, *live.findings)), *remarks),
        measured_at=live.measured_at,
    )


def _sum_of_known(parts: tuple[int | None, ...]) -> int | None:
    """The sum, or None if any part is unknown: a sum without it would read as less than there is."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None

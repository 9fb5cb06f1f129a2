"""What programs outside the ledger hold. Pure.

E = max(0, measured use − what leases hold). "Free ≥ bytes" would admit beside a grant that has not loaded yet;
"measured + charged" counts a loaded lease twice, so that nothing passes any more; "measured − charged" takes another
program for a lease that has not loaded (rule 3 of the admission rules has the arithmetic).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from weighbridge_ledger.book.states import Ceilings, External
from weighbridge_ledger.machine.model import LiveDevice, LiveMemory, Machine, Pool, Source


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """What one lease holds, from three sources, in bytes, at one place.

    `attributed` was measured on the processes of the lease; None where that cannot be done. `reported` is what the
    holder observed of itself, None before it did. `charged` is its grant.
    """

    attributed: int | None
    reported: int | None
    charged: int


def held_bytes(lease: HeldBytes) -> int:
    """Measured on its processes, or as reported up to its charge, whichever is more.

    The second also where the first exists: not every driver accounts a GPU's memory to processes (on a Jetson a
    process's footprint has none of it), and an engine must not be taken for a stranger that holds its own model. A
    holder that reports too much hides at most its own charge.
    """
    credible = min(max(0, lease.reported or 0), lease.charged)
    return credible if lease.attributed is None else max(lease.attributed, credible)


def external_bytes(measured_used: int | None, leases: Iterable[HeldBytes]) -> int | None:
    """E at one place: max(0, measured use − Σ held). None: use cannot be measured, which counts as 0 and is said."""
    if measured_used is None:
        return None
    return max(0, measured_used - sum(held_bytes(lease) for lease in leases))


@dataclass(frozen=True, slots=True)
class ExternalUse:
    """E of the host and of each device. None: cannot be measured, or does not count on a declared machine."""

    host_bytes: int | None = None
    devices: Mapping[str, int | None] = field(default_factory=dict)

    def device_bytes(self, device_id: str) -> int | None:
        """E of a device."""
        return self.devices.get(device_id)


NO_EXTERNAL_USE = ExternalUse()


def external_use(
    machine: Machine,
    live: LiveMemory,
    host_leases: Iterable[HeldBytes],
    device_leases: Mapping[str, Iterable[HeldBytes]],
) -> ExternalUse:
    """E of every place of a machine. On a machine that was not detected live memory does not count."""
    if machine.source is not Source.DETECTED:
        return NO_EXTERNAL_USE
    return ExternalUse(
        host_bytes=external_bytes(live.host_used_bytes, host_leases),
        devices={
            device.device_id: external_bytes(
                live.device(device.device_id).used_bytes, device_leases.get(device.device_id, ())
            )
            for device in machine.devices
        },
    )


def over_reserve(machine: Machine, automatic: Ceilings, external: ExternalUse) -> ExternalUse:
    """The part of E that goes beyond what the automatic ceilings already leave to everything else.

    A ceiling is lower than the memory exactly so that the system and other programs fit beside it: a 64 GiB unified
    machine admits 48 GiB and leaves 16. Subtracting all of E from the ceiling would count that reserve twice, and a
    machine with nothing but its own system running would keep a model waiting for memory that is free. Memory stays
    safe: what is admitted plus E never exceeds the memory.
    """
    return ExternalUse(
        host_bytes=_beyond(external.host_bytes, machine.ram_bytes - automatic.host_bytes),
        devices={
            device.device_id: _beyond(
                external.device_bytes(device.device_id),
                device.total_bytes - automatic.devices.get(device.device_id, 0),
            )
            for device in machine.devices
        },
    )


def _beyond(external: int | None, reserve: int) -> int | None:
    return None if external is None else max(0, external - max(0, reserve))


def for_book(external: ExternalUse) -> External:
    """E as the book takes it. What cannot be measured counts 0; the capacity's notes say so."""
    return External(
        host_bytes=external.host_bytes or 0,
        devices={device_id: used for device_id, used in external.devices.items() if used is not None},
    )


def processes_bytes(device: LiveDevice, pids: Iterable[int]) -> int | None:
    """What these processes hold on a device, or None where the driver does not attribute memory to processes.

    None as well when the driver names none of the pids although it sees processes: it counts in the host's pid
    namespace, and a container's own numbers mean nothing there.
    """
    if device.processes is None:
        return None
    wanted = set(pids)
    own = [process for process in device.processes if process.pid in wanted]
    if any(process.used_bytes is None for process in own) or (device.processes and not own):
        return None
    return sum(process.used_bytes or 0 for process in own)


def host_attribution(
    machine: Machine, live: LiveMemory, tree_footprint_bytes: int | None, pids: Iterable[int]
) -> int | None:
    """What a lease's process tree holds in host memory. On a unified machine its GPU memory is host memory too."""
    if tree_footprint_bytes is None or machine.pool is not Pool.UNIFIED:
        return tree_footprint_bytes
    own = tuple(pids)
    return tree_footprint_bytes + sum(processes_bytes(device, own) or 0 for device in live.devices)

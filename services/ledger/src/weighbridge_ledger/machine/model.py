"""The words of this package: machine, devices, live memory, and findings about readings that could not be used."""

from dataclasses import dataclass, field
from enum import Enum

from weighbridge_ledger.machine.findings import Finding
from weighbridge_ledger.machine.sensors import DeviceSensors

GIB = 2**30

# Bounds of what a reading may claim. Nothing on sale in November 2026 comes near them: x86-64 addresses 2^46 bytes of
# physical memory, and the largest accelerator has a few hundred GiB. They catch garbage (a sentinel read as a size).
LARGEST_RAM_BYTES = 2**46
LARGEST_CARD_BYTES = 2**40


class Pool(Enum):
    """The kind of machine memory."""

    UNIFIED = "unified"
    DISCRETE = "discrete"
    CPU = "cpu"


class Source(Enum):
    """Where a machine's figures come from."""

    DETECTED = "detected"
    DECLARED = "declared"
    INLINE = "inline"


@dataclass(frozen=True, slots=True)
class Device:
    """One card with its own memory. `allocation_limit_bytes` is its largest single allocation, None where unknown."""

    device_id: str
    name: str
    total_bytes: int
    allocation_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as far as memory goes.

    `ram_bytes` is physical memory, or the container's limit where that is lower. `devices` are cards with their own
    memory: empty for UNIFIED and CPU. `gpu_wired_bytes` is what the operating system was told the GPU of a unified
    machine may hold at most; None where nobody told it anything. `gpu_mappable_bytes` is what the GPU's driver lets it
    use of a unified machine's memory unless it is told otherwise; None: all of it, or not known. `platform` is
    operating system and processor, such as darwin/arm64; "" where it is not known.
    """

    node_id: str
    pool: Pool
    ram_bytes: int
    devices: tuple[Device, ...] = ()
    source: Source = Source.DETECTED
    gpu_wired_bytes: int | None = None
    platform: str = ""
    gpu_mappable_bytes: int | None = None

    def device(self, device_id: str) -> Device | None:
        """The card with this id, or None."""
        return next((device for device in self.devices if device.device_id == device_id), None)


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """What one process holds on a device; `used_bytes` is None where the driver does not say."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class LiveDevice:
    """A device's memory now. None is unsupported or rejected, never zero.

    On a unified machine the figures of the GPU are no memory of their own, so free and used are None there and only
    `processes` counts.
    """

    device_id: str
    free_bytes: int | None = None
    used_bytes: int | None = None
    processes: tuple[DeviceProcess, ...] | None = None
    pci: str = ""
    """PCI address, where the kernel accounts the card's memory by process instead of its driver's library."""


@dataclass(frozen=True, slots=True)
class LiveMemory:
    """Memory now. None is unsupported or rejected, never zero.

    `host_free_bytes` can be had without swapping: memory that is free or whose content can be dropped.
    `host_used_bytes` is what programs hold: cache that can be dropped is not used. The two need not add up to the RAM
    on macOS, whose categories overlap.
    """

    host_free_bytes: int | None = None
    host_used_bytes: int | None = None
    devices: tuple[LiveDevice, ...] = ()
    findings: tuple[Finding, ...] = ()
    measured_at: float | None = None
    """Seconds since the epoch; None where nothing was measured."""
    sensors: tuple[DeviceSensors, ...] = ()
    """What the same reading said of temperatures; only devices that say anything."""
    gpu_panic_at: float | None = None
    """When the GPU's driver last brought the system down, in seconds since the epoch; None: no report of it."""
    answered: bool = True
    """False: the probe failed or took too long, so nothing was measured."""

    def device(self, device_id: str) -> LiveDevice:
        """The live figures of a device; all None where it was not read."""
        return next((live for live in self.devices if live.device_id == device_id), LiveDevice(device_id))


UNMEASURED = LiveMemory()


@dataclass(frozen=True, slots=True)
class Interpretation:
    """What readings say: the machine, its memory now, and what could not be used."""

    machine: Machine
    live: LiveMemory
    findings: tuple[Finding, ...] = field(default=())


def in_gib(size_bytes: int) -> str:
    """A size as people read it."""
    return f"{size_bytes / GIB:.2f} GiB"

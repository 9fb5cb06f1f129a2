"""Raw readings of one machine as plain data, so that they can be recorded in a file and replayed (see `recorded`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CgroupLevel:
    """The memory files of one directory of a cgroup hierarchy, by file name, as text."""

    version: int
    path: str
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TemperatureReading:
    """One sensor of a device, in °C. `slowdown_celsius` is where the device slows itself down; None: not said."""

    sensor: str
    celsius: float
    slowdown_celsius: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """What a driver says about one device. None: not said, or not supported."""

    device_id: str
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    integrated: bool | None = None
    allocation_limit_bytes: int | None = None
    processes: tuple[tuple[int, int | None], ...] | None = None
    """(pid in the driver's own pid namespace, bytes) pairs."""
    temperatures: tuple[TemperatureReading, ...] = ()
    slowdown_reasons: int | None = None
    """NVML's bit mask of why clocks are lowered now."""
    pci: str = ""
    """PCI address of a card that the kernel accounts by process (fdinfo)."""


@dataclass(frozen=True, slots=True)
class DrmReading:
    """One graphics card of Linux's /sys/class/drm: texts by file name, as they stand there.

    `files` are those of the card's `device` folder (`mem_info_vram_total`, ...), with its temperature sensors as
    `hwmon/<file>` and the revision of its metrics table, the only binary file of interest, as `gpu_metrics` ("2.3").
    """

    name: str
    """card0, card1, ..."""
    driver: str = ""
    """amdgpu, xe, i915, nvidia, nouveau, virtio-pci, ..."""
    pci: str = ""
    """PCI address such as 0000:03:00.0; "" for what is no PCI device."""
    product: str = ""
    """The name that the system's own tables have for its ids."""
    usable: bool | None = None
    """Whether its render node is in this process's /dev: containers see all cards here and are given few."""
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CrashReport:
    """The beginning of a report that macOS wrote after a crash."""

    name: str
    modified_at: float
    """Seconds since the epoch."""
    head: str


@dataclass(frozen=True, slots=True)
class Readings:
    """Everything the probes read off one machine, uninterpreted.

    `unified` is an explicit statement that overrides what names and sizes suggest. `ram_bytes` and
    `ram_available_bytes` are the portable figures, used where the platform's own texts are absent.
    """

    platform: str
    meminfo: str | None = None
    cgroups: tuple[CgroupLevel, ...] = ()
    vm_stat: str | None = None
    sysctl: Mapping[str, str] = field(default_factory=dict)
    ram_bytes: int | None = None
    ram_available_bytes: int | None = None
    devices: tuple[DeviceReading, ...] = ()
    unified: bool | None = None
    processor: str = ""
    """arm64, x86_64, ... as the kernel names it, aliases resolved; "" in recordings that do not say."""
    failures: tuple[str, ...] = ()
    """Probes that failed or ran out of time, a sentence each."""
    drm: tuple[DrmReading, ...] = ()
    board: str = ""
    """The boards that the device tree of an ARM machine calls compatible, such as "nvidia,tegra234"."""
    crash_reports: tuple[CrashReport, ...] = ()

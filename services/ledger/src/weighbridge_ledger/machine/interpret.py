"""Readings → machine and live memory. Pure.

Impossible readings are rejected with a named reason and become unknown; what is not supported is unknown, never zero.
"""

import re
from dataclasses import replace

from weighbridge_ledger.machine.ceilings import unified_share
from weighbridge_ledger.machine.cgroups import interpret_cgroups
from weighbridge_ledger.machine.devices import as_device, device_processes, free_exceeds, live_device, sort_devices
from weighbridge_ledger.machine.drm import interpret_drm
from weighbridge_ledger.machine.findings import Finding
from weighbridge_ledger.machine.model import (
    LARGEST_RAM_BYTES,
    UNMEASURED,
    Interpretation,
    LiveDevice,
    LiveMemory,
    Machine,
    Pool,
    Source,
    in_gib,
)
from weighbridge_ledger.machine.panics import last_gpu_panic
from weighbridge_ledger.machine.platform_texts import meminfo_bytes, parse_vm_stat
from weighbridge_ledger.machine.readings import DeviceReading, Readings
from weighbridge_ledger.machine.sensors import DeviceSensors, device_sensors

MIB = 2**20

# vm_stat's categories overlap, so their sum counts for at most this part of the RAM (0.9, as integers).
OVERLAP_CAP_NUMERATOR, OVERLAP_CAP_DENOMINATOR = 9, 10


NO_FREE_MEMORY = "The machine's free memory cannot be measured here: what other programs hold counts as nothing."

PRESSURE = {
    2: "macOS reports memory pressure (warning): it compresses and swaps what programs hold.",
    4: "macOS reports critical memory pressure: it is about to end programs.",
}


class UnreadableMachineError(ValueError):
    """No reading says how much memory the machine has. The message says what to do."""


def interpret(
    readings: Readings, *, node_id: str = "", source: Source = Source.DETECTED, now: float | None = None
) -> Interpretation:
    """What the readings say.

    Args:
        readings: the raw readings.
        node_id: the machine's name among several.
        source: DETECTED, or DECLARED for recorded readings, whose live memory does not count.
        now: seconds since the epoch, kept as the time of measurement.

    Raises:
        UnreadableMachineError: no usable figure for the RAM.
    """
    findings = [Finding("PROBE_FAILED", failure) for failure in readings.failures]
    physical = _physical_ram(readings, findings)
    if physical is None:
        raise UnreadableMachineError(
            "the machine's memory size cannot be read; declare the machine instead (WEIGHBRIDGE_LEDGER_MACHINE, for "
            "example unified:64, discrete:64+24 or cpu:32)"
        )
    cgroup = interpret_cgroups(readings.cgroups)
    findings += cgroup.findings
    ram = physical if cgroup.limit_bytes is None else min(physical, cgroup.limit_bytes)
    if ram < physical:
        findings.append(
            Finding(
                "CONTAINER_LIMIT",
                f"A container limit of {in_gib(ram)} counts as the RAM ({in_gib(physical)} built in).",
            )
        )

    drm = interpret_drm(readings.drm, nvml_answers=bool(readings.devices))
    findings += drm.findings
    read = (*readings.devices, *drm.devices)
    cards, shared = sort_devices(read, physical, readings.unified, findings)
    pool = _pool(readings, cards, shared)
    devices = tuple(as_device(card, findings) for card in cards)
    if pool is Pool.DISCRETE and shared:
        names = ", ".join(reading.name for reading in shared)
        findings.append(
            Finding("SHARED_DEVICE_IGNORED", f"{names}: shares the machine's memory and is not counted as a card.")
        )
    machine = Machine(
        node_id=node_id,
        pool=pool,
        ram_bytes=ram,
        devices=devices,
        source=source,
        gpu_wired_bytes=_gpu_wired(readings, physical, findings) if pool is Pool.UNIFIED else None,
        platform=_platform(readings),
        gpu_mappable_bytes=_mappable(drm.mappable_bytes, physical, findings) if pool is Pool.UNIFIED else None,
    )
    if source is not Source.DETECTED:
        return Interpretation(machine, UNMEASURED, tuple(findings))
    live_findings: list[Finding] = list(cgroup.findings)
    live = _host_live(readings, physical, ram, cgroup.free_bytes, cgroup.limit_bytes is not None, live_findings)
    live = replace(
        live,
        devices=tuple(live_device(card, live_findings) for card in cards)
        + tuple(
            LiveDevice(reading.device_id, processes=device_processes(reading, live_findings), pci=reading.pci)
            for reading in shared
        ),
        sensors=_sensors((*cards, *shared), live_findings),
        gpu_panic_at=last_gpu_panic(readings.crash_reports),
        findings=tuple(live_findings),
        measured_at=now,
    )
    return Interpretation(machine, live, tuple(findings))


def _physical_ram(readings: Readings, findings: list[Finding]) -> int | None:
    candidates = (
        _sysctl_integer(readings, "hw.memsize"),
        None if readings.meminfo is None else meminfo_bytes(readings.meminfo, "MemTotal"),
        readings.ram_bytes,
    )
    for candidate in candidates:
        if candidate is None:
            continue
        if candidate <= 0:
            findings.append(
                Finding("RAM_NOT_POSITIVE", "A reading of the machine's memory was not positive; rejected.")
            )
        elif candidate > LARGEST_RAM_BYTES:
            findings.append(
                Finding("RAM_IMPOSSIBLE", f"A reading of {in_gib(candidate)} of memory is impossible; rejected.")
            )
        else:
            return candidate
    return None


def _sysctl_integer(readings: Readings, name: str) -> int | None:
    text = readings.sysctl.get(name, "").strip()
    return int(text) if text.removeprefix("-").isdecimal() else None


def _pool(readings: Readings, cards: tuple[DeviceReading, ...], shared: tuple[DeviceReading, ...]) -> Pool:
    if readings.unified:
        return Pool.UNIFIED
    if cards:
        return Pool.DISCRETE
    if readings.unified is None and (shared or _is_apple_silicon(readings) or _is_tegra(readings)):
        return Pool.UNIFIED
    return Pool.CPU


def _is_tegra(readings: Readings) -> bool:
    """Jetson modules: before JetPack 6 they have no NVML, and their GPU is no PCI device either."""
    return re.search(r"\bnvidia,tegra", readings.board) is not None


def _is_apple_silicon(readings: Readings) -> bool:
    """Intel Macs have no hw.optional.arm64; it is 1 on Apple silicon, for translated processes too."""
    return readings.platform == "darwin" and readings.sysctl.get("hw.optional.arm64", "").strip() == "1"


def _platform(readings: Readings) -> str:
    """Operating system and processor, "" where one of them is not known."""
    processor = "arm64" if _is_apple_silicon(readings) else readings.processor  # a translated process is told x86_64
    return f"{readings.platform}/{processor}" if readings.platform and processor else ""


def _gpu_wired(readings: Readings, physical: int, findings: list[Finding]) -> int | None:
    """What macOS was told the GPU may hold at most. 0 there means the system's own default, which is not a reading."""
    wired_mib = _sysctl_integer(readings, "iogpu.wired_limit_mb")
    if wired_mib is None or wired_mib == 0:
        return None
    wired = wired_mib * MIB
    if not 0 < wired <= physical:
        findings.append(Finding("WIRED_LIMIT_IMPOSSIBLE", "The system's limit for the GPU is impossible; rejected."))
        return None
    findings.append(Finding("WIRED_LIMIT", f"The system lets the GPU hold at most {in_gib(wired)}."))
    return wired


def _mappable(mappable: int | None, physical: int, findings: list[Finding]) -> int | None:
    """What an APU's driver lets its GPU use. Kernels give it half of the memory unless they are told more."""
    if mappable is None:
        return None
    if mappable > physical:
        findings.append(
            Finding(
                "DEVICE_EXCEEDS_PHYSICAL",
                f"The GPU's driver offers it {in_gib(mappable)}, but the machine has {in_gib(physical)}; rejected.",
            )
        )
        return None
    if mappable < unified_share(physical):
        findings.append(
            Finding(
                "GPU_MAPPABLE",
                f"The driver lets the GPU use {in_gib(mappable)} of the machine's memory; the kernel's "
                "ttm.pages_limit raises it.",
            )
        )
    return mappable


def _sensors(readings: tuple[DeviceReading, ...], findings: list[Finding]) -> tuple[DeviceSensors, ...]:
    found = (device_sensors(reading, findings) for reading in readings)
    return tuple(sensors for sensors in found if sensors.says_anything)


def _host_live(
    readings: Readings, physical: int, ram: int, cgroup_free: int | None, has_limit: bool, findings: list[Finding]
) -> LiveMemory:
    level = _sysctl_integer(readings, "kern.memorystatus_vm_pressure_level")
    if level in PRESSURE:
        findings.append(Finding("MEMORY_PRESSURE", PRESSURE[level]))
    if readings.vm_stat is not None:
        return _darwin_live(readings.vm_stat, ram, findings)
    available = readings.ram_available_bytes
    if readings.meminfo is not None:
        available = meminfo_bytes(readings.meminfo, "MemAvailable")
    if available is None:
        findings.append(Finding("FREE_MEMORY_UNSUPPORTED", NO_FREE_MEMORY))
        return UNMEASURED
    if not 0 <= available <= physical:
        findings.append(free_exceeds("The machine", available, physical))
        return UNMEASURED
    if has_limit:
        if cgroup_free is None:
            return UNMEASURED
        available = min(available, cgroup_free)
    free = min(available, ram)
    return LiveMemory(host_free_bytes=free, host_used_bytes=ram - free)


def _darwin_live(text: str, ram: int, findings: list[Finding]) -> LiveMemory:
    pages = parse_vm_stat(text)
    if pages is None:
        findings.append(Finding("FREE_MEMORY_UNSUPPORTED", NO_FREE_MEMORY))
        return UNMEASURED
    if pages.free_bytes > ram:
        findings.append(free_exceeds("The machine", pages.free_bytes, ram))
        return UNMEASURED
    capped = min(pages.reclaimable_bytes, ram * OVERLAP_CAP_NUMERATOR // OVERLAP_CAP_DENOMINATOR)
    cached = pages.cached_bytes
    used = None if cached is None else max(0, ram - pages.free_bytes - cached)
    return LiveMemory(host_free_bytes=max(capped, pages.free_bytes), host_used_bytes=used)

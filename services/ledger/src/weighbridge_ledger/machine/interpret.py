"""Readings → machine and live memory. Pure.

Impossible readings are rejected with a named reason and become unknown; what is not supported is unknown, never zero.
"""

from dataclasses import replace

from weighbridge_ledger.machine.cgroups import interpret_cgroups
from weighbridge_ledger.machine.device_kind import shares_host_memory
from weighbridge_ledger.machine.model import (
    LARGEST_CARD_BYTES,
    LARGEST_RAM_BYTES,
    UNMEASURED,
    Device,
    DeviceProcess,
    Finding,
    Interpretation,
    LiveDevice,
    LiveMemory,
    Machine,
    Pool,
    Source,
    in_gib,
)
from weighbridge_ledger.machine.platform_texts import meminfo_bytes, parse_vm_stat
from weighbridge_ledger.machine.readings import DeviceReading, Readings

MIB = 2**20

# vm_stat's categories overlap, so their sum counts for at most this part of the RAM (0.9, as integers).
OVERLAP_CAP_NUMERATOR, OVERLAP_CAP_DENOMINATOR = 9, 10


NO_FREE_MEMORY = "The machine's free memory cannot be measured here: what other programs hold counts as nothing."


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

    cards, shared = _sort_devices(readings, physical, findings)
    pool = _pool(readings, cards, shared)
    devices = tuple(_device(card, findings) for card in cards)
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
    )
    if source is not Source.DETECTED:
        return Interpretation(machine, UNMEASURED, tuple(findings))
    live_findings: list[Finding] = list(cgroup.findings)
    live = _host_live(readings, physical, ram, cgroup.free_bytes, cgroup.limit_bytes is not None, live_findings)
    live = replace(
        live,
        devices=tuple(_live_device(card, live_findings) for card in cards)
        + tuple(LiveDevice(reading.device_id, processes=_processes(reading)) for reading in shared),
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


def _sort_devices(
    readings: Readings, physical: int, findings: list[Finding]
) -> tuple[tuple[DeviceReading, ...], tuple[DeviceReading, ...]]:
    """Usable devices: those with memory of their own, and those that share the host's."""
    cards: list[DeviceReading] = []
    shared: list[DeviceReading] = []
    seen: set[str] = set()
    for reading in readings.devices:
        if reading.device_id in seen:
            findings.append(Finding("DUPLICATE_DEVICE", f"{reading.name} was reported twice; counted once."))
            continue
        seen.add(reading.device_id)
        if _shares(readings, reading, physical):
            if reading.total_bytes is not None and reading.total_bytes > physical:
                findings.append(
                    Finding(
                        "DEVICE_EXCEEDS_PHYSICAL",
                        f"{reading.name} reported {in_gib(reading.total_bytes)} of memory, shared with a host of "
                        f"{in_gib(physical)}; rejected.",
                    )
                )
            shared.append(reading)
        elif (problem := _card_problem(reading)) is not None:
            findings.append(problem)
        else:
            cards.append(reading)
    return tuple(cards), tuple(shared)


def _shares(readings: Readings, reading: DeviceReading, physical: int) -> bool:
    if readings.unified is not None:
        return readings.unified
    return shares_host_memory(reading.name, reading.integrated, reading.total_bytes, physical)


def _card_problem(reading: DeviceReading) -> Finding | None:
    total = reading.total_bytes
    if total is None:
        return Finding(
            "DEVICE_MEMORY_UNSUPPORTED",
            f"{reading.name} does not say how much memory it has; it is not counted as a card.",
        )
    if total <= 0:
        return Finding("DEVICE_MEMORY_NOT_POSITIVE", f"{reading.name} reported no memory at all; rejected.")
    if total > LARGEST_CARD_BYTES:
        return Finding("DEVICE_MEMORY_IMPOSSIBLE", f"{reading.name} reported {in_gib(total)} of memory; rejected.")
    return None


def _pool(readings: Readings, cards: tuple[DeviceReading, ...], shared: tuple[DeviceReading, ...]) -> Pool:
    if readings.unified:
        return Pool.UNIFIED
    if cards:
        return Pool.DISCRETE
    if readings.unified is None and (shared or _is_apple_silicon(readings)):
        return Pool.UNIFIED
    return Pool.CPU


def _is_apple_silicon(readings: Readings) -> bool:
    """Intel Macs have no hw.optional.arm64; it is 1 on Apple silicon, for translated processes too."""
    return readings.platform == "darwin" and readings.sysctl.get("hw.optional.arm64", "").strip() == "1"


def _device(reading: DeviceReading, findings: list[Finding]) -> Device:
    assert reading.total_bytes is not None
    limit = reading.allocation_limit_bytes
    if limit is not None and not 0 < limit <= reading.total_bytes:
        findings.append(
            Finding(
                "ALLOCATION_LIMIT_IMPOSSIBLE",
                f"The largest allocation that {reading.name} reported is impossible; rejected.",
            )
        )
        limit = None
    return Device(reading.device_id, reading.name, reading.total_bytes, limit)


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


def _host_live(
    readings: Readings, physical: int, ram: int, cgroup_free: int | None, has_limit: bool, findings: list[Finding]
) -> LiveMemory:
    if readings.vm_stat is not None:
        return _darwin_live(readings.vm_stat, ram, findings)
    available = readings.ram_available_bytes
    if readings.meminfo is not None:
        available = meminfo_bytes(readings.meminfo, "MemAvailable")
    if available is None:
        findings.append(Finding("FREE_MEMORY_UNSUPPORTED", NO_FREE_MEMORY))
        return UNMEASURED
    if not 0 <= available <= physical:
        findings.append(_free_exceeds("The machine", available, physical))
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
        findings.append(_free_exceeds("The machine", pages.free_bytes, ram))
        return UNMEASURED
    capped = min(pages.reclaimable_bytes, ram * OVERLAP_CAP_NUMERATOR // OVERLAP_CAP_DENOMINATOR)
    cached = pages.cached_bytes
    used = None if cached is None else max(0, ram - pages.free_bytes - cached)
    return LiveMemory(host_free_bytes=max(capped, pages.free_bytes), host_used_bytes=used)


def _live_device(reading: DeviceReading, findings: list[Finding]) -> LiveDevice:
    total = reading.total_bytes
    assert total is not None
    free, used = reading.free_bytes, reading.used_bytes
    if free is not None and not 0 <= free <= total:
        # A driver that is wrong about one of the two figures is not believed about the other.
        findings.append(_free_exceeds(reading.name, free, total))
        free = used = None
    elif used is not None and not 0 <= used <= total:
        findings.append(
            Finding(
                "USED_EXCEEDS_TOTAL",
                f"{reading.name} reported {in_gib(used)} used of {in_gib(total)}; the reading is rejected.",
            )
        )
        free = used = None
    elif free is None and used is None:
        findings.append(
            Finding(
                "DEVICE_USE_UNSUPPORTED",
                f"{reading.name} does not say what is in use: what other programs hold on it counts as nothing.",
            )
        )
    elif free is None and used is not None:
        free = total - used
    elif used is None and free is not None:
        used = total - free
    return LiveDevice(reading.device_id, free, used, _processes(reading))


def _free_exceeds(what: str, free: int, total: int) -> Finding:
    return Finding(
        "FREE_EXCEEDS_TOTAL", f"{what} reported {in_gib(free)} free of {in_gib(total)}; the reading is rejected."
    )


def _processes(reading: DeviceReading) -> tuple[DeviceProcess, ...] | None:
    if reading.processes is None:
        return None
    return tuple(DeviceProcess(pid, used) for pid, used in reading.processes)

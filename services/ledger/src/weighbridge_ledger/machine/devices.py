"""Devices: which of them are cards, and what is free on those. Pure."""

from weighbridge_ledger.machine.device_kind import shares_host_memory
from weighbridge_ledger.machine.findings import Finding
from weighbridge_ledger.machine.model import LARGEST_CARD_BYTES, Device, DeviceProcess, LiveDevice, in_gib
from weighbridge_ledger.machine.readings import DeviceReading


def sort_devices(
    readings: tuple[DeviceReading, ...], physical: int, unified: bool | None, findings: list[Finding]
) -> tuple[tuple[DeviceReading, ...], tuple[DeviceReading, ...]]:
    """Usable devices: those with memory of their own, and those that share the host's.

    Args:
        readings: the devices.
        physical: the host's memory, in bytes.
        unified: an explicit statement about all of them.
        findings: where those go that cannot be counted.
    """
    cards: list[DeviceReading] = []
    shared: list[DeviceReading] = []
    seen: set[str] = set()
    for reading in readings:
        if reading.device_id in seen:
            findings.append(Finding("DUPLICATE_DEVICE", f"{reading.name} was reported twice; counted once."))
            continue
        seen.add(reading.device_id)
        if _shares(reading, physical, unified):
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


def _shares(reading: DeviceReading, physical: int, unified: bool | None) -> bool:
    if unified is not None:
        return unified
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


def as_device(reading: DeviceReading, findings: list[Finding]) -> Device:
    """A card. An allocation limit that cannot be is rejected."""
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


def live_device(reading: DeviceReading, findings: list[Finding]) -> LiveDevice:
    """What is free on a card now. Of two sources the lower one counts: some leave out what the display holds."""
    total = reading.total_bytes
    assert total is not None
    free, used = reading.free_bytes, reading.used_bytes
    if free is not None and not 0 <= free <= total:
        # A driver that is wrong about one of the two figures is not believed about the other.
        findings.append(free_exceeds(reading.name, free, total))
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
    elif free is not None and used is not None:
        free = min(free, total - used)
    return LiveDevice(reading.device_id, free, used, device_processes(reading, findings), reading.pci)


def free_exceeds(what: str, free: int, total: int) -> Finding:
    """More free than there is."""
    return Finding(
        "FREE_EXCEEDS_TOTAL", f"{what} reported {in_gib(free)} free of {in_gib(total)}; the reading is rejected."
    )


def device_processes(reading: DeviceReading, findings: list[Finding]) -> tuple[DeviceProcess, ...] | None:
    """What processes hold on a device, None where the driver does not say. More than the device has is no reading."""
    if reading.processes is None:
        return None
    most = LARGEST_CARD_BYTES if reading.total_bytes is None else max(reading.total_bytes, 0)
    processes = tuple(
        DeviceProcess(pid, used if used is None or 0 <= used <= most else None) for pid, used in reading.processes
    )
    if sum(process.used_bytes is None for process in processes) > sum(used is None for _, used in reading.processes):
        findings.append(
            Finding(
                "PROCESS_USE_IMPOSSIBLE",
                f"{reading.name} reported more memory held by one process than it has; rejected.",
            )
        )
    return processes

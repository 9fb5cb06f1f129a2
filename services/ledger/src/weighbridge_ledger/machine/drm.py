"""Graphics cards of Linux's /sys/class/drm: AMD and Intel say there how much memory they have. Pure.

What the files mean is documented with the drivers: the kernel's Documentation/gpu/amdgpu (memory in bytes: `vram` is on
the card, or what the firmware set aside of an APU's memory; `gtt` is host memory that the GPU may use), igt's
xe_sysfs_tile for `physical_vram_size_bytes`, Documentation/hwmon/sysfs-interface for temperatures (thousandths of a
degree). NVIDIA's driver says nothing there; those cards are asked through NVML.
"""

import re
from dataclasses import dataclass, replace

from weighbridge_ledger.machine.findings import Finding
from weighbridge_ledger.machine.model import GIB, in_gib
from weighbridge_ledger.machine.readings import DeviceReading, DrmReading, TemperatureReading

AMD, INTEL, NVIDIA = 0x1002, 0x8086, 0x10DE
_VENDORS = {AMD: "AMD", INTEL: "Intel", NVIDIA: "NVIDIA"}

# Drivers of GPUs that are no PCI devices and have no memory of their own: Apple's under Linux, Qualcomm's Adreno.
_SHARED_DRIVERS = {"asahi": "Apple GPU", "msm": "Qualcomm Adreno"}

# Intel's integrated graphics have been at this address since they exist.
_INTEL_INTEGRATED = "0000:00:02.0"

# amdgpu's metrics table has one layout for cards (1.x) and others for APUs (2.x, 3.x): kgd_pp_interface.h.
_METRICS_OF_CARDS, _METRICS_OF_APUS = ("1",), ("2", "3")

# The voltage of the north bridge, which amdgpu's hwmon has on APUs alone.
_APU_VOLTAGE = "vddnb"


@dataclass(frozen=True, slots=True)
class DrmDevices:
    """The devices that these cards are.

    `mappable_bytes` is what its driver lets an APU's GPU use of the memory that it shares; None: there is none, or it
    is not said.
    """

    devices: tuple[DeviceReading, ...]
    mappable_bytes: int | None
    findings: tuple[Finding, ...]


def interpret_drm(cards: tuple[DrmReading, ...], *, nvml_answers: bool) -> DrmDevices:
    """Cards → devices, and findings about those that cannot be counted.

    Args:
        cards: the readings. Display controllers that compute nothing (servers' management chips, virtual screens) are
            left out in silence.
        nvml_answers: whether NVIDIA's cards are known from their own driver.
    """
    ids = [_unique_id(card) for card in cards]
    devices: list[DeviceReading] = []
    mappable: list[int] = []
    findings: list[Finding] = []
    for card, unique_id in zip(cards, ids, strict=True):
        vendor = _vendor(card)
        if vendor == NVIDIA:
            if not nvml_answers:
                findings.append(_not_detected(card, "NVIDIA's driver does not answer here"))
            continue
        if vendor not in (AMD, INTEL) and card.driver not in _SHARED_DRIVERS:
            continue
        if card.usable is False:
            findings.append(_not_given(card))
            continue
        # Partitions of one card say the same unique id: it names a device only where it is one.
        device_id = f"GPU-{unique_id}" if unique_id and ids.count(unique_id) == 1 else _address(card)
        if vendor == AMD:
            devices.append(_amd(card, device_id, mappable, findings))
        elif vendor == INTEL:
            devices += _intel(card, device_id, findings)
        else:
            devices.append(DeviceReading(device_id, _name(card), integrated=True, temperatures=_temperatures(card)))
    return DrmDevices(tuple(devices), max(mappable, default=None), tuple(findings))


def _amd(card: DrmReading, device_id: str, mappable: list[int], findings: list[Finding]) -> DeviceReading:
    """A card, or an APU: one memory of which the firmware may have set a part aside for the GPU.

    Where models go then is decided by the larger of the two heaps that the driver has: a large carve-out is a card for
    all purposes, because host programs cannot use it at all; beside a small one they go to memory that is shared.
    """
    total, used = _bytes(card, "mem_info_vram_total"), _bytes(card, "mem_info_vram_used")
    own = DeviceReading(
        device_id,
        _name(card),
        total_bytes=total,
        used_bytes=used,
        integrated=_amd_integrated(card),
        temperatures=_temperatures(card),
        pci=card.pci,
    )
    if not own.integrated:
        return own
    gtt = _bytes(card, "mem_info_gtt_total")
    if total is not None and gtt is not None and total > gtt > 0:
        findings.append(
            Finding(
                "CARVE_OUT_IS_A_CARD",
                f"{own.name}: the firmware set {in_gib(total)} of the memory aside for it; they count as a card.",
            )
        )
        return replace(own, integrated=False)
    if total is not None and total >= GIB:
        findings.append(
            Finding(
                "CARVE_OUT_IGNORED",
                f"{own.name}: the firmware set {in_gib(total)} of the memory aside for it, which is not counted; a "
                "smaller part leaves more to models.",
            )
        )
    if gtt is not None and gtt > 0:
        mappable.append(gtt + (total or 0))
    return replace(own, total_bytes=None, used_bytes=None)


def _amd_integrated(card: DrmReading) -> bool | None:
    """What the driver says, not the name: "Radeon Graphics" is on APUs and on cards that nobody named yet."""
    if re.search(r"\bmi300a\b", card.product, re.IGNORECASE):
        return True  # the one APU whose metrics are a card's
    if card.files.get("hwmon/in1_label", "").strip() == _APU_VOLTAGE:
        return True
    revision = card.files.get("gpu_metrics", "").partition(".")[0]
    if revision in _METRICS_OF_APUS:
        return True
    return False if revision in _METRICS_OF_CARDS else None


def _intel(card: DrmReading, device_id: str, findings: list[Finding]) -> list[DeviceReading]:
    if card.pci == _INTEL_INTEGRATED:
        return [DeviceReading(device_id, _name(card), integrated=True, temperatures=_temperatures(card), pci=card.pci)]
    total = _intel_total(card)
    if total is None:
        findings.append(
            _not_detected(card, f"its driver ({card.driver or 'none'}) does not say how much memory it has")
        )
        return []
    return [
        DeviceReading(
            device_id,
            _name(card),
            total_bytes=total,
            integrated=False,
            temperatures=_temperatures(card),
            pci=card.pci,
        )
    ]


def _intel_total(card: DrmReading) -> int | None:
    """xe says it for each tile, i915 (where it says anything) for the card."""
    tiles = [_bytes(card, name) for name in card.files if re.fullmatch(r"tile\d+/physical_vram_size_bytes", name)]
    known = [tile for tile in tiles if tile is not None]
    return sum(known) if known else _bytes(card, "lmem_total_bytes")


def _not_detected(card: DrmReading, why: str) -> Finding:
    return Finding(
        "DEVICE_NOT_DETECTED",
        f"{_name(card)}: {why}; it is not counted as a card. Declare the machine to count it "
        "(WEIGHBRIDGE_LEDGER_MACHINE, for example discrete:64+16).",
    )


def _not_given(card: DrmReading) -> Finding:
    return Finding(
        "DEVICE_NOT_GIVEN",
        f"{_name(card)} is in the machine, but not in /dev/dri of this container; it is not counted.",
    )


def _vendor(card: DrmReading) -> int | None:
    return _hex(card, "vendor")


def _name(card: DrmReading) -> str:
    for name in (card.files.get("product_name", "").strip(), card.product):
        if name:
            return name
    if card.driver in _SHARED_DRIVERS:
        return _SHARED_DRIVERS[card.driver]
    vendor = _vendor(card)
    return f"{_VENDORS.get(vendor or 0, 'unknown')} GPU {vendor or 0:04x}:{_hex(card, 'device') or 0:04x}"


def _address(card: DrmReading) -> str:
    return f"pci-{card.pci}" if card.pci else card.name


def _unique_id(card: DrmReading) -> str:
    """amdgpu's 16 hexadecimal digits, "" where there are none (zeros are none)."""
    text = card.files.get("unique_id", "").strip().lower()
    return text if re.fullmatch(r"[0-9a-f]{1,16}", text) and text.strip("0") else ""


def _hex(card: DrmReading, name: str) -> int | None:
    text = card.files.get(name, "").strip()
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text) else None


def _bytes(card: DrmReading, name: str) -> int | None:
    """A size; None where the file is missing or holds no number (drivers answer with an error then)."""
    text = card.files.get(name, "").strip()
    if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text):
        return int(text, 16)
    return int(text) if re.fullmatch(r"-?[0-9]{1,20}", text) else None


def _temperatures(card: DrmReading) -> tuple[TemperatureReading, ...]:
    """Every tempN of the card's hwmon, under its label. `crit` is where the driver begins to slow the card down."""
    found = []
    for name in sorted(card.files):
        match = re.fullmatch(r"hwmon/(temp\d+)_input", name)
        if match is None:
            continue
        sensor = match.group(1)
        celsius = _degrees(card.files[name])
        if celsius is not None:
            label = card.files.get(f"hwmon/{sensor}_label", "").strip() or sensor
            found.append(TemperatureReading(label, celsius, _degrees(card.files.get(f"hwmon/{sensor}_crit", ""))))
    return tuple(found)


def _degrees(text: str) -> float | None:
    return int(text) / 1000 if re.fullmatch(r"\s*-?\d{1,9}\s*", text) else None

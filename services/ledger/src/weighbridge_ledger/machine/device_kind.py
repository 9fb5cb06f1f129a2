"""Does a GPU have memory of its own? Decided by what the driver says, then by the product name, then by size."""

import re
from enum import Enum

# Integer form of 0.75: a GPU of unknown kind that reports at least this part of the RAM as its own is sharing it.
SHARED_NUMERATOR, SHARED_DENOMINATOR = 3, 4


class DeviceKind(Enum):
    """SHARED memory is the host's; OWN is on the card; UNKNOWN names do not say."""

    SHARED = "shared"
    OWN = "own"
    UNKNOWN = "unknown"


# Checked in order, on names in lower case without (R) and (TM). GB10 and DGX Spark are one board: a CPU and a GPU on
# one memory. Jetson modules (Orin, Thor, Xavier) report themselves as "... (nvgpu)", or by name alone. The A of MI300A
# is for APU: its HBM is the host's memory. Intel graphics are integrated
# except the Arc boards (a letter, two to four digits, optionally Pro); AMD says "Radeon Graphics", "Radeon 780M" or
# Vega for the integrated ones.
_RULES: tuple[tuple[str, DeviceKind], ...] = (
    (r"\bgb10\b|\bdgx spark\b", DeviceKind.SHARED),
    (r"\bnvgpu\b|\btegra\b|\bjetson\b|\bnvidia (thor|orin|xavier)\b", DeviceKind.SHARED),
    (r"\bmi300a\b", DeviceKind.SHARED),
    (r"\bqualcomm\b|\badreno\b", DeviceKind.SHARED),
    (r"\barc\s+(pro\s+)?[ab]\d{2,4}\b", DeviceKind.OWN),
    (r"\bintel\b|\biris\b|\buhd graphics\b", DeviceKind.SHARED),
    (r"\bradeon\s+rx\s*(\d|vega)|\bradeon vii\b|\bradeon\s+(ai\s+)?pro\s+[wr]?\d", DeviceKind.OWN),
    (r"\binstinct\b|\bfirepro\b", DeviceKind.OWN),
    (r"\bvega\b|\bradeon graphics\b|\bradeon\s+\d{3}[ms]\b|\bradeon\s+8\d{3}s\b", DeviceKind.SHARED),
    (r"\bnvidia\b|\bgeforce\b|\bquadro\b|\btesla\b", DeviceKind.OWN),
)


def kind_by_name(name: str) -> DeviceKind:
    """The kind that a product name says."""
    plain = re.sub(r"\((r|tm)\)|®|™", "", name.lower())
    plain = re.sub(r"\s+", " ", plain)
    return next((kind for pattern, kind in _RULES if re.search(pattern, plain)), DeviceKind.UNKNOWN)


def shares_host_memory(name: str, integrated: bool | None, total_bytes: int | None, physical_ram_bytes: int) -> bool:
    """Whether a device's memory is the host's.

    The size rule is for unknown kinds only: a card as large as the RAM is no evidence of sharing. A card of unknown
    kind below the ratio is treated as having its own memory.
    """
    if integrated is not None:
        return integrated
    kind = kind_by_name(name)
    if kind is not DeviceKind.UNKNOWN:
        return kind is DeviceKind.SHARED
    return total_bytes is not None and total_bytes * SHARED_DENOMINATOR >= physical_ram_bytes * SHARED_NUMERATOR

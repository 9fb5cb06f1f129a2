"""Readings of Linux's graphics cards: /sys/class/drm, and the names that the system's tables have. Never raises."""

import re
from dataclasses import replace
from pathlib import Path

from weighbridge_ledger.machine.readings import DrmReading

MOST_CARDS = 64
"""More than any machine has; it bounds what a strange /sys can cost."""

_FILES = (
    "vendor",
    "device",
    "revision",
    "product_name",
    "unique_id",
    "mem_info_vram_total",
    "mem_info_vram_used",
    "mem_info_gtt_total",
    "mem_info_gtt_used",
    "lmem_total_bytes",
)

# Sensors and their labels; in1_label says whether an AMD GPU is part of an APU.
_HWMON_FILE = re.compile(r"temp\d{1,2}_(input|label|crit)|in1_label")

LARGEST_TEXT_BYTES = 4096
LARGEST_TABLE_BYTES = 8 * 2**20
"""pci.ids has 1.5 MB."""


class DrmFolder:
    """The graphics cards of a system. Their names are looked up once: the tables are large, and names do not change."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._products: dict[tuple[str, str, str], str] = {}

    def read(self, sensors: bool = True) -> tuple[DrmReading, ...]:
        """Every card, in the order of its number. `sensors`: with temperatures."""
        cards = _matching(self._root / "sys/class/drm", r"card\d{1,4}")
        cards.sort(key=lambda path: int(path.name.removeprefix("card")))
        return tuple(self._card(path, sensors) for path in cards[:MOST_CARDS])

    def _card(self, card: Path, sensors: bool) -> DrmReading:
        reading = _card(card, self._root, sensors)
        ids = tuple(_hex_digits(reading.files.get(name, "")) for name in ("vendor", "device", "revision"))
        vendor, device, revision = ids
        if (vendor, device, revision) not in self._products:
            self._products[vendor, device, revision] = _product(self._root, vendor, device, revision)
        return replace(reading, product=self._products[vendor, device, revision])


def _card(card: Path, root: Path, sensors: bool) -> DrmReading:
    device = card / "device"
    files = {name: text for name in _FILES if (text := _text(device / name)) is not None}
    if "lmem_total_bytes" not in files and (text := _text(card / "lmem_total_bytes")) is not None:
        files["lmem_total_bytes"] = text  # older layouts of i915
    for tile in _matching(device, r"tile\d{1,2}"):
        if (text := _text(tile / "physical_vram_size_bytes")) is not None:
            files[f"{tile.name}/physical_vram_size_bytes"] = text
    for folder in _matching(device / "hwmon", r"hwmon\d+")[:1]:
        for path in _matching(folder, _HWMON_FILE.pattern):
            if (sensors or path.name == "in1_label") and (text := _text(path)) is not None:
                files[f"hwmon/{path.name}"] = text
    header = _bytes(device / "gpu_metrics", 4)
    if header is not None and len(header) == 4:
        # struct metrics_table_header: size (16 bits), format revision, content revision.
        files["gpu_metrics"] = f"{header[2]}.{header[3]}"
    pci = _target(device) or ""
    return DrmReading(
        name=card.name,
        driver=_target(device / "driver") or "",
        pci=pci if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", pci) else "",
        usable=_usable(device, root),
        files=files,
    )


def _usable(device: Path, root: Path) -> bool | None:
    """Whether the card's render node is in /dev. None: it has none (a card that only displays)."""
    nodes = _matching(device / "drm", r"renderD\d+")
    return (root / "dev/dri" / nodes[0].name).exists() if nodes else None


def _product(root: Path, vendor: str, device: str, revision: str) -> str:
    if not vendor or not device:
        return ""
    if vendor == "1002":
        name = _in_amdgpu_ids(_table(root, "usr/share/libdrm/amdgpu.ids"), device, revision)
        if name:
            return name
    tables = (_table(root, f"usr/share/{folder}/pci.ids") for folder in ("hwdata", "misc"))
    return next((name for table in tables if (name := _in_pci_ids(table, vendor, device))), "")


def _in_amdgpu_ids(table: str, device: str, revision: str) -> str:
    """Lines of libdrm's table: `device,<tab>revision,<tab>name`, in hexadecimal without leading zeros."""
    for line in table.splitlines():
        parts = [part.strip() for part in line.split(",", 2)]
        if len(parts) == 3 and parts[0].lower() == device and _same(parts[1], revision):
            return parts[2]
    return ""


def _same(one: str, other: str) -> bool:
    return one.lower().lstrip("0") == other.lower().lstrip("0")


def _in_pci_ids(table: str, vendor: str, device: str) -> str:
    """pci.ids has vendors at the line's start, their devices behind one tab."""
    start = re.search(rf"^{vendor}  (.+)$", table, re.MULTILINE)
    if start is None:
        return ""
    for line in table[start.end() + 1 :].splitlines():
        if line and not line.startswith(("\t", "#")):
            break
        if line.startswith(f"\t{device}  "):
            # "Advanced Micro Devices, Inc. [AMD/ATI]", "Intel Corporation": the first word is what people say.
            short = {"1002": "AMD", "8086": "Intel"}.get(vendor, start.group(1))
            return f"{short} {line.split('  ', 1)[1].strip()}"
    return ""


def _hex_digits(text: str) -> str:
    match = re.fullmatch(r"0x([0-9a-f]{1,4})", text.strip().lower())
    return "" if match is None else match.group(1)


def _table(root: Path, path: str) -> str:
    data = _bytes(root / path, LARGEST_TABLE_BYTES)
    return "" if data is None else data.decode(errors="replace")


def _matching(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if re.fullmatch(pattern, path.name))
    except OSError:
        return []


def _target(link: Path) -> str | None:
    """The name of what a link leads to."""
    try:
        return link.resolve(strict=True).name
    except (OSError, RuntimeError):
        return None


def _text(path: Path) -> str | None:
    data = _bytes(path, LARGEST_TEXT_BYTES)
    return None if data is None else data.decode(errors="replace")


def _bytes(path: Path, most: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError:  # amdgpu answers EPERM or EINVAL for what a card does not have
        return None

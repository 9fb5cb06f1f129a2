"""What processes hold on graphics cards that NVML does not know: the kernel's own account, /proc/PID/fdinfo.

Every open file of a graphics card says there which client it belongs to and how much memory that client has in each
region (the kernel's Documentation/gpu/drm-usage-stats). Without it an engine's own weights on an AMD or Intel card, or
in the host memory that an APU's GPU was given, would look like another program's: none of it is in any resident size.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from weighbridge_ledger.machine.probe_linux import read_text

_LINE = re.compile(r"^(drm-[a-z0-9-]+):\s*(.*?)\s*$", re.MULTILINE)
_SIZE = re.compile(r"(\d{1,20})(?:\s*(KiB|MiB))?")
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20}

# Names of the same figure in the order of preference: what is in the region now; its old name in amdgpu; what was
# asked for.
_FIGURES = ("resident", "memory", "total")

MOST_FILES = 4096
"""Open files of one process that are looked at."""


@dataclass(frozen=True, slots=True)
class CardUse:
    """What clients of one card hold: in its own memory, and in host memory that the GPU was given (GTT)."""

    own_bytes: int = 0
    gtt_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DrmClient:
    """One client of one card. Its files say the same, so that it must be counted once."""

    pci: str
    client_id: str
    use: CardUse


def parse_fdinfo(text: str) -> DrmClient | None:
    """The client of an open file; None for files that are no graphics card's."""
    fields = {match.group(1): match.group(2) for match in _LINE.finditer(text)}
    pci, client_id = fields.get("drm-pdev"), fields.get("drm-client-id")
    if not pci or not client_id:
        return None
    own = sum(_region(fields, name) for name in _regions(fields) if re.fullmatch(r"(vram|local)\d*", name))
    return DrmClient(pci, client_id, CardUse(own, _region(fields, "gtt")))


def _regions(fields: dict[str, str]) -> set[str]:
    return {name.split("-", 2)[2] for name in fields if name.startswith(tuple(f"drm-{figure}-" for figure in _FIGURES))}


def _region(fields: dict[str, str], region: str) -> int:
    for figure in _FIGURES:
        match = _SIZE.fullmatch(fields.get(f"drm-{figure}-{region}", ""))
        if match is not None:
            return int(match.group(1)) * _UNITS[match.group(2) or ""]
    return 0


def uses_by_card(clients: Iterable[DrmClient]) -> dict[str, CardUse]:
    """What these clients hold by PCI address, each counted once."""
    uses: dict[str, CardUse] = {}
    for client in {(client.pci, client.client_id): client for client in clients}.values():
        before = uses.get(client.pci, CardUse())
        uses[client.pci] = CardUse(before.own_bytes + client.use.own_bytes, before.gtt_bytes + client.use.gtt_bytes)
    return uses


def tree_uses(pids: Iterable[int], root: Path = Path("/")) -> dict[str, CardUse] | None:
    """What these processes and their descendants hold on each card; None if none of them can be looked into."""
    clients: list[DrmClient] = []
    readable = False
    for member in {member for pid in pids for member in _family(pid)}:
        files = _drm_files(root / "proc" / str(member))
        if files is None:
            continue
        readable = True
        clients += [client for text in files if (client := parse_fdinfo(text)) is not None]
    return uses_by_card(clients) if readable else None


def _family(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return [pid]


def _drm_files(process: Path) -> list[str] | None:
    """The fdinfo of every file of a process that is a graphics card's."""
    try:
        numbers = [path.name for path in (process / "fd").iterdir()][:MOST_FILES]
    except OSError:
        return None
    return list(_texts(process, numbers))


def _texts(process: Path, numbers: Iterable[str]) -> Iterator[str]:
    for number in numbers:
        try:
            target = str((process / "fd" / number).readlink())
        except OSError:
            continue
        if "/dev/dri/" in target and (text := read_text(process / "fdinfo" / number)) is not None:
            yield text

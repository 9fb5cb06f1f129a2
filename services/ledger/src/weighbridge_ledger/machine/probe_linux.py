"""Readings of a Linux machine: /proc/meminfo and the memory files of this process's control groups. Never raises."""

from pathlib import Path

from weighbridge_ledger.machine.cgroups import V1_FILES, V2_FILES, CgroupDirectory, memory_directories
from weighbridge_ledger.machine.readings import CgroupLevel

# Pseudo-files of this kind hold a few KiB; a bound keeps a wrong mount from being read whole.
LARGEST_FILE_BYTES = 256 * 1024


def read_meminfo(root: Path = Path("/")) -> str | None:
    """/proc/meminfo, or None."""
    return read_text(root / "proc/meminfo")


def find_directories(root: Path = Path("/")) -> tuple[CgroupDirectory, ...]:
    """The directories of this process's memory hierarchies, wherever they are mounted."""
    own, mounts = read_text(root / "proc/self/cgroup"), read_text(root / "proc/self/mountinfo")
    return () if own is None or mounts is None else memory_directories(own, mounts)


def read_cgroups(directories: tuple[CgroupDirectory, ...], root: Path = Path("/")) -> tuple[CgroupLevel, ...]:
    """The memory files of these directories; directories without any are left out."""
    levels = []
    for directory in directories:
        folder = root / directory.path.lstrip("/")
        names = V2_FILES if directory.version == 2 else V1_FILES
        files = {name: text for name in names if (text := read_text(folder / name)) is not None}
        if files:
            levels.append(CgroupLevel(directory.version, directory.path, files))
    return tuple(levels)


def read_board(root: Path = Path("/")) -> str:
    """What the device tree of an ARM machine calls its board compatible with, one name a line; "" elsewhere."""
    return (read_text(root / "proc/device-tree/compatible") or "").replace("\0", "\n").strip()


def read_text(path: Path) -> str | None:
    """A small file, or None."""
    try:
        with path.open("rb") as file:
            return file.read(LARGEST_FILE_BYTES).decode(errors="replace")
    except OSError:
        return None

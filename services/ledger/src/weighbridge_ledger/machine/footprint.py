"""What a process tree holds of the memory that the probes call used.

Resident size lies both ways. It has the pages of mapped files, which the system can drop and which no probe counts as
used: an engine that maps 8 GiB of weights would hide 8 GiB of other programs. And on macOS it leaves the GPU's memory
out: 30 GB resident against 103 GB of physical footprint were seen on one engine. So here counts, on Linux, what is
anonymous or shared memory (proportionally, once over all sharers); on macOS the physical footprint, which has the GPU's
memory and no clean file pages; elsewhere what is private to the process.
"""

import ctypes
import re
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from weighbridge_ledger.machine.probe_linux import read_text

# struct rusage_info_v0 of <sys/resource.h>: a UUID of 16 bytes, then ten 64-bit figures, of which the eighth is
# ri_phys_footprint. Version 0 is the beginning of all later ones.
_RUSAGE_INFO_V0 = 0
_RUSAGE_BYTES = 96
_FOOTPRINT_OFFSET = 16 + 7 * 8

Held = Callable[[int], int | None]


def held_by_this_system(system: str = sys.platform) -> Held:
    """How one process is measured on a system."""
    if system == "linux":
        return held_on_linux
    return physical_footprint if system == "darwin" else private_bytes


def tree_held(pid: int, held: Held | None = None) -> int | None:
    """What a process and its descendants hold, in bytes; None if it is gone or nothing of it can be read."""
    measure = held_by_this_system() if held is None else held
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return None
    sizes = [size for process in family if (size := measure(process.pid)) is not None]
    return sum(sizes) if sizes else None


def held_on_linux(pid: int, root: Path = Path("/")) -> int | None:
    """Pss_Anon + Pss_Shmem, else (other people's processes, kernels before 5.4) RssAnon + RssShmem.

    Pages of mapped files that are locked (weights under mlock) cannot be dropped, so they are used and count. How much
    of Locked is files is not said: as much as there are mapped files, because whoever locks memory locks its weights.
    """
    folder = root / "proc" / str(pid)
    rollup, status = read_text(folder / "smaps_rollup"), read_text(folder / "status")
    proportional = _sum(rollup, ("Pss_Anon", "Pss_Shmem"))
    if proportional is not None:
        return proportional + min(_sum(rollup, ("Pss_File",)) or 0, _sum(rollup, ("Locked",)) or 0)
    resident = _sum(status, ("RssAnon", "RssShmem"))
    if resident is not None:
        return resident + min(_sum(status, ("RssFile",)) or 0, _sum(status, ("VmLck",)) or 0)
    return None


def _sum(text: str | None, names: Iterable[str]) -> int | None:
    """The sum of lines "Name: n kB", in bytes; None unless all of them are there."""
    if text is None:
        return None
    total = 0
    for name in names:
        match = re.search(rf"^{name}:\s+(\d+) kB\s*$", text, re.MULTILINE)
        if match is None:
            return None
        total += int(match.group(1)) * 1024
    return total


def physical_footprint(pid: int) -> int | None:
    """macOS's physical footprint of one process, in bytes; None if it is gone or somebody else's."""
    try:
        ask = ctypes.CDLL(None).proc_pid_rusage
    except (OSError, AttributeError):
        return None
    buffer = ctypes.create_string_buffer(_RUSAGE_BYTES)
    if ask(ctypes.c_int(pid), ctypes.c_int(_RUSAGE_INFO_V0), buffer) != 0:
        return None
    return footprint_of(buffer.raw)


def footprint_of(rusage_info: bytes) -> int:
    """ri_phys_footprint of a struct rusage_info of any version."""
    return int(struct.unpack_from("<Q", rusage_info, _FOOTPRINT_OFFSET)[0])


def private_bytes(pid: int) -> int | None:
    """What is private to one process (Windows), else its resident size."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return None
    return int(getattr(memory, "private", memory.rss))

"""What the runtime says about memory, and how the process gives freed memory back."""

import ctypes
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROC_STATUS = Path("/proc/self/status")
_KIB = 1024


@dataclass(frozen=True)
class MlxMemory:
    """MLX's allocator, in bytes: live allocations, freed buffers kept for reuse, and the most that was live at once."""

    active_bytes: int = 0
    cache_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True)
class MemoryState:
    """What the owner thread last published: MLX's allocator and the key/value caches of the request in flight."""

    mlx: MlxMemory = MlxMemory()
    kv_bytes: int = 0


@dataclass(frozen=True)
class ProcessMemory:
    """This process's resident memory in bytes, now and at most."""

    resident_bytes: int
    peak_bytes: int


def process_memory() -> ProcessMemory:
    """Reads this process's resident memory."""
    resident = int(psutil.Process().memory_info().rss)
    return ProcessMemory(resident, max(resident, _peak_resident()))


def peak_from_status(status: str) -> int | None:
    """VmHWM of a Linux /proc/<pid>/status text, in bytes; None if the line is not there."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * _KIB
    return None


def return_free_heap() -> None:
    """Gives free pages of the C heap back to the system, where the C library can (glibc).

    glibc raises its threshold for separate mappings as large blocks are freed, so later blocks of that size come from
    the heap and stay resident after they are freed: the process would be charged for memory that nobody uses.
    """
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


def _find_malloc_trim() -> "ctypes._NamedFuncPointer | None":
    try:
        return ctypes.CDLL(None).malloc_trim if sys.platform == "linux" else None
    except (OSError, AttributeError):
        return None


_MALLOC_TRIM = _find_malloc_trim()


def _peak_resident() -> int:
    # Linux hands ru_maxrss on through fork and exec, so a child of a large process would report its parent's peak.
    # VmHWM belongs to the address space and starts anew with exec.
    try:
        peak = peak_from_status(_PROC_STATUS.read_text(encoding="ascii"))
    except OSError:
        peak = None
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else _KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

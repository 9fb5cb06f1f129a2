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


def keep_large_blocks_out_of_the_heap() -> None:
    """Makes every large block a mapping of its own that goes when the block is freed, where the C library can (glibc).

    Left alone, glibc raises its threshold for that up to 32 MiB as large blocks are freed. Scores and caches that grow
    with each chunk then fragment the heap: a context of 4,096 tokens held 33 MB more than MLX's allocator knew of after
    one conversation and 74 MB after two, with a fixed threshold 18 MB after both (2026-11-30).
    """
    if _MALLOPT is not None:
        _MALLOPT(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def return_free_heap() -> None:
    """Gives free pages of the C heap back to the system, where the C library can (glibc)."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


def _glibc(function: str) -> "ctypes._NamedFuncPointer | None":
    try:
        return getattr(ctypes.CDLL(None), function) if sys.platform == "linux" else None
    except (OSError, AttributeError):
        return None


_MALLOC_TRIM = _glibc("malloc_trim")
_MALLOPT = _glibc("mallopt")
# The number of that parameter in glibc's malloc.h.
_M_MMAP_THRESHOLD = -3
# Blocks of one token stay in the heap, those of a chunk do not.
_LARGE_BLOCK_BYTES = 1 << 20


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

"""The runtime's heap: what was freed goes back to the system, so that a process is charged for what it holds."""

import subprocess
import sys

import pytest
from weighbridge_engines.mlx_qwen.runtime import memory

MIB = 1 << 20

# One large block freed raises glibc's own threshold; smaller ones then lie in the heap between blocks that stay.
FRAGMENTING = """
import ctypes, psutil, sys
from weighbridge_engines.mlx_qwen.runtime import memory
if sys.argv[1] == "fixed":
    memory.keep_large_blocks_out_of_the_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def block(size):
    address = libc.malloc(size)
    ctypes.memset(address, 1, size)
    return address
libc.free(block(30 << 20))
blocks = []
for _ in range(8):
    blocks.append(block(8 << 20))
    block(1000)
resident = psutil.Process().memory_info().rss
for address in blocks:
    libc.free(address)
print(resident - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(memory._MALLOPT is None, reason="the C library is not glibc")
def test_freed_large_blocks_leave_the_process_whatever_stays_between_them() -> None:
    given_back = {
        mode: int(subprocess.run([sys.executable, "-c", FRAGMENTING, mode], capture_output=True, check=True).stdout)
        for mode in ("left alone", "fixed")
    }
    assert given_back["fixed"] >= 60 * MIB
    assert given_back["left alone"] < 20 * MIB, "glibc no longer needs this"

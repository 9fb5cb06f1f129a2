"""What a process holds of used memory: not the pages of mapped files, not the half of it on macOS."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from weighbridge_ledger.machine import footprint

MIB = 2**20

# The text of a kernel 6.8: 7 GiB of a model's file are mapped, 1 GiB is the engine's own.
SMAPS_ROLLUP = (
    "55d0c0a00000-7ffd5a9f0000 ---p 00000000 00:00 0                          [rollup]\n"
    "Rss:             8912896 kB\nPss:             8650752 kB\nPss_Dirty:       1048576 kB\n"
    "Pss_Anon:        1048576 kB\nPss_File:        7340032 kB\nPss_Shmem:        262144 kB\nShared_Clean: 0 kB\n"
)
STATUS = "Name:\tengine\nVmRSS:\t 8912896 kB\nRssAnon:\t 1048576 kB\nRssFile:\t 7340032 kB\nRssShmem:\t  524288 kB\n"


def write(root: Path, pid: int, **texts: str) -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name).write_text(text)


def test_mapped_files_are_not_held(tmp_path: Path) -> None:
    write(tmp_path, 7, smaps_rollup=SMAPS_ROLLUP, status=STATUS)
    assert footprint.held_on_linux(7, tmp_path) == (1024 + 256) * MIB


@pytest.mark.parametrize(
    ("locked_gib", "held_mib"),
    [
        (0, 1280),
        (3, 1280 + 3072),
        (7, 1280 + 7168),
        (8, 1280 + 7168),
    ],  # the last: everything is locked, 7 GiB are files
)
def test_locked_weights_cannot_be_dropped_and_are_held(tmp_path: Path, locked_gib: int, held_mib: int) -> None:
    locked = f"{locked_gib * 2**20} kB\n"
    write(tmp_path, 7, smaps_rollup=f"{SMAPS_ROLLUP}Locked:         {locked}")
    write(tmp_path, 8, status=f"{STATUS}VmLck:\t {locked}")
    assert footprint.held_on_linux(7, tmp_path) == held_mib * MIB
    assert footprint.held_on_linux(8, tmp_path) == (held_mib + 256) * MIB


def test_another_users_process_is_measured_by_its_status(tmp_path: Path) -> None:
    write(tmp_path, 7, status=STATUS)
    assert footprint.held_on_linux(7, tmp_path) == (1024 + 512) * MIB


@pytest.mark.parametrize("status", ["Name:\tkthreadd\n", "RssAnon:\t 5 kB\n", ""])
def test_half_a_figure_is_none(tmp_path: Path, status: str) -> None:
    write(tmp_path, 7, status=status)
    assert footprint.held_on_linux(7, tmp_path) is None
    assert footprint.held_on_linux(8, tmp_path) is None


def test_the_physical_footprint_is_the_eighth_figure() -> None:
    # struct rusage_info_v0: UUID, user and system time, two counts of wake-ups, page-ins, wired, resident, footprint,
    # start, exit. 30 GB resident and 103 GB of footprint: an engine on Metal.
    info = struct.pack("<16s10Q", b"u" * 16, 1, 2, 3, 4, 5, 6, 30_000_000_000, 103_000_000_000, 9, 10)
    assert len(info) == 96
    assert footprint.footprint_of(info) == 103_000_000_000
    assert footprint.footprint_of(info + bytes(200)) == 103_000_000_000, "later versions begin the same"


def test_each_system_is_measured_its_own_way() -> None:
    assert footprint.held_by_this_system("linux") is footprint.held_on_linux
    assert footprint.held_by_this_system("darwin") is footprint.physical_footprint
    assert footprint.held_by_this_system("win32") is footprint.private_bytes


ENGINE = """
import mmap, subprocess, sys
held = bytearray(b"x" * (48 << 20))
file = open(sys.argv[1], "rb")
weights = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
touched = sum(weights[::4096])
worker = "held = bytearray(b'x' * (24 << 20)); print('ready', flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
input()
child.kill()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's /proc")
def test_a_real_engine_that_maps_its_weights(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"w" * (192 * MIB))
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ENGINE, str(weights)], stdin=pipe, stdout=pipe) as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        held = footprint.tree_held(engine.pid)
        resident = psutil.Process(engine.pid).memory_info().rss
        engine.communicate(b"\n")
    assert held is not None
    assert resident > 192 * MIB, "resident size has the mapped file"
    # Its own 48 MiB and its child's 24, beside two interpreters of some MiB; nothing of the 192.
    assert 72 * MIB <= held < 150 * MIB


def test_a_process_that_is_gone_holds_nothing_known() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert footprint.tree_held(child.pid) is None
    assert footprint.private_bytes(child.pid) is None


def test_the_physical_footprint_of_this_process() -> None:
    size = footprint.physical_footprint(os.getpid())
    if sys.platform == "darwin":
        assert size is not None
        assert size > MIB
    else:
        assert size is None

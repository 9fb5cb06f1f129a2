"""A process is told from a later one of the same pid, and a tree's memory is counted whole."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from weighbridge_common import processes
from weighbridge_common.processes import ProcessIdentity


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_a_process_knows_itself() -> None:
    own = processes.current()
    assert own.pid == os.getpid()
    assert processes.identify(os.getpid()) == own
    assert processes.is_alive(own) is True
    assert ProcessIdentity.from_message(own.to_message()) == own


@pytest.mark.skipif(sys.platform != "linux", reason="clock ticks are Linux's unit")
def test_the_start_time_is_the_kernels_exact_number() -> None:
    # psutil derives its own figure from the same field: boot time plus ticks over the clock's rate.
    created = psutil.Process().create_time()
    ticks = os.sysconf("SC_CLK_TCK")
    assert processes.current().start_time == round((created - psutil.boot_time()) * ticks)


def test_a_zombie_and_a_dead_process_are_dead(child: "subprocess.Popen[bytes]") -> None:
    identity = processes.identify(child.pid)
    assert identity is not None and processes.is_alive(identity) is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and nobody has collected it
    assert processes.is_alive(identity) is False
    assert processes.identify(child.pid) is None
    child.wait()
    assert processes.is_alive(identity) is False
    assert processes.tree_footprint(child.pid) is None


def test_the_same_pid_started_at_another_time_is_another_process() -> None:
    own = processes.current()
    assert processes.is_alive(dataclasses.replace(own, start_time=own.start_time - 1)) is False


def test_a_process_of_another_boot_is_dead_and_of_another_namespace_unknown() -> None:
    own = processes.current()
    assert processes.is_alive(dataclasses.replace(own, boot_id="another")) is False
    assert processes.is_alive(dataclasses.replace(own, pid_namespace="pid:[1]")) is None
    # The other boot decides first: nothing of it lives, in whatever namespace it was.
    assert processes.is_alive(dataclasses.replace(own, boot_id="another", pid_namespace="pid:[1]")) is False
    assert processes.is_alive(dataclasses.replace(own, boot_id="")) is None


def test_a_program_name_with_brackets_and_spaces_hides_no_field(tmp_path: "os.PathLike[str]") -> None:
    program = os.path.join(tmp_path, "a) R (b c")
    os.symlink("/bin/cat", program)
    process = subprocess.Popen([program], stdin=subprocess.PIPE)
    try:
        identity = processes.identify(process.pid)
        assert identity is not None and identity.start_time >= processes.current().start_time
    finally:
        process.kill()
        process.wait()


def test_a_tree_is_counted_with_its_descendants() -> None:
    size = 64 * 2**20
    hold = f"import mmap; m = mmap.mmap(-1, {size}); m.write(b'x' * {size}); print(flush=True); input()"
    parent = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {hold!r}], stdin=subprocess.PIPE)\n"
        "input(); p.kill(); p.wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    process.stdout.readline()  # the grandchild holds its memory
    try:
        footprint = processes.tree_footprint(process.pid)
        alone = psutil.Process(process.pid).memory_info().rss
        assert footprint is not None
        assert size < footprint < size + 2 * alone + 64 * 2**20
    finally:
        process.communicate(b"\n")


SHARING = """
import mmap, os, sys
from weighbridge_common import processes
size = 64 * 2**20
shared = mmap.mmap(-1, size)  # anonymous and shared: a forked child maps the same pages
shared.write(b"x" * size)
before = processes.tree_footprint(os.getpid())
touched, done = os.pipe(), os.pipe()
if os.fork() == 0:
    for offset in range(0, size, 4096):
        shared[offset]
    os.write(touched[1], b"x")
    os.read(done[0], 1)
    os._exit(0)
os.read(touched[0], 1)
print(before, processes.tree_footprint(os.getpid()))
os.write(done[1], b"x")
os.wait()
"""


@pytest.mark.skipif(not os.access("/proc/self/smaps_rollup", os.R_OK), reason="proportional sizes are not told here")
def test_pages_that_are_shared_count_once() -> None:
    done = subprocess.run([sys.executable, "-c", SHARING], capture_output=True, text=True, timeout=60, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 64 * 2**20
    assert after - before < 32 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's peak")
def test_the_peak_outlives_what_was_freed() -> None:
    size = 64 * 2**20
    program = f"b = bytearray({size}); b[::4096] = b'x' * {size // 4096}; del b; print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    try:
        peak, now = processes.peak_rss(process.pid), processes.tree_footprint(process.pid)
        assert peak is not None and now is not None
        assert peak > size > now
    finally:
        process.communicate(b"\n")
    assert processes.peak_rss(process.pid) is None

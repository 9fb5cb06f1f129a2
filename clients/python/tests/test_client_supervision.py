"""Services as processes: started in order, restarted when they die, stopped in reverse, ended with their starter."""

import asyncio
import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge.cli.running import engine_kinds_here
from weighbridge.reach import HEALTH_SERVICES
from weighbridge.supervision.budget import RestartBudget
from weighbridge.supervision.lock import RunLock, SuiteRunningError, is_supervised, supervised_services
from weighbridge.supervision.process import StartFailedError, explain_exit
from weighbridge.supervision.services import ServiceSpec
from weighbridge.supervision.suite import RunningSuite, SuiteBrokenError, make_private

TESTS = Path(__file__).parent


def spec(name: str, rank: int, mode: str = "") -> ServiceSpec:
    argv = (sys.executable, "-m", "weighbridge.supervision.lifeline", "client_fake_service", name, mode)
    return ServiceSpec(name, argv, HEALTH_SERVICES[name], rank)


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(TESTS)}


async def until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            if holds():
                return
            await asyncio.sleep(0.02)


# ---- the restart budget


def test_the_delay_doubles_up_to_its_bound_and_then_the_service_counts_as_broken() -> None:
    budget = RestartBudget(max_restarts=4, window_s=60, first_delay_s=0.5, longest_delay_s=2.0)
    assert [budget.delay_after_death(float(now)) for now in range(5)] == [0.5, 1.0, 2.0, 2.0, None]


def test_deaths_outside_the_window_are_forgotten() -> None:
    budget = RestartBudget(max_restarts=1, window_s=60, first_delay_s=0.5)
    assert budget.delay_after_death(0.0) == 0.5
    assert budget.delay_after_death(60.0) == 0.5
    assert budget.delay_after_death(61.0) is None


@given(st.lists(st.floats(min_value=0, max_value=100), max_size=60))
def test_no_window_sees_more_restarts_than_the_budget(gaps: list[float]) -> None:
    budget = RestartBudget(max_restarts=3, window_s=10)
    now, restarts = 0.0, list[float]()
    for gap in gaps:
        now += gap
        if budget.delay_after_death(now) is None:
            break
        restarts.append(now)
    for start in restarts:
        assert sum(1 for at in restarts if start <= at < start + 10) <= 3


def test_exits_are_explained() -> None:
    assert explain_exit(2) == "ended with exit code 2"
    assert explain_exit(-9) == "was killed by SIGKILL"


# ---- one suite for each run folder


def test_a_second_suite_is_refused_and_the_lock_goes_with_its_holder(short_dir: Path) -> None:
    first = RunLock(short_dir)
    assert not is_supervised(short_dir)
    first.acquire()
    assert is_supervised(short_dir)
    with pytest.raises(SuiteRunningError) as refused:
        RunLock(short_dir).acquire()
    assert refused.value.pid == os.getpid()
    assert str(short_dir) in str(refused.value)
    first.release()
    assert not is_supervised(short_dir)
    assert list(short_dir.iterdir()) == []
    again = RunLock(short_dir)
    again.acquire()
    again.release()


def test_a_lock_file_of_a_dead_suite_is_no_suite(short_dir: Path) -> None:
    (short_dir / "up.lock").write_text("999999")
    assert not is_supervised(short_dir)
    lock = RunLock(short_dir)
    lock.acquire()
    lock.release()


def test_a_run_folder_that_others_may_open_is_refused(short_dir: Path) -> None:
    short_dir.chmod(0o750)
    with pytest.raises(PermissionError, match="chmod 700"):
        make_private(short_dir)
    make_private(short_dir / "new")
    assert (short_dir / "new").stat().st_mode & 0o777 == 0o700


# ---- processes


def last_pid(folder: Path, name: str) -> str:
    return (folder / "logs" / f"{name}.log").read_text().splitlines()[1].split()[-1]


async def test_services_start_in_order_and_stop_in_reverse_leaving_nothing(short_dir: Path) -> None:
    lines: list[str] = []
    services = [spec("ledger", 2), spec("fit", 1), spec("engine-mlx", 0)]
    async with RunningSuite(services, short_dir, environ(), lines.append) as suite:
        pids = [process.pid for process in suite.processes]
        assert [line.split()[:2] for line in lines] == [["ledger", "ready"], ["fit", "ready"], ["engine-mlx", "ready"]]
        assert str(short_dir / "ledger.sock") in lines[0]
        assert "ledger starts as" in (short_dir / "logs" / "ledger.log").read_text()
        with pytest.raises(SuiteRunningError):
            await RunningSuite(services, short_dir, environ(), lines.append).start()
    assert (short_dir / "stopped.txt").read_text().split() == ["engine-mlx", "fit", "ledger"]
    assert not any(psutil.pid_exists(pid) for pid in pids if pid)
    assert sorted(os.listdir(short_dir)) == ["logs", "stopped.txt"]


async def test_a_killed_service_is_started_again(short_dir: Path) -> None:
    lines: list[str] = []
    async with RunningSuite([spec("ledger", 0)], short_dir, environ(), lines.append) as suite:
        supervising = asyncio.create_task(suite.supervise())
        process = suite.processes[0]
        first = process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: sum("ready" in line for line in lines) == 2)
        assert process.pid not in (None, first)
        assert any("was killed by SIGKILL" in line for line in lines)
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)


async def test_a_killed_service_is_started_again_on_a_full_disk(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log takes no note of its start then. That is no reason to stop the others."""

    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lines: list[str] = []
    async with RunningSuite([spec("ledger", 0)], short_dir, environ(), lines.append) as suite:
        supervising = asyncio.create_task(suite.supervise())
        process = suite.processes[0]
        assert process.pid is not None
        opened = Path.open
        monkeypatch.setattr(
            Path,
            "open",
            lambda path, mode="r", *more, **named: (
                FullDisk(path, mode) if mode == "ab" else opened(path, mode, *more, **named)
            ),
        )
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: supervising.done() or sum("ready" in line for line in lines) == 2)
        assert not supervising.done()
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)


async def test_a_service_that_cannot_live_breaks_the_suite(short_dir: Path) -> None:
    lines: list[str] = []

    def budget() -> RestartBudget:
        return RestartBudget(max_restarts=1, first_delay_s=0.01)

    async with RunningSuite([spec("ledger", 0)], short_dir, environ(), lines.append, budget=budget) as suite:
        process = suite.processes[0]
        process.spec = spec("ledger", 0, "dies")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(SuiteBrokenError, match="ledger ended with exit code 7"):
            await suite.supervise()


async def test_a_service_that_ends_at_its_start_is_named_with_its_last_words(short_dir: Path) -> None:
    lines: list[str] = []
    suite = RunningSuite([spec("ledger", 1), spec("fit", 0, "dies")], short_dir, environ(), lines.append)
    with pytest.raises(StartFailedError) as failed:
        await suite.start()
    assert "fit ended with exit code 7" in str(failed.value)
    assert failed.value.status == 7
    assert str(failed.value).splitlines()[1:] == [f"  fit starts as {last_pid(short_dir, 'fit')}", "  the disk is full"]
    assert [process.pid for process in suite.processes] == [None, None], "what had started is stopped"
    assert not is_supervised(short_dir)


async def test_a_service_that_never_serves_is_given_up(short_dir: Path) -> None:
    suite = RunningSuite([spec("fit", 0, "mute")], short_dir, environ(), print, start_timeout_s=1.0)
    with pytest.raises(StartFailedError, match="did not serve within 1 s"):
        await suite.start()
    assert suite.processes[0].pid is None


async def test_verbose_services_print_with_their_name(short_dir: Path) -> None:
    lines: list[str] = []
    async with RunningSuite([spec("fit", 0)], short_dir, environ(), lines.append, verbose=True):
        assert any(line.startswith("fit | fit starts as") for line in lines)


async def test_stopping_at_once_does_not_wait_for_a_deaf_service(short_dir: Path) -> None:
    suite = RunningSuite([spec("ledger", 1), spec("fit", 0, "deaf")], short_dir, environ(), print)
    await suite.start()
    stopping = asyncio.create_task(suite.stop())
    await asyncio.sleep(0.1)
    assert not stopping.done(), "it waits for the deaf one"
    suite.stop_at_once()
    await stopping  # the grace is 15 s; the test's time limit is beyond it, the next line is the proof
    assert [process.pid for process in suite.processes] == [None, None]
    assert [name for name in os.listdir(short_dir) if name.endswith(".sock")] == []


async def test_a_cancelled_start_leaves_nothing(short_dir: Path) -> None:
    suite = RunningSuite([spec("ledger", 1), spec("fit", 0, "mute")], short_dir, environ(), print)
    starting = asyncio.create_task(suite.start())
    await until(lambda: suite.processes[1].pid is not None)
    pids = [process.pid for process in suite.processes]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(psutil.pid_exists(pid) for pid in pids if pid)
    assert not is_supervised(short_dir)


def test_services_do_not_outlive_a_killed_starter(short_dir: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(short_dir)], env=environ(), stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    services = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
    starter.kill()
    starter.wait()
    psutil.wait_procs(services, timeout=30)
    assert not any(service.is_running() for service in services)
    stopped = (short_dir / "stopped.txt").read_text().split()
    assert stopped == ["engine-mlx", "fit", "ledger"], "cleanly, as by SIGTERM, and each before what it needs"


STARTER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, __import__("os").environ["PYTHONPATH"])
import test_client_supervision as t
from weighbridge.supervision.suite import RunningSuite
async def main():
    services = [t.spec("ledger", 2), t.spec("fit", 1), t.spec("engine-mlx", 0)]
    suite = RunningSuite(services, Path(sys.argv[1]), t.environ(), lambda line: None)
    await suite.start()
    print(*(process.pid for process in suite.processes), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _no_processes_left() -> Any:
    yield
    left = [child for child in psutil.Process().children(recursive=True) if "lifeline" in " ".join(child.cmdline())]
    assert left == []


def test_engines_that_a_suite_keeps_up_are_here_while_they_are_being_started(run_dir: Path) -> None:
    (run_dir / "engine-mlx.sock").touch()
    assert engine_kinds_here() == ["mlx"], "nobody starts any other"
    lock = RunLock(run_dir, ["ledger", "fit", "engine-ds4"])
    lock.acquire()
    try:
        assert engine_kinds_here() == ["mlx", "ds4"], "and sd is not waited for in vain"
    finally:
        lock.release()
    (run_dir / "up.lock").write_text("999999\nengine-ds4\n")  # of a suite that was killed
    assert engine_kinds_here() == ["mlx"]


async def test_a_suite_tells_what_it_keeps_up_also_while_that_is_dead(run_dir: Path) -> None:
    services = [spec("ledger", 1), spec("engine-ds4", 0)]
    async with RunningSuite(services, run_dir, environ(), lambda line: None) as suite:
        engine = suite.processes[1]
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await engine.wait()
        (run_dir / "engine-ds4.sock").unlink(missing_ok=True)  # as its next start does
        assert supervised_services(run_dir) == ("ledger", "engine-ds4")
        assert engine_kinds_here() == ["ds4"]
    assert engine_kinds_here() == []

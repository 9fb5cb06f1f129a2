"""Real processes: held, started, stopped, killed at every place, and never left behind."""

# ruff: noqa: ASYNC220 # the tests are about processes

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from host_fakes import eventually, kill, process_exists
from weighbridge_common import processes
from weighbridge_engines.supervisor.child import ChildSpec, SpawnError, spawn
from weighbridge_engines.supervisor.exits import ExitCause, FatalLine, explain
from weighbridge_engines.supervisor.output import RingLog
from weighbridge_engines.supervisor.readiness import (
    EngineEndedError,
    FatalOutputError,
    LivenessPolicy,
    ReadinessPolicy,
    until_dead,
    until_ready,
)
from weighbridge_engines.supervisor.records import ProcessRecord

SLEEPS = "import time; print('up', flush=True); time.sleep(1000)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)"


def python(code, tmp_path, **fields):
    return ChildSpec("test", [sys.executable, "-S", "-c", code], dict(os.environ), tmp_path, **fields)


async def started(code, tmp_path, **fields):
    log = RingLog()
    child = await spawn(python(code, tmp_path, **fields), log)
    child.open_gate()
    await eventually(lambda: log.last_number)
    return child, log


async def test_nothing_of_the_engine_runs_before_the_gate_opens(tmp_path):
    mark = tmp_path / "ran"
    log = RingLog()
    child = await spawn(python(f"open({str(mark)!r}, 'w').close()", tmp_path), log)
    assert processes.is_alive(child.engine)
    assert processes.is_alive(child.guard)
    await asyncio.sleep(0.1)
    assert not mark.exists()
    child.open_gate()
    facts = await child.wait()
    assert mark.exists()
    assert (facts.exit_code, facts.asked) == (0, False)


async def test_the_identity_told_is_the_engines_own(tmp_path):
    child, log = await started(
        "import os; print(os.getpid(), os.getsid(0), flush=True); import time; time.sleep(99)", tmp_path
    )
    pid, session = log.tail(1)[0].text.split()
    assert int(pid) == child.engine.pid
    assert int(session) == child.engine.pid  # a session, hence a group, of its own
    await child.stop()


async def test_a_held_engine_can_be_stopped(tmp_path):
    child = await spawn(python(SLEEPS, tmp_path), RingLog())
    await child.stop(grace_s=0.5)
    assert not process_exists(child.engine.pid)
    assert not process_exists(child.guard.pid)


async def test_stop_asks_first_and_then_kills(tmp_path):
    polite, _ = await started(SLEEPS, tmp_path)
    assert (await polite.stop(5)).signal_number == signal.SIGTERM
    deaf, _ = await started(DEAF, tmp_path)
    facts = await deaf.stop(0.1)
    assert (facts.signal_number, facts.asked) == (signal.SIGKILL, True)
    assert await deaf.stop(0.1) == facts  # again


async def test_a_second_sigterm_comes_before_the_kill_where_the_engine_needs_one(tmp_path):
    """ds4 finishes what it computes on the first, however long, and gives it up on the second."""
    twice = textwrap.dedent(
        """
        import signal, time
        heard = []
        def hear(*_):
            heard.append(1)
            if len(heard) == 2:
                raise SystemExit(130)
        signal.signal(signal.SIGTERM, hear)
        print('up', flush=True)
        while True:
            time.sleep(0.01)
        """
    )
    child, _ = await started(twice, tmp_path, second_term_after_s=0.05)
    assert (await child.stop(30)).exit_code == 130
    child, _ = await started(twice, tmp_path)
    assert (await child.stop(0.2)).signal_number == signal.SIGKILL  # one alone does not end it
    deaf, _ = await started(DEAF, tmp_path, second_term_after_s=0.05)
    assert (await deaf.stop(0.1)).signal_number == signal.SIGKILL


async def test_a_stop_that_was_given_up_goes_on_with_the_second_sigterm(tmp_path):
    child, _ = await started(DEAF, tmp_path, second_term_after_s=60.0)
    stopping = asyncio.create_task(child.stop(100))
    await eventually(lambda: child._asked)
    stopping.cancel()
    assert (await child.stop(0.1)).signal_number == signal.SIGKILL  # too short for a second one


async def test_an_end_keeps_its_exit_code_or_signal(tmp_path):
    child = await spawn(python("raise SystemExit(7)", tmp_path), RingLog())
    child.open_gate()
    assert (await child.wait()).exit_code == 7
    child = await spawn(python("import os; os.abort()", tmp_path), RingLog())
    child.open_gate()
    assert (await child.wait()).signal_number == signal.SIGABRT
    child = await spawn(ChildSpec("none", ["/does/not/exist"], {}, tmp_path), RingLog())
    child.open_gate()
    assert explain(await child.wait()).cause is ExitCause.CANNOT_START


async def test_the_guard_ends_as_its_engine_does(tmp_path):
    for code, expected in [("raise SystemExit(7)", 7), ("import os; os.abort()", -signal.SIGABRT)]:
        child = await spawn(python(code, tmp_path), RingLog())
        child.open_gate()
        await child.wait()
        assert child._popen.returncode == expected


async def test_the_last_line_before_the_end_is_not_lost(tmp_path):
    log = RingLog()
    child = await spawn(python("import sys; sys.stderr.write('the reason'); sys.stderr.flush()", tmp_path), log)
    child.open_gate()
    await child.wait()
    assert [(line.text, line.from_stderr) for line in log.tail(9)] == [("the reason", True)]


async def test_a_killed_guard_takes_its_engine_along(tmp_path):
    child, _ = await started(DEAF, tmp_path)
    kill(child.guard.pid)
    facts = await child.wait()
    assert facts.guard_lost
    assert not process_exists(child.engine.pid)


async def test_a_killed_guard_takes_the_engines_children_along(tmp_path):
    code = textwrap.dedent(
        f"""
        import subprocess, sys
        p = subprocess.Popen([sys.executable, '-S', '-c', {DEAF!r}], stdout=subprocess.DEVNULL)
        print(p.pid, flush=True)
        p.wait()
        """
    )
    child, log = await started(code, tmp_path)
    grandchild = int(log.tail(1)[0].text)
    kill(child.guard.pid)
    await child.wait()
    await eventually(lambda: not process_exists(grandchild))


async def test_a_stray_that_outlives_a_killed_guard_holds_no_pipe_of_the_service_open(tmp_path):
    code = textwrap.dedent(
        f"""
        import subprocess, sys
        p = subprocess.Popen([sys.executable, '-S', '-c', {DEAF!r}], start_new_session=True)
        print(p.pid, flush=True)
        p.wait()
        """
    )
    before = len(os.listdir("/proc/self/fd"))
    child, log = await started(code, tmp_path)
    stray = int(log.tail(9)[0].text)
    kill(child.guard.pid)
    await child.wait()
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert process_exists(stray)
    kill(stray)


async def test_a_stopped_guard_cannot_keep_an_engine_alive(tmp_path):
    child, _ = await started(DEAF, tmp_path)
    kill(child.guard.pid, signal.SIGSTOP)
    await child.stop(0.05)
    assert not process_exists(child.engine.pid)
    assert not process_exists(child.guard.pid)


async def test_descendants_that_left_the_group_end_with_the_engine(tmp_path):
    code = textwrap.dedent(
        f"""
        import subprocess, sys
        p = subprocess.Popen([sys.executable, '-S', '-c', {DEAF!r}], start_new_session=True, stdout=subprocess.DEVNULL)
        print(p.pid, flush=True)
        """
    )
    log = RingLog()
    child = await spawn(python(code, tmp_path), log)
    child.open_gate()
    await child.wait()
    stray = int(log.tail(1)[0].text)
    if sys.platform.startswith("linux"):
        assert not process_exists(stray)
    else:
        kill(stray)


@pytest.mark.parametrize("held", [True, False])
def test_a_killed_service_takes_guard_and_engine_along(tmp_path, held):
    service = textwrap.dedent(
        f"""
        import asyncio, os, sys
        from pathlib import Path
        from weighbridge_engines.supervisor.child import ChildSpec, spawn
        from weighbridge_engines.supervisor.output import RingLog
        async def main():
            log = RingLog()
            spec = ChildSpec("t", [sys.executable, "-S", "-c", {DEAF!r}], dict(os.environ), Path("/"))
            child = await spawn(spec, log)
            if not {held}:
                child.open_gate()
                await log.next_change.wait()
            print(child.guard.pid, child.engine.pid, flush=True)
            await asyncio.sleep(1000)
        asyncio.run(main())
        """
    )
    process = subprocess.Popen([sys.executable, "-c", service], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert all(process_exists(pid) for pid in pids)
    process.kill()
    process.wait()
    asyncio.run(eventually(lambda: not any(process_exists(pid) for pid in pids), 5))


@pytest.mark.parametrize("pipes_left", [0, 1])
async def test_without_a_file_descriptor_left_it_is_said_what_cannot_be_started(tmp_path, monkeypatch, pipes_left):
    made, pipe = [], os.pipe

    def few_pipes():
        if len(made) == 2 * pipes_left:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.extend(pipe())
        return tuple(made)

    monkeypatch.setattr(os, "pipe", few_pipes)
    with pytest.raises(SpawnError, match="The guard of test cannot be started: Too many open files"):
        await spawn(python(SLEEPS, tmp_path), RingLog())
    for descriptor in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


async def test_cancelling_a_spawn_leaves_nothing(tmp_path):
    for delay_s in (0.0, 0.005, 0.02):
        task = asyncio.create_task(spawn(python(DEAF, tmp_path), RingLog()))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().stop(0)
    needle = f"{tmp_path}"
    for folder in os.listdir("/proc"):
        if folder.isdigit() and process_exists(int(folder)):
            try:
                assert os.readlink(f"/proc/{folder}/cwd") != needle
            except OSError:
                continue


async def test_readiness_gives_up_when_the_engine_ends_or_says_it_must(tmp_path):
    async def never():
        return False

    child, _ = await started("print('up', flush=True)", tmp_path)
    with pytest.raises(EngineEndedError) as ended:
        await until_ready(child, never, ReadinessPolicy(timeout_s=30))
    assert ended.value.facts.exit_code == 0

    def classify(line, from_stderr):
        return FatalLine(ExitCause.OUT_OF_MEMORY, line) if "no memory" in line else None

    child, _ = await started("import time; print('no memory', flush=True); time.sleep(99)", tmp_path, classify=classify)
    with pytest.raises(FatalOutputError):
        await until_ready(child, never, ReadinessPolicy(timeout_s=30))
    await child.stop(0)


async def test_a_probe_that_hangs_or_fails_is_a_no_and_the_start_has_an_end(tmp_path):
    answers = iter([RuntimeError("refused"), None, True])

    async def probe():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        return answer

    child, _ = await started(SLEEPS, tmp_path)
    await until_ready(child, probe, ReadinessPolicy(timeout_s=30, poll_s=0.001, probe_timeout_s=0.02))

    async def never():
        return False

    with pytest.raises(TimeoutError):
        await until_ready(child, never, ReadinessPolicy(timeout_s=0.05, poll_s=0.001))
    await child.stop(0)


async def test_liveness_counts_failures_in_a_row_and_excuses_a_busy_engine():
    asked = []

    async def probe():
        asked.append(1)
        return len(asked) == 2

    policy = LivenessPolicy(interval_s=0.001, probe_timeout_s=1, failures=3)
    await asyncio.wait_for(until_dead(probe, policy), 5)
    assert len(asked) == 5  # no, yes, no, no, no
    asked.clear()
    excuses = iter([True] * 4 + [False] * 3)
    await asyncio.wait_for(until_dead(probe, policy, excused=lambda: next(excuses)), 5)
    assert len(asked) == 8


async def test_a_classifier_that_fails_does_not_stop_the_output(tmp_path):
    def classify(line, from_stderr):
        raise ValueError("odd line")

    log = RingLog()
    child = await spawn(python("print('a'); print('b')", tmp_path, classify=classify), log)
    child.open_gate()
    await child.wait()
    assert [line.text for line in log.tail(9)] == ["a", "b"]


async def test_orphans_of_a_dead_service_are_ended_by_identity(tmp_path):
    orphan = subprocess.Popen([sys.executable, "-S", "-c", DEAF], start_new_session=True, stdout=subprocess.DEVNULL)
    other = subprocess.Popen([sys.executable, "-S", "-c", DEAF], start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        dead = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        owner = processes.identify(dead.pid)
        dead.communicate(b"\n")
        path = tmp_path / "engine.processes.json"
        identity = processes.identify(orphan.pid)
        reused = processes.ProcessIdentity(
            other.pid, identity.start_time - 100, identity.boot_id, identity.pid_namespace
        )
        await ProcessRecord(path, owner).write([identity, reused])
        mine = ProcessRecord(path, processes.current())
        assert await mine.reap() == 1
        assert not process_exists(orphan.pid)
        assert process_exists(other.pid)  # the same pid, but another process than the recorded one
        assert not path.exists()
        assert await mine.reap() == 0
    finally:
        for process in (orphan, other):
            process.kill()
            process.wait()


async def test_what_a_living_service_recorded_is_left_alone(tmp_path):
    path = tmp_path / "engine.processes.json"
    me = processes.current()
    parent = processes.identify(os.getppid())
    await ProcessRecord(path, parent).write([me])
    killed = []
    assert await ProcessRecord(path, me).reap(kill=killed.append) == 0
    assert killed == []


async def test_a_slow_disk_stops_nothing_but_its_own_record_which_is_whole_even_when_cancelled(tmp_path, monkeypatch):
    path = tmp_path / "engine.processes.json"
    syncing, synced, sync = threading.Event(), threading.Event(), os.fsync

    def slow(descriptor):
        syncing.set()
        assert synced.wait(10), "the event loop went on meanwhile"
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    writing = asyncio.create_task(ProcessRecord(path, processes.current()).write([processes.current()]))
    await eventually(syncing.is_set)
    writing.cancel()
    await asyncio.sleep(0)
    assert not writing.done()
    synced.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert json.loads(path.read_text())["children"][0]["pid"] == os.getpid()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 2, "owner": {}, "children": []}'])
async def test_a_broken_record_ends_nothing(tmp_path, text):
    path = tmp_path / "engine.processes.json"
    path.write_text(text)
    killed = []
    assert await ProcessRecord(path, processes.current()).reap(kill=killed.append) == 0
    assert killed == []

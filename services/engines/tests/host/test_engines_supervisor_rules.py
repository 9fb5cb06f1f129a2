"""The supervisor's rules without processes: lines, ring, budget, environment, cgroups, explanations."""

import errno
import random
import signal

import pytest
from weighbridge_engines.supervisor import cgroup
from weighbridge_engines.supervisor.budget import RestartBudget
from weighbridge_engines.supervisor.environment import scrub
from weighbridge_engines.supervisor.exits import ExitCause, ExitFacts, FatalLine, explain
from weighbridge_engines.supervisor.output import MAX_LINE_CHARS, LineSplitter, RingLog
from weighbridge_engines.supervisor.ports import free_loopback_port


def split(chunks):
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.end()


def test_lines_end_at_lf_cr_and_crlf():
    assert split([b"a\nb\rc\r\nd"]) == ["a", "b", "c", "d"]
    assert split([b"10%\r20%\r30%\n"]) == ["10%", "20%", "30%"]  # three repaints, three lines
    assert split([b"\n\n a \r\n"]) == [" a"]


def test_a_bar_is_a_line_as_soon_as_it_is_painted():
    splitter = LineSplitter()
    assert splitter.feed(b"\r  |=>  | 1/3 - 35.10s/it\x1b[") == []
    assert splitter.feed(b"K") == ["  |=>  | 1/3 - 35.10s/it"]
    assert splitter.feed(b"\r  |==>| 2/3 - 35.00s/it\x1b[K[INFO ] next\n") == [
        "  |==>| 2/3 - 35.00s/it",
        "[INFO ] next",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_lines_do_not_depend_on_how_the_stream_is_cut(seed):
    text = "load\r 1/3\r 2/3\r\ndone: größe\r\n\nCUDA error: out of memory\nend".encode()
    whole = split([text])
    assert whole == ["load", " 1/3", " 2/3", "done: größe", "CUDA error: out of memory", "end"]
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(len(text)), 12))
    assert split([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    assert split([bytes([byte]) for byte in text]) == whole


def test_an_endless_line_is_kept_in_pieces():
    lines = split([b"x" * 1000] * 50)
    assert sum(map(len, lines)) == 50_000
    assert max(map(len, lines)) <= MAX_LINE_CHARS


def test_the_ring_keeps_the_last_bytes():
    ring = RingLog(capacity_bytes=30, now=lambda: 5.0)
    for number in range(10):
        ring.append(f"line {number:04}", from_stderr=False)
    assert [line.text for line in ring.tail(99)] == ["line 0007", "line 0008", "line 0009"]
    assert [line.text for line in ring.tail(1)] == ["line 0009"]
    assert ring.tail(0) == []
    assert [line.number for line in ring.after(9)] == [10]
    assert ring.last_number == 10


def test_three_failures_within_a_minute_exhaust_the_budget():
    budget = RestartBudget()
    for now in (100.0, 110.0):
        budget.record_failure(now)
        assert budget.exhausted_for_s(now) is None
    budget.record_failure(120.0)
    assert budget.exhausted_for_s(120.0) == pytest.approx(40.0)  # until the first is a minute old
    assert budget.exhausted_for_s(159.9) is not None
    assert budget.exhausted_for_s(160.0) is None


def test_back_off_doubles_and_passes():
    budget = RestartBudget()
    assert budget.delay_s(0.0) == 0.0
    budget.record_failure(10.0)
    assert budget.delay_s(10.0) == pytest.approx(0.25)
    assert budget.delay_s(10.1) == pytest.approx(0.15)
    assert budget.delay_s(11.0) == 0.0
    budget.record_failure(11.0)
    assert budget.delay_s(11.0) == pytest.approx(0.5)


def test_an_engine_sees_only_named_variables():
    environ = {"PATH": "/bin", "LC_ALL": "C", "AWS_SECRET": "x", "LD_PRELOAD": "y", "PYTHONPATH": "z", "DS4_MODE": "1"}
    assert scrub(environ, extra={"A": "b"}) == {"PATH": "/bin", "LC_ALL": "C", "A": "b"}
    assert scrub(environ, also=["DS4_MODE"])["DS4_MODE"] == "1"


def test_a_free_port_can_be_bound():
    assert 1024 <= free_loopback_port() <= 65535


@pytest.mark.parametrize(
    ("facts", "cause", "words"),
    [
        (ExitFacts(exit_code=0, asked=True), ExitCause.STOPPED, "stopped"),
        (ExitFacts(signal_number=signal.SIGKILL, oom_kills=1), ExitCause.OUT_OF_MEMORY, "for want of memory"),
        (ExitFacts(signal_number=signal.SIGKILL, oom_kills=0), ExitCause.KILLED, "from outside"),
        (ExitFacts(signal_number=signal.SIGKILL), ExitCause.KILLED, "or by the kernel"),
        (ExitFacts(signal_number=signal.SIGTERM), ExitCause.KILLED, "ended by somebody else's signal (SIGTERM)"),
        (ExitFacts(signal_number=signal.SIGINT), ExitCause.KILLED, "ended by somebody else's signal (SIGINT)"),
        (ExitFacts(signal_number=signal.SIGHUP), ExitCause.KILLED, "ended by somebody else's signal (SIGHUP)"),
        (ExitFacts(signal_number=signal.SIGILL), ExitCause.ILLEGAL_INSTRUCTION, "processor"),
        (ExitFacts(signal_number=signal.SIGSEGV), ExitCause.CRASHED, "SIGSEGV"),
        (ExitFacts(exit_code=7), ExitCause.EXITED, "exit code 7: lock held"),
        (ExitFacts(exit_code=127, start_errno=errno.ENOENT), ExitCause.CANNOT_START, "Is it installed?"),
        (ExitFacts(guard_lost=True), ExitCause.GUARD_LOST, "guard"),
        # The kernel kills by SIGKILL alone. What it killed beside an end of another kind was another program.
        (ExitFacts(signal_number=signal.SIGSEGV, oom_kills=1), ExitCause.CRASHED, "SIGSEGV"),
        (ExitFacts(exit_code=7, oom_kills=1), ExitCause.EXITED, "exit code 7: lock held"),
        (ExitFacts(guard_lost=True, oom_kills=1), ExitCause.OUT_OF_MEMORY, "for want of memory"),
        # An engine that runs out of memory often aborts, and some runtimes abort by SIGILL.
        (
            ExitFacts(signal_number=signal.SIGILL, fatal=FatalLine(ExitCause.OUT_OF_MEMORY, "CUDA out of memory")),
            ExitCause.OUT_OF_MEMORY,
            "CUDA out of memory",
        ),
        (
            ExitFacts(signal_number=signal.SIGABRT, fatal=FatalLine(ExitCause.CRASHED, "assertion failed", False)),
            ExitCause.CRASHED,
            "assertion failed",
        ),
    ],
)
def test_ends_are_explained(facts, cause, words):
    why = explain(facts, "The engine", {7: "lock held"})
    assert why.cause is cause
    assert words in why.message
    assert why.metadata["cause"] == cause.value


def test_cgroup_v2_limit_and_kills(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    inner = tmp_path / "root/a/b"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("1000\n")
    (inner / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert cgroup.memory_limit_bytes(tmp_path / "root", membership) == 1000
    assert cgroup.oom_kills(tmp_path / "root", membership) == 2


def test_cgroup_v1_without_a_limit(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("5:cpu:/x\n4:memory:/x\n")
    inner = tmp_path / "root/memory/x"
    inner.mkdir(parents=True)
    (inner / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (inner / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert cgroup.memory_limit_bytes(tmp_path / "root", membership) is None
    assert cgroup.oom_kills(tmp_path / "root", membership) == 1


def test_no_cgroup_at_all(tmp_path):
    assert cgroup.memory_limit_bytes(tmp_path, tmp_path / "none") is None
    assert cgroup.oom_kills(tmp_path, tmp_path / "none") is None

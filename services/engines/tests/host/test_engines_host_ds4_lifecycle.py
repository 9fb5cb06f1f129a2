"""A ds4 model's life under the host: loaded with progress, its lease raised to what it announces, and each of its ends.

The program is the stand-in; the behaviour suite holds that to the real one. Ledger and fit are fakes over real
channels.
"""

# ruff: noqa: N802 # rpcs are named as in the contract

import contextlib
import fcntl
import os
import signal
import socket
import sys

import grpc
import pytest
from host_fakes import FakeFit, Suite, eventually, failure_of, kill, kinds, until_event
from weighbridge_engines.ds4.kind import Ds4Kind
from weighbridge_engines.models import sparse_ds4
from weighbridge_engines.supervisor.ports import free_loopback_port
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import fit_service_pb2, plan_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

from services.engines.standins.ds4.behaviour import Behaviour
from services.engines.standins.ds4.program import write_standin

GIB = 2**30
CONTEXT = 4096
CLAIM_BYTES = 120 * GIB
"""More than V4 Flash Q2 (80.77 GiB) says that it will hold at this context."""

S = grpc.StatusCode


class Ds4Fit(FakeFit):
    """Plans one model resident on CUDA."""

    def __init__(self, model, claim_bytes, sessions=1):
        super().__init__()
        self._model, self._claim_bytes, self._sessions = model, claim_bytes, sessions

    async def PlanModel(self, request, context):
        self.plans.append(request)
        plan = fit_service_pb2.PlanModelResponse(
            claim=requirement_pb2.Claim(host_bytes=self._claim_bytes),
            model_digest="digest",
            model_name=request.model.path,
            engine_kind=plan_pb2.ENGINE_KIND_DS4,
            shape="ds4",
            resolved_path=str(self._model),
        )
        plan.notes.add(code="DRAFT_UNMET", message="There is no drafter.")
        launch = plan.launch.ds4
        launch.arguments.extend(["--model", str(self._model), "--cuda", "--ctx", str(CONTEXT)])
        if self._sessions > 1:
            launch.arguments.extend(["--batched-session", str(self._sessions)])
        launch.context_tokens, launch.sessions, launch.compute = CONTEXT, self._sessions, "cuda"
        launch.prefill_chunk_tokens = CONTEXT
        launch.loaded_bytes = self._model.stat().st_size
        plan.requirement.total.expected_bytes = plan.requirement.total.high_bytes = self._claim_bytes
        plan.assessment.verdict = requirement_pb2.VERDICT_RUNS
        return plan


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return sparse_ds4.write(tmp_path_factory.mktemp("flash") / "flash.gguf")


@pytest.fixture
def ds4(run_dir, tmp_path, model):
    """A host with a ds4 engine that behaves like this, and otherwise from its next start after ``becomes``."""

    @contextlib.asynccontextmanager
    async def started(claim_bytes=CLAIM_BYTES, sessions=1, file=model, setting=None, **behaviour):
        program = tmp_path / "bin"
        program.mkdir(exist_ok=True)
        kind = Ds4Kind(
            str(write_standin(program, Behaviour(compute="cuda", **behaviour))),
            lock_file=str(tmp_path / "ds4.lock"),
            checkpoints_root=tmp_path / "kv",
            cache=tmp_path / "cache",
        )
        fit = Ds4Fit(file, claim_bytes, sessions)
        async with Suite(run_dir, kind=kind, fit=fit, **(setting or {"stop_grace_s": 1.0})) as suite:
            suite.becomes = lambda **other: write_standin(program, Behaviour(compute="cuda", **{**behaviour, **other}))
            yield suite

    return started


async def test_a_load_tells_its_plan_and_its_progress_and_ends_ready(ds4):
    async with ds4(load_s=0.8) as suite:
        events = await suite.load_all()
        planned = next(event.planned for event in events if event.WhichOneof("event") == "planned")
        assert [note.code for note in planned.plan.notes] == ["DRAFT_UNMET"]
        steps = [event.starting for event in events if event.WhichOneof("event") == "starting"]
        told = [step.fraction for step in steps if step.phase == "weights" and step.fraction >= 0]
        assert told == sorted(told)
        assert any(0 < fraction < 1 for fraction in told)
        assert steps[-1].phase == "listening"
        assert kinds(events)[-1] == "ready"
        assert suite.ledger.committed == CLAIM_BYTES
        await suite.unload()
        await suite.nothing_left()


async def test_a_chat_is_answered(ds4):
    async with ds4(answer="Hello there.") as suite:
        events = await suite.chat_all()
        text = "".join(event.delta.text for event in events if event.WhichOneof("event") == "delta")
        assert text == "Hello there."
        assert kinds(events)[-1] == "finished"


async def test_the_lease_is_raised_to_what_it_says_that_it_will_hold(ds4):
    async with ds4(claim_bytes=90 * GIB, extra_planned_gib=50) as suite:
        await suite.load_all()
        # 80.76 GiB of weights and 50 more, and a context of less than a GiB.
        assert 130.7 * GIB < suite.ledger.committed < 132 * GIB
        await suite.unload()
        await suite.nothing_left()


async def test_each_session_s_buffers_are_in_what_it_announces(ds4):
    async with ds4(claim_bytes=GIB) as one:
        await one.load_all()
        single = one.ledger.committed
        await one.unload()
    async with ds4(claim_bytes=GIB, sessions=4) as four:
        await four.load_all()
        buffers = (four.ledger.committed - single) / 3
        # One session of 4,096 tokens on CUDA: ring 43 x 4,096 x 512 x 4 bytes, compressed rows and scratch beside it.
        assert 0.33 * GIB < buffers < 0.6 * GIB
        await four.unload()


async def test_what_cannot_be_granted_ends_it(ds4):
    async with ds4(claim_bytes=90 * GIB, extra_planned_gib=50) as suite:
        suite.ledger.refuse_resize = RequestError(S.RESOURCE_EXHAUSTED, "CANNOT_GROW", "There is no room.")
        failure = await failure_of(suite.load())
        assert (failure.code, failure.reason) == (S.RESOURCE_EXHAUSTED, "OUT_OF_GRANT")
        await suite.nothing_left()


# -- loads that fail ---------------------------------------------------------------------------------------------------


async def test_a_lock_held_elsewhere_is_told_with_its_holder(ds4, tmp_path, monkeypatch):
    """Where the holder cannot be told beforehand, it is the started ds4 that tells."""
    monkeypatch.setattr("weighbridge_engines.ds4.lock.holder_outside", lambda file: None)
    with (tmp_path / "ds4.lock").open("w") as held:
        held.write("4711\n")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        async with ds4() as suite:
            for _ in range(8):  # more often than crashes are put up with: it is none
                failure = await failure_of(suite.load())
                assert (failure.code, failure.reason) == (S.FAILED_PRECONDITION, "ENGINE_LOCKED")
                assert failure.metadata["pid"] == "4711"
                assert "4711" in failure.message
            await suite.nothing_left()
            fcntl.flock(held, fcntl.LOCK_UN)
            assert kinds(await suite.load_all())[-1] == "ready"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who holds a lock")
async def test_a_holder_that_can_be_told_is_told_before_memory_is_asked_for(ds4, tmp_path):
    with (tmp_path / "ds4.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        async with ds4() as suite:
            failure = await failure_of(suite.load())
            assert (failure.reason, failure.metadata["pid"]) == ("ENGINE_LOCKED", str(os.getpid()))
            assert suite.ledger.admits == []


async def test_an_engine_of_this_service_does_not_lock_out_its_successor(ds4):
    async with ds4() as suite:
        await suite.load_all("a")
        suite.fit._claim_bytes += 1
        assert kinds(await suite.load_all("b"))[-1] == "ready"


async def test_a_port_that_was_taken_meanwhile_is_explained_and_another_is_used_next_time(ds4, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        monkeypatch.setattr("weighbridge_engines.ds4.kind.free_loopback_port", lambda: taken)
        async with ds4() as suite:
            failure = await failure_of(suite.load())
            assert (failure.reason, failure.metadata["failure"]) == ("ENGINE_START_FAILED", "PORT_TAKEN")
            assert "another port" in failure.message
            await suite.nothing_left()
            monkeypatch.setattr("weighbridge_engines.ds4.kind.free_loopback_port", free_loopback_port)
            assert kinds(await suite.load_all())[-1] == "ready"


@pytest.mark.parametrize(
    ("fault", "reason", "metadata"),
    [
        ("out_of_memory", "ENGINE_OUT_OF_MEMORY", {"failure": "OUT_OF_MEMORY", "exit_code": "1"}),
        ("no_session", "ENGINE_OUT_OF_MEMORY", {"failure": "OUT_OF_MEMORY", "exit_code": "1"}),
        ("SIGILL", "ENGINE_START_FAILED", {"cause": "ILLEGAL_INSTRUCTION"}),
        ("SIGSEGV", "ENGINE_START_FAILED", {"cause": "CRASHED", "signal": "SIGSEGV"}),
    ],
)
async def test_a_load_that_fails_says_why_and_a_later_one_succeeds(ds4, fault, reason, metadata):
    async with ds4(load_fault=fault) as suite:
        failure = await failure_of(suite.load())
        assert failure.reason == reason
        assert metadata.items() <= failure.metadata.items()
        await suite.nothing_left()
        suite.becomes(load_fault="")
        assert kinds(await suite.load_all())[-1] == "ready"


async def test_a_file_that_is_no_model_is_told(ds4, tmp_path):
    text = tmp_path / "text.gguf"
    text.write_text("no weights, but long enough to look into\n")
    async with ds4(file=text) as suite:
        failure = await failure_of(suite.load())
        assert (failure.reason, failure.metadata["failure"]) == ("ENGINE_START_FAILED", "WRONG_FILE")
        await suite.nothing_left()


async def test_a_load_that_hangs_is_given_up(ds4):
    async with ds4(load_fault="hang", setting={"start_timeout_s": 1.5, "stop_grace_s": 0.3}) as suite:
        failure = await failure_of(suite.load())
        assert failure.reason == "ENGINE_START_TIMED_OUT"
        await suite.nothing_left()


# -- ends --------------------------------------------------------------------------------------------------------------


async def test_an_engine_that_is_killed_is_explained_and_loaded_again(ds4):
    async with ds4(tokens=100_000, rate=50) as suite:
        await suite.load_all()
        call = suite.chat()
        await until_event(call, "delta")
        before = suite.engine_pids
        kill((await suite.get()).model.process.pid)
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (S.UNAVAILABLE, "ENGINE_DIED")
        assert failure.metadata["signal"] == "SIGKILL"
        await suite.nothing_left()
        suite.becomes(tokens=3, rate=0)
        assert kinds(await suite.chat_all())[-1] == "finished"
        assert not set(before) & set(suite.engine_pids)


async def test_an_unload_asks_once_where_that_is_enough(ds4):
    async with ds4() as suite:
        await suite.load_all()
        child = suite.host.current.child
        await suite.unload()
        await suite.nothing_left()
        assert (await child.wait()).exit_code == 0
        assert any("shutdown requested" in line.text for line in suite.host.around.log.tail(20))


async def test_one_that_hears_no_sigterm_is_killed_and_only_then_its_memory_is_free(ds4):
    async with ds4(deaf=True, setting={"stop_grace_s": 0.3}) as suite:
        await suite.load_all()
        child = suite.host.current.child
        await suite.unload()  # the fake ledger takes no release while a process lives
        assert (await child.wait()).signal_number == signal.SIGKILL
        await suite.nothing_left()
        assert len(suite.ledger.released) == 1


async def test_a_prompt_that_is_read_is_given_up_on_the_second_sigterm(ds4, monkeypatch):
    monkeypatch.setattr("weighbridge_engines.ds4.kind.SECOND_TERM_AFTER_S", 0.3)
    async with ds4(prefill_rate=1, setting={"stop_grace_s": 60.0}) as suite:
        await suite.load_all()
        call = suite.chat("word " * 600)
        await until_event(call, "started")
        await eventually(lambda: any("prompt start" in line.text for line in suite.host.around.log.tail(50)))
        child = suite.host.current.child
        await suite.unload(force=True)
        assert (await failure_of(call)).reason == "MODEL_UNLOADED"
        assert (await child.wait()).exit_code == 130  # a prompt of ten minutes, and a grace of one
        await suite.nothing_left()

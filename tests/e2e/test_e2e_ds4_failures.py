"""What goes wrong with ds4, through a whole suite: each failure is told for what it is, nothing stays charged, and the
next request finds an engine. And drafters that have no room: what stays in memory never yields to them."""

import fcntl
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from weighbridge_engines.models import sparse_ds4
from weighbridge_engines.supervisor import cgroup
from weighbridge_proto.engines.v1 import chat_service_pb2
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.fit.v1 import fit_service_pb2

from tests.ds4 import (
    Ds4Engine,
    Ds4Models,
    Program,
    ds4_models,
    ds4_program,
    ds4_scratch,
    failure_of,
    server_of,
    settings_of,
    tended,
)
from tests.harness import Suite, running_suite
from tests.images import told

WHOLE = {"stream_experts": False}
"""V4 Flash's 80.8 GiB and 32 for the system are less than the machine's 116."""

CHUNK_TOKENS = 512
"""Of a prompt, read in one go."""


models, program, scratch = ds4_models, ds4_program, ds4_scratch


@pytest.fixture(scope="module")
def suite(models: Ds4Models, program: Program, scratch: Path) -> Iterator[Suite]:
    with running_suite(models.root, "ds4", **settings_of(program, scratch, "unified:116")) as started:
        yield started


@pytest.fixture
async def engine(suite: Suite, program: Program) -> AsyncIterator[Ds4Engine]:
    async with tended(suite, program) as opened:
        yield opened


@asynccontextmanager
async def an_engine_on(
    machine: str, models: Ds4Models, program: Program, scratch: Path
) -> AsyncIterator[tuple[Suite, Ds4Engine]]:
    """A suite of its own on another machine."""
    with running_suite(models.root, "ds4", **settings_of(program, scratch, machine)) as suite:
        async with tended(suite, program) as engine:
            yield suite, engine


@pytest.fixture
async def fresh(models: Ds4Models, program: Program, tmp_path: Path) -> AsyncIterator[tuple[Suite, Ds4Engine]]:
    """A suite for one test: an engine that ends unasked too often within a minute is left alone for a while."""
    async with an_engine_on("unified:116", models, program, tmp_path) as opened:
        yield opened


@pytest.fixture
async def of_may(models: Ds4Models, tmp_path: Path) -> AsyncIterator[tuple[Suite, Ds4Engine]]:
    """A build of May 2026, for CUDA, where a model may have 96 GiB and more."""
    program = Program(tmp_path, build="2026-05", compute="cuda")
    async with an_engine_on("unified:128", models, program, tmp_path) as opened:
        yield opened


async def plan_of(load: Any) -> fit_service_pb2.PlanModelResponse:
    [event] = [event async for event in load if event.HasField("planned")]
    plan: fit_service_pb2.PlanModelResponse = event.planned.plan
    return plan


async def refusal_of(load: Any) -> tuple[RpcFailure, list[str]]:
    """How a load fails, and the kinds of what it told before."""
    kinds: list[str] = []
    try:
        async for event in load:
            kinds.append(str(event.WhichOneof("event")))  # noqa: PERF401 # what came before the failure counts
    except grpc.aio.AioRpcError as error:
        return RpcFailure.from_rpc_error(error), kinds
    raise AssertionError(f"it went well: {kinds}")


def kernel_is_suspected() -> bool:
    """Whether a SIGKILL that nobody owns up to is taken for the kernel's, for want of memory.

    ds4 offers itself to the Linux kernel first. Where the control group counts such kills, that count decides instead,
    and the kills of these tests are none of them.
    """
    return sys.platform == "linux" and cgroup.oom_kills() is None


def unmet(plan: fit_service_pb2.PlanModelResponse) -> list[str]:
    return [note.metadata["reason"] for note in plan.notes if note.code == "DRAFT_UNMET"]


async def test_a_drafter_that_does_not_fit_is_left_out_and_the_model_stays_whole_in_memory(
    suite: Suite, engine: Ds4Engine, models: Ds4Models
) -> None:
    # 80.8 + 32 GiB fit in 116, 5.6 GiB more do not.
    plan = await plan_of(engine.load(models.flash, draft_policy="on", drafter_file=models.flash_drafter.name, **WHOLE))
    assert unmet(plan) == ["NO_ROOM"]
    words = server_of(suite).cmdline()
    assert not {"--ssd-streaming", "--dspark", "--mtp-model"} & set(words)
    assert suite.committed_bytes() >= models.flash.stat().st_size


async def test_a_streamed_model_without_room_for_its_drafter_streams_without_it(
    models: Ds4Models, program: Program, tmp_path: Path
) -> None:
    drafter = {"draft_policy": "on", "drafter_file": models.v41_drafter.name}
    # Weights that stay 9.4 GiB, a session 9, ds4's reserve 2, the least cache 8 and the system 32 fit in 66 GiB; a
    # drafter of 8 GiB more does not.
    async with an_engine_on("unified:66", models, program, tmp_path) as (suite, engine):
        plan = await plan_of(engine.load(models.v41, **drafter))
        assert unmet(plan) == ["NO_ROOM"]
        words = server_of(suite).cmdline()
        assert "--ssd-streaming" in words
        assert not {"--dspark", "--mtp-model"} & set(words)
        await engine.unload()
        assert suite.committed_bytes() == 0


@pytest.mark.parametrize(
    ("fault", "code", "reason"),
    [
        ("out_of_memory", "RESOURCE_EXHAUSTED", "ENGINE_OUT_OF_MEMORY"),
        ("no_session", "RESOURCE_EXHAUSTED", "ENGINE_OUT_OF_MEMORY"),
        ("hang", "DEADLINE_EXCEEDED", "ENGINE_START_TIMED_OUT"),
        pytest.param(
            "SIGKILL",
            *(("RESOURCE_EXHAUSTED", "ENGINE_OUT_OF_MEMORY") if kernel_is_suspected()
              else ("INTERNAL", "ENGINE_START_FAILED")),
            id="killed",
        ),
    ],
)  # fmt: skip
async def test_a_load_that_fails_says_why_and_the_next_one_succeeds(
    fresh: tuple[Suite, Ds4Engine], models: Ds4Models, program: Program, fault: str, code: str, reason: str
) -> None:
    suite, engine = fresh
    program.becomes(load_fault=fault, load_s=0.2)
    failure = await failure_of(engine.load(models.flash, **WHOLE))
    assert (failure.code.name, failure.reason) == (code, reason)
    # It says by which signal it ended, where it was one that nobody of the suite sent.
    assert failure.metadata.get("signal") == (fault if fault == "SIGKILL" else None)
    assert suite.committed_bytes() == 0
    program.becomes()
    assert (await told(engine.load(models.flash, **WHOLE))).kinds[-1] == "ready"


async def test_a_ds4_outside_the_suite_is_told_with_its_pid(
    suite: Suite, engine: Ds4Engine, models: Ds4Models, scratch: Path
) -> None:
    lock = os.open(scratch / "ds4.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, f"{os.getpid()}\n".encode())
        failure = await failure_of(engine.load(models.flash, **WHOLE))
        assert (failure.code.name, failure.reason) == ("FAILED_PRECONDITION", "ENGINE_LOCKED")
        assert str(os.getpid()) in failure.message
        assert suite.committed_bytes() == 0
    finally:
        os.close(lock)
    assert (await told(engine.load(models.flash, **WHOLE))).kinds[-1] == "ready"


@pytest.mark.parametrize("kept_bytes", [2**20, 6 * 2**20], ids=["in its header", "in its weights"])
async def test_a_file_that_is_cut_off_is_refused(
    suite: Suite, engine: Ds4Engine, models: Ds4Models, kept_bytes: int
) -> None:
    # The header has 5.1 MiB.
    cut_off = models.root / "cut-off.gguf"
    with models.flash.open("rb") as whole:
        cut_off.write_bytes(whole.read(kept_bytes))
    failure, told_before = await refusal_of(engine.load(cut_off, **WHOLE))
    assert (failure.code.name, failure.reason) == ("INVALID_ARGUMENT", "MALFORMED_WEIGHTS")
    assert (failure.metadata["cause"], failure.metadata["file"]) == ("TRUNCATED", cut_off.name)
    assert "admitted" not in told_before
    assert suite.committed_bytes() == 0


async def test_one_that_is_killed_in_a_chat_is_told_and_loaded_again(
    fresh: tuple[Suite, Ds4Engine], models: Ds4Models, program: Program
) -> None:
    suite, engine = fresh
    program.becomes(tokens=3000, rate=50, reasoning="")
    await told(engine.load(models.flash, **WHOLE))
    cut_off = engine.chat_with(models.flash)
    await told(cut_off, until="delta")
    server_of(suite).send_signal(signal.SIGKILL)
    failure = await failure_of(cut_off)
    assert (failure.code.name, failure.reason) == ("UNAVAILABLE", "ENGINE_DIED")
    assert failure.metadata["signal"] == "SIGKILL"
    assert failure.metadata["cause"] == ("OUT_OF_MEMORY" if kernel_is_suspected() else "KILLED")
    program.becomes()
    assert (await told(engine.chat_with(models.flash))).finished.reason == chat_service_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("fault", "prompt", "code", "reason", "message"),
    [
        ({"prefill_fault": "error"}, "Hello", "INTERNAL", "ENGINE_ERROR", "ds4 failed while it read the prompt ("),
        ({"prefill_fault": "error"}, "a" * 2 * CHUNK_TOKENS, "INTERNAL", "ENGINE_ERROR",
         "ds4 failed while it read the prompt or answered ("),
        ({"decode_fault": "error"}, "Hello", "INTERNAL", "ENGINE_ERROR", "ds4 broke the answer off ("),
        ({"decode_fault": "cut"}, "Hello", "UNAVAILABLE", "STREAM_LOST", "ds4 broke the answer off without"),
        ({"decode_fault": "stall"}, "Hello", "DEADLINE_EXCEEDED", "ENGINE_SILENT", "Nothing came of ds4 for 3 s"),
    ],
    ids=["HTTP 500", "an error event in the stream", "finish error", "cut", "stall"],
)  # fmt: skip
async def test_an_answer_that_ends_wrongly_is_a_failure_of_its_own_kind_and_the_next_is_well(
    suite: Suite,
    engine: Ds4Engine,
    models: Ds4Models,
    program: Program,
    fault: dict[str, str],
    prompt: str,
    code: str,
    reason: str,
    message: str,
) -> None:
    # A prompt of several chunks has the head of its answer sent after the first; a later failure is an event.
    program.becomes(faulty_requests=1, **fault)
    await told(engine.load(models.flash, prefill_chunk_tokens=CHUNK_TOKENS, **WHOLE))
    server = server_of(suite).pid
    failure = await failure_of(engine.chat(prompt))
    assert (failure.code.name, failure.reason) == (code, reason)
    assert failure.message.startswith(message)
    assert (await told(engine.chat(prompt))).finished.reason == chat_service_pb2.FINISH_REASON_STOP
    assert server_of(suite).pid == server


async def test_one_that_fails_every_request_is_ended_and_loaded_again(
    fresh: tuple[Suite, Ds4Engine], models: Ds4Models, program: Program
) -> None:
    suite, engine = fresh
    program.becomes(breaks_after=1)
    await told(engine.load(models.flash, **WHOLE))
    assert (await told(engine.chat())).kinds[-1] == "finished"
    broken = server_of(suite)
    failures = [(await failure_of(engine.chat())).reason for _ in range(3)]
    assert failures == ["ENGINE_ERROR", "ENGINE_ERROR", "ENGINE_RECYCLED"]
    program.becomes()
    assert (await told(engine.chat_with(models.flash))).kinds[-1] == "finished"
    assert not broken.is_running()


async def test_a_build_that_lacks_what_was_asked_for_is_neither_charged_nor_started(
    of_may: tuple[Suite, Ds4Engine], models: Ds4Models
) -> None:
    suite, engine = of_may
    too_large = models.root / "flash-q4.gguf"
    sparse_ds4.write(too_large, "q4")
    refusals = {
        # It was built for another device than the plan is made for.
        "ENGINE_LACKS_FEATURE": ("FAILED_PRECONDITION", engine.load(models.flash, compute="metal")),
        # Its kind knows no power levels, which fit knows too.
        "INVALID_OPTION": ("INVALID_ARGUMENT", engine.load(models.flash, power="50")),
        # It streams nothing, and this model has 153 GiB.
        "MODEL_WONT_RUN": ("FAILED_PRECONDITION", engine.load(too_large, stream_experts=True)),
    }
    for reason, (code, load) in refusals.items():
        failure, told_before = await refusal_of(load)
        assert (failure.code.name, failure.reason) == (code, reason)
        assert not {"admitted", "starting", "ready"} & set(told_before)
        assert suite.committed_bytes() == 0
        assert not suite.json("leases").get("leases")


async def test_a_build_that_streams_nothing_holds_what_fits_whole_and_says_so(
    of_may: tuple[Suite, Ds4Engine], models: Ds4Models
) -> None:
    suite, engine = of_may
    plan = await plan_of(engine.load(models.flash, stream_experts=True))
    assert "STREAMING_IGNORED" in [note.code for note in plan.notes]
    assert "--ssd-streaming" not in server_of(suite).cmdline()
    assert suite.committed_bytes() >= models.flash.stat().st_size

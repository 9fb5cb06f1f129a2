"""What goes wrong with ds4, through a whole suite: each failure is told for what it is, nothing stays charged, and the
next request finds an engine. And drafters that have no room: what stays in memory never yields to them."""

import fcntl
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from weighbridge_proto.engines.v1 import chat_service_pb2
from weighbridge_proto.fit.v1 import fit_service_pb2

from tests.ds4 import (
    Ds4Engine,
    Ds4Models,
    Program,
    connected,
    failure_of,
    server_of,
    settings_of,
    write_models,
)
from tests.harness import Suite, running_suite
from tests.images import told

WHOLE = {"stream_experts": False}
"""V4 Flash's 80.8 GiB and 32 for the system are less than the machine's 116."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> Ds4Models:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def program(tmp_path_factory: Any) -> Program:
    return Program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: Any) -> Path:
    return Path(tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="module")
def suite(models: Ds4Models, program: Program, scratch: Path) -> Iterator[Suite]:
    with running_suite(models.root, "ds4", **settings_of(program, scratch, "unified:116")) as started:
        yield started


@pytest.fixture
async def engine(suite: Suite, program: Program) -> AsyncIterator[Ds4Engine]:
    """The engine. Whatever a test did, unloading gives every byte back."""
    async with connected(suite) as opened:
        yield opened
        await opened.unload(force=True)
    assert suite.committed_bytes() == 0
    program.becomes()


@asynccontextmanager
async def an_engine_on(
    machine: str, models: Ds4Models, program: Program, scratch: Path
) -> AsyncIterator[tuple[Suite, Ds4Engine]]:
    """A suite of its own on another machine."""
    with running_suite(models.root, "ds4", **settings_of(program, scratch, machine)) as suite:
        async with connected(suite) as engine:
            yield suite, engine


@pytest.fixture
async def fresh(models: Ds4Models, program: Program, tmp_path: Path) -> AsyncIterator[tuple[Suite, Ds4Engine]]:
    """A suite for one test: an engine that ends unasked too often within a minute is left alone for a while."""
    async with an_engine_on("unified:116", models, program, tmp_path) as (suite, engine):
        yield suite, engine
        await engine.unload(force=True)
        assert suite.committed_bytes() == 0
    program.becomes()


async def plan_of(load: Any) -> fit_service_pb2.PlanModelResponse:
    [event] = [event async for event in load if event.HasField("planned")]
    plan: fit_service_pb2.PlanModelResponse = event.planned.plan
    return plan


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
    ("fault", "reason"),
    [
        ("out_of_memory", "ENGINE_OUT_OF_MEMORY"),
        ("no_session", "ENGINE_OUT_OF_MEMORY"),
        ("hang", "ENGINE_START_TIMED_OUT"),
    ],
)
async def test_a_load_that_fails_says_why_and_the_next_one_succeeds(
    fresh: tuple[Suite, Ds4Engine], models: Ds4Models, program: Program, fault: str, reason: str
) -> None:
    suite, engine = fresh
    program.becomes(load_fault=fault, load_s=0.2)
    failure = await failure_of(engine.load(models.flash, **WHOLE))
    assert failure.reason == reason
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


async def test_a_file_that_is_cut_off_is_refused(suite: Suite, engine: Ds4Engine, models: Ds4Models) -> None:
    cut_off = models.root / "cut-off.gguf"
    with models.flash.open("rb") as whole:
        cut_off.write_bytes(whole.read(2**20))
    failure = await failure_of(engine.load(cut_off, **WHOLE))
    assert failure.code.name in ("INVALID_ARGUMENT", "FAILED_PRECONDITION")
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
    # On Linux a SIGKILL that nobody asked for is as a rule the kernel's, when memory runs out.
    assert failure.reason in ("ENGINE_DIED", "ENGINE_OUT_OF_MEMORY")
    program.becomes()
    assert (await told(engine.chat_with(models.flash))).finished.reason == chat_service_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("faults", "code", "reason"),
    [
        ({"prefill_fault": "error"}, "INTERNAL", "ENGINE_ERROR"),
        ({"decode_fault": "error"}, "INTERNAL", "ENGINE_ERROR"),
        ({"decode_fault": "cut"}, "UNAVAILABLE", "STREAM_LOST"),
        ({"decode_fault": "stall"}, "DEADLINE_EXCEEDED", "ENGINE_SILENT"),
    ],
)
async def test_an_answer_that_ends_wrongly_is_a_failure_of_its_own_kind(
    engine: Ds4Engine, models: Ds4Models, program: Program, faults: dict[str, str], code: str, reason: str
) -> None:
    program.becomes(**faults)
    await told(engine.load(models.flash, **WHOLE))
    failure = await failure_of(engine.chat())
    assert (failure.code.name, failure.reason) == (code, reason)


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


async def test_a_build_that_lacks_what_was_asked_for_is_not_started(models: Ds4Models, tmp_path: Path) -> None:
    """Builds of May 2026 stream nothing, and 64 GiB hold no V4 Flash whole."""
    old = Program(tmp_path, build="2026-05")
    async with an_engine_on("unified:64", models, old, tmp_path) as (suite, engine):
        failure = await failure_of(engine.load(models.flash, stream_experts=True))
        assert failure.code.name == "FAILED_PRECONDITION"
        assert failure.reason in ("MODEL_WONT_RUN", "ENGINE_LACKS_FEATURE")
        assert suite.committed_bytes() == 0
        assert not suite.json("leases").get("leases")

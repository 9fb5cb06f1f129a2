"""Chats that are given up while ds4 reads their prompts: a build of July 2026 reads them to their end for nobody."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from weighbridge_proto.engines.v1 import chat_service_pb2

from tests.ds4 import Ds4Engine, Ds4Models, Program, ds4_models, failure_of, server_of, settings_of, tended
from tests.harness import Suite, running_suite
from tests.images import told

LONG = "word " * 200
"""1,000 tokens to the stand-in, which reads 400 in a second."""

SLOW_PROMPTS = {"prefill_rate": 400, "keepalive_s": 0.5}


models = ds4_models


@pytest.fixture(scope="module")
def program(tmp_path_factory: Any) -> Program:
    return Program(tmp_path_factory.mktemp("program"), build="2026-07")


@pytest.fixture(scope="module")
def suite(models: Ds4Models, program: Program, tmp_path_factory: Any) -> Iterator[Suite]:
    settings = settings_of(program, tmp_path_factory.mktemp("scratch"), "unified:128")
    # Longer than the prompts: one of which nothing is heard for so long ends its engine.
    settings["WEIGHBRIDGE_ENGINES_DS4_IDLE_LIMIT_S"] = "60"
    with running_suite(models.root, "ds4", **settings) as started:
        yield started


@pytest.fixture
async def engine(suite: Suite, program: Program, models: Ds4Models) -> AsyncIterator[Ds4Engine]:
    """The engine with a model loaded."""
    program.becomes(**SLOW_PROMPTS)
    async with tended(suite, program) as opened:
        await told(opened.load(models.flash, stream_experts=False))
        yield opened


async def test_the_next_answer_waits_until_a_prompt_is_over_that_nobody_waits_for(
    suite: Suite, engine: Ds4Engine
) -> None:
    committed, server = suite.committed_bytes(), server_of(suite).pid
    given_up = engine.chat(LONG * 2)
    await told(given_up, until="started")
    given_up.cancel()
    draining = await engine.until(lambda state: state.requests_draining == 1)
    assert draining.requests_in_flight == 1
    following = asyncio.create_task(told(engine.chat(max_output_tokens=3)))
    await engine.until(lambda state: state.requests_queued == 1)
    assert suite.committed_bytes() == committed
    answer = await following
    assert answer.finished.reason == chat_service_pb2.FINISH_REASON_LENGTH
    after = await engine.engine()
    assert (after.requests_draining, after.requests_in_flight) == (0, 0)
    assert server_of(suite).pid == server


async def test_a_client_that_is_killed_has_given_up(suite: Suite, engine: Ds4Engine) -> None:
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "weighbridge", "chat", "flash.gguf", LONG,
        env=suite.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await engine.until(lambda state: state.requests_in_flight == 1)
    finally:
        client.kill()
        await client.wait()
    # Whether its prompt had reached ds4 by then is left to chance: it is over in a while, or had not begun.
    await engine.until(lambda state: state.requests_in_flight == 0)
    assert (await told(engine.chat())).kinds[-1] == "finished"


async def test_a_forced_unload_does_not_wait_for_a_prompt(suite: Suite, engine: Ds4Engine) -> None:
    # 7.5 s of reading, of which neither the caller nor the unload sees the end.
    reading = engine.chat(LONG * 3)
    await told(reading, until="started")
    cut_off = asyncio.create_task(failure_of(reading))
    server = server_of(suite)
    await engine.unload(force=True)
    assert not server.is_running()
    assert suite.committed_bytes() == 0
    failure = await cut_off
    assert (failure.code.name, failure.reason) == ("ABORTED", "MODEL_UNLOADED")

"""Chats with the stand-in as a process: its stream over HTTP and its lines on stderr, each on its own way."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from weighbridge_engines.ds4.client import Ds4Client, OtherServerError
from weighbridge_engines.ds4.conversation import Conversations
from weighbridge_engines.ds4.feed import OutputFeed
from weighbridge_engines.ds4.served import Served
from weighbridge_engines.host.kind import EngineBrokenError, EngineLostError
from weighbridge_engines.models import sparse_ds4
from weighbridge_engines.supervisor.output import LineSplitter
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.errors import RequestError

from services.engines.standins.ds4.behaviour import Behaviour
from services.engines.standins.ds4.program import write_standin
from services.engines.tests.ds4.ds4_loopback import hello

CONTEXT = 4096
SCHEMA = '{"type":"object","properties":{"place":{"type":"string"},"days":{"type":"integer"}}}'


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return sparse_ds4.write(tmp_path_factory.mktemp("model") / "flash.gguf")


@pytest.fixture
def start(tmp_path, model):
    """Starts a stand-in that behaves like this, and talks with it."""

    @contextlib.asynccontextmanager
    async def started(behaviour: Behaviour, **served) -> AsyncIterator[tuple[Conversations, list[str]]]:
        program = write_standin(tmp_path, behaviour)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            program, "-m", model, "--cpu", "--ctx", str(CONTEXT), "--port", str(port),
            env={**os.environ, "DS4_LOCK_FILE": str(tmp_path / "lock")},
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        feed, lines = OutputFeed(), []
        reading = asyncio.create_task(_read(process.stderr, feed, lines))
        client = Ds4Client(port, CONTEXT)
        try:
            while not await _answers(client):
                assert process.returncode is None, lines
                await asyncio.sleep(0.02)
            yield Conversations(client, feed, Served(model_name="flash", context_tokens=CONTEXT, **served)), lines
        finally:
            await client.aclose()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            await reading

    return started


async def _read(stderr: asyncio.StreamReader, feed: OutputFeed, lines: list[str]) -> None:
    splitter = LineSplitter()
    while chunk := await stderr.read(1 << 16):
        for line in splitter.feed(chunk):
            feed.take(line, True)
            lines.append(line)


async def _answers(client: Ds4Client) -> bool:
    try:
        return await client.is_ours()
    except (httpx2.HTTPError, OtherServerError):
        return False


async def whole(talk: Conversations, request: chat_pb.ChatRequest | None = None) -> list[chat_pb.ChatResponse]:
    return [response async for response in talk.answer(request or hello())]


async def give_up_after(talk: Conversations, request: chat_pb.ChatRequest, event: str) -> None:
    """Asks, and leaves at the first event of this kind."""
    async with contextlib.aclosing(talk.answer(request)) as responses:
        async for response in responses:
            if response.WhichOneof("event") == event:
                return
    raise AssertionError(f"no {event} came")


@pytest.mark.parametrize("build", ["2026-05", "2026-07", "2026-09"])
async def test_thinking_answer_and_tool_call_of_each_build(start, build):
    behaviour = Behaviour(build=build, reasoning="Rome, then.", answer="One moment.", calls=(
        ("weather", '{"place":"Rome","days":3}'),
    ))  # fmt: skip
    async with start(behaviour) as (talk, _):
        tool = chat_pb.Tool(name="weather", parameters_json_schema=SCHEMA)
        responses = await whole(talk, hello(tools=[tool]))
    deltas = [response.delta for response in responses if response.HasField("delta")]
    assert "".join(delta.reasoning for delta in deltas) == "Rome, then."
    assert "".join(delta.text for delta in deltas).strip() == "One moment."
    calls = [delta.tool_call for delta in deltas if delta.HasField("tool_call")]
    assert calls[0].name == "weather"
    assert calls[0].tool_call_id.startswith("call_")
    assert len(calls) > 2  # its arguments come piece by piece
    assert "".join(call.arguments_json for call in calls) == '{"place":"Rome","days":3}'
    finished = responses[-1].finished
    assert finished.reason == chat_pb.FINISH_REASON_TOOL_CALLS
    # The figures came with the log before the answer, and again at its end.
    assert responses[0].started.prompt_tokens == finished.usage.prompt_tokens > 0


async def test_a_prompt_that_was_given_up_is_read_to_its_end_and_then_it_is_free(start):
    async with start(Behaviour(build="2026-05", prefill_rate=400.0)) as (talk, lines):
        prompt = chat_pb.ContentPart(text="word " * 100)
        request = hello()
        request.messages[0].parts.append(prompt)
        await give_up_after(talk, request, "started")
        assert not any("prompt done" in line for line in lines)
        await talk.settle()
        assert any("prompt done" in line for line in lines)
        assert (await whole(talk))[-1].finished.reason == chat_pb.FINISH_REASON_STOP


async def test_an_answer_that_was_given_up_stops_at_a_failed_write(start):
    async with start(Behaviour(build="2026-05", rate=100.0, tokens=100_000)) as (talk, lines):
        await give_up_after(talk, hello(), "delta")
        await talk.settle()
        assert any("finish=error" in line for line in lines)


async def test_a_build_that_notices_is_free_at_once(start):
    async with start(Behaviour(prefill_rate=20.0, cancels=True), stops_on_disconnect=True) as (talk, _):
        request = hello()
        request.messages[0].parts.append(chat_pb.ContentPart(text="word " * 600))
        await give_up_after(talk, request, "started")  # 3,000 tokens at 20 a second: nobody waits for that
        await talk.settle()
        assert (await whole(talk))[-1].HasField("finished")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour(prefill_fault="error"), "ENGINE_ERROR"),
        (Behaviour(decode_fault="error"), "ENGINE_ERROR"),
        (Behaviour(decode_fault="cut"), "STREAM_LOST"),
    ],
)
async def test_failures_that_ds4_survives(start, behaviour, reason):
    async with start(behaviour) as (talk, _):
        with pytest.raises(RequestError) as caught:
            await whole(talk)
        await talk.settle()
    assert caught.value.failure.reason == reason
    assert bool(caught.value.failure.metadata.get("engine_message")) is (reason == "ENGINE_ERROR")


@pytest.mark.parametrize(
    "behaviour", [Behaviour(decode_fault="SIGKILL"), Behaviour(prefill_fault="SIGSEGV"), Behaviour(stopping=True)]
)
async def test_failures_that_it_does_not(start, behaviour):
    async with start(behaviour) as (talk, _):
        with pytest.raises(EngineLostError):
            await whole(talk)


async def test_a_broken_device_ends_it_at_the_third_request(start):
    async with start(Behaviour(breaks_after=1)) as (talk, _):
        await whole(talk)
        for _ in range(2):
            with pytest.raises(RequestError):
                await whole(talk)
        with pytest.raises(EngineBrokenError, match="illegal memory access"):
            await whole(talk)


async def test_a_reader_slower_than_ds4s_patience_loses_nothing(start):
    behaviour = Behaviour(tokens=3000, stall_s=0.2, send_buffer_bytes=4096, reasoning="")
    async with start(behaviour) as (talk, lines):
        answer = talk.answer(hello(thinking=chat_pb.THINKING_OFF))
        await anext(answer)
        # Nothing is read until ds4 has sent all; it would have dropped the stream after 0.2 s.
        while not any("finish=" in line for line in lines):  # noqa: ASYNC110 # another process tells no event
            await asyncio.sleep(0.01)
        rest = [response async for response in answer]
    assert rest[-1].finished.reason == chat_pb.FINISH_REASON_STOP
    assert rest[-1].finished.usage.output_tokens == 3000
    assert len("".join(response.delta.text for response in rest).split()) == 3000


async def test_a_warm_up_leaves_the_prompt_where_the_same_one_is_found(start):
    async with start(Behaviour(build="2026-05")) as (talk, _):
        warmed = (await whole(talk, hello(warm_up=True)))[-1].finished
        real = (await whole(talk, hello()))[-1].finished
    assert warmed.reason == chat_pb.FINISH_REASON_UNSPECIFIED
    assert warmed.usage.output_tokens == 0
    assert real.usage.cached_tokens == real.usage.prompt_tokens == warmed.usage.prompt_tokens


async def test_a_prompt_that_does_not_fit_tells_both_numbers(start):
    async with start(Behaviour()) as (talk, _):
        request = hello(max_output_tokens=5)
        request.messages[0].parts.append(chat_pb.ContentPart(text="x" * CONTEXT))
        with pytest.raises(RequestError) as caught:
            await whole(talk, request)
    failure = caught.value.failure
    assert failure.reason == "CONTEXT_OVERFLOW"
    assert failure.metadata["context_tokens"] == str(CONTEXT)
    assert int(failure.metadata["prompt_tokens"]) > CONTEXT

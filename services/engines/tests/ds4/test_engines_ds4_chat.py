"""One chat with ds4 from its request to its end, against a server that answers byte by byte as each test says."""

import asyncio
import contextlib
import json
from pathlib import Path

import grpc
import pytest
from weighbridge_engines.ds4.client import Ds4Client, UnreadError
from weighbridge_engines.host.kind import EngineBrokenError, EngineLostError
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.errors import RequestError

from services.engines.tests.ds4.ds4_loopback import CONTEXT, Loopback, hello, plain, talking, turns, until

RECORDED = Path(__file__).with_name("recorded")


def kinds(responses):
    return [response.WhichOneof("event") for response in responses]


def text_of(responses):
    return "".join(response.delta.text for response in responses)


async def failure(talk, request=None):
    with pytest.raises(RequestError) as caught:
        await talk.ask(request)
    return caught.value.failure


async def test_an_answer_comes_with_its_end_and_what_it_took():
    async with talking() as talk:
        responses = await talk.ask(hello(max_output_tokens=9))
    assert kinds(responses) == ["started", "delta", "finished"]
    assert text_of(responses) == "Yes"
    finished = responses[-1].finished
    assert finished.reason == chat_pb.FINISH_REASON_STOP
    assert (finished.usage.prompt_tokens, finished.usage.cached_tokens, finished.usage.output_tokens) == (7, 3, 5)
    assert talk.server.bodies == [
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 9,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


@pytest.mark.parametrize("name", ["answer", "thought", "long-prompt"])
async def test_a_recorded_session_is_answered_as_it_was(name):
    session = (RECORDED / f"{name}.sse").read_bytes()

    async def replay(exchange):
        await exchange.begin()
        for at in range(0, len(session), 7):
            await exchange.send(session[at : at + 7])

    async with talking(replay) as talk:
        responses = await talk.ask()
    # Read from the recording by other means: each piece of text is in a line of its own.
    sent = [json.loads(line[6:]) for line in session.decode().splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in sent for choice in chunk["choices"]]
    assert text_of(responses) == "".join(delta.get("content", "") for delta in deltas)
    thought = "".join(response.delta.reasoning for response in responses)
    assert thought == "".join(delta.get("reasoning_content", "") for delta in deltas)
    usage = responses[-1].finished.usage
    assert usage.prompt_tokens == sent[-1]["usage"]["prompt_tokens"]
    assert usage.output_tokens == sent[-1]["usage"]["completion_tokens"]


async def test_the_prompts_tokens_are_told_when_ds4_prints_them():
    may_answer = asyncio.Event()

    async def slow(exchange):
        await may_answer.wait()
        await plain(exchange)

    async with talking(slow) as talk:
        answer = talk.conversations.answer(hello())
        first = asyncio.ensure_future(anext(answer))
        await until(lambda: bool(talk.server.bodies))
        assert not first.done()
        talk.output.start(cached=4, prompt=9)
        started = (await first).started
        may_answer.set()
        rest = [response async for response in answer]
    assert (started.model_name, started.prompt_tokens, started.cached_tokens) == ("flash", 9, 4)
    assert kinds(rest) == ["delta", "finished"]


async def test_an_answer_that_comes_before_that_line_is_not_held_back():
    async with talking() as talk:
        started = (await talk.ask())[0].started
    assert (started.model_name, started.prompt_tokens) == ("flash", 0)


async def test_an_answer_of_nothing_tells_the_prompts_tokens_at_its_end():
    async def nothing(exchange):
        await exchange.begin()
        await exchange.end(finish="length", prompt=7, output=0, cached=3)

    async with talking(nothing) as talk:
        responses = await talk.ask()
    assert kinds(responses) == ["started", "finished"]
    assert (responses[0].started.prompt_tokens, responses[0].started.cached_tokens) == (7, 3)


async def test_times_are_those_at_which_tokens_came_not_those_at_which_they_were_read():
    steps = [asyncio.Event() for _ in range(3)]

    async def stepwise(exchange):
        await exchange.begin()
        for step, text in zip(steps, ("a", "b"), strict=False):
            await step.wait()
            await exchange.tell({"content": text})
        await steps[2].wait()
        await exchange.end()

    async with talking(stepwise) as talk:
        answer = talk.conversations.answer(hello())
        first = asyncio.ensure_future(anext(answer))
        await until(lambda: bool(talk.server.bodies))
        await talk.clock.move(3.0)
        steps[0].set()
        await first  # that it has started
        await talk.clock.move(2.0)
        steps[1].set()
        read = [await anext(answer), await anext(answer)]
        await talk.clock.move(50.0)
        steps[2].set()
        finished = [response async for response in answer][-1].finished
    assert [response.delta.text for response in read] == ["a", "b"]
    assert finished.usage.time_to_first_token.ToSeconds() == 3
    assert finished.usage.generation_time.ToSeconds() == 2


async def test_a_thought_that_was_cut_off_is_told():
    async def thinking(exchange):
        await exchange.begin()
        await exchange.tell({"reasoning_content": "hm"})
        await exchange.end(finish="length")

    async with talking(thinking) as talk:
        finished = (await talk.ask())[-1].finished
    assert (finished.reason, finished.ended_in_thinking) == (chat_pb.FINISH_REASON_LENGTH, True)


async def test_a_slow_reader_does_not_keep_ds4_waiting():
    pieces, sent_all = 3000, asyncio.Event()

    async def long(exchange):
        await exchange.begin()
        for _ in range(pieces):
            await exchange.tell({"content": "x" * 1000})  # 3 MB: far more than the sockets hold
        sent_all.set()
        await exchange.end()

    async with talking(long) as talk:
        answer = talk.conversations.answer(hello())
        await anext(answer)
        await sent_all.wait()  # though nothing more was read
        assert len(text_of([response async for response in answer])) == pieces * 1000


async def test_a_reader_that_is_too_far_behind_loses_the_answer_and_hears_why():
    left = asyncio.Event()

    async def endless(exchange):
        with contextlib.suppress(ConnectionError):
            await exchange.begin()
            while True:
                await exchange.tell({"content": "x" * 1000})
        left.set()

    async with talking(endless, most_unread_bytes=1 << 20) as talk:
        answer = talk.conversations.answer(hello())
        heard = [await anext(answer)]
        await left.wait()  # the socket was closed, so that ds4 stops
        with pytest.raises(RequestError) as caught:
            async for response in answer:
                heard.append(response)  # noqa: PERF401 # what came before the failure counts
    refused = caught.value.failure
    assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "ANSWER_NOT_READ")
    assert refused.metadata["limit_bytes"] == str(1 << 20)
    # What had come before is read first: text that was streamed stands. Some 1,340 bytes count for each 1,000 of text.
    assert 700_000 < len(text_of(heard)) <= 1 << 20


@pytest.mark.parametrize("event", [b"data:\n\n", b"data: {}\n\n", b"event: x\ndata\n\n"])
async def test_events_without_text_take_no_memory_without_end(event):
    async def endless(exchange):
        await exchange.begin()
        while True:
            await exchange.send(event * 1000)

    server = Loopback(endless)
    client = Ds4Client(await server.start(), CONTEXT, most_unread_bytes=1 << 20)
    try:
        async with client.chat(b"{}") as stream:
            while not stream.ended:
                await stream.changed()
            assert isinstance(stream.failure, UnreadError)
            held = sum(1 for _ in iter(stream.take, None))
    finally:
        await client.aclose()
        server.stop_listening()
    # An event is two objects at least, and CPython has none below 16 bytes.
    assert 1000 < held <= (1 << 20) / 32


async def test_the_socket_is_closed_at_once_when_an_answer_is_given_up():
    left = asyncio.Event()

    async def reading(exchange):
        await exchange.until_client_left()
        left.set()

    async with talking(reading) as talk:
        answer = talk.conversations.answer(hello())
        waiting = asyncio.ensure_future(anext(answer))
        await until(lambda: bool(talk.server.bodies))
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await left.wait()


async def test_closing_the_iterator_in_the_middle_closes_the_socket():
    left = asyncio.Event()

    async def answering(exchange):
        await exchange.begin()
        await exchange.tell({"content": "a"})
        await exchange.until_client_left()
        left.set()

    async with talking(answering) as talk:
        answer = talk.conversations.answer(hello())
        assert kinds([await anext(answer), await anext(answer)]) == ["started", "delta"]
        await answer.aclose()
        await left.wait()


async def test_nothing_for_the_idle_limit_ends_the_request():
    async def silent(exchange):
        await exchange.until_client_left()

    async with talking(silent, idle_limit_s=60.0) as talk:
        asking = asyncio.ensure_future(failure(talk))
        await until(lambda: bool(talk.server.bodies))
        await talk.clock.move(59.0)
        assert not asking.done()
        await talk.clock.move(1.0)
        refused = await asking
    assert (refused.code, refused.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "ENGINE_SILENT")
    assert refused.metadata["idle_limit_seconds"] == "60"


async def test_comments_and_lines_of_the_log_are_signs_of_life():
    comment, answer = asyncio.Event(), asyncio.Event()

    async def long_prompt(exchange):
        await exchange.begin()
        await comment.wait()
        await exchange.send(b": prefill\n\n")
        await answer.wait()
        await exchange.tell({"content": "a"})
        await exchange.end()

    async with talking(long_prompt, idle_limit_s=60.0) as talk:
        asking = asyncio.ensure_future(talk.ask())
        await until(lambda: talk.clock.stamps == 2)  # when it was asked, and the head of the stream
        await talk.clock.move(59.0)
        talk.output.start()
        await talk.clock.move(59.0)
        stamps = talk.clock.stamps
        comment.set()
        await until(lambda: talk.clock.stamps > stamps)
        await talk.clock.move(59.0)
        assert not asking.done()
        answer.set()
        assert text_of(await asking) == "a"


async def test_an_answer_that_breaks_off_while_ds4_lives_is_lost():
    async def cut(exchange):
        await exchange.begin()
        await exchange.tell({"content": "a"})

    async with talking(cut) as talk:
        refused = await failure(talk)
    assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "STREAM_LOST")


async def test_an_end_without_the_last_line_is_no_end():
    async def cut(exchange):
        await exchange.begin()
        await exchange.tell({"content": "a"}, finish="stop")

    async with talking(cut) as talk:
        assert (await failure(talk)).reason == "STREAM_LOST"


async def test_an_answer_that_breaks_off_with_ds4_is_the_hosts_to_explain():
    async with talking() as talk:

        async def ending(exchange):
            await exchange.begin()
            await exchange.tell({"content": "a"})
            talk.server.stop_listening()

        talk.server.scripts = [ending]
        with pytest.raises(EngineLostError):
            await talk.ask()


async def test_another_server_on_the_port_is_not_taken_for_ds4():
    async def cut(exchange):
        await exchange.begin()

    async with talking(cut) as talk:
        talk.server.context = CONTEXT + 1
        with pytest.raises(EngineLostError):
            await talk.ask()


async def test_no_server_is_a_lost_engine():
    async with talking() as talk:
        talk.server.stop_listening()
        with pytest.raises(EngineLostError):
            await talk.ask()


async def test_a_stopping_ds4_is_a_lost_engine():
    async def stopping(exchange):
        await exchange.refuse(503, b'{"error":{"message":"server shutting down","type":"invalid_request_error"}}')

    async with talking(stopping) as talk:
        with pytest.raises(EngineLostError):
            await talk.ask()


async def test_a_prompt_that_does_not_fit_tells_the_numbers():
    recorded = (RECORDED / "overflow.json").read_bytes()  # of a prompt of 24,004 tokens in a context of 4096

    async def overflow(exchange):
        await exchange.refuse(400, recorded)

    async with talking(overflow) as talk:
        refused = await failure(talk, hello(max_output_tokens=9))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_OVERFLOW")
    assert dict(refused.metadata) == {"prompt_tokens": "24004", "max_output_tokens": "9", "context_tokens": "4096"}


async def test_another_refusal_is_an_error_with_ds4s_words():
    async def refusing(exchange):
        await exchange.refuse(400, b'{"error":{"message":"invalid JSON request","type":"invalid_request_error"}}')

    async with talking(refusing) as talk:
        refused = await failure(talk)
    assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")
    assert refused.metadata["engine_message"] == "invalid JSON request"


@pytest.mark.parametrize("body", [b"", b"no JSON", b"[]", b'{"error":7}', b"x" * 200_000, b"[" * 60_000])
async def test_a_refusal_that_says_nothing_is_an_error(body):
    async def refusing(exchange):
        with contextlib.suppress(ConnectionError):
            await exchange.refuse(500, body)

    async with talking(refusing) as talk:
        refused = await failure(talk)
    assert (refused.reason, dict(refused.metadata)) == ("ENGINE_ERROR", {})


async def failing_early(exchange):
    await exchange.refuse(500, b'{"error":{"message":"prefill failed","type":"invalid_request_error"}}')


async def failing_late(exchange):
    await exchange.begin()
    await exchange.send(b'event: error\ndata: {"error":{"message":"prefill failed","type":"server_error"}}\n\n')


@pytest.mark.parametrize("failing", [failing_early, failing_late])
async def test_a_prompt_that_fails_says_what_ds4_said(failing):
    async with talking(failing) as talk:
        refused = await failure(talk)
    assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")
    assert refused.metadata["engine_message"] == "prefill failed"


async def breaking(exchange):
    await exchange.begin()
    await exchange.tell({"content": "a"})
    await exchange.end(finish="error")


async def ask_with_line(talk, error):
    """Asks, and prints how the request ended when its stream has."""
    asking = asyncio.ensure_future(talk.ask())
    count = len(talk.server.bodies)
    await until(lambda: len(talk.server.bodies) > count)
    talk.output.start()
    talk.output.end(finish="error", error=error)
    return await asyncio.gather(asking, return_exceptions=True)


async def test_an_answer_that_ds4_breaks_off_is_explained_by_its_log():
    async with talking(breaking) as talk:
        (error,) = await ask_with_line(talk, "decode failed")
    assert isinstance(error, RequestError)
    assert error.failure.reason == "ENGINE_ERROR"
    assert error.failure.metadata["engine_message"] == "decode failed"


async def test_without_that_line_it_is_an_error_all_the_same():
    async with talking(breaking) as talk:
        asking = asyncio.ensure_future(failure(talk))
        while not asking.done():
            await until(lambda: bool(talk.server.bodies))
            await talk.clock.move(0.1)
            await asyncio.sleep(0.001)
        assert (await asking).reason == "ENGINE_ERROR"


async def test_an_answer_that_ends_because_ds4_is_stopped_is_a_lost_engine():
    async with talking(breaking) as talk:
        (error,) = await ask_with_line(talk, "shutdown requested")
    assert isinstance(error, EngineLostError)


@pytest.mark.parametrize(
    "sent", [b"data: {oops\n\n", b"data: " + b"x" * (9 << 20)], ids=["no JSON", "an event without an end"]
)
async def test_what_cannot_be_read_is_an_error_and_the_socket_is_closed(sent):
    left = asyncio.Event()

    async def garbled(exchange):
        await exchange.begin()
        with contextlib.suppress(ConnectionError):
            await exchange.send(sent)
        await exchange.until_client_left()
        left.set()

    async with talking(garbled) as talk:
        asking = asyncio.ensure_future(failure(talk))
        while not asking.done():
            await talk.clock.move(0.1)
            await asyncio.sleep(0.001)
        refused = await asking
        await left.wait()
    assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")


async def test_three_failures_in_a_row_end_the_engine():
    async with talking(failing_early) as talk:
        assert [(await failure(talk)).reason for _ in range(2)] == ["ENGINE_ERROR"] * 2
        with pytest.raises(EngineBrokenError, match="prefill failed"):
            await talk.ask()


async def test_an_answer_between_them_shows_that_it_can_serve():
    async with talking(failing_early, failing_early, plain, failing_early, failing_early, plain) as talk:
        for _ in range(2):
            assert [(await failure(talk)).reason for _ in range(2)] == ["ENGINE_ERROR"] * 2
            assert text_of(await talk.ask()) == "Yes"


async def test_tool_calls_that_the_longest_answer_cut_off_are_no_sign_of_a_broken_engine():
    async with talking(breaking) as talk:
        for _ in range(4):
            (error,) = await ask_with_line(talk, "unterminated tool call")
            assert isinstance(error, RequestError)


async def test_requests_that_cannot_be_sent_never_reach_ds4():
    async with talking() as talk:
        assert (await failure(talk, hello(forced_tool="t"))).reason == "UNSUPPORTED_TOOL_CHOICE"
        assert talk.server.bodies == []


async def reading_only(exchange):
    await exchange.begin()
    await exchange.end(finish="length", output=0)


async def test_a_warm_up_reads_and_answers_nothing():
    async with talking(reading_only) as talk:
        responses = await talk.ask(hello(warm_up=True, max_output_tokens=9))
        assert [body["max_tokens"] for body in talk.server.bodies] == [0]
    assert kinds(responses) == ["started", "finished"]
    finished = responses[-1].finished
    assert finished.reason == chat_pb.FINISH_REASON_UNSPECIFIED
    assert not finished.ended_in_thinking
    assert (finished.usage.prompt_tokens, finished.usage.cached_tokens) == (7, 3)


async def test_a_build_that_demands_a_token_gets_one_and_it_is_dropped():
    async def demanding(exchange):
        if exchange.body["max_tokens"] < 1:
            message = b'{"error":{"message":"Requested output tokens must be a positive integer"}}'
            await exchange.refuse(400, message)
        else:
            await plain(exchange)

    async with talking(demanding) as talk:
        responses = await talk.ask(hello(warm_up=True))
        assert [body["max_tokens"] for body in talk.server.bodies] == [0, 1]
    assert kinds(responses) == ["started", "finished"]
    assert responses[-1].finished.reason == chat_pb.FINISH_REASON_UNSPECIFIED


async def test_nothing_is_left_running_behind_an_answer():
    async with talking() as talk:
        await talk.ask()
        await turns()
        names = {task.get_name() for task in asyncio.all_tasks()}
    assert not {name for name in names if name.startswith("ds4-")}

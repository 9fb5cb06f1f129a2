"""After a chat was given up: when ds4 is free again, by its output, by a probe, or never."""

import asyncio
import contextlib

import pytest
from weighbridge_engines.ds4.events import PromptProgress, Span
from weighbridge_engines.ds4.leftovers import PROBE_AFTER_S, PROBE_RUNNING_AFTER_S
from weighbridge_engines.host.kind import EngineBrokenError, EngineLostError

from services.engines.tests.ds4.ds4_loopback import hello, plain, talking, turns, until


async def reading(exchange):
    """A prompt is read, and a client that left is not noticed."""
    await exchange.until_client_left()


async def give_up(talk, request=None):
    """A request that its caller cancels while its prompt is read."""
    count = len(talk.server.bodies)
    answer = talk.conversations.answer(request or hello())
    waiting = asyncio.ensure_future(anext(answer))
    await until(lambda: len(talk.server.bodies) > count)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


@contextlib.asynccontextmanager
async def settling(talk):
    """Waits until ds4 is free, beside what a test does."""
    task = asyncio.ensure_future(talk.conversations.settle())
    await turns()  # that it waits by now: what is slept is counted from there
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_without_anything_given_up_it_is_free():
    async with talking() as talk:
        await talk.conversations.settle()
        await talk.ask()
        await talk.conversations.settle()
        assert len(talk.server.bodies) == 1


async def test_it_is_free_when_its_log_says_that_the_request_ended():
    async with talking(reading) as talk:
        await give_up(talk)
        talk.output.start()
        async with settling(talk) as settled:
            await talk.clock.move(1.0)
            assert not settled.done()
            talk.output.end(finish="error", error="client stream write failed")
            await settled
        assert len(talk.server.bodies) == 1


async def test_a_line_that_came_before_anyone_waited_counts():
    async with talking(reading) as talk:
        await give_up(talk)
        talk.output.start()
        talk.output.end(finish="", error="stream closed during prefill")
        await talk.conversations.settle()


async def test_the_end_of_the_answer_before_is_not_taken_for_its_end():
    async with talking(plain, reading) as talk:
        await talk.ask()
        # The lines of the first are read late: after its answer, and after the second was given up.
        await give_up(talk)
        talk.output.start(prompt=7)
        talk.output.end(prompt=7)
        async with settling(talk) as settled:
            await talk.clock.move(0.0)
            assert not settled.done()
            talk.output.start(prompt=8)
            await talk.clock.move(1.0)
            assert not settled.done()
            talk.output.end(prompt=8)
            await settled


async def test_another_prompt_that_starts_shows_that_it_is_over():
    async with talking(reading, reading) as talk:
        await give_up(talk)
        talk.output.start(prompt=7)
        await give_up(talk)
        talk.output.start(prompt=9)  # one conversation at a time: the first is over, though no line said so
        async with settling(talk) as settled:
            talk.output.end(prompt=9)
            await settled


async def test_where_the_log_tells_nothing_the_same_request_is_sent_again_for_one_token():
    async with talking(reading, plain) as talk:
        await give_up(talk, hello(max_output_tokens=500))
        async with settling(talk) as settled:
            await talk.clock.move(PROBE_AFTER_S - 1)
            assert len(talk.server.bodies) == 1
            await talk.clock.move(1.0)
            await settled
        first, probe = talk.server.bodies
        assert first == {**probe, "max_tokens": 500}
        assert probe["max_tokens"] == 1


async def test_a_prompt_that_goes_on_is_not_asked_for():
    async with talking(reading, plain) as talk:
        await give_up(talk)
        span = Span(0, 9000, 9000)
        talk.output.start(prompt=9000)
        async with settling(talk) as settled:
            for chunk in range(1, 5):
                await talk.clock.move(PROBE_RUNNING_AFTER_S - 1)
                talk.output.print(PromptProgress(span, chunk * 2048, 9000, 200.0))
                await asyncio.sleep(0)
            assert len(talk.server.bodies) == 1
            assert not settled.done()


async def test_a_prompt_that_is_being_read_is_asked_for_much_later():
    async with talking(reading, plain) as talk:
        await give_up(talk)
        talk.output.start()
        async with settling(talk) as settled:
            await talk.clock.move(PROBE_RUNNING_AFTER_S - 1)
            assert len(talk.server.bodies) == 1
            await talk.clock.move(1.0)
            await settled
        assert len(talk.server.bodies) == 2


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_whatever_is_answered_shows_that_it_is_free(status):
    async def refusing(exchange):
        await exchange.refuse(status, b"{}")

    async with talking(reading, refusing) as talk:
        await give_up(talk)
        async with settling(talk) as settled:
            await talk.clock.move(PROBE_AFTER_S)
            await settled


async def test_a_probe_that_was_sent_is_waited_for_too():
    may_answer = asyncio.Event()

    async def slow(exchange):
        await may_answer.wait()
        await plain(exchange)

    async with talking(reading, slow) as talk:
        await give_up(talk)
        talk.output.start(prompt=7)
        async with settling(talk) as settled:
            await talk.clock.move(PROBE_RUNNING_AFTER_S)
            await until(lambda: len(talk.server.bodies) == 2)
            talk.output.start(prompt=7)  # the probe's: so the request before it is over, and the probe is computed now
            await talk.clock.move(1.0)
            assert not settled.done()
            may_answer.set()
            await settled


async def test_an_engine_that_tells_nothing_for_the_idle_limit_is_broken():
    async with talking(reading, reading, idle_limit_s=60.0) as talk:
        await give_up(talk)
        async with settling(talk) as settled:
            await talk.clock.move(PROBE_AFTER_S)
            await until(lambda: len(talk.server.bodies) == 2)
            await talk.clock.move(60.0 - PROBE_AFTER_S - 1)
            assert not settled.done()
            await talk.clock.move(1.0)
            with pytest.raises(EngineBrokenError, match="60 s"):
                await settled


async def test_an_engine_that_is_gone_is_lost():
    async with talking(reading) as talk:
        await give_up(talk)
        talk.server.stop_listening()
        async with settling(talk) as settled:
            await talk.clock.move(PROBE_AFTER_S)
            with pytest.raises(EngineLostError):
                await settled


async def test_a_build_that_stops_when_its_client_leaves_is_free_at_once():
    async with talking(reading, stops_on_disconnect=True) as talk:
        await give_up(talk)
        await talk.conversations.settle()


async def test_a_request_that_such_a_build_dropped_does_not_take_the_next_ones_lines():
    async with talking(reading, reading, stops_on_disconnect=True) as talk:
        await give_up(talk)
        answer = talk.conversations.answer(hello())
        first = asyncio.ensure_future(anext(answer))
        await until(lambda: len(talk.server.bodies) == 2)
        talk.output.start(prompt=11)
        assert (await first).started.prompt_tokens == 11
        await answer.aclose()


async def test_with_several_conversations_only_the_log_tells():
    async with talking(reading, plain, sessions=2) as talk:
        await give_up(talk)
        talk.output.start(prompt=7)
        async with settling(talk) as settled:
            await talk.clock.move(2 * PROBE_RUNNING_AFTER_S)
            assert len(talk.server.bodies) == 1  # a probe would be answered from another place
            assert not settled.done()
            talk.output.start(prompt=8)
            await talk.clock.move(1.0)
            assert not settled.done()
            talk.output.end(prompt=7)
            await settled


async def test_an_answer_that_could_not_be_read_is_waited_for():
    async def garbled(exchange):
        await exchange.begin()
        await exchange.send(b"data: {oops\n\n")
        await exchange.until_client_left()

    async with talking(garbled) as talk:
        asking = asyncio.ensure_future(talk.ask())
        await until(lambda: bool(talk.server.bodies))
        talk.output.start()
        while not asking.done():
            await talk.clock.move(0.1)
            await asyncio.sleep(0.001)
        assert asking.exception() is not None
        async with settling(talk) as settled:
            await talk.clock.move(0.0)
            assert not settled.done()
            talk.output.end(finish="error", error="client stream write failed")
            await settled


async def test_all_that_was_given_up_is_waited_for_by_everyone():
    async with talking(reading) as talk:
        for prompt in (7, 8):
            await give_up(talk)
            talk.output.start(prompt=prompt)
        async with settling(talk) as one, settling(talk) as other:
            await talk.clock.move(0.0)
            assert not one.done() and not other.done()
            talk.output.end(prompt=8)
            await asyncio.gather(one, other)

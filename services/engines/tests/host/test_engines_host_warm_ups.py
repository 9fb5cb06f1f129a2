"""Warm-ups come after everybody, load nothing, and keep nobody out."""

import asyncio

import grpc
from chat_fakes import ChatSuite
from host_fakes import eventually, failure_of, kinds, until_event
from weighbridge_engines.host.requests import RequestQueue

S = grpc.StatusCode


async def waiting(suite, call, number):
    """Read ``call`` to its end in the background, once it is the so-manieth that waits."""
    reading = asyncio.create_task(_all(call))
    await eventually(lambda: suite.host.current.queue.waiting == number)
    return reading


async def _all(call):
    return [event async for event in call]


async def busy(suite):
    """A chat that goes on until it is cancelled; the engine is free at once after that."""
    suite.kind.free.set()
    call = suite.chat("endless")
    await until_event(call, "delta")
    return call


async def test_a_warm_up_starts_when_nobody_else_waits(run_dir):
    async with ChatSuite(run_dir) as suite:
        first = await busy(suite)
        warming = await waiting(suite, suite.warm_up(), 1)
        others = [await waiting(suite, suite.chat(name), number) for number, name in enumerate(("one", "two"), 2)]
        first.cancel()
        await asyncio.gather(warming, *others)
        assert suite.kind.begun == ["endless", "one", "two", "warm"]
        assert kinds(await _all(suite.warm_up("again")))[-1] == "finished"  # nobody is there: at once


async def test_a_queue_full_of_requests_refuses_none_for_a_warm_up(run_dir):
    async with ChatSuite(run_dir, queue_limit=2) as suite:
        first = await busy(suite)
        one = await waiting(suite, suite.chat("one"), 1)
        warming = asyncio.create_task(failure_of(suite.warm_up()))
        await eventually(lambda: suite.host.current.queue.waiting == 2)
        two = asyncio.create_task(suite.chat_all("two"))
        failure = await warming
        assert (failure.code, failure.reason) == (S.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        assert (await failure_of(suite.warm_up())).reason == "TOO_MANY_REQUESTS"  # full again
        assert (await failure_of(suite.chat("three"))).reason == "TOO_MANY_REQUESTS"
        first.cancel()
        await asyncio.gather(one, two)
        assert suite.kind.begun == ["endless", "one", "two"]
        assert kinds(await suite.chat_all("last"))[-1] == "finished"  # no slot was lost


async def test_a_warm_up_dropped_in_the_moment_of_its_cancelling_gives_no_slot_away():
    queue = RequestQueue(slots=1, limit=1)

    async def warm_up():
        async with queue.slot(is_warm_up=True):
            raise AssertionError("it had a turn")

    async with queue.slot():
        warming = asyncio.create_task(warm_up())
        await eventually(lambda: queue.waiting == 1)

        async def request():
            async with queue.slot():
                return "served"

        requested = asyncio.create_task(request())
        await asyncio.sleep(0)  # it has taken the place of the warm-up, which does not know yet
        assert (queue.waiting, warming.done()) == (1, False)
        warming.cancel()
        await asyncio.wait([warming])
        assert not requested.done()  # the one slot is still held
    assert await requested == "served"


async def test_one_warm_up_at_a_time(run_dir):
    async with ChatSuite(run_dir) as suite:
        first = await busy(suite)
        call = suite.warm_up()
        warming = await waiting(suite, call, 1)
        assert (await failure_of(suite.warm_up())).reason == "TOO_MANY_REQUESTS"
        call.cancel()
        await asyncio.wait([warming])
        await eventually(lambda: suite.host.current.queue.waiting == 0)
        again = await waiting(suite, suite.warm_up("again"), 1)
        first.cancel()
        await again
        assert suite.kind.begun == ["endless", "again"]


async def test_a_warm_up_loads_no_model_and_replaces_none(run_dir):
    async with ChatSuite(run_dir) as suite:
        for model in ("a", None):
            failure = await failure_of(suite.warm_up(model=model))
            assert (failure.code, failure.reason) == (S.FAILED_PRECONDITION, "NO_MODEL_LOADED")
        assert not suite.ledger.admits
        suite.ledger.grant.clear()
        loading = asyncio.create_task(suite.load_all())
        await eventually(lambda: suite.ledger.queued)
        assert (await failure_of(suite.warm_up())).reason == "NO_MODEL_LOADED"  # not even one that comes soon
        suite.ledger.grant.set()
        await loading
        assert (await failure_of(suite.warm_up(model="b"))).reason == "NO_MODEL_LOADED"
        assert kinds(await _all(suite.warm_up(model="also-a")))[-1] == "finished"  # the same model by another name
        assert len(suite.ledger.admits) == 1

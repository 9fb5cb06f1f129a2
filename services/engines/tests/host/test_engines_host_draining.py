"""Answers that nobody waits for and that the engine cannot stop; engines that answer and can serve no more."""

import asyncio

import grpc
import pytest
from chat_fakes import ChatSuite
from host_fakes import eventually, failure_of, kinds, until_event
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb


async def given_up(suite):
    """A chat whose caller has gone, and whose engine computes on; returns its lease."""
    call = suite.chat("endless")
    await until_event(call, "delta")
    call.cancel()
    await eventually(lambda: suite.host.current.use.draining)
    [lease] = suite.ledger.leases.values()
    return lease


async def test_a_given_up_answer_keeps_slot_use_and_stake_until_the_engine_is_free(run_dir):
    async with ChatSuite(run_dir) as suite:
        lease = await given_up(suite)
        engine = await suite.get()
        assert (engine.requests_draining, engine.requests_in_flight, engine.requests_queued) == (1, 1, 0)
        next_one = asyncio.create_task(suite.chat_all("next"))
        await eventually(lambda: suite.host.current.queue.waiting == 1)
        engine = await suite.get()
        assert (engine.requests_draining, engine.requests_in_flight, engine.requests_queued) == (1, 1, 1)
        assert lease.uses == 1
        assert suite.kind.begun == ["endless"]
        suite.kind.free.set()
        assert kinds(await next_one)[-1] == "finished"
        await eventually(lambda: lease.uses == 0)
        engine = await suite.get()
        assert (engine.requests_draining, engine.requests_in_flight) == (0, 0)
        assert len(suite.ledger.admits) == 1


async def test_who_cancels_is_not_kept_and_watchers_see_the_engine_drain(run_dir):
    async with ChatSuite(run_dir) as suite:
        await suite.load_all()
        watching = suite.engine.Watch(engine_pb.WatchRequest())
        assert (await watching.read()).engine.requests_draining == 0
        failure = await failure_of(suite.chat("silent"))  # told at once, while the engine computes on
        assert (failure.code, failure.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "ENGINE_SILENT")
        while not (await watching.read()).engine.requests_draining:
            pass
        suite.kind.free.set()
        while (await watching.read()).engine.requests_draining:
            pass
        watching.cancel()


@pytest.mark.parametrize("asked_by", ["unload", "ledger"])
async def test_what_is_asked_to_go_waits_for_a_given_up_answer(run_dir, asked_by):
    async with ChatSuite(run_dir) as suite:
        lease = await given_up(suite)
        child = suite.host.current.child
        if asked_by == "unload":
            unloading = asyncio.create_task(suite.unload())
        else:
            suite.ledger.vacate(lease.lease_id)
        await eventually(lambda: suite.host.state == engine_pb.ENGINE_STATE_UNLOADING)
        assert (await suite.get()).requests_draining == 1
        assert not child.has_ended
        suite.kind.free.set()
        await suite.nothing_left()
        assert suite.ledger.released == ["UNLOADED" if asked_by == "unload" else "VACATED"]
        if asked_by == "unload":
            assert (await unloading).unloaded.model_name == "a"


async def test_an_unload_by_force_does_not_wait_for_a_given_up_answer(run_dir):
    async with ChatSuite(run_dir) as suite:
        await given_up(suite)
        use = suite.host.current.use
        await suite.unload(force=True)
        await suite.nothing_left()
        await eventually(lambda: not use.draining)  # nor does anything go on waiting for a dead engine
        assert not suite.kind.free.is_set()


async def test_a_model_is_not_idle_while_it_drains(run_dir):
    async with ChatSuite(run_dir, idle_timeout_s=300) as suite:
        await given_up(suite)
        assert not (await suite.get()).model.HasField("idle_unload_time")
        suite.kind.free.set()
        await eventually(lambda: not suite.host.current.use.draining)
        assert (await suite.get()).model.HasField("idle_unload_time")


# -- engines that can serve no more --


async def test_a_broken_engine_is_ended_and_loaded_again_for_the_next_request(run_dir):
    async with ChatSuite(run_dir) as suite:
        suite.kind.free.set()
        failure = await failure_of(suite.chat("broken"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_RECYCLED")
        assert "Three answers in a row failed." in failure.message
        assert failure.retry_after_s > 0
        await suite.nothing_left()
        assert suite.ledger.released == ["ENGINE_RECYCLED"]
        assert (await suite.get()).last_failure.reason == "ENGINE_RECYCLED"
        assert kinds(await suite.chat_all())[-1] == "finished"
        assert len(suite.ledger.admits) == 2


async def test_those_who_wait_for_a_broken_engine_have_it_loaded_again(run_dir):
    async with ChatSuite(run_dir) as suite:
        suite.kind.settles_broken = True
        await given_up(suite)
        waiting = [asyncio.create_task(suite.chat_all(prompt)) for prompt in ("one", "two")]
        await eventually(lambda: suite.host.current.queue.waiting == 2)
        suite.kind.free.set()
        assert [kinds(events)[-1] for events in await asyncio.gather(*waiting)] == 2 * ["finished"]
        assert suite.ledger.released == ["ENGINE_RECYCLED"]
        assert len(suite.ledger.admits) == 2


async def test_an_engine_that_breaks_again_and_again_is_left_alone_for_a_while(run_dir):
    async with ChatSuite(run_dir) as suite:
        suite.kind.free.set()
        for _ in range(3):
            assert (await failure_of(suite.chat("broken"))).reason == "ENGINE_RECYCLED"
            await suite.nothing_left()
        failure = await failure_of(suite.chat())
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "RESTART_BUDGET_EXHAUSTED")
        assert "Three answers in a row failed." in failure.message

"""Renders take turns, one at a time; what becomes of those that are cancelled, and of those behind them."""

import asyncio
from unittest import mock

import grpc
from host_fakes import eventually, failure_of, kinds, until_event
from image_fakes import ImageSuite, size
from weighbridge_engines.host.images import MAX_LOADS
from weighbridge_proto.channel import open_channel
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.engines.v1 import image_service_pb2 as image_pb
from weighbridge_proto.engines.v1 import image_service_pb2_grpc

SMALL = {"size": size(64, 64)}


def places(events):
    return [event.queued.position for event in events if event.WhichOneof("event") == "queued"]


async def queued(suite, *prompts, model="a"):
    """Requests that wait in this order."""
    tasks = []
    for prompt in prompts:
        waiting = suite.host.current.queue.waiting
        tasks.append(asyncio.create_task(suite.image_all(prompt, model, **SMALL)))
        await eventually(lambda before=waiting: suite.host.current.queue.waiting == before + 1)
    return tasks


# -- one at a time --


async def test_renders_take_turns_in_order_and_hear_their_place(run_dir):
    async with ImageSuite(run_dir) as suite:
        async with suite.slow_image():
            tasks = await queued(suite, "one", "two", "three")
            engine = await suite.get()
            assert (engine.requests_in_flight, engine.requests_queued) == (1, 3)
            suite.kind.go_on.set()
        one, two, three = await asyncio.gather(*tasks)
        assert suite.kind.finished == ["slow", "one", "two", "three"]
        assert suite.kind.most_rendering == suite.ledger.most_uses == 1
        assert (places(one), places(two), places(three)) == ([1], [2, 1], [3, 2, 1])
        assert kinds(one)[0] == "queued"


async def test_the_queue_is_bounded(run_dir):
    async with ImageSuite(run_dir, queue_limit=1) as suite, suite.slow_image():
        [waiting] = await queued(suite, "one")
        failure = await failure_of(suite.image("two", **SMALL))
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        assert failure.retry_after_s > 0
        suite.kind.go_on.set()
        assert kinds(await waiting)[-1] == "finished"


async def test_a_device_that_must_rest_is_waited_for_at_the_head_of_the_queue(run_dir):
    async with ImageSuite(run_dir) as suite:
        await suite.load_all()
        suite.ledger.unhealthy_s = 30.0
        call = suite.image(**SMALL)
        assert (await until_event(call, "queued")).queued.position == 1
        assert not suite.kind.jobs
        suite.ledger.unhealthy_s = None
        await suite.clock.pass_a_sleep(30.0)
        await until_event(call, "finished")


async def test_another_model_waits_for_the_render_in_flight(run_dir):
    """The reference system stopped its server for another model before the render was over."""
    async with ImageSuite(run_dir) as suite:
        async with suite.slow_image() as first:
            other = asyncio.create_task(suite.image_all("other", "b", **SMALL))
            await eventually(lambda: len(suite.ledger.admits) == 2)
            await eventually(lambda: suite.host.state == engine_pb.ENGINE_STATE_UNLOADING)
            assert suite.host.current.child.has_ended is False
            suite.kind.go_on.set()
            await until_event(first, "finished")
        assert kinds(await other)[-1] == "finished"
        assert suite.kind.finished == ["slow", "other"]
        assert suite.ledger.released == ["REPLACED"]


async def test_those_who_wait_for_a_model_have_it_before_it_is_replaced(run_dir):
    async with ImageSuite(run_dir) as suite:
        async with suite.slow_image() as first:
            [same] = await queued(suite, "same")
            other = asyncio.create_task(suite.image_all("other", "b", **SMALL))
            await eventually(lambda: len(suite.fit.plans) >= 3)
            suite.kind.go_on.set()
            await until_event(first, "finished")
        await asyncio.gather(same, other)
        assert suite.kind.finished == ["slow", "same", "other"]
        assert len(suite.ledger.admits) == 2


async def test_a_model_asked_back_before_a_render_had_its_turn_is_loaded_again(run_dir):
    async with ImageSuite(run_dir) as suite:
        await suite.load_all()
        suite.ledger.refuse_use = suite.ledger.active[0].lease_id
        events = await suite.image_all(**SMALL)
        assert "load" in kinds(events)
        assert kinds(events)[-1] == "finished"
        assert len(suite.ledger.admits) == 2


async def test_a_model_asked_back_again_and_again_is_given_up(run_dir):
    async with ImageSuite(run_dir) as suite:
        suite.ledger.refuse_use = mock.ANY  # whichever lease it is
        failure = await failure_of(suite.image(**SMALL))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "LEASE_VACATING")
        assert len(suite.ledger.admits) == MAX_LOADS
        assert not suite.kind.jobs


async def test_unloading_waits_for_renders_or_breaks_them_off(run_dir):
    async with ImageSuite(run_dir) as suite, suite.slow_image() as call:
        patient = asyncio.create_task(suite.unload())
        await eventually(lambda: suite.host.state == engine_pb.ENGINE_STATE_UNLOADING)
        assert not patient.done()
        await suite.unload(force=True)
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "MODEL_UNLOADED")
        await patient
        await suite.nothing_left()


async def test_a_service_that_stops_ends_renders_and_leaves_nothing(run_dir):
    suite = ImageSuite(run_dir, grace_s=0)
    async with suite, suite.slow_image() as call:
        [waiting] = await queued(suite, "one")
        failures = asyncio.gather(failure_of(call), waiting, return_exceptions=True)
        await suite.server.stop(0)
        await failures
    assert not suite.engine_pids
    assert suite.kind.finished == []


# -- cancelled --


async def test_a_render_that_is_cancelled_in_the_queue_is_dropped_and_the_others_move_up(run_dir):
    async with ImageSuite(run_dir) as suite:
        async with suite.slow_image() as first:
            dropped = suite.image("dropped", **SMALL)
            await until_event(dropped, "queued")
            [waiting] = await queued(suite, "one")
            dropped.cancel()
            await eventually(lambda: suite.host.current.queue.waiting == 1)
            suite.kind.go_on.set()
            await until_event(first, "finished")
        assert places(await waiting) == [2, 1]
        assert suite.kind.finished == ["slow", "one"]


async def test_a_render_that_is_cancelled_before_its_end_is_finished_for_nobody(run_dir):
    """A step of 1 s: after all four the decode is taken to last four more."""
    async with ImageSuite(run_dir) as suite:
        suite.kind.step_s = 1.0
        async with suite.slow_image("slow decode", **SMALL) as call:
            [lease] = suite.ledger.active
            [waiting] = await queued(suite, "one")
            call.cancel()
            await eventually(lambda: call.cancelled())
            # Until it is over it is in use, and nobody else's turn.
            assert (lease.uses, len(suite.kind.jobs)) == (1, 1)
            engine = await suite.get()
            assert (engine.requests_in_flight, engine.requests_queued, engine.requests_draining) == (1, 1, 1)
            suite.kind.go_on.set()
        assert kinds(await waiting)[-1] == "finished"
        await eventually(lambda: lease.uses == 0)
        assert (await suite.get()).requests_draining == 0
        assert suite.kind.finished == ["slow decode", "one"]
        assert suite.kind.most_rendering == suite.ledger.most_uses == 1
        assert len(suite.ledger.admits) == 1
        await eventually(lambda: lease.uses == 0)


async def test_watchers_see_that_a_cancelled_render_is_finished_for_nobody(run_dir):
    async with ImageSuite(run_dir) as suite:
        suite.kind.step_s = 1.0
        async with suite.slow_image("slow decode", **SMALL) as call:
            watching = suite.engine.Watch(engine_pb.WatchRequest())
            assert (await watching.read()).engine.requests_draining == 0
            call.cancel()
            while not (await watching.read()).engine.requests_draining:
                pass
            suite.kind.go_on.set()
            while (await watching.read()).engine.requests_draining:
                pass
            watching.cancel()


async def test_a_render_that_is_cancelled_long_before_its_end_is_ended_with_its_engine(run_dir):
    """A step of 2 s: after the first of four, three more and a decode of four steps would take 14 s."""
    async with ImageSuite(run_dir) as suite:
        suite.kind.step_s = 2.0
        async with suite.slow_image(**SMALL) as call:
            pid = suite.host.current.child.engine.pid
            call.cancel()
            await suite.nothing_left()
        assert suite.ledger.released == ["RENDER_CANCELLED"]
        assert not (await suite.get()).HasField("last_failure")
        assert suite.kind.finished == []
        suite.kind.step_s = 0.0
        assert kinds(await suite.image_all(**SMALL))[-1] == "finished"
        assert suite.host.current.child.engine.pid != pid


async def test_ending_an_engine_for_cancelled_renders_is_no_failure_of_the_engine(run_dir):
    # Five failures within a minute would leave it alone for the rest of it; the clock stands still here.
    async with ImageSuite(run_dir) as suite:
        for _ in range(8):
            async with suite.slow_image("slow text", **SMALL) as call:
                call.cancel()
                await suite.nothing_left()
        assert suite.ledger.released == 8 * ["RENDER_CANCELLED"]
        assert kinds(await suite.image_all(**SMALL))[-1] == "finished"


async def test_those_behind_a_render_that_is_ended_have_the_model_loaded_again_for_them(run_dir):
    async with ImageSuite(run_dir) as suite:
        async with suite.slow_image("slow text", **SMALL) as call:
            tasks = await queued(suite, "one", "two", "three", "four")
            call.cancel()
            events = await asyncio.gather(*tasks)
        assert sorted(suite.kind.finished) == ["four", "one", "three", "two"]
        assert all("load" in kinds(answer) and kinds(answer)[-1] == "finished" for answer in events)
        assert len(suite.ledger.admits) == 2
        assert suite.kind.most_rendering == 1


async def test_those_who_named_no_model_have_the_same_one_loaded_again(run_dir):
    async with ImageSuite(run_dir) as suite:
        async with suite.slow_image("slow text", **SMALL) as call:
            [waiting] = await queued(suite, "one", model=None)
            call.cancel()
            assert kinds(await waiting)[-1] == "finished"
        assert [request.model.path for request in suite.fit.plans] == len(suite.fit.plans) * ["a"]


async def test_waiting_behind_renders_that_others_cancel_never_wears_out(run_dir):
    """A model that is taken away is loaded MAX_LOADS times at most; not so one that is ended for cancelled renders."""
    async with ImageSuite(run_dir) as suite:
        calls = {f"slow text {number}": None for number in range(MAX_LOADS + 2)}
        for place, prompt in enumerate(calls):
            calls[prompt] = suite.image(prompt, **SMALL)
            if place == 0:
                await until_event(calls[prompt], "progress")
            else:
                assert (await until_event(calls[prompt], "queued")).queued.position == place
        while len(calls) > 1:
            await eventually(lambda: suite.kind.jobs[-1].prompt in calls)  # the next one renders, whichever it is
            calls.pop(suite.kind.jobs[-1].prompt).cancel()
        await eventually(lambda: len(suite.ledger.released) == MAX_LOADS + 1)
        suite.kind.go_on.set()
        [(last, call)] = calls.items()
        await until_event(call, "finished")
        assert suite.kind.finished == [last]
        assert set(suite.ledger.released) == {"RENDER_CANCELLED"}


async def test_a_cancelled_render_that_takes_longer_than_expected_is_ended_after_all(run_dir):
    async with ImageSuite(run_dir) as suite:
        suite.kind.step_s = 1.0
        async with suite.slow_image("slow decode", **SMALL) as call:
            call.cancel()
            await suite.clock.pass_a_sleep(10.0)
            await suite.nothing_left()
        assert suite.ledger.released == ["RENDER_CANCELLED"]


async def test_a_render_is_as_good_as_cancelled_when_its_client_is_gone(run_dir):
    async with ImageSuite(run_dir) as suite:
        channel = open_channel(suite.server.target)
        request = image_pb.GenerateImageRequest(prompt="slow text", **SMALL)
        request.model.path = "a"
        call = image_service_pb2_grpc.ImageServiceStub(channel).GenerateImage(request)
        await until_event(call, "progress")
        await channel.close()
        await suite.nothing_left()
        assert suite.ledger.released == ["RENDER_CANCELLED"]


async def test_a_render_whose_time_is_over_is_as_good_as_cancelled(run_dir):
    async with ImageSuite(run_dir) as suite:
        await suite.load_all()
        request = image_pb.GenerateImageRequest(prompt="slow text", **SMALL)
        request.model.path = "a"
        failure = await failure_of(suite.images.GenerateImage(request, timeout=0.5))
        assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await suite.nothing_left()


async def test_a_load_that_only_a_cancelled_request_wanted_is_stopped(run_dir):
    async with ImageSuite(run_dir) as suite:
        suite.ledger.grant.clear()
        call = suite.image(**SMALL)
        await eventually(lambda: suite.ledger.queued)
        call.cancel()
        await eventually(lambda: not suite.ledger.queued)
        assert not suite.kind.jobs


async def test_another_model_waits_for_a_cancelled_render_that_is_finished(run_dir):
    async with ImageSuite(run_dir) as suite:
        suite.kind.step_s = 1.0
        async with suite.slow_image("slow decode", **SMALL) as call:
            call.cancel()
            other = asyncio.create_task(suite.image_all("other", "b", **SMALL))
            await eventually(lambda: suite.host.state == engine_pb.ENGINE_STATE_UNLOADING)
            assert not suite.host.current.child.has_ended
            suite.kind.go_on.set()
        assert kinds(await other)[-1] == "finished"
        assert suite.kind.finished == ["slow decode", "other"]
        assert suite.ledger.released == ["REPLACED"]

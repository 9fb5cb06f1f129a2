"""Answers: loaded on demand, in turn, cancelled, broken off, and what the log and the state tell."""

import asyncio
import signal
import threading

import grpc
import pytest
from chat_fakes import FakeChatKind
from host_fakes import Suite, eventually, failure_of, kill, kinds, until_event
from weighbridge_engines.host.chat_limits import LARGE_REQUEST_BYTES, MOST_MESSAGES
from weighbridge_proto.engines.v1 import chat_service_pb2, engine_service_pb2, image_service_pb2, image_service_pb2_grpc
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb


async def test_a_chat_loads_its_model_and_is_busy_by_the_ledgers_leave(run_dir):
    async with Suite(run_dir) as suite:
        events = await suite.chat_all("hello", "a")
        assert kinds(events)[0] == "load"
        assert kinds(events)[-5:] == ["started", "delta", "delta", "delta", "finished"]
        assert events[-1].finished.usage.output_tokens == 3
        assert suite.ledger.uses_begun == 1
        [lease] = suite.ledger.active
        await eventually(lambda: lease.uses == 0)
        assert kinds(await suite.chat_all("hello", "a"))[0] == "started"
        assert kinds(await suite.chat_all("hello", None))[0] == "started"  # whatever is loaded
        assert len(suite.ledger.admits) == 1


async def test_a_chat_that_names_no_model_and_finds_none(run_dir):
    async with Suite(run_dir) as suite:
        failure = await failure_of(suite.chat("hello", None))
        assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_MODEL_LOADED")
        failure = await failure_of(suite.chats.Chat(chat_service_pb2.ChatRequest()))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "EMPTY_CONVERSATION")


async def test_a_chat_of_too_many_pieces_is_refused_before_the_engine_looks_at_them(run_dir):
    looked_at = []

    class Looking(FakeChatKind):
        def check_chat(self, request):
            looked_at.append(request)

    async with Suite(run_dir, kind=Looking()) as suite:
        message = chat_service_pb2.ChatMessage(role=chat_service_pb2.ROLE_USER)
        request = chat_service_pb2.ChatRequest(messages=[message] * (MOST_MESSAGES + 1))
        failure = await failure_of(suite.chats.Chat(request))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TOO_MANY_MESSAGES")
    assert not looked_at


async def test_the_engines_own_refusal_passes_through_and_ends_nothing(run_dir):
    async with Suite(run_dir) as suite:
        failure = await failure_of(suite.chat("overflow"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_OVERFLOW")
        assert failure.metadata["prompt_tokens"] == "9"
        assert kinds(await suite.chat_all())[-1] == "finished"
        assert len(suite.ledger.admits) == 1


async def test_the_engine_answers_others_while_a_large_request_is_checked(run_dir):
    begun, others_were_answered, seen = threading.Event(), threading.Event(), []

    class Checking(FakeChatKind):
        def check_chat(self, request):
            begun.set()
            # Bounded, so that a check on the event loop fails the test and does not hang it.
            seen.append(others_were_answered.wait(5))

    async with Suite(run_dir, kind=Checking()) as suite:
        chat = asyncio.create_task(suite.chat_all("x" * LARGE_REQUEST_BYTES))
        assert await asyncio.to_thread(begun.wait, 10)
        await suite.engine.GetEngine(engine_service_pb2.GetEngineRequest())
        others_were_answered.set()
        assert kinds(await chat)[-1] == "finished"
    assert seen == [True]


async def test_cancelling_an_answer_stops_it_in_the_engine_and_ends_the_use(run_dir):
    async with Suite(run_dir) as suite:
        call = suite.chat("endless")
        await until_event(call, "delta")
        [lease] = suite.ledger.active
        assert lease.uses == 1
        call.cancel()
        await eventually(lambda: lease.uses == 0)
        await eventually(lambda: any("generate ended, busy=0" in line.text for line in suite.host.around.log.tail(50)))
        assert kinds(await suite.chat_all())[-1] == "finished"


async def test_requests_take_turns_and_the_queue_is_bounded(run_dir):
    async with Suite(run_dir, queue_limit=1) as suite:
        first = suite.chat("endless")
        await until_event(first, "delta")
        second = asyncio.create_task(suite.chat_all("hello"))
        await eventually(lambda: suite.host.current.queue.waiting == 1)
        engine = await suite.get()
        assert (engine.requests_in_flight, engine.requests_queued) == (1, 1)
        failure = await failure_of(suite.chat("hello"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        assert failure.retry_after_s > 0
        first.cancel()
        events = await second
        assert events[-2].delta.text.endswith("busy=1 ")  # never two at once in the engine
        await eventually(lambda: suite.ledger.active[0].uses == 0)


@pytest.mark.parametrize(("ended_by", "reason"), [("unload", "MODEL_UNLOADED"), ("kill", "ENGINE_DIED")])
async def test_requests_that_wait_are_told_why_their_engine_ended(run_dir, ended_by, reason):
    async with Suite(run_dir) as suite:
        first = suite.chat("endless")
        await until_event(first, "delta")
        waiting = [asyncio.create_task(failure_of(suite.chat("hello"))) for _ in range(3)]
        await eventually(lambda: suite.host.current.queue.waiting == 3)
        if ended_by == "unload":
            await suite.unload(force=True)
        else:
            kill(suite.host.current.child.engine.pid)
        failures = [await failure_of(first), *await asyncio.gather(*waiting)]
        assert [failure.reason for failure in failures] == 4 * [reason]
        await suite.nothing_left()


async def test_a_chat_that_no_model_can_answer_loads_none(run_dir):
    async with Suite(run_dir) as suite:
        hello = chat_service_pb2.ChatMessage(
            role=chat_service_pb2.ROLE_USER, parts=[chat_service_pb2.ContentPart(text="hello")]
        )
        bad = [
            {"sampling": chat_service_pb2.Sampling(temperature=float("nan"))},
            {"sampling": chat_service_pb2.Sampling(top_p=-0.5)},
            {"stop_sequences": [str(number) for number in range(10_000)]},
            {"max_output_tokens": -1},
        ]
        for fields in bad:
            request = chat_service_pb2.ChatRequest(messages=[hello], **fields)
            request.model.path = "a"
            failure = await failure_of(suite.chats.Chat(request))
            assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_SAMPLING")
        assert not suite.ledger.admits


async def test_as_many_at_once_as_were_planned_for(run_dir):
    async with Suite(run_dir) as suite:
        suite.fit.slots = 2
        calls = [suite.chat("endless"), suite.chat("endless")]
        for call in calls:
            await until_event(call, "delta")
        assert suite.host.current.queue.waiting == 0


async def test_an_engine_that_dies_in_mid_answer_is_explained_and_loaded_again_by_the_next_chat(run_dir):
    async with Suite(run_dir) as suite:
        call = suite.chat("crash")
        await until_event(call, "delta")  # text before the failure stands
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DIED")
        assert (failure.metadata["signal"], failure.metadata["was_ready"]) == ("SIGKILL", "true")
        await suite.nothing_left()
        assert suite.ledger.released == ["CRASHED"]
        assert (await suite.get()).last_failure.reason == "ENGINE_DIED"
        assert kinds(await suite.chat_all())[-1] == "finished"
        assert len(suite.ledger.admits) == 2  # a restart is a new claim
        assert not (await suite.get()).HasField("last_failure")


async def test_killing_engine_or_guard_while_an_answer_streams(run_dir):
    async with Suite(run_dir) as suite:
        for which in (0, 1):  # guard, engine
            call = suite.chat("endless")
            await until_event(call, "delta")
            [lease] = suite.ledger.active
            kill(lease.engine_processes[which].pid)
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DIED")
            assert failure.metadata["cause"] == ("GUARD_LOST", "KILLED")[which]
            await suite.nothing_left()


async def test_an_idle_engine_that_dies_gives_its_lease_back(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all()
        kill(suite.ledger.active[0].engine_processes[1].pid, signal.SIGSEGV)
        await suite.nothing_left()
        assert (await suite.get()).last_failure.metadata["signal"] == "SIGSEGV"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
async def test_an_engine_ended_again_and_again_by_others_is_not_told_to_fail_by_itself(run_dir, number):
    async with Suite(run_dir) as suite:
        for _ in range(3):
            await suite.load_all()
            kill(suite.ledger.active[0].engine_processes[1].pid, number)
            await suite.nothing_left()
        failure = await failure_of(suite.load())
        assert failure.reason == "RESTART_BUDGET_EXHAUSTED"
        assert signal.Signals(number).name in failure.message
        assert "failed" not in failure.message
        assert "crashed" not in failure.message


async def test_unloading_waits_for_answers_or_breaks_them_off(run_dir):
    async with Suite(run_dir) as suite:
        call = suite.chat("endless")
        await until_event(call, "delta")
        patient = asyncio.create_task(suite.unload())
        await eventually(lambda: suite.host.state == engine_pb.ENGINE_STATE_UNLOADING)
        assert not patient.done()
        await suite.unload(force=True)
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "MODEL_UNLOADED")
        assert (await patient).unloaded.model_name == "a"
        await suite.nothing_left()
        assert suite.ledger.released == ["UNLOADED"]


async def test_an_engine_that_ignores_sigterm_is_killed(run_dir):
    async with Suite(run_dir, {"ignore_term": True}, stop_grace_s=0.1) as suite:
        await suite.load_all()
        await suite.unload()
        await suite.nothing_left()


async def test_the_log_splits_progress_bars_and_can_be_followed(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all()
        tail = [line.line async for line in suite.engine.TailLog(engine_service_pb2.TailLogRequest())]
        assert tail[:4] == ["loading", " 50%", "100%", "serving"]
        following = suite.engine.TailLog(engine_service_pb2.TailLogRequest(max_lines=1, follow=True))
        assert (await following.read()).line == "serving"
        await suite.chat_all()
        line = await following.read()
        assert (line.line, line.from_stderr) == ("generate ended, busy=0", False)
        following.cancel()


async def test_watching_tells_each_state(run_dir):
    async with Suite(run_dir) as suite:
        watching = suite.engine.Watch(engine_service_pb2.WatchRequest())
        assert (await watching.read()).engine.state == engine_pb.ENGINE_STATE_EMPTY
        await suite.load_all()
        seen = []
        while seen[-1:] != [engine_pb.ENGINE_STATE_READY]:
            seen.append((await watching.read()).engine.state)
        assert seen[0] == engine_pb.ENGINE_STATE_LOADING
        await suite.unload()
        while seen[-1] != engine_pb.ENGINE_STATE_EMPTY:
            seen.append((await watching.read()).engine.state)
        assert engine_pb.ENGINE_STATE_UNLOADING in seen
        watching.cancel()


async def test_images_are_refused_with_a_reason(run_dir):
    async with Suite(run_dir) as suite:
        images = image_service_pb2_grpc.ImageServiceStub(suite.channel)
        failure = await failure_of(images.GenerateImage(image_service_pb2.GenerateImageRequest()))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNIMPLEMENTED, "ENGINE_DOES_NOT_DO_IMAGES")
        assert "makes no images" in failure.message and "`weighbridge chat`" in failure.message

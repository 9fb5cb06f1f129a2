"""Another model, or another shape of the same, in one engine: by a claim in the place of the loaded one's lease."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from host_fakes import Suite, eventually, failure_of, kinds, until_event
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import plan_pb2


def context(tokens):
    return plan_pb2.Workload(chat=plan_pb2.ChatWorkload(context_tokens=tokens))


async def test_another_model_replaces_the_loaded_one_after_the_answers_in_flight(run_dir):
    async with Suite(run_dir) as suite:
        answer = suite.chat("endless", "a")
        await until_event(answer, "delta")
        [first] = suite.ledger.active
        load = suite.load("b")
        reclaiming = (await until_event(load, "reclaiming")).reclaiming
        assert list(reclaiming.victim_lease_ids) == [first.lease_id]
        assert suite.ledger.admits[1].replaces_lease.lease_id == first.lease_id
        assert not answer.done()
        answer.cancel()
        ready = (await until_event(load, "ready")).ready
        assert ready.engine.model.model_name == "b"
        assert suite.ledger.released == ["REPLACED"]
        assert len(suite.ledger.active) == 1


async def test_the_old_model_serves_on_while_the_claim_for_the_new_one_waits(run_dir):
    # Unloaded first and then queued behind others, an engine would serve nobody for as long as that takes.
    async with Suite(run_dir) as suite:
        await suite.load_all("a")
        suite.ledger.grant.clear()
        load = suite.load("b")
        await until_event(load, "queued")
        assert kinds(await suite.chat_all("hello", "a"))[-1] == "finished"
        assert kinds(await suite.chat_all("hello", None))[-1] == "finished"
        assert kinds(await suite.load_all("a")) == ["ready"]
        suite.ledger.grant.set()
        assert (await until_event(load, "ready")).ready.engine.model.model_name == "b"
        assert len(suite.ledger.admits) == 2


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "CLAIM_EXCEEDS_CAPACITY"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "ADMISSION_TIMED_OUT"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    ],
)
async def test_a_claim_that_is_refused_leaves_the_old_model_loaded(run_dir, code, reason):
    async with Suite(run_dir) as suite:
        await suite.load_all("a")
        suite.ledger.refuse_admit = RequestError(code, reason, "No.")
        failure = await failure_of(suite.load("b"))
        assert (failure.code, failure.reason) == (code, reason)
        assert kinds(await suite.chat_all("hello", "a"))[0] == "started"
        assert suite.ledger.released == []


async def test_a_plan_that_fails_leaves_the_old_model_loaded(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all("a")
        assert (await failure_of(suite.load("missing"))).reason == "MODEL_NOT_FOUND"
        assert kinds(await suite.chat_all("hello", "a"))[0] == "started"
        assert len(suite.ledger.admits) == 1


async def test_a_replacement_cancelled_before_the_old_model_was_asked_leaves_it_loaded(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all("a")
        suite.ledger.grant.clear()
        load = suite.load("b")
        await until_event(load, "queued")
        load.cancel()
        await eventually(lambda: not suite.ledger.queued)
        assert kinds(await suite.chat_all("hello", "a"))[0] == "started"
        assert len(suite.ledger.admits) == 2


async def test_a_replacement_cancelled_after_the_old_model_was_asked_leaves_nothing(run_dir):
    # VACATING is one-way: a model that came back to life would hold its waiter for ever.
    async with Suite(run_dir) as suite:
        answer = suite.chat("endless", "a")
        await until_event(answer, "delta")
        load = suite.load("b")
        await until_event(load, "reclaiming")
        load.cancel()
        answer.cancel()
        await suite.nothing_left()
        assert (await suite.get()).state == engine_pb.ENGINE_STATE_EMPTY


async def test_calls_that_came_first_begin_before_the_switch_is_asked_for(run_dir):
    # llama-swap 588: the switch came in the middle of a batch, and 10 of 20 requests were lost.
    async with Suite(run_dir) as suite:
        first = suite.chat("endless", "a")
        await until_event(first, "delta")
        second = asyncio.create_task(suite.chat_all("hello", "a"))
        await eventually(lambda: suite.host.current.queue.waiting == 1)
        load = asyncio.create_task(suite.load_all("b"))
        await eventually(lambda: len(suite.fit.plans) == 2)
        assert len(suite.ledger.admits) == 1
        first.cancel()
        assert kinds(await second)[-1] == "finished"
        assert kinds(await load)[-1] == "ready"
        assert len(suite.ledger.admits) == 2


async def test_a_call_for_the_old_model_that_came_too_late_loads_it_again_in_its_turn(run_dir):
    async with Suite(run_dir) as suite:
        first = suite.chat("endless", "a")
        await until_event(first, "delta")
        for_b = asyncio.create_task(suite.chat_all("hello", "b"))
        await eventually(lambda: suite.host.state == engine_pb.ENGINE_STATE_UNLOADING)
        late = asyncio.create_task(suite.chat_all("hello", "a"))
        first.cancel()
        assert kinds(await for_b)[-1] == "finished"
        assert kinds(await late)[-1] == "finished"
        assert [admit.purpose.model_name for admit in suite.ledger.admits] == ["a", "b", "a"]


async def test_two_models_wanted_by_turns_are_both_served(run_dir):
    async with Suite(run_dir) as suite:
        answers = await asyncio.gather(*(suite.chat_all("hello", name) for name in "abab"))
        assert all(kinds(events)[-1] == "finished" for events in answers)
        assert len(suite.ledger.active) == 1


async def test_context_sizes_that_alternate_do_not_reload_the_model(run_dir):
    # ollama PR 8029: two clients with two context sizes moved 13 GB out and 3.1 GB in with each of their requests.
    async with Suite(run_dir) as suite:
        for tokens in (4096, 32768, 4096, 32768):
            request = suite.chat_request("hello", "a")
            request.workload.CopyFrom(context(tokens))
            assert kinds([event async for event in suite.chats.Chat(request)])[-1] == "finished"
        assert len(suite.ledger.admits) == 1


async def test_a_larger_context_is_a_claim_in_the_place_of_the_smaller_one(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all("a", workload=context(4096))
        [small] = suite.ledger.active
        assert kinds(await suite.load_all("a", workload=context(32768)))[-1] == "ready"
        assert suite.ledger.admits[1].replaces_lease.lease_id == small.lease_id
        assert kinds(await suite.load_all("a", workload=context(32768))) == ["ready"]
        assert len(suite.ledger.admits) == 2


@pytest.mark.parametrize("promise", ["pinned", "exclusive"])
async def test_what_the_loaded_ones_lease_does_not_promise_needs_a_new_claim(run_dir, promise):
    async with Suite(run_dir) as suite:
        await suite.load_all("a")
        await suite.load_all("a", **{promise: True})
        assert [getattr(admit, promise) for admit in suite.ledger.admits] == [False, True]
        assert kinds(await suite.load_all("a")) == ["ready"]  # who asks for less is content with more
        assert kinds(await suite.load_all("a", **{promise: True})) == ["ready"]
        assert len(suite.ledger.admits) == 2


async def test_what_a_load_says_of_its_claim_reaches_the_ledger(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all("a", priority=3, pinned=True, exclusive=True, max_wait=Duration(seconds=7))
        [admit] = suite.ledger.admits
        assert (admit.priority, admit.pinned, admit.exclusive, admit.max_wait.seconds) == (3, True, True, 7)


async def test_a_claim_that_waits_over_a_restart_names_the_old_lease_by_its_new_secret(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all("a")
        [old] = suite.ledger.active
        suite.ledger.grant.clear()
        load = suite.load("b")
        await until_event(load, "queued")
        await suite.restart_ledger()
        suite.ledger.grant.set()
        assert (await until_event(load, "ready")).ready.engine.model.model_name == "b"
        assert {admit.request_id for admit in suite.ledger.admits[1:]} == {suite.ledger.admits[1].request_id}
        named = [admit.replaces_lease for admit in suite.ledger.admits[1:]]
        assert {credential.lease_id for credential in named} == {old.lease_id}
        assert named[0].secret != named[-1].secret


async def test_an_old_model_that_ends_by_itself_is_no_hindrance(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all("a")
        suite.ledger.grant.clear()
        load = suite.load("b")
        await until_event(load, "queued")
        await suite.host.current.on_idle()
        suite.ledger.grant.set()
        assert (await until_event(load, "ready")).ready.engine.model.model_name == "b"

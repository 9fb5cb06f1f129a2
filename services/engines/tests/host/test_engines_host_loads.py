"""Loading: the order of events, shared loads, replacement, and that a cancelled load leaves nothing."""

import asyncio
import errno
import os
import random

import grpc
import pytest
from host_fakes import CLAIM_BYTES, ManualClock, Suite, eventually, failure_of, kinds, process_exists, until_event
from weighbridge_engines.supervisor import cgroup
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.fit.v1 import weights_pb2


async def test_a_load_goes_plan_admit_start_ready_and_an_unload_gives_everything_back(run_dir):
    async with Suite(run_dir) as suite:
        events = await suite.load_all("a")
        assert kinds(events)[:3] == ["planned", "admitted", "starting"]
        assert kinds(events)[-1] == "ready"
        engine = events[-1].ready.engine
        assert engine.state == engine_pb.ENGINE_STATE_READY
        assert engine.model.lease.charge.host_bytes == CLAIM_BYTES
        assert engine.node_id == "node-1"
        [lease] = suite.ledger.active
        pids = [p.pid for p in lease.engine_processes]
        assert len(pids) == 2
        assert engine.model.process.pid in pids
        assert lease.purpose.engine_kind == "mlx"
        await eventually(lambda: lease.lease_id in suite.ledger.load_complete)

        response = await suite.unload()
        assert response.unloaded.model_name == "a"
        assert not any(process_exists(pid) for pid in pids)
        assert suite.ledger.released == ["UNLOADED"]
        [observation] = suite.ledger.observations
        assert (observation.peak_bytes, observation.planned_bytes) == (500_000_000, CLAIM_BYTES)
        assert (observation.claimed_bytes, observation.granted_bytes) == (CLAIM_BYTES, CLAIM_BYTES)
        assert observation.model_digest == "digest-a"
        assert not (await suite.unload()).HasField("unloaded")
        await suite.nothing_left()


async def test_a_claim_says_what_memory_its_holder_may_have(run_dir, monkeypatch):
    # A claim that fits the machine and not the holder's own container would end in a kill by the kernel.
    monkeypatch.setattr(cgroup, "memory_limit_bytes", lambda: 3 * CLAIM_BYTES)
    async with Suite(run_dir) as suite:
        await suite.load_all("a")
        assert suite.ledger.admits[0].holder.memory_limit_bytes == 3 * CLAIM_BYTES


async def test_loading_what_is_loaded_answers_at_once_whatever_it_is_called(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all("a")
        assert kinds(await suite.load_all("a")) == ["ready"]
        assert kinds(await suite.load_all("also-a"))[-1] == "ready"  # another name for the same weights
        assert len(suite.ledger.admits) == 1


async def test_calls_for_one_model_join_one_load_and_the_last_to_leave_stops_it(run_dir):
    async with Suite(run_dir, {"hang_in_load": True}) as suite:
        calls = [suite.load("a") for _ in range(3)]
        for call in calls:
            await until_event(call, "starting")
        assert len(suite.ledger.admits) == 1
        calls[0].cancel()
        calls[1].cancel()
        late = suite.load("a")
        await until_event(late, "planned")  # it hears what happened before
        await until_event(late, "starting")
        assert len(suite.ledger.active) == 1
        await eventually(lambda: len(suite.engine_pids) == 2)
        calls[2].cancel()
        late.cancel()
        await suite.nothing_left()
        assert suite.ledger.released == ["LOAD_CANCELLED"]
        assert (await suite.get()).state == engine_pb.ENGINE_STATE_EMPTY


async def test_cancelled_while_queued_leaves_no_claim(run_dir):
    async with Suite(run_dir) as suite:
        suite.ledger.grant.clear()
        call = suite.load("a")
        queued = await until_event(call, "queued")
        assert queued.queued.position == 1
        call.cancel()
        await suite.nothing_left()
        assert suite.ledger.released == []  # never activated, so nothing is owed


async def test_cancelled_while_activating_releases_what_may_have_been_activated(run_dir):
    async with Suite(run_dir) as suite:
        suite.ledger.activate_gate.clear()
        call = suite.load("a")
        await until_event(call, "planned")
        await eventually(lambda: suite.ledger.committed == CLAIM_BYTES)
        call.cancel()
        suite.ledger.activate_gate.set()
        await suite.nothing_left()


@pytest.mark.parametrize(
    "behaviour", [{"never_ready": True}, {"hang_in_load": True}, {"never_ready": True, "ignore_term": True}]
)
async def test_cancelled_while_starting_leaves_neither_process_nor_lease(run_dir, behaviour):
    async with Suite(run_dir, behaviour, stop_grace_s=0.2) as suite:
        call = suite.load("a")
        await until_event(call, "starting")
        await eventually(lambda: len(suite.engine_pids) == 2)
        call.cancel()
        await suite.nothing_left()
        assert suite.ledger.released == ["LOAD_CANCELLED"]


async def test_a_model_that_wont_run_disturbs_nobody(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all("a")
        failure = await failure_of(suite.load("huge"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_WONT_RUN")
        assert "900 GiB" in failure.message
        assert (await suite.get()).state == engine_pb.ENGINE_STATE_READY
        assert len(suite.ledger.admits) == 1


@pytest.mark.parametrize(("name", "reason"), [("c", "CATALOG_MODEL_NOT_ON_DISK"), ("huge", "MODEL_WONT_RUN")])
async def test_a_catalogue_model_is_loaded_only_when_its_files_are_here(run_dir, name, reason):
    async with Suite(run_dir) as suite:
        wish = engine_pb.LoadModelRequest(model=weights_pb2.ModelRef(catalog_id=name))
        failure = await failure_of(suite.engine.LoadModel(wish))
        assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
        assert ("weighbridge pull c" in failure.message) == (name == "c")
        assert suite.ledger.admits == []


async def test_refusals_of_fit_and_of_the_runtime_reach_the_caller(run_dir):
    async with Suite(run_dir) as suite:
        failure = await failure_of(suite.load("missing"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        failure = await failure_of(suite.load("refused"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_WEIGHTS")
        await suite.nothing_left()
        assert suite.ledger.released == ["LOAD_FAILED"]
        assert (await suite.get()).last_failure.reason == "MALFORMED_WEIGHTS"
        failure = await failure_of(suite.engine.LoadModel(engine_pb.LoadModelRequest()))
        assert failure.code == grpc.StatusCode.INVALID_ARGUMENT
        assert failure.field_violations[0][0] == "model"


async def test_an_engine_that_ends_at_its_start_is_explained_and_then_left_alone(run_dir):
    async with Suite(run_dir, {"exit_at_start": 69}) as suite:
        for _ in range(3):
            failure = await failure_of(suite.load("a"))
            assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_START_FAILED")
            assert failure.metadata["exit_code"] == "69"
            assert "cannot be imported" in failure.message
        await suite.nothing_left()
        failure = await failure_of(suite.load("a"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "RESTART_BUDGET_EXHAUSTED")
        assert 0 < failure.retry_after_s <= 60
        assert len(suite.ledger.admits) == 3


async def test_a_ledger_that_falls_silent_while_a_model_loads_is_not_counted_against_the_engine(run_dir):
    suite = Suite(run_dir, ledger_patience_s=0.1)
    activate = suite.ledger.ActivateLease

    async def silent_about_processes(request, context):
        if request.engine_processes:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "")
        return await activate(request, context)

    suite.ledger.ActivateLease = silent_about_processes
    async with suite:
        for _ in range(4):
            assert (await failure_of(suite.load("a"))).reason == "LEDGER_UNREACHABLE"


async def test_killed_in_load_fails_the_load(run_dir):
    async with Suite(run_dir, {"die_in_load": 9}) as suite:
        failure = await failure_of(suite.load("a"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_START_FAILED")
        assert failure.metadata["signal"] == "SIGKILL"
        await suite.nothing_left()


async def test_not_ready_in_time(run_dir):
    async with Suite(run_dir, {"never_ready": True}, start_timeout_s=0.3) as suite:
        failure = await failure_of(suite.load("a"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "ENGINE_START_TIMED_OUT")
        await suite.nothing_left()


async def test_unload_stops_a_load_in_progress(run_dir):
    async with Suite(run_dir, {"hang_in_load": True}) as suite:
        call = suite.load("a")
        await until_event(call, "starting")
        await eventually(lambda: len(suite.engine_pids) == 2)
        await suite.unload()
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "LOAD_SUPERSEDED")
        await suite.nothing_left()


async def test_fit_and_ledger_that_do_not_answer_are_named(run_dir):
    async with Suite(run_dir, ledger_patience_s=0.1) as suite:
        await suite.stop_ledger()
        failure = await failure_of(suite.load("a"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "LEDGER_UNREACHABLE")
        await suite._fit_server.stop(0)
        failure = await failure_of(suite.load("a"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "FIT_UNREACHABLE")


async def test_options_of_another_engine_are_refused(run_dir):
    async with Suite(run_dir) as suite:
        request = engine_pb.LoadModelRequest()
        request.model.path = "a"
        request.options.sd.mmap = True
        with pytest.raises(grpc.RpcError) as caught:
            async for _ in suite.engine.LoadModel(request):
                pass
        assert RpcFailure.from_rpc_error(caught.value).reason == "INVALID_OPTION"


async def test_a_deadline_that_passes_is_a_cancellation(run_dir):
    async with Suite(run_dir, {"hang_in_load": True}) as suite:
        request = engine_pb.LoadModelRequest()
        request.model.path = "a"
        failure = await failure_of(suite.engine.LoadModel(request, timeout=0.8))
        assert failure.code == grpc.StatusCode.DEADLINE_EXCEEDED
        await suite.nothing_left()


async def test_cancelled_at_any_moment_a_load_leaves_nothing_and_the_next_one_works(run_dir):
    rng = random.Random(20261130)
    async with Suite(run_dir) as suite:
        for _ in range(12):
            call = suite.chat("endless") if rng.random() < 0.5 else suite.load("a")
            reading = asyncio.ensure_future(failure_of(call))
            await asyncio.sleep(rng.uniform(0, 0.9))
            call.cancel()
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.exception()
            if rng.random() < 0.5:
                await suite.unload(force=True)
                await suite.nothing_left()
        assert kinds(await suite.chat_all())[-1] == "finished"
        await suite.unload()
        await suite.nothing_left()


async def test_a_ledger_that_stops_and_comes_back_does_not_fail_a_load(run_dir):
    async with Suite(run_dir) as suite:
        suite.ledger.stopping = True
        loading = asyncio.create_task(suite.load_all())
        await eventually(lambda: len(suite.ledger.admits) >= 2)
        suite.ledger.stopping = False
        assert kinds(await loading)[-1] == "ready"
        assert len({admit.request_id for admit in suite.ledger.admits}) == 1  # its place in the queue is kept


async def test_patience_with_a_silent_ledger_begins_when_it_falls_silent(run_dir):
    time_s = ManualClock()
    async with Suite(run_dir, clock=time_s.clock()) as suite:
        suite.ledger.grant.clear()
        call = suite.load()
        await until_event(call, "queued")
        time_s.advance(600)  # a long wait without news is no silence
        await suite.restart_ledger()
        await eventually(lambda: len(suite.ledger.admits) == 2)
        suite.ledger.grant.set()
        assert (await until_event(call, "ready")).ready.engine.HasField("model")


async def test_a_run_folder_without_room_for_what_a_launch_prepares_is_named_and_nothing_is_left(run_dir, monkeypatch):
    async with Suite(run_dir) as suite:

        def launch(plan, workspace):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(suite.kind, "launch", launch)
        failure = await failure_of(suite.load())
        assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_START_FAILED")
        assert "run folder" in failure.message and "No space left" in failure.message
        await suite.nothing_left()


async def test_a_run_folder_that_cannot_be_used_is_named_and_nothing_is_left(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all()  # by now the host is connected to ledger and fit, whose sockets go with the folder
        await suite.unload()
        away = run_dir.with_name(run_dir.name + "-away")
        run_dir.rename(away)
        try:
            failure = await failure_of(suite.load())
        finally:
            away.rename(run_dir)
        assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_START_FAILED")
        assert "run folder" in failure.message
        await suite.nothing_left()
        assert kinds(await suite.load_all())[-1] == "ready"

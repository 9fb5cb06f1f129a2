"""The lease while it is held: renewed, attached again, vacated, outgrown, idle; and the service's end."""

import asyncio
import time

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from host_fakes import CLAIM_BYTES, ManualClock, Suite, eventually, failure_of, kill, kinds, until_event
from weighbridge_engines.host import residency
from weighbridge_engines.host.footprint import FootprintVerdict, judge
from weighbridge_proto.engines.v1 import chat_service_pb2
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.ledger.v1 import lease_pb2


async def test_a_ledger_that_restarts_is_attached_to_and_the_answer_goes_on(run_dir):
    async with Suite(run_dir) as suite:
        call = suite.chat("endless")
        await until_event(call, "delta")
        [lease] = suite.ledger.active
        old_secret = suite.ledger.secrets[lease.lease_id]
        await suite.stop_ledger()
        await suite.restart_ledger()
        await eventually(lambda: suite.ledger.streams and suite.ledger.secrets[lease.lease_id] != old_secret)
        assert not call.done()
        call.cancel()
        await eventually(lambda: lease.uses == 0)  # told with the new secret
        assert kinds(await suite.chat_all())[-1] == "finished"
        await suite.unload()
        await suite.nothing_left()
        assert len(suite.ledger.admits) == 1


async def test_a_use_ended_while_the_ledger_is_away_is_told_later(run_dir):
    async with Suite(run_dir) as suite:
        call = suite.chat("endless")
        await until_event(call, "delta")
        [lease] = suite.ledger.active
        await suite.stop_ledger()
        call.cancel()
        await eventually(lambda: not suite.host.current.use.stakes)
        await suite.restart_ledger()
        await eventually(lambda: lease.uses == 0)


async def test_a_new_use_needs_the_ledger(run_dir):
    async with Suite(run_dir, ledger_patience_s=0.2) as suite:
        await suite.load_all()
        await suite.stop_ledger()
        failure = await failure_of(suite.chat())
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "LEDGER_UNREACHABLE")
        await suite.restart_ledger()
        assert kinds(await suite.chat_all())[-1] == "finished"


async def test_a_use_that_was_given_up_while_the_ledger_counted_it_is_ended(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all()
        [lease] = suite.ledger.active
        suite.ledger.use_gate.clear()  # it counts, and its answer does not arrive
        call = suite.chat()
        reading = asyncio.ensure_future(failure_of(call))
        await eventually(lambda: lease.uses == 1)
        call.cancel()
        await asyncio.wait({reading})
        reading.cancel()
        await eventually(lambda: lease.uses == 0)


async def test_a_chat_whose_model_ended_while_the_ledger_was_silent_loads_it_again(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all()
        residency, hold = suite.host.current, suite.host.current.hold
        await suite.stop_ledger()
        chat = asyncio.create_task(suite.chat_all())
        await eventually(lambda: residency.use.stakes)
        kill(residency.child.engine.pid)
        await eventually(lambda: suite.host.current is None)
        suite.ledger.leases[hold.lease_id].state = lease_pb2.LEASE_STATE_RELEASED  # it saw the process end
        await suite.restart_ledger()
        assert kinds(await chat)[-1] == "finished"
        assert len(suite.ledger.admits) == 2


async def test_a_footprint_that_cannot_be_measured_for_a_moment_is_measured_again(run_dir):
    fails, asked = False, 0

    def held_bytes():
        nonlocal asked
        asked += 1
        if fails:
            raise OSError(24, "Too many open files")
        return CLAIM_BYTES // 2

    async with Suite(run_dir, held_bytes=held_bytes) as suite:
        await suite.load_all()
        fails, seen = True, asked
        await eventually(lambda: asked > seen + 1)
        fails, seen = False, asked
        await eventually(lambda: asked > seen + 1)
        assert suite.host.current.footprint.now_bytes == CLAIM_BYTES // 2


async def test_a_lease_that_was_given_away_ends_the_engine_at_once(run_dir):
    async with Suite(run_dir) as suite:
        call = suite.chat("endless")
        await until_event(call, "delta")
        await suite.stop_ledger()
        suite.ledger.forget_all = True
        await suite.restart_ledger()
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "LEASE_LOST")
        await eventually(lambda: not suite.engine_pids)
        suite.ledger.forget_all = False
        assert kinds(await suite.chat_all())[-1] == "finished"  # by a new claim
        assert len(suite.ledger.admits) == 2


async def test_vacating_finishes_what_is_in_flight_and_the_next_chat_claims_anew(run_dir):
    async with Suite(run_dir) as suite:
        call = suite.chat("endless")
        await until_event(call, "delta")
        [lease] = suite.ledger.active
        suite.ledger.vacate(lease.lease_id)
        await eventually(lambda: suite.host.state == engine_pb.ENGINE_STATE_UNLOADING)
        assert not call.done()
        later = asyncio.create_task(suite.chat_all())
        call.cancel()
        assert kinds(await later)[-1] == "finished"
        assert suite.ledger.released == ["VACATED"]
        assert len(suite.ledger.admits) == 2


async def test_a_use_refused_because_the_lease_vacates_is_served_by_a_new_claim(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all()
        [lease] = suite.ledger.active
        suite.ledger.refuse_use = lease.lease_id  # the request to vacate itself is still under way
        events = await suite.chat_all()
        assert kinds(events)[-1] == "finished"
        assert suite.ledger.released == ["VACATED"]
        assert len(suite.ledger.admits) == 2


async def test_a_call_that_names_no_model_is_told_that_the_loaded_one_is_ending(run_dir):
    async with Suite(run_dir) as suite:
        call = suite.chat("endless")
        await until_event(call, "delta")
        suite.ledger.vacate(suite.ledger.active[0].lease_id)
        await eventually(lambda: suite.host.state == engine_pb.ENGINE_STATE_UNLOADING)
        failure = await failure_of(suite.chat("hello", None))
        assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_MODEL_LOADED")
        assert "ending" in failure.message
        call.cancel()


async def test_the_end_of_loading_is_told_at_once(run_dir):
    # Minimum residency begins with it, and where loads are made one at a time the next one waits for it.
    time_s = ManualClock()  # stands still: no renewal is due
    async with Suite(run_dir, clock=time_s.clock(), idle_timeout_s=0) as suite:
        suite.ledger.term_s = 1e6
        await suite.load_all()
        [lease] = suite.ledger.active
        await eventually(lambda: lease.lease_id in suite.ledger.load_complete)


async def test_news_that_come_while_a_renewal_is_written_are_told_at_once(run_dir):
    time_s = ManualClock()
    async with Suite(run_dir, clock=time_s.clock(), idle_timeout_s=0) as suite:
        suite.ledger.term_s = 1e6
        await suite.load_all()
        hold, footprint, told = suite.host.current.hold, suite.host.current.footprint, 0

        def observe():
            nonlocal told
            told += 1
            if told == 1:
                hold.renew_soon()
            return footprint.message()

        await eventually(lambda: suite.ledger.load_complete)
        hold._observe = observe
        hold.renew_soon()
        await eventually(lambda: told == 2)


async def test_an_engine_within_its_grown_grant_goes_on(run_dir):
    held = 500_000_000
    async with Suite(run_dir, held_bytes=lambda: held) as suite:
        await suite.load_all()
        held = round(1.05 * CLAIM_BYTES)
        await eventually(lambda: suite.ledger.active[0].charge.host_bytes == held)
        assert kinds(await suite.chat_all())[-1] == "finished"
        assert (await suite.get()).model.observed.host_peak_bytes == held


async def test_refused_growth_is_lived_with_up_to_a_quarter_of_the_grant(run_dir):
    held = 500_000_000
    async with Suite(run_dir, held_bytes=lambda: held) as suite:
        suite.ledger.refuse_growth = True
        call = suite.chat("endless")
        await until_event(call, "delta")
        held = round(1.05 * CLAIM_BYTES)
        await eventually(lambda: suite.ledger.growths_refused >= 2)
        assert not call.done()
        assert suite.ledger.attached == 0  # the lease is not in doubt
        held = round(1.25 * CLAIM_BYTES)
        failure = await failure_of(call)
        assert failure.reason == "OUT_OF_GRANT"
        held = 0
        await suite.nothing_left()
        assert suite.ledger.released == ["OUT_OF_GRANT"]


def test_what_a_footprint_means():
    # Design, engines: at 110 % of the grant no new work, at 125 % it is killed.
    assert judge(109, 100) is FootprintVerdict.WITHIN
    assert judge(110, 100) is FootprintVerdict.NO_NEW_WORK
    assert judge(124, 100) is FootprintVerdict.NO_NEW_WORK
    assert judge(125, 100) is FootprintVerdict.KILL
    assert judge(10**12, 0) is FootprintVerdict.WITHIN


def test_an_engine_within_its_own_price_is_not_ended() -> None:
    """A tiny model's claim is 140 MiB and its price ends at 191: 184 were seen once, and are 131 % of the claim."""
    assert judge(184, 140) is FootprintVerdict.KILL
    assert judge(184, 140, 191) is FootprintVerdict.WITHIN
    assert judge(191, 140, 191) is FootprintVerdict.WITHIN
    assert judge(192, 140, 191) is FootprintVerdict.KILL
    assert judge(160, 140, 141) is FootprintVerdict.NO_NEW_WORK


async def test_the_watchdog_refuses_new_work_and_then_kills(run_dir):
    held = 500_000_000
    async with Suite(run_dir, held_bytes=lambda: held) as suite:
        call = suite.chat("endless")
        await until_event(call, "delta")
        await suite.stop_ledger()  # nobody can grant more
        held = round(1.12 * CLAIM_BYTES)
        await eventually(lambda: suite.host.current.over_grant)
        failure = await failure_of(suite.chat())
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_GRANT")
        assert not call.done()
        held = round(1.3 * CLAIM_BYTES)
        failure = await failure_of(call)
        assert failure.reason == "OUT_OF_GRANT"
        await eventually(lambda: not suite.engine_pids)
        await suite.restart_ledger()
        await suite.nothing_left()  # the release was owed, and came


async def test_an_idle_model_is_unloaded_when_its_time_has_come(run_dir):
    time_s = ManualClock()
    async with Suite(run_dir, clock=time_s.clock(), idle_timeout_s=60) as suite:
        suite.ledger.term_s = 1e6
        await suite.load_all()
        engine = await suite.get()
        assert engine.model.idle_unload_time.seconds - engine.model.ready_time.seconds == 60
        time_s.advance(40)
        await suite.chat_all()
        time_s.advance(40)
        await asyncio.sleep(0.05)
        assert (await suite.get()).state == engine_pb.ENGINE_STATE_READY  # used in between
        time_s.advance(21)
        await suite.nothing_left()
        assert suite.ledger.released == ["IDLE"]


async def test_a_busy_or_pinned_model_is_not_idle(run_dir):
    time_s = ManualClock()
    async with Suite(run_dir, clock=time_s.clock(), idle_timeout_s=60) as suite:
        suite.ledger.term_s = 1e6
        call = suite.chat("endless")
        await until_event(call, "delta")
        time_s.advance(1000)
        await asyncio.sleep(0.05)
        assert (await suite.get()).state == engine_pb.ENGINE_STATE_READY
        call.cancel()
        await eventually(lambda: not suite.host.current.use.stakes)
        await suite.load_all("a", pinned=True)
        await suite.load_all("a", idle_timeout=Duration(seconds=1))  # another caller, who does not know of the pin
        time_s.advance(1000)
        await asyncio.sleep(0.05)
        engine = await suite.get()
        assert engine.state == engine_pb.ENGINE_STATE_READY
        assert not engine.model.HasField("idle_unload_time")


async def test_the_service_stops_while_an_answer_streams(run_dir):
    async with Suite(run_dir) as suite:
        call = suite.chat("endless")
        await until_event(call, "delta")
        watching = suite.engine.Watch(engine_pb.WatchRequest())
        await watching.read()
        started_s = time.monotonic()
        await suite.server.stop(0.3)
        assert time.monotonic() - started_s < 5
        assert (await failure_of(call)).code == grpc.StatusCode.UNAVAILABLE
        await suite.nothing_left()
        assert suite.ledger.released == ["SERVICE_STOPPED"]
        assert not list(run_dir.glob("engine-mlx.sock"))
        assert not list(run_dir.glob("*.processes.json"))


async def test_the_service_stops_while_it_loads(run_dir):
    async with Suite(run_dir, {"hang_in_load": True}) as suite:
        call = suite.load()
        await until_event(call, "starting")
        await eventually(lambda: len(suite.engine_pids) == 2)
        stopping = asyncio.create_task(suite.server.stop(3))
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_STOPPING")
        await stopping
        await suite.nothing_left()


async def test_a_suspect_holder_attaches_again_and_goes_on(run_dir):
    async with Suite(run_dir) as suite:
        suite.ledger.term_s = 0.3
        call = suite.chat("endless")
        await until_event(call, "delta")
        [lease] = suite.ledger.active
        lease.suspect = True
        await eventually(lambda: suite.ledger.attached == 1)
        assert not call.done()
        assert kinds(await suite.load_all("a")) == ["ready"]


@pytest.mark.parametrize(("setting", "ledger_sees"), [("auto", False), ("on", True)])
async def test_a_holder_that_the_ledger_cannot_see_fences_itself(run_dir, setting, ledger_sees):
    # It would be charged for nothing a while after its term, and whoever is granted its bytes then would share them.
    async with Suite(run_dir, fence_when_silent=setting) as suite:
        suite.ledger.term_s, suite.ledger.sees_processes = 0.3, ledger_sees
        call = suite.chat("endless")
        await until_event(call, "delta")
        await suite.stop_ledger()
        assert (await failure_of(call)).reason == "LEASE_LOST"
        await eventually(lambda: not suite.engine_pids)
        await suite.restart_ledger()


async def test_an_engine_whose_lease_is_lost_is_killed_before_its_bytes_are_given_away(run_dir, monkeypatch):
    # However patient it is with engines that end for other reasons: 20 s after the term somebody else loads there.
    monkeypatch.setattr(residency, "LOST_GRACE_S", 0.1)
    async with Suite(run_dir, {"ignore_term": True}, stop_grace_s=120) as suite:
        await suite.load_all()
        suite.ledger.forget_all = True
        await suite.restart_ledger()
        await eventually(lambda: not suite.engine_pids)
        suite.ledger.forget_all = False


async def test_an_engine_whose_lease_is_lost_while_it_is_being_stopped_is_killed_as_soon(run_dir, monkeypatch):
    # ds4 has 30 s to write its conversation to disk, and its bytes may be given away before they are over.
    monkeypatch.setattr(residency, "LOST_GRACE_S", 0.1)
    async with Suite(run_dir, {"ignore_term": True}, stop_grace_s=120) as suite:
        suite.ledger.term_s = 0.3
        await suite.load_all()
        asked, stop = asyncio.Event(), suite.host.current.child.stop

        async def stop_and_tell(grace_s):
            asked.set()
            return await stop(grace_s)

        suite.host.current.child.stop = stop_and_tell
        unloading = asyncio.ensure_future(suite.unload())
        await asked.wait()
        suite.ledger.forget_all = True
        await suite.restart_ledger()
        await eventually(lambda: not suite.engine_pids)
        await unloading
        suite.ledger.forget_all = False


async def test_a_holder_that_the_ledger_sees_goes_on_without_it(run_dir):
    time_s = ManualClock()
    async with Suite(run_dir, clock=time_s.clock(), idle_timeout_s=0) as suite:
        suite.ledger.term_s = 30
        call = suite.chat("endless")
        await until_event(call, "delta")
        hold, tries = suite.host.current.hold, 0
        attach_once = hold._attach_once

        async def counted():
            nonlocal tries
            tries += 1
            await attach_once()

        hold._attach_once = counted
        await suite.stop_ledger()
        time_s.advance(1000)  # long after its term
        await eventually(lambda: tries == 2)  # the first one failed, and was thought about
        assert not call.done()
        await suite.restart_ledger()
        await eventually(lambda: suite.ledger.attached == 1)
        assert not call.done()
        call.cancel()


async def test_a_chat_is_content_with_whatever_shape_is_loaded(run_dir):
    async with Suite(run_dir) as suite:
        await suite.load_all("a")
        request = chat_service_pb2.ChatRequest(
            messages=[
                chat_service_pb2.ChatMessage(
                    role=chat_service_pb2.ROLE_USER, parts=[chat_service_pb2.ContentPart(text="hello")]
                )
            ]
        )
        request.model.path = "also-a"
        request.workload.chat.context_tokens = 9999
        events = [event async for event in suite.chats.Chat(request)]
        assert kinds(events)[-1] == "finished"
        assert len(suite.ledger.admits) == 1
        load = engine_pb.LoadModelRequest(model=request.model, workload=request.workload)
        assert kinds([event async for event in suite.engine.LoadModel(load)])[-1] == "ready"
        assert len(suite.ledger.admits) == 2  # LoadModel insists on the shape


async def test_a_lease_outgrown_by_the_ledgers_own_count_is_lost(run_dir):
    # What the ledger sees may hold more than the host's watchdog looks at (cards): its word alone is enough.
    async with Suite(run_dir) as suite:
        await suite.load_all()
        suite.host.current.hold._growth_refused(
            RpcFailure(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "OUT_OF_GRANT",
                "It holds more.",
                {"observed_bytes": "125", "granted_bytes": "100"},
            )
        )
        await suite.nothing_left()
        assert suite.ledger.released == ["OUT_OF_GRANT"]


async def test_a_holder_that_missed_several_secrets_is_known_by_its_process(run_dir):
    # A ledger that was frozen carries out every attempt to attach that was given up meanwhile, each with a new secret.
    async with Suite(run_dir) as suite:
        await suite.load_all()
        [lease] = suite.ledger.active
        suite.ledger.secrets[lease.lease_id] = "a secret that nobody heard"
        assert kinds(await suite.chat_all())[-1] == "finished"
        assert suite.ledger.attached == 1
        assert len(suite.ledger.admits) == 1


async def test_memory_that_the_last_answer_freed_does_not_refuse_the_next(run_dir):
    held = 500_000_000
    async with Suite(run_dir, held_bytes=lambda: held, footprint_period_s=60) as suite:
        suite.ledger.refuse_growth = True
        await suite.load_all()
        held = round(1.12 * CLAIM_BYTES)
        await suite.host.current.footprint.measure()
        assert suite.host.current.over_grant
        held = 500_000_000  # freed, and the next measurement is a minute away
        assert kinds(await suite.chat_all())[-1] == "finished"

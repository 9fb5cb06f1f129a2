"""Holders are asked to make room, over the wire: what the claim hears, what the holder hears, what others see."""

import grpc
from weighbridge_ledger.service import admit
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

from services.ledger.tests.holders import LONG_TERM, RESIDENCY_S, loaded, next_of, resident, story

GIB = 2**30
Code = grpc.StatusCode


# -- what the claim hears ------------------------------------------------------------------------------------------


async def test_a_claim_hears_that_it_waits_then_who_was_asked_then_that_it_is_granted(ledger) -> None:
    holder = await resident(ledger, 20, 1)
    call = ledger.admit(10, 2)
    assert (await call.read()).queued.position == 1
    asked = (await call.read()).reclaiming
    assert list(asked.victim_lease_ids) == [holder.lease_id]
    # 31 s of the test's clock have passed; a holder has 30 s to vacate.
    assert asked.deadline.seconds == 1_000_000 + RESIDENCY_S + 1 + 30
    await holder.release()
    granted = await next_of(call, "granted")
    assert granted.lease.lease_id == asked.lease_id
    assert granted.lease.charge.host_bytes == 10 * GIB
    assert ledger.committed == 10


async def test_who_was_asked_is_told_at_once_however_seldom_positions_are(ledger, monkeypatch) -> None:
    monkeypatch.setattr(admit, "UPDATE_PERIOD_S", 3600.0)  # what keeps its distance is not told while this test lasts
    holder = await loaded(ledger, 20, 1)
    call = ledger.admit(10, 2)
    assert (await call.read()).HasField("queued")
    await ledger.pass_time(RESIDENCY_S + 1)
    assert list((await call.read()).reclaiming.victim_lease_ids) == [holder.lease_id]
    await holder.release()
    assert (await call.read()).HasField("granted")


async def test_each_set_of_victims_is_told_once(ledger) -> None:
    await resident(ledger, 20, 1, 11)
    call = ledger.admit(10, 2)
    assert await story(call, "reclaiming") == ["queued", "reclaiming"]
    # Overdue: what it waits for is another thing now, but nobody new was asked.
    await ledger.pass_time(30)
    codes: list[str] = []
    while "HOLDER_DID_NOT_VACATE" not in codes:
        response = await call.read()
        assert response.HasField("queued")
        codes = [reason.code for reason in response.queued.reasons]
    call.cancel()


async def test_a_retry_of_the_request_hears_who_was_asked(ledger) -> None:
    holder = await resident(ledger, 20, 1)
    first = ledger.admit(10, 2, "r")
    await next_of(first, "reclaiming")
    again = ledger.admit(10, 2, "r")
    assert list((await next_of(again, "reclaiming")).victim_lease_ids) == [holder.lease_id]
    assert (await ledger.failure(first.read())).reason == "REQUEST_TAKEN_OVER"
    await holder.release()
    assert await story(again, "granted") in (["granted"], ["queued", "granted"])


async def test_a_claim_that_is_protected_asks_those_that_are_free_now_and_the_rest_as_they_fall_idle(ledger) -> None:
    idle, busy = await loaded(ledger, 12, 1), await loaded(ledger, 12, 2)
    use = await busy.begin_use()
    call = ledger.admit(24, 3)
    await call.read()
    await ledger.pass_time(61)  # waits for longer than 60 s: protected
    first = await next_of(call, "reclaiming")
    assert list(first.victim_lease_ids) == [idle.lease_id]
    await ledger.stub.EndUse(pb.EndUseRequest(**busy.credential, use_id=use))
    second = await next_of(call, "reclaiming")
    assert list(second.victim_lease_ids) == [idle.lease_id, busy.lease_id]
    for one in (idle, busy):
        await one.release()
    assert (await next_of(call, "granted")).lease.charge.host_bytes == 24 * GIB


# -- what the holder hears -----------------------------------------------------------------------------------------


async def test_a_holder_that_is_asked_hears_for_whom_and_everybody_sees_it(ledger) -> None:
    holder = await resident(ledger, 20, 1, 11, model="old")
    call = ledger.admit(10, 2, purpose={"model_name": "new"})
    waiting = await next_of(call, "reclaiming")
    vacate = (await holder.heard()).vacate
    assert vacate.deadline.seconds == waiting.deadline.seconds
    assert vacate.reason.reason == "LEASE_VACATING"
    assert vacate.reason.message.startswith("new of holder-2 (10.00 GiB) waits for its memory.")
    assert vacate.reason.metadata["waiting_lease_id"] == waiting.lease_id
    seen = await holder.seen()
    assert seen.state == lease_pb2.LEASE_STATE_VACATING
    assert "new of holder-2" in seen.end_reason.message
    assert seen.end_reason.metadata["waiting_lease_id"] == waiting.lease_id
    call.cancel()


async def test_when_the_claim_is_gone_it_is_said_that_it_waited(ledger) -> None:
    """Vacating is one-way: the holder goes although nobody wants its memory any more."""
    holder = await resident(ledger, 20, 1, 11)
    watch = ledger.stub.Watch(pb.WatchRequest())
    await watch.read()
    call = ledger.admit(10, 2, purpose={"model_name": "new"})
    await next_of(call, "reclaiming")
    call.cancel()
    while (await watch.read()).kind != pb.CHANGE_KIND_RELEASED:
        pass
    seen = await holder.seen()
    assert seen.state == lease_pb2.LEASE_STATE_VACATING
    assert "new of holder-2 (10.00 GiB) waited for its memory." in seen.end_reason.message
    watch.cancel()


async def test_a_holder_that_released_is_not_told_that_somebody_waits(ledger) -> None:
    holder = await resident(ledger, 20, 1, 11)
    await holder.release()
    vacate = (await holder.heard()).vacate
    assert "waits" not in vacate.reason.message
    seen = await holder.seen()
    assert seen.end_reason.message.startswith("It was released.")
    assert "waiting_lease_id" not in seen.end_reason.metadata


async def test_a_holder_that_was_asked_takes_no_new_use(ledger) -> None:
    holder = await resident(ledger, 20, 1)
    call = ledger.admit(10, 2)
    await next_of(call, "reclaiming")
    failure = await ledger.failure(ledger.stub.BeginUse(pb.BeginUseRequest(**holder.credential)))
    assert (failure.code, failure.reason) == (Code.FAILED_PRECONDITION, "LEASE_VACATING")
    call.cancel()


async def test_a_busy_holder_is_not_asked(ledger) -> None:
    holder = await resident(ledger, 20, 1)
    await holder.begin_use()
    call = ledger.admit(10, 2)
    assert (await call.read()).HasField("queued")
    await ledger.pass_time(10)
    assert (await holder.seen()).state == lease_pb2.LEASE_STATE_ACTIVE
    call.cancel()


async def test_load_complete_is_kept_shown_and_begins_the_residency(ledger) -> None:
    lease_id, secret = await ledger.active(20, 1, term=LONG_TERM)
    await ledger.pass_time(40)
    stream = ledger.stub.KeepAlive()
    await stream.write(pb.KeepAliveRequest(lease_id=lease_id, secret=secret, load_complete=True))
    await stream.read()
    (lease,) = await ledger.leases()
    assert lease.load_complete_time.seconds == 1_000_040
    call = ledger.admit(10, 2)
    assert (await call.read()).HasField("queued")
    # Twice its load time: 80 s.
    await ledger.pass_time(79)
    assert (await ledger.leases())[0].state == lease_pb2.LEASE_STATE_ACTIVE
    await ledger.pass_time(1)
    assert (await ledger.leases())[0].state == lease_pb2.LEASE_STATE_VACATING
    call.cancel()
    stream.cancel()


async def test_after_a_restart_nobody_claims_to_know_why_a_lease_is_vacating(new_ledger, tmp_path) -> None:
    """The claim that waited is gone with the ledger that it waited at."""
    ledger = new_ledger(tmp_path)
    async with ledger.serve():
        holder = await resident(ledger, 20, 1, 11)
        call = ledger.admit(10, 2)
        await next_of(call, "reclaiming")
    async with ledger.serve():
        (lease,) = await ledger.leases()
        assert (lease.lease_id, lease.state) == (holder.lease_id, lease_pb2.LEASE_STATE_VACATING)
        assert lease.end_reason.message.startswith("It was released, or asked to make room.")


# -- looking -------------------------------------------------------------------------------------------------------


async def test_a_preview_says_who_would_be_asked(ledger) -> None:
    holder = await resident(ledger, 20, 1)
    preview = (await ledger.admit(10, 2, validate_only=True).read()).preview
    assert preview.outcome == lease_pb2.OUTCOME_AFTER_EVICTION
    assert preview.charge.host_bytes == 10 * GIB
    assert list(preview.would_evict_lease_ids) == [holder.lease_id]
    # Nobody was asked.
    assert (await holder.seen()).state == lease_pb2.LEASE_STATE_ACTIVE
    await holder.begin_use()
    busy = (await ledger.admit(10, 2, validate_only=True).read()).preview
    assert (busy.outcome, list(busy.would_evict_lease_ids)) == (lease_pb2.OUTCOME_MUST_WAIT, [])


async def test_watchers_are_told_what_kind_each_change_is(ledger) -> None:
    watch = ledger.stub.Watch(pb.WatchRequest())
    first = await watch.read()
    assert first.kind == pb.CHANGE_KIND_SNAPSHOT
    holder = await resident(ledger, 20, 1, 11)
    call = ledger.admit(10, 2)
    asked = await next_of(call, "reclaiming")
    await ledger.pass_time(30)
    ledger.dead.add(ledger.servicer._keeper.book.view(holder.lease_id).lease.engines[0])
    await holder.release()
    await next_of(call, "granted")
    call.cancel()
    await ledger.stub.SetLimit(pb.SetLimitRequest(limit_bytes=20 * GIB))
    told = [await watch.read() for _ in range(11)]
    lease_ids = [one.lease.lease_id for one in told]
    assert [(pb.ChangeKind.Name(one.kind).removeprefix("CHANGE_KIND_")) for one in told] == [
        "GRANTED",
        "ACTIVATED",
        "LOADED",
        "QUEUED",
        "VACATING",
        "RECLAIMING",
        "OVERDUE",
        "RELEASED",
        "GRANTED",
        "RELEASED",
        "CEILINGS",
    ]
    assert [one.revision for one in told] == list(range(first.revision + 1, first.revision + 12))
    reclaiming, vacating = told[5].lease, told[4].lease
    assert lease_ids[5] == asked.lease_id
    assert reclaiming.state == lease_pb2.LEASE_STATE_QUEUED
    assert vacating.end_reason.metadata["waiting_lease_id"] == asked.lease_id
    watch.cancel()


async def test_a_change_that_is_told_late_does_not_say_what_is_no_longer_known(ledger) -> None:
    """Who resumes after a lease has ended is told that it was vacating, in words that are true of it."""
    holder = await resident(ledger, 20, 1, 11)
    first = await ledger.stub.Watch(pb.WatchRequest()).read()
    call = ledger.admit(10, 2)
    await next_of(call, "reclaiming")
    ledger.dead.add(ledger.servicer._keeper.book.view(holder.lease_id).lease.engines[0])
    await holder.release()
    await next_of(call, "granted")
    call.cancel()
    resumed = ledger.stub.Watch(pb.WatchRequest(epoch=first.epoch, revision=first.revision))
    while (change := await resumed.read()).kind != pb.CHANGE_KIND_VACATING:
        pass
    assert not change.lease.end_reason.message.startswith("It was released.")
    resumed.cancel()

"""Watch: numbered, resumable, bounded."""

import asyncio

import grpc
import pytest
from weighbridge_ledger.book import Event, EventKind
from weighbridge_ledger.service.watch import RING_EVENTS, WatchHub
from weighbridge_proto.errors import RequestError, RpcFailure
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb


async def test_a_watch_begins_with_a_snapshot_and_goes_on_with_every_change(ledger) -> None:
    lease_id, secret = await ledger.active(10)
    watch = ledger.stub.Watch(pb.WatchRequest())
    first = await watch.read()
    assert [lease.lease_id for lease in first.snapshot.leases] == [lease_id]
    assert first.snapshot.capacity.revision == first.revision == 2
    await ledger.release(lease_id, secret)
    await ledger.stub.SetLimit(pb.SetLimitRequest(limit_bytes=5 * 2**30))
    released, limited = await watch.read(), await watch.read()
    assert (released.revision, released.lease.state) == (3, lease_pb2.LEASE_STATE_RELEASED)
    assert (limited.revision, limited.capacity.total.limit_bytes) == (4, 5 * 2**30)
    watch.cancel()


async def test_a_watch_resumes_after_the_revision_it_saw(ledger) -> None:
    await ledger.active(10)
    first = await ledger.stub.Watch(pb.WatchRequest()).read()
    resumed = ledger.stub.Watch(pb.WatchRequest(epoch=first.epoch, revision=0))
    states = [(await resumed.read()).lease.state for _ in range(2)]
    assert states == [lease_pb2.LEASE_STATE_GRANTED, lease_pb2.LEASE_STATE_ACTIVE]
    resumed.cancel()


async def test_another_epoch_or_a_revision_to_come_cannot_be_resumed(ledger) -> None:
    await ledger.active(10)
    first = await ledger.stub.Watch(pb.WatchRequest()).read()
    for epoch, revision in (("other", 1), (first.epoch, 99)):
        failure = await ledger.failure(ledger.stub.Watch(pb.WatchRequest(epoch=epoch, revision=revision)).read())
        assert (failure.code, failure.reason) == (grpc.StatusCode.OUT_OF_RANGE, "REVISION_COMPACTED")
        assert failure.metadata["oldest_revision"] == "0"


def hub() -> WatchHub:
    return WatchHub("e", lambda event, revision: pb.WatchResponse(revision=revision), pb.WatchSnapshot, lambda: 0.0)


EVENT = Event(EventKind.CEILINGS_CHANGED, 0.0)


async def test_old_revisions_are_compacted() -> None:
    watched = hub()
    watched.on_events([EVENT] * (RING_EVENTS + 5))
    with pytest.raises(RequestError) as error:
        await anext(watched.watch("e", 4))
    assert error.value.failure.metadata["oldest_revision"] == "5"
    assert (await anext(watched.watch("e", 5))).revision == 6


async def test_a_watcher_that_does_not_keep_up_is_dropped_and_begins_anew() -> None:
    watched = hub()
    slow = watched.watch("", 0)
    assert (await anext(slow)).HasField("snapshot")
    watched.on_events([EVENT] * 3)
    assert (await anext(slow)).revision == 1
    # Exactly as far behind as the ring reaches: it still gets everything.
    watched.on_events([EVENT] * (RING_EVENTS - 2))
    assert (await anext(slow)).revision == 2
    watched.on_events([EVENT] * 2)
    with pytest.raises(RequestError) as error:
        await anext(slow)
    failure = error.value.failure
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "WATCHER_TOO_SLOW")
    assert failure.metadata["revision"] == "2"
    again = await anext(watched.watch("", 0))
    assert (again.HasField("snapshot"), again.revision) == (True, RING_EVENTS + 3)


async def test_watchers_share_one_message_for_each_change_however_many_and_slow_they_are() -> None:
    rendered: list[int] = []

    def render(event: Event, revision: int) -> pb.WatchResponse:
        rendered.append(revision)
        return pb.WatchResponse(revision=revision)

    watched = WatchHub("e", render, pb.WatchSnapshot, lambda: 0.0)
    slow = [watched.watch("", 0) for _ in range(50)]
    for watch in slow:
        await anext(watch)
    watched.on_events([EVENT] * 2 * RING_EVENTS)
    fast = watched.watch("e", 2 * RING_EVENTS - 1)
    assert (await anext(fast)).revision == 2 * RING_EVENTS
    assert rendered == list(range(1, 2 * RING_EVENTS + 1))
    # What is kept for 50 watchers that have read nothing is the ring.
    assert sum(change.message is not None for change in watched._ring) == len(watched._ring) == RING_EVENTS


async def test_changes_made_before_anybody_watched_are_rendered_once_for_all_who_resume() -> None:
    rendered: list[int] = []

    def render(event: Event, revision: int) -> pb.WatchResponse:
        rendered.append(revision)
        return pb.WatchResponse(revision=revision)

    watched = WatchHub("e", render, pb.WatchSnapshot, lambda: 0.0)
    watched.on_events([EVENT] * 3)
    assert rendered == []
    for _ in range(2):
        resumed = watched.watch("e", 1)
        assert [(await anext(resumed)).revision for _ in range(2)] == [2, 3]
    assert rendered == [2, 3]


async def test_a_caller_that_reads_nothing_is_dropped_over_a_real_channel(ledger) -> None:
    """The transport holds what fits its windows; beyond that the ledger neither waits nor remembers."""
    call = ledger.stub.Watch(pb.WatchRequest())
    first = await call.read()
    events = [Event(EventKind.CEILINGS_CHANGED, 0.0)] * RING_EVENTS
    hub = ledger.servicer._watch
    last = first
    with pytest.raises(grpc.aio.AioRpcError) as error:
        # Each round the ledger makes a whole ring of changes and the caller reads one of them.
        for _ in range(1000):
            hub.on_events(events)
            last = await call.read()
        pytest.fail("never dropped")
    failure = RpcFailure.from_rpc_error(error.value)
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "WATCHER_TOO_SLOW")
    assert int(failure.metadata["revision"]) >= last.revision
    assert len(hub._ring) == RING_EVENTS
    assert not hub._watchers


async def test_who_looks_sees_what_a_queued_claim_waits_for_and_a_change_does_not_tell_it(ledger) -> None:
    holder, _ = await ledger.active(20)
    watch = ledger.stub.Watch(pb.WatchRequest())
    await watch.read()
    waiting = [ledger.admit(10, 2), ledger.admit(10, 3)]
    for call in waiting:
        assert (await call.read()).HasField("queued")
    _, first, second = await ledger.leases()
    assert [first.queue_position, second.queue_position] == [1, 2]
    # 20 + 10 of 24 GiB: 6 are missing.
    assert [(reason.code, reason.missing_bytes) for reason in first.wait_reasons] == [("BYTES_HELD", 6 * 2**30)]
    assert list(first.wait_reasons[0].lease_ids) == [holder]
    assert not (await watch.read()).lease.wait_reasons
    snapshot = (await ledger.stub.Watch(pb.WatchRequest()).read()).snapshot
    assert [len(lease.wait_reasons) for lease in snapshot.leases] == [0, 1, 1]
    one = (await ledger.stub.GetLease(pb.GetLeaseRequest(lease_id=second.lease_id))).lease
    assert one.wait_reasons == second.wait_reasons
    for call in (*waiting, watch):
        call.cancel()


async def test_a_snapshot_is_what_was_told_while_decisions_are_being_written(ledger) -> None:
    """A is granted while its commit waits: a watch that begins then is not shown it, and is told of it afterwards."""
    standing, _ = await ledger.active(4)
    keeper = ledger.servicer._keeper
    ledger.store.gate.clear()
    a = ledger.admit(20, 2)
    while keeper.book.lease_count < 2:  # noqa: ASYNC110 # nothing tells that a verb has run and is not yet on disk
        await asyncio.sleep(0)
    snapshot = ledger.servicer._snapshot()
    assert [lease.lease_id for lease in snapshot.leases] == [standing]
    hub = ledger.servicer._watch
    watch = hub.watch("", 0)
    first = await anext(watch)
    assert [lease.lease_id for lease in first.snapshot.leases] == [standing]
    ledger.store.gate.set()
    granted = (await a.read()).granted.lease
    told = (await anext(watch)).lease
    assert (told.lease_id, told.state) == (granted.lease_id, lease_pb2.LEASE_STATE_GRANTED)
    await watch.aclose()
    a.cancel()

"""Watch: numbered, resumable, bounded."""

import asyncio

import grpc
import pytest
from weighbridge_ledger.book import Event, EventKind
from weighbridge_ledger.service.watch import RING_EVENTS, WATCHER_BEHIND, WatchHub
from weighbridge_proto.errors import RequestError
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


async def test_a_watcher_that_does_not_keep_up_is_dropped_and_can_resume() -> None:
    watched = hub()
    slow = watched.watch("", 0)
    assert (await anext(slow)).HasField("snapshot")
    reading = asyncio.ensure_future(anext(slow))
    await asyncio.sleep(0)
    watched.on_events([EVENT] * (WATCHER_BEHIND + 10))
    last = (await reading).revision
    with pytest.raises(RequestError) as error:
        while True:
            last = (await anext(slow)).revision
    assert error.value.failure.reason == "WATCHER_TOO_SLOW"
    assert (await anext(watched.watch("e", last))).revision == last + 1

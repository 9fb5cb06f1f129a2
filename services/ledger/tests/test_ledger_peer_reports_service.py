"""What was reported of other programs' servers, as tests over a real channel: cancelled calls, and what is left."""

import asyncio

import grpc
import pytest
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

GIB = 2**30


async def until(condition, what: str) -> None:
    """Wait for something that another task does; the bound is for a test that would hang."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never happened: {what}")


@pytest.mark.parametrize("queued", [True, False])
async def test_model_runner_1041_a_client_that_goes_leaves_nothing_and_is_not_counted_as_a_success(
    ledger, queued: bool
) -> None:
    """The client was gone and its render went on; a cancel leaked a context; a cancelled call counted as a success."""
    if queued:
        await ledger.active(20, 9)
    call = ledger.admit(20, 1)
    assert (await call.read()).WhichOneof("event") == ("queued" if queued else "granted")
    call.cancel()
    await until(lambda: ledger.committed == (20 if queued else 0), "its bytes are back")
    await until(lambda: ledger.servicer._keeper.book.queue_depth == 0, "its claim is gone")
    assert await call.code() is grpc.StatusCode.CANCELLED
    listed = await ledger.stub.ListLeases(pb.ListLeasesRequest(include_released=True))
    ended = [lease.end_reason.reason for lease in listed.leases if lease.state == lease_pb2.LEASE_STATE_RELEASED]
    assert ended == ["CANCELLED"]


async def test_atom_1441_nothing_is_kept_of_claims_that_are_over(ledger) -> None:
    """Maps of requests grew with each request that completed normally."""
    servicer = ledger.servicer
    book = servicer._keeper.book
    await ledger.release(*await ledger.active(1, 1))  # whatever is made at the first use is made

    def remembered() -> dict[str, int]:
        """Sizes of everything that is kept, but for what is bounded by itself: ended leases that are shown on demand,
        and timers of what is over."""
        return {
            name: len(kept)
            for owner in (book, servicer._admit, servicer._keep_alive, servicer._keeper)
            for name, kept in vars(owner).items()
            if hasattr(kept, "__len__") and name not in ("_released", "_timers", "_by_pool")
        }

    before = remembered()
    for pid in range(2, 12):
        lease_id, secret = await ledger.active(2, pid, 100 + pid)
        beat = ledger.stub.KeepAlive()
        await beat.write(pb.KeepAliveRequest(lease_id=lease_id, secret=secret))
        await beat.read()
        use = await ledger.stub.BeginUse(pb.BeginUseRequest(lease_id=lease_id, secret=secret))
        await ledger.stub.EndUse(pb.EndUseRequest(lease_id=lease_id, secret=secret, use_id=use.use_id))
        ledger.dead.update(book.view(lease_id).lease.processes)
        await ledger.release(lease_id, secret)
        await beat.done_writing()
        assert await beat.read() is not None
    await until(lambda: remembered() == before, "all is given back")

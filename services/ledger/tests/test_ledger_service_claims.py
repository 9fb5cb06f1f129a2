"""Claims that ask for more than bytes, over the wire: a device alone, the place of a lease, waiting while holding."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from weighbridge_ledger.machine.ceilings import Sharing
from weighbridge_ledger.machine.model import Machine, Pool, Source
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

from services.ledger.tests.holders import LONG_TERM, loaded, next_of, read_to_the_end, resident

GIB = 2**30
Code = grpc.StatusCode
ACTIVE, VACATING = lease_pb2.LEASE_STATE_ACTIVE, lease_pb2.LEASE_STATE_VACATING


async def codes_of(call) -> list[str]:
    """What a claim that begins to wait waits for."""
    return [reason.code for reason in (await call.read()).queued.reasons]


# -- a device alone (rule 26) --------------------------------------------------------------------------------------


@pytest.fixture
async def unified(new_ledger, tmp_path: Path) -> AsyncIterator:
    """A ledger of a machine whose GPU shares the memory: of 40 GiB models may hold 28."""
    ledger = new_ledger(tmp_path)
    ledger.probe.machine = Machine("node", Pool.UNIFIED, 40 * GIB, (), Source.DECLARED)
    async with ledger.serve():
        yield ledger


async def test_who_is_alone_on_a_device_keeps_others_from_it_and_not_from_the_memory(unified) -> None:
    lease_id, secret = await unified.active(5, 1, exclusive=True, term=LONG_TERM)
    assert (await unified.leases())[0].exclusive
    waiting = unified.admit(5, 2)
    assert await codes_of(waiting) == ["EXCLUSIVE_USE"]
    beside = unified.request(5, 3)
    beside.claim.cpu_only = True
    response = await unified.stub.Admit(beside).read()
    assert response.granted.lease.claim.cpu_only
    await unified.release(lease_id, secret)
    assert not (await next_of(waiting, "granted")).lease.exclusive


async def test_who_wants_a_device_alone_waits_for_those_who_are_there_and_asks_the_idle_ones(unified) -> None:
    there = await resident(unified, 5, 1)
    call = unified.admit(5, 2, exclusive=True)
    assert list((await next_of(call, "reclaiming")).victim_lease_ids) == [there.lease_id]
    assert [lease.exclusive for lease in await unified.leases()] == [False, True]
    await there.release()
    assert (await next_of(call, "granted")).lease.exclusive


async def test_being_alone_is_dropped_at_will_and_raised_only_when_alone(unified) -> None:
    lease_id, secret = await unified.active(5, 1, exclusive=True, term=LONG_TERM)

    def resized(**how):
        request = pb.ResizeLeaseRequest(lease_id=lease_id, secret=secret, claim={"host_bytes": 5 * GIB}, **how)
        return unified.stub.ResizeLease(request)

    watch = unified.stub.Watch(pb.WatchRequest())
    await watch.read()
    waiting = unified.admit(5, 2)
    await waiting.read()
    # Left out, it stays as it is; said, it is what is said.
    assert (await resized()).lease.exclusive
    assert not (await resized(exclusive=False)).lease.exclusive
    await next_of(waiting, "granted")
    failure = await unified.failure(resized(exclusive=True))
    assert (failure.code, failure.reason) == (Code.RESOURCE_EXHAUSTED, "CANNOT_GROW")
    waiting.cancel()
    told = [await watch.read() for _ in range(4)]  # the last one: that nobody is there any more
    assert (await resized(exclusive=True)).lease.exclusive
    told.append(await watch.read())
    assert [pb.ChangeKind.Name(one.kind).removeprefix("CHANGE_KIND_") for one in told] == [
        "QUEUED",
        "RESIZED",
        "GRANTED",
        "RELEASED",
        "RESIZED",
    ]
    watch.cancel()


async def test_where_engines_coexist_the_flag_is_ignored(new_ledger, tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path, sharing=Sharing.COEXIST)
    ledger.probe.machine = Machine("node", Pool.UNIFIED, 40 * GIB, (), Source.DECLARED)
    async with ledger.serve():
        await ledger.active(5, 1, exclusive=True)
        await ledger.granted(5, 2, exclusive=True)
        assert [lease.exclusive for lease in await ledger.leases()] == [False, False]


# -- in the place of a lease (rule 24) -----------------------------------------------------------------------------


async def test_a_claim_takes_the_place_of_its_caller_s_own_lease_however_busy_and_pinned(ledger) -> None:
    old = await loaded(ledger, 14, 1, 11, model="old", pinned=True)
    await old.begin_use()
    preview = (await ledger.admit(20, 1, replaces_lease=old.credential, validate_only=True).read()).preview
    # Its own bytes count as available, and nobody else would have to go.
    assert (preview.outcome, preview.charge.host_bytes) == (lease_pb2.OUTCOME_NOW, 20 * GIB)
    call = ledger.admit(20, 1, replaces_lease=old.credential, purpose={"model_name": "new"})
    queued = (await call.read()).queued
    assert [(reason.code, list(reason.lease_ids)) for reason in queued.reasons] == [("BYTES_HELD", [old.lease_id])]
    assert list((await next_of(call, "reclaiming")).victim_lease_ids) == [old.lease_id]
    waiting = (await ledger.stub.GetLease(pb.GetLeaseRequest(lease_id=queued.lease_id))).lease
    assert waiting.replaces_lease_id == old.lease_id
    vacate = (await old.heard()).vacate
    assert vacate.reason.message.startswith("new of holder-1 (20.00 GiB) waits")
    # Its engine lives, so it is charged: the new one is granted when that is gone.
    assert (await old.release()).state == VACATING
    assert ledger.committed == 14
    ledger.dead.add(ledger.servicer._keeper.book.view(old.lease_id).lease.engines[0])
    assert (await old.release()).state == lease_pb2.LEASE_STATE_RELEASED
    granted = (await next_of(call, "granted")).lease
    assert (granted.charge.host_bytes, granted.replaces_lease_id) == (20 * GIB, "")
    assert ledger.committed == 20


async def test_the_lease_that_is_replaced_is_asked_last(ledger) -> None:
    old = await loaded(ledger, 10, 1)
    other_id, other_secret = await ledger.active(10, 2, term=LONG_TERM)
    call = ledger.admit(20, 1, replaces_lease=old.credential)
    assert (await call.read()).HasField("queued")
    # The other one is in the way, and pending its load: as long as it stays, the caller keeps what it has.
    assert (await old.seen()).state == ACTIVE
    await ledger.release(other_id, other_secret)
    assert list((await next_of(call, "reclaiming")).victim_lease_ids) == [old.lease_id]
    assert (await old.seen()).state == VACATING
    call.cancel()


async def test_a_lease_that_has_ended_is_no_hindrance_to_replace(ledger) -> None:
    old = await loaded(ledger, 14, 1)
    await old.release()
    granted = (await ledger.admit(20, 1, replaces_lease=old.credential).read()).granted
    assert granted.lease.charge.host_bytes == 20 * GIB


@pytest.mark.parametrize("field", ["replaces_lease", "while_holding"])
@pytest.mark.parametrize("wrong", ["secret", "process"])
async def test_only_a_lease_s_own_process_with_its_secret_may_name_it(ledger, field: str, wrong: str) -> None:
    lease_id, secret = await ledger.active(10, 1)
    credential = {"lease_id": lease_id, "secret": "another" if wrong == "secret" else secret}
    named = [credential] if field == "while_holding" else credential
    failure = await ledger.failure(ledger.admit(20, 2 if wrong == "process" else 1, **{field: named}).read())
    assert (failure.code, failure.reason) == (Code.PERMISSION_DENIED, "LEASE_SECRET_MISMATCH")
    (lease,) = await ledger.leases()
    assert lease.state == ACTIVE


# -- waiting while holding (rule 25) -------------------------------------------------------------------------------


async def test_who_keeps_a_lease_busy_is_not_let_wait_for_one_that_is_in_use(ledger) -> None:
    mine, theirs = await loaded(ledger, 10, 1), await loaded(ledger, 10, 2)
    for one in (mine, theirs):
        await one.begin_use()
    failure = await ledger.failure(ledger.admit(10, 1, while_holding=[mine.credential]).read())
    assert (failure.code, failure.reason) == (Code.RESOURCE_EXHAUSTED, "WAIT_WHILE_HOLDING")
    assert len(await ledger.leases()) == 2


async def test_who_keeps_a_lease_busy_may_wait_for_one_that_is_idle(ledger) -> None:
    mine, theirs = await loaded(ledger, 10, 1), await resident(ledger, 10, 2)
    await mine.begin_use()
    call = ledger.admit(10, 1, while_holding=[mine.credential])
    assert list((await next_of(call, "reclaiming")).victim_lease_ids) == [theirs.lease_id]
    await theirs.release()
    await next_of(call, "granted")


async def test_when_what_it_may_wait_for_does_not_come_it_hears_so_and_who_holds_it(ledger) -> None:
    """A and B keep leases busy and wait for each other's: neither would ever be served."""
    mine = await loaded(ledger, 10, 1)
    theirs = await resident(ledger, 10, 2, 12, model="slow")
    await mine.begin_use()
    call = ledger.admit(10, 1, while_holding=[mine.credential])
    await next_of(call, "reclaiming")
    await ledger.pass_time(30)  # overdue: no longer hoped for
    failure = await ledger.failure(read_to_the_end(call))
    assert (failure.code, failure.reason) == (Code.RESOURCE_EXHAUSTED, "WAIT_WHILE_HOLDING")
    assert "slow of holder-2 (10.00 GiB)" in failure.message
    assert theirs.lease_id in failure.metadata["lease_ids"]
    assert (await mine.seen()).uses == 1

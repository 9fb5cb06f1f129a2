"""Waiting over the wire: in which order, and how it ends without a grant (rules 15, 25)."""

import grpc
import pytest
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

from services.ledger.tests.holders import LONG_TERM, next_of

GIB = 2**30
Code = grpc.StatusCode


# -- order ---------------------------------------------------------------------------------------------------------


async def test_of_those_who_wait_the_most_urgent_is_served_first(ledger) -> None:
    lease_id, secret = await ledger.active(24, 1, term=LONG_TERM)
    calls = {}
    for pid, priority in ((2, "BACKGROUND"), (3, "NORMAL"), (4, "INTERACTIVE")):
        calls[priority] = ledger.admit(24, pid, priority=f"PRIORITY_{priority}")
        await calls[priority].read()
    listed = {lease.holder.process.pid: lease for lease in await ledger.leases()}
    assert [listed[pid].queue_position for pid in (2, 3, 4)] == [3, 2, 1]
    await ledger.release(lease_id, secret)
    for priority in ("INTERACTIVE", "NORMAL", "BACKGROUND"):
        await next_of(calls[priority], "granted")
        calls[priority].cancel()


async def test_waiting_raises_a_claim_and_everybody_sees_to_what(ledger) -> None:
    await ledger.active(24, 1, term=LONG_TERM)
    call = ledger.admit(24, 2, priority="PRIORITY_BACKGROUND")
    await call.read()

    async def level() -> tuple[int, int]:
        lease = (await ledger.leases())[1]
        return lease.priority, lease.level

    assert await level() == (lease_pb2.PRIORITY_BACKGROUND, lease_pb2.PRIORITY_BACKGROUND)
    await ledger.pass_time(30)
    assert await level() == (lease_pb2.PRIORITY_BACKGROUND, lease_pb2.PRIORITY_NORMAL)
    await ledger.pass_time(90)
    assert await level() == (lease_pb2.PRIORITY_BACKGROUND, lease_pb2.PRIORITY_INTERACTIVE)
    call.cancel()


# -- how waiting ends ----------------------------------------------------------------------------------------------


async def test_a_claim_that_waited_too_long_hears_what_it_waited_for_last(ledger) -> None:
    lease_id, _ = await ledger.active(20, 1, purpose={"model_name": "old"}, term=LONG_TERM)
    call = ledger.admit(10, 2, max_wait={"seconds": 30})
    await call.read()
    await ledger.pass_time(30)
    failure = await ledger.failure(call.read())
    assert (failure.code, failure.reason) == (Code.DEADLINE_EXCEEDED, "ADMISSION_TIMED_OUT")
    assert "10.00 GiB waited 30 s" in failure.message
    assert "old of holder-1 (20.00 GiB)" in failure.message
    assert failure.metadata["waited_s"] == "30"
    assert failure.metadata["required_bytes"] == str(10 * GIB)
    assert failure.metadata["missing_bytes"] == str(6 * GIB)
    assert failure.metadata["wait_codes"] == "BYTES_HELD"
    assert failure.metadata["lease_ids"] == lease_id


async def test_a_claim_that_a_limit_overtakes_hears_what_it_needs_and_what_is_allowed(ledger) -> None:
    await ledger.active(20, 1, term=LONG_TERM)
    call = ledger.admit(10, 2)
    await call.read()
    await ledger.stub.SetLimit(pb.SetLimitRequest(limit_bytes=8 * GIB))
    failure = await ledger.failure(call.read())
    assert (failure.code, failure.reason) == (Code.FAILED_PRECONDITION, "CLAIM_EXCEEDS_CAPACITY")
    assert "10.00 GiB" in failure.message
    assert "8.00 GiB" in failure.message
    assert failure.metadata["missing_bytes"] == str(2 * GIB)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("priority", {"priority": 9}),
        ("replaces_lease.lease_id", {"replaces_lease": {"secret": "s"}}),
        ("while_holding[1].lease_id", {"while_holding": [{"lease_id": "l"}, {}]}),
        ("while_holding[0].secret", {"while_holding": [{"lease_id": "l", "secret": "s" * 513}]}),
        ("while_holding", {"while_holding": [{"lease_id": "l"}] * 65}),
    ],
)
async def test_what_cannot_be_meant_is_refused_with_its_field(ledger, field: str, wrong: dict) -> None:
    failure = await ledger.failure(ledger.admit(1, **wrong).read())
    assert (failure.code, failure.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert [violation[0] for violation in failure.field_violations] == [field]
    assert await ledger.leases() == []


async def test_a_claim_that_says_no_priority_is_a_normal_one(ledger) -> None:
    await ledger.granted(1)
    assert (await ledger.leases())[0].priority == lease_pb2.PRIORITY_NORMAL

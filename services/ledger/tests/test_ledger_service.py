"""The contract over a real channel: every verb, every refusal with its code and reason. Time moves by hand."""

import asyncio

import grpc
import pytest
from weighbridge_ledger.book import Policy
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

GIB = 2**30
Code = grpc.StatusCode


async def until(condition, what: str) -> None:
    """Wait for something that another task does; the bound is for a test that would hang."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never happened: {what}")


# -- the way of a lease --------------------------------------------------------------------------------------------


async def test_the_way_of_a_lease(ledger) -> None:
    call, granted = await ledger.granted(10)
    assert granted.lease.state == lease_pb2.LEASE_STATE_GRANTED
    assert granted.lease.charge.host_bytes == 10 * GIB
    assert len(bytes.fromhex(granted.secret)) == 16
    assert granted.activate_before_time.seconds == 1_000_010
    credential = {"lease_id": granted.lease.lease_id, "secret": granted.secret}
    activated = await ledger.stub.ActivateLease(
        pb.ActivateLeaseRequest(**credential, process=ledger.process(1), engine_processes=[ledger.process(11)])
    )
    assert activated.lease.state == lease_pb2.LEASE_STATE_ACTIVE
    assert [process.pid for process in activated.lease.engine_processes] == [11]
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is Code.OK
    capacity = (await ledger.stub.GetCapacity(pb.GetCapacityRequest())).capacity
    assert capacity.total.committed_bytes == 10 * GIB
    assert (await ledger.release(*credential.values())).state == lease_pb2.LEASE_STATE_VACATING
    ledger.dead.add(ledger.servicer._keeper.book.view(granted.lease.lease_id).lease.engines[0])
    assert (await ledger.release(*credential.values())).state == lease_pb2.LEASE_STATE_RELEASED
    assert ledger.committed == 0
    # Repeated until answered (rule 7): the answer to a repetition is the same.
    assert (await ledger.release(*credential.values())).state == lease_pb2.LEASE_STATE_RELEASED


async def test_a_claim_waits_with_position_and_reason_and_is_granted_when_room_is_made(ledger) -> None:
    lease_id, secret = await ledger.active(20)
    first, second = ledger.admit(10, 2), ledger.admit(10, 3)
    queued = [(await call.read()).queued for call in (first, second)]
    assert [one.position for one in queued] == [1, 2]
    reason = queued[0].reasons[0]
    assert (reason.code, list(reason.lease_ids), reason.missing_bytes) == ("BYTES_HELD", [lease_id], 6 * GIB)
    assert "6.00 GiB" in reason.message
    await ledger.release(lease_id, secret)
    for call in (first, second):
        while (response := await call.read()).WhichOneof("event") == "queued":
            pass
        assert response.granted.lease.charge.host_bytes == 10 * GIB
    assert ledger.committed == 20


async def test_a_claim_cancelled_while_it_waits_leaves_nothing(ledger) -> None:
    await ledger.active(20)
    call = ledger.admit(10, 2)
    await call.read()
    call.cancel()
    await until(lambda: ledger.servicer._keeper.book.queue_depth == 0, "the claim is gone")
    assert len(await ledger.leases()) == 1
    assert ledger.committed == 20


async def test_a_grant_whose_call_is_cancelled_is_freed(ledger) -> None:
    call, _ = await ledger.granted(20)
    call.cancel()
    await until(lambda: ledger.committed == 0, "the grant is freed")


async def test_a_grant_that_is_not_activated_is_freed_and_its_call_told(ledger) -> None:
    call, _ = await ledger.granted(20)
    await ledger.pass_time(10)
    failure = await ledger.failure(call.read())
    assert (failure.code, failure.reason) == (Code.ABORTED, "GRANT_NOT_ACTIVATED")
    assert ledger.committed == 0


async def test_position_moves_up(ledger) -> None:
    await ledger.active(20)
    first, second = ledger.admit(10, 2), ledger.admit(10, 3)
    await first.read()
    assert (await second.read()).queued.position == 2
    first.cancel()
    assert (await second.read()).queued.position == 1


# -- refusals of Admit ---------------------------------------------------------------------------------------------


async def test_a_claim_larger_than_the_machine_is_refused_at_once(ledger) -> None:
    failure = await ledger.failure(ledger.admit(25).read())
    assert (failure.code, failure.reason) == (Code.FAILED_PRECONDITION, "CLAIM_EXCEEDS_CAPACITY")
    assert failure.quota_violations == (("host", "1.00 GiB missing"),)
    assert "25.00 GiB" in failure.message
    assert "24.00 GiB" in failure.message
    assert str(GIB)[:4] not in failure.message
    assert failure.metadata["missing_bytes"] == str(GIB)
    assert await ledger.leases() == []


async def test_a_retry_takes_the_call_over_and_gets_the_same_secret(ledger) -> None:
    first, granted = await ledger.granted(10, 1, "r")
    _second, again = await ledger.granted(10, 1, "r")
    assert (again.lease.lease_id, again.secret) == (granted.lease.lease_id, granted.secret)
    failure = await ledger.failure(first.read())
    assert (failure.code, failure.reason) == (Code.ABORTED, "REQUEST_TAKEN_OVER")
    assert ledger.committed == 10


@pytest.mark.parametrize(
    ("request_", "code", "reason"),
    [
        ({"gib": 5, "request_id": "used"}, Code.INVALID_ARGUMENT, "REQUEST_ID_REUSED"),
        ({"gib": 1, "pid": 9, "request_id": "used"}, Code.ALREADY_EXISTS, "REQUEST_IN_USE"),
        ({"gib": 1, "request_id": "ended"}, Code.FAILED_PRECONDITION, "REQUEST_ENDED"),
        ({"gib": 0}, Code.INVALID_ARGUMENT, "CLAIM_EMPTY"),
        ({"gib": -1}, Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        ({"gib": 1, "pid": 0}, Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        ({"gib": 1, "request_id": "x" * 600}, Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        ({"gib": 1, "replaces_lease": {"lease_id": "l"}}, Code.NOT_FOUND, "LEASE_NOT_FOUND"),
        ({"gib": 1, "while_holding": [{"lease_id": "l"}]}, Code.NOT_FOUND, "LEASE_NOT_FOUND"),
    ],
)
async def test_admit_refuses(ledger, request_: dict, code: Code, reason: str) -> None:
    await ledger.active(1, 1, request_id="used")
    await ledger.release(*await ledger.active(1, 1, request_id="ended"))
    failure = await ledger.failure(ledger.admit(**request_).read())
    assert (failure.code, failure.reason) == (code, reason)
    assert len(await ledger.leases()) == 1


async def test_a_card_that_is_not_there_is_named_in_the_failure(ledger) -> None:
    request = ledger.request(1)
    request.claim.devices.add(device_id="GPU-x", required_bytes=1)
    failure = await ledger.failure(ledger.stub.Admit(request).read())
    assert (failure.code, failure.reason, failure.metadata) == (
        Code.INVALID_ARGUMENT,
        "DEVICE_UNKNOWN",
        {"device_id": "GPU-x"},
    )


async def test_a_full_queue_says_when_to_retry(new_ledger, tmp_path) -> None:
    async with new_ledger(tmp_path, policy=Policy(queue_bound=1)).serve() as ledger:
        await ledger.active(20)
        waiting = ledger.admit(10, 2)
        await waiting.read()
        failure = await ledger.failure(ledger.admit(10, 3).read())
        assert (failure.code, failure.reason, failure.retry_after_s) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", 5.0)


async def test_waiting_ends_when_the_caller_said(ledger) -> None:
    await ledger.active(20)
    request = ledger.request(10, 2)
    request.max_wait.FromSeconds(30)
    call = ledger.stub.Admit(request)
    await call.read()
    await ledger.pass_time(30)
    failure = await ledger.failure(call.read())
    assert (failure.code, failure.reason) == (Code.DEADLINE_EXCEEDED, "ADMISSION_TIMED_OUT")


async def test_previews(ledger) -> None:
    await ledger.active(20)

    async def preview(gib: int) -> pb.AdmitPreview:
        return (await ledger.admit(gib, 2, validate_only=True).read()).preview

    now, wait, never = [await preview(gib) for gib in (4, 5, 25)]
    assert (now.outcome, now.charge.host_bytes) == (lease_pb2.OUTCOME_NOW, 4 * GIB)
    assert (wait.outcome, wait.reasons[0].code) == (lease_pb2.OUTCOME_MUST_WAIT, "BYTES_HELD")
    assert (never.outcome, never.failure.reason) == (lease_pb2.OUTCOME_NEVER, "CLAIM_EXCEEDS_CAPACITY")
    assert len(await ledger.leases()) == 1


# -- holding -------------------------------------------------------------------------------------------------------


async def test_a_wrong_secret_or_process_changes_nothing(ledger) -> None:
    _call, granted = await ledger.granted(10)
    lease_id = granted.lease.lease_id
    for secret, pid in (("wrong", 1), (granted.secret, 2)):
        failure = await ledger.failure(
            ledger.stub.ActivateLease(
                pb.ActivateLeaseRequest(lease_id=lease_id, secret=secret, process=ledger.process(pid))
            )
        )
        assert (failure.code, failure.reason) == (Code.PERMISSION_DENIED, "LEASE_SECRET_MISMATCH")
    assert (await ledger.leases())[0].state == lease_pb2.LEASE_STATE_GRANTED


async def test_verbs_on_unknown_leases_find_nothing(ledger) -> None:
    stub, credential = ledger.stub, {"lease_id": "none", "secret": "s"}
    for call in (
        stub.ActivateLease(pb.ActivateLeaseRequest(**credential, process=ledger.process(1))),
        stub.AttachLease(pb.AttachLeaseRequest(lease_id="none", process=ledger.process(1))),
        stub.BeginUse(pb.BeginUseRequest(**credential)),
        stub.EndUse(pb.EndUseRequest(**credential)),
        stub.ResizeLease(pb.ResizeLeaseRequest(**credential, claim={"host_bytes": 1})),
        stub.ReleaseLease(pb.ReleaseLeaseRequest(**credential)),
        stub.ReleaseLease(pb.ReleaseLeaseRequest(lease_id="none", operator_override=True)),
        stub.GetLease(pb.GetLeaseRequest(lease_id="none")),
    ):
        failure = await ledger.failure(call)
        assert (failure.code, failure.reason) == (Code.NOT_FOUND, "LEASE_NOT_FOUND")


async def test_keep_alive_renews_reports_and_outlives_its_stream(ledger) -> None:
    lease_id, secret = await ledger.active(10)
    call = ledger.stub.KeepAlive()
    await ledger.pass_time(10)
    beat = pb.KeepAliveRequest(
        lease_id=lease_id, secret=secret, observed={"host_bytes": 3 * GIB, "host_peak_bytes": 4 * GIB}
    )
    await call.write(beat)
    renewed = (await call.read()).renewed
    assert (renewed.expire_time.seconds, renewed.term.seconds) == (1_000_025, 15)
    assert renewed.charge.host_bytes == 10 * GIB
    lease = (await ledger.leases())[0]
    assert (lease.connected, lease.observed.host_peak_bytes) == (True, 4 * GIB)
    await call.write(pb.KeepAliveRequest(lease_id="none", secret=secret))
    assert (await call.read()).failure.reason == "LEASE_NOT_FOUND"
    await call.write(pb.KeepAliveRequest(lease_id=lease_id, secret="wrong"))
    assert (await call.read()).failure.reason == "LEASE_SECRET_MISMATCH"
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    lease = (await ledger.leases())[0]
    assert (lease.connected, lease.suspect, lease.state) == (False, False, lease_pb2.LEASE_STATE_ACTIVE)


async def test_a_holder_is_asked_to_vacate_over_its_open_stream(ledger) -> None:
    lease_id, secret = await ledger.active(10, 1, 11)
    call = ledger.stub.KeepAlive()
    await call.write(pb.KeepAliveRequest(lease_id=lease_id, secret=secret))
    assert (await call.read()).HasField("renewed")
    await ledger.release(lease_id, secret)
    vacate = (await call.read()).vacate
    assert vacate.deadline.seconds == 1_000_030
    call.cancel()


async def test_a_silent_holder_is_told_on_its_stream_and_attaches_again(ledger) -> None:
    lease_id, secret = await ledger.active(10)
    call = ledger.stub.KeepAlive()
    await call.write(pb.KeepAliveRequest(lease_id=lease_id, secret=secret))
    await call.read()
    await ledger.pass_time(15)
    assert (await call.read()).failure.reason == "LEASE_SUSPECT"
    failure = await ledger.failure(ledger.stub.BeginUse(pb.BeginUseRequest(lease_id=lease_id, secret=secret)))
    assert (failure.code, failure.reason) == (Code.FAILED_PRECONDITION, "LEASE_SUSPECT")
    attached = await ledger.stub.AttachLease(
        pb.AttachLeaseRequest(lease_id=lease_id, process=ledger.process(1), secret=secret)
    )
    assert (attached.lease.suspect, attached.lease.charge.host_bytes) == (False, 10 * GIB)
    await call.write(pb.KeepAliveRequest(lease_id=lease_id, secret=attached.secret))
    assert (await call.read()).HasField("renewed")
    call.cancel()


async def test_use_beyond_what_can_be_granted_is_told(ledger) -> None:
    lease_id, secret = await ledger.active(10, 1)
    await ledger.active(10, 2)
    call = ledger.stub.KeepAlive()
    await call.write(pb.KeepAliveRequest(lease_id=lease_id, secret=secret, observed={"host_bytes": 15 * GIB}))
    assert (await call.read()).HasField("renewed")
    failure = (await call.read()).failure
    assert (failure.reason, failure.metadata["granted_bytes"]) == ("OUT_OF_GRANT", str(10 * GIB))
    call.cancel()


async def test_uses_and_sizes(ledger) -> None:
    lease_id, secret = await ledger.active(10)
    await ledger.active(10, 2)
    credential = {"lease_id": lease_id, "secret": secret}
    use = await ledger.stub.BeginUse(pb.BeginUseRequest(**credential))
    assert (await ledger.leases())[0].uses == 1
    assert (await ledger.stub.EndUse(pb.EndUseRequest(**credential, use_id=use.use_id))).uses == 0
    grown = await ledger.stub.ResizeLease(pb.ResizeLeaseRequest(**credential, claim={"host_bytes": 14 * GIB}))
    assert grown.lease.charge.host_bytes == 14 * GIB
    failure = await ledger.failure(
        ledger.stub.ResizeLease(pb.ResizeLeaseRequest(**credential, claim={"host_bytes": 15 * GIB}))
    )
    assert (failure.code, failure.reason) == (Code.RESOURCE_EXHAUSTED, "CANNOT_GROW")
    assert ledger.committed == 24


async def test_an_operators_word_is_refused_while_a_process_is_seen_alive(ledger) -> None:
    lease_id, _ = await ledger.active(10, 1, 11)
    request = pb.ReleaseLeaseRequest(lease_id=lease_id, operator_override=True)
    failure = await ledger.failure(ledger.stub.ReleaseLease(request))
    assert (failure.code, failure.reason) == (Code.FAILED_PRECONDITION, "PROCESS_ALIVE")
    assert failure.message == "Process 1 of this lease is alive. End it first."
    assert ledger.committed == 10


# -- commit, then tell ---------------------------------------------------------------------------------------------


async def test_nothing_is_told_before_it_is_on_disk(ledger) -> None:
    ledger.store.gate.clear()
    call = ledger.admit(10)
    reading = asyncio.ensure_future(call.read())
    await until(lambda: ledger.committed == 10, "the grant is decided")
    listing = asyncio.ensure_future(ledger.leases())
    done, _ = await asyncio.wait({reading, listing}, timeout=0.2)
    assert not done
    ledger.store.gate.set()
    assert (await reading).HasField("granted")
    assert len(await listing) == 1


async def test_a_commit_is_not_abandoned_when_its_caller_is_cancelled(ledger) -> None:
    _call, granted = await ledger.granted(10)
    ledger.store.gate.clear()
    activation = ledger.stub.ActivateLease(
        pb.ActivateLeaseRequest(lease_id=granted.lease.lease_id, secret=granted.secret, process=ledger.process(1))
    )
    lease_id = granted.lease.lease_id
    book = ledger.servicer._keeper.book
    await until(lambda: book.view(lease_id).lease.state == "ACTIVE", "the activation is decided")
    activation.cancel()
    ledger.store.gate.set()
    await until(lambda: ledger.store.load().leases[0].state == "ACTIVE", "the activation is on disk")
    assert book.view(lease_id).lease.state == "ACTIVE"


async def test_many_decisions_share_a_sync(ledger) -> None:
    await ledger.granted(1, 100)
    before = ledger.store.commits
    ledger.store.gate.clear()
    calls = [ledger.admit(0.1, pid) for pid in range(1, 31)]
    await until(lambda: ledger.servicer._keeper.book.lease_count == 31, "all are decided")
    ledger.store.gate.set()
    for call in calls:
        assert (await call.read()).HasField("granted")
    # The first of them had a batch of its own; the others gathered behind it.
    assert ledger.store.commits - before == 2


async def test_a_full_disk_refuses_claims_and_loses_nothing(ledger) -> None:
    lease_id, secret = await ledger.active(20)
    waiting = ledger.admit(10, 2)
    await waiting.read()
    ledger.store.fail_with = "database or disk is full"
    # The release is decided and makes room, but neither it nor the grant it leads to can be kept.
    failure = await ledger.failure(ledger.stub.ReleaseLease(pb.ReleaseLeaseRequest(lease_id=lease_id, secret=secret)))
    assert (failure.code, failure.reason) == (Code.UNAVAILABLE, "STORE_UNAVAILABLE")
    assert (await ledger.failure(waiting.read())).reason == "STORE_UNAVAILABLE"
    assert (await ledger.failure(ledger.admit(1, 3).read())).reason == "STORE_UNAVAILABLE"
    assert [lease.lease_id for lease in ledger.store.load().leases] == [lease_id]
    ledger.store.fail_with = None
    await until(lambda: ledger.store.load().leases == (), "the release is written after all")
    assert (await ledger.release(lease_id, secret)).state == lease_pb2.LEASE_STATE_RELEASED
    await ledger.granted(24, 4)


async def test_what_is_only_in_memory_is_not_answered_as_done(ledger) -> None:
    """An activation that could not be kept must not succeed when it is repeated: the engine would run under a grant
    that a restart frees."""
    call, granted = await ledger.granted(10)
    activate = pb.ActivateLeaseRequest(
        lease_id=granted.lease.lease_id, secret=granted.secret, process=ledger.process(1)
    )
    ledger.store.fail_with = "database or disk is full"
    for _ in range(2):
        failure = await ledger.failure(ledger.stub.ActivateLease(activate))
        assert (failure.code, failure.reason) == (Code.UNAVAILABLE, "STORE_UNAVAILABLE")
    assert len(await ledger.leases()) == 1  # people may look meanwhile
    assert ledger.store.load().leases[0].state == "GRANTED"
    ledger.store.fail_with = None
    assert (await ledger.stub.ActivateLease(activate)).lease.state == lease_pb2.LEASE_STATE_ACTIVE
    assert ledger.store.load().leases[0].state == "ACTIVE"
    assert await call.read() is grpc.aio.EOF


async def test_a_limit_that_cannot_be_kept_is_not_in_force(ledger) -> None:
    ledger.store.fail_with = "database or disk is full"
    failure = await ledger.failure(ledger.stub.SetLimit(pb.SetLimitRequest(limit_bytes=10 * GIB)))
    assert failure.reason == "STORE_UNAVAILABLE"
    ledger.store.fail_with = None
    capacity = (await ledger.stub.GetCapacity(pb.GetCapacityRequest())).capacity
    assert capacity.total.effective_bytes == 24 * GIB
    await until(lambda: not ledger.servicer._keeper.committer.failing, "the disk is well again")
    assert ledger.store.load().limit_bytes is None


async def test_of_two_limits_that_cannot_be_kept_neither_is_in_force(ledger) -> None:
    ledger.store.gate.clear()
    limits = [
        asyncio.create_task(ledger.servicer.SetLimit(pb.SetLimitRequest(limit_bytes=size * GIB), None))
        for size in (10, 12)
    ]
    await asyncio.sleep(0)  # both have begun, and the disk is still at work on the first
    ledger.store.fail_with = "database or disk is full"
    ledger.store.gate.set()
    refused = await asyncio.gather(*limits, return_exceptions=True)
    assert [error.failure.reason for error in refused] == ["STORE_UNAVAILABLE"] * 2
    ledger.store.fail_with = None
    capacity = (await ledger.stub.GetCapacity(pb.GetCapacityRequest())).capacity
    assert capacity.total.effective_bytes == 24 * GIB
    await until(lambda: not ledger.servicer._keeper.committer.failing, "the disk is well again")
    assert ledger.store.load().limit_bytes is None


async def test_stopping_ends_every_stream_and_frees_what_was_not_activated(ledger) -> None:
    await ledger.active(5, 1)
    granted, _ = await ledger.granted(15, 2)
    waiting = ledger.admit(10, 3)
    await waiting.read()
    watch = ledger.stub.Watch(pb.WatchRequest())
    await watch.read()
    keep_alive = ledger.stub.KeepAlive()
    await keep_alive.write(pb.KeepAliveRequest(lease_id="none"))
    await keep_alive.read()
    stopping = asyncio.ensure_future(ledger.stop())
    for call in (granted, waiting, watch, keep_alive):
        failure = await ledger.failure(call.read())
        assert (failure.code, failure.reason) == (Code.UNAVAILABLE, "LEDGER_STOPPING")
    await stopping
    assert [lease.holder.pid for lease in ledger.store.load().leases] == [1]

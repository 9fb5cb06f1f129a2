"""What may come between a decision, its commit and its telling: cancelled calls, a disk that fails, a second stream."""

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from weighbridge_ledger.book.core import digest_of
from weighbridge_ledger.machine.interpret import interpret
from weighbridge_ledger.machine.model import Source
from weighbridge_ledger.machine.recorded import from_json
from weighbridge_ledger.service import machine_desk, messages, sweep
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

GIB = 2**30
PATIENCE_S = 30
"""A bound for tests that would hang, not an expectation."""


async def until(condition, what: str) -> None:
    """Wait for something that another task does."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never happened: {what}")


# -- between decision and commit -------------------------------------------------------------------------------------


async def test_a_claim_cancelled_before_its_grant_is_on_disk_leaves_nothing_there(ledger) -> None:
    ledger.store.gate.clear()
    call = ledger.admit(20, 1, "r")
    await until(lambda: ledger.committed == 20, "the grant is decided")
    call.cancel()
    await until(lambda: ledger.committed == 0, "the grant is taken back")
    ledger.store.gate.set()
    await until(lambda: ledger.store.load().tickets, "all is written")
    assert ledger.store.load().leases == ()
    await ledger.granted(24, 2)


async def test_a_retry_while_the_grant_is_not_yet_on_disk_gets_the_one_grant(ledger) -> None:
    ledger.store.gate.clear()
    first = ledger.admit(20, 1, "r")
    await until(lambda: ledger.committed == 20, "the grant is decided")
    older = dict(ledger.servicer._admit._calls)
    second = ledger.admit(20, 2, "r")  # another process
    await until(lambda: ledger.servicer._admit._calls != older, "the retry has come")
    ledger.store.gate.set()
    assert (await ledger.failure(first.read())).reason == "REQUEST_TAKEN_OVER"
    granted = (await second.read()).granted
    assert [lease.secret_digest for lease in ledger.store.load().leases] == [digest_of(granted.secret)]
    assert ledger.committed == 20


async def test_a_grant_that_cannot_be_written_is_told_to_nobody_who_waits_for_it(ledger) -> None:
    ledger.store.gate.clear()
    first = ledger.admit(20, 1, "r")
    await until(lambda: ledger.committed == 20, "the grant is decided")
    older = dict(ledger.servicer._admit._calls)
    second = ledger.admit(20, 1, "r")
    await until(lambda: ledger.servicer._admit._calls != older, "the retry has come")
    ledger.store.fail_with = "database or disk is full"
    ledger.store.gate.set()
    await ledger.failure(first.read())
    assert (await ledger.failure(second.read())).reason == "STORE_UNAVAILABLE"
    await until(lambda: ledger.committed == 0, "the grant is taken back")
    assert ledger.store.load().leases == ()
    ledger.store.fail_with = None
    await until(lambda: not ledger.servicer._keeper.committer.failing, "the disk is well again")
    assert ledger.store.load().leases == ()
    await ledger.granted(24, 3)


async def test_a_grant_that_cannot_be_written_is_taken_back_before_its_call_comes_to_hear_of_it(ledger) -> None:
    """Its call may hang in a message that the client does not read."""
    keeper = ledger.servicer._keeper
    ask = messages.ask_of(ledger.request(20), None)
    ledger.store.fail_with = "database or disk is full"
    keeper.run(lambda book, now: book.admit(ask, now))
    assert ledger.committed == 20
    assert await keeper.committer.durable() is not None
    assert ledger.committed == 0


# -- KeepAlive -------------------------------------------------------------------------------------------------------


async def test_a_full_disk_does_not_make_holders_believe_that_they_were_not_renewed(ledger) -> None:
    """Renewals are not committed (rule 5). A holder that fences itself would end its engine after one term."""
    lease_id, secret = await ledger.active(10)
    call = ledger.stub.KeepAlive()
    beat = pb.KeepAliveRequest(lease_id=lease_id, secret=secret, observed={"host_bytes": 9 * GIB})
    await call.write(beat)
    assert (await call.read()).renewed.charge.host_bytes == 10 * GIB
    ledger.store.fail_with = "database or disk is full"
    await ledger.pass_time(10)
    beat.observed.host_bytes = 12 * GIB  # grows, which cannot be written
    await call.write(beat)
    renewed = (await call.read()).renewed
    assert renewed.expire_time.seconds == 1_000_025
    assert not renewed.HasField("charge")
    assert ledger.store.load().leases[0].charge.host_bytes == 10 * GIB
    ledger.store.fail_with = None
    await call.write(beat)
    assert (await call.read()).renewed.charge.host_bytes == 12 * GIB
    assert ledger.store.load().leases[0].charge.host_bytes == 12 * GIB
    call.cancel()


async def test_a_renewal_tells_no_charge_that_is_not_yet_on_disk(ledger) -> None:
    lease_id, secret = await ledger.active(10)
    ledger.store.gate.clear()
    resize = ledger.stub.ResizeLease(
        pb.ResizeLeaseRequest(lease_id=lease_id, secret=secret, claim={"host_bytes": 20 * GIB})
    )
    await until(lambda: ledger.committed == 20, "the growth is decided")
    call = ledger.stub.KeepAlive()
    await call.write(pb.KeepAliveRequest(lease_id=lease_id, secret=secret))
    reading = asyncio.ensure_future(call.read())
    done, _ = await asyncio.wait({reading}, timeout=0.2)
    assert not done
    ledger.store.gate.set()
    assert (await reading).renewed.charge.host_bytes == 20 * GIB
    assert (await resize).lease.charge.host_bytes == 20 * GIB
    call.cancel()


async def test_two_streams_of_one_lease_are_both_told_and_the_older_secret_renews_nothing(ledger) -> None:
    lease_id, old = await ledger.active(10, 1, 11)
    streams = [ledger.stub.KeepAlive(), ledger.stub.KeepAlive()]
    for call in streams:
        await call.write(pb.KeepAliveRequest(lease_id=lease_id, secret=old))
        assert (await call.read()).HasField("renewed")
    attached = await ledger.stub.AttachLease(pb.AttachLeaseRequest(lease_id=lease_id, process=ledger.process(1)))
    await streams[0].write(pb.KeepAliveRequest(lease_id=lease_id, secret=old))
    assert (await streams[0].read()).failure.reason == "LEASE_SECRET_MISMATCH"
    await streams[1].write(pb.KeepAliveRequest(lease_id=lease_id, secret=attached.secret))
    assert (await streams[1].read()).HasField("renewed")
    streams[0].cancel()
    await until(lambda: len(ledger.servicer._keep_alive._sessions) == 1, "the first stream has ended")
    assert (await ledger.leases())[0].connected
    await ledger.release(lease_id, attached.secret)
    assert (await streams[1].read()).HasField("vacate")
    streams[1].cancel()


async def test_an_absurd_report_stops_its_own_engine_and_no_waiter(ledger) -> None:
    lease_id, secret = await ledger.active(10)
    call = ledger.stub.KeepAlive()
    await call.write(pb.KeepAliveRequest(lease_id=lease_id, secret=secret, observed={"host_bytes": 2**63 - 1}))
    assert (await call.read()).HasField("renewed")
    assert (await call.read()).failure.reason == "OUT_OF_GRANT"
    assert (await ledger.admit(5, 2).read()).queued.reasons[0].code == "EXTERNAL_USE"
    call.cancel()


# -- the background --------------------------------------------------------------------------------------------------


async def test_the_sweep_goes_on_after_a_look_that_failed(ledger, monkeypatch) -> None:
    """Without it no time passes in the book and no death is seen again."""
    lease_id, _ = await ledger.active(10, 1, 11)
    keeper = ledger.servicer._keeper
    processes = keeper.book.view(lease_id).lease.processes

    def without_descriptors(process) -> bool | None:
        raise OSError(24, "Too many open files")

    await sweep.sweep(keeper, without_descriptors)
    assert ledger.committed == 10  # what cannot be looked at is not dead
    failures = 0

    def failing(verb) -> None:
        nonlocal failures
        failures += 1
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(sweep, "RETRY_PERIOD_S", 0.0)
        patched.setattr(keeper, "run", failing)
        await until(lambda: failures > 1, "looks have failed")
        ledger.dead.update(processes)
    await until(lambda: ledger.committed == 0, "the deaths are seen")


RECORDED = Path(__file__).parent / "machine_readings"


class RecordedProbe:
    """A machine that was detected, with its memory as it was recorded."""

    def __init__(self, name: str) -> None:
        found = interpret(from_json((RECORDED / f"{name}.json").read_text()), node_id="node", source=Source.DETECTED)
        self.machine, self.findings, self._live = found.machine, found.findings, found.live
        self.looks = 0

    async def live(self):
        self.looks += 1
        return self._live


async def test_the_book_gets_what_goes_beyond_the_reserve_and_people_see_all_of_it(new_ledger, tmp_path) -> None:
    """64 GiB unified: 48 admitted, 16 left to everything else. Others use total − free − file-backed − purgeable pages,
    53.32 GiB: 37.32 more than their reserve, so 10.68 can be granted. 48 − 53.32 would grant nothing to anybody."""
    ledger = new_ledger(tmp_path)
    ledger.probe = RecordedProbe("mac-m3-max-64")
    outside = (64 * GIB // 16_384 - 200_000 - 450_000 - 50_000) * 16_384
    async with ledger.serve():
        capacity = (await ledger.stub.GetCapacity(pb.GetCapacityRequest())).capacity
        assert capacity.host.effective_bytes == 48 * GIB
        assert capacity.host.external_bytes == outside
        assert ledger.servicer._keeper.book.external.host_bytes == outside - 16 * GIB
        room = 64 * GIB - outside
        for size, outcome in ((room, lease_pb2.OUTCOME_NOW), (room + 1, lease_pb2.OUTCOME_MUST_WAIT)):
            request = ledger.request(0, validate_only=True)
            request.claim.host_bytes = size
            preview = (await ledger.stub.Admit(request).read()).preview
            assert preview.outcome == outcome
        assert [(reason.code, reason.missing_bytes) for reason in preview.reasons] == [("EXTERNAL_USE", 1)]


async def test_each_card_has_its_reserve(new_ledger, tmp_path) -> None:
    """24 GiB cards: 22.8 admitted, 1.2 left to the driver. 612 MiB and 3 MiB are in use: within the reserve."""
    ledger = new_ledger(tmp_path)
    ledger.probe = RecordedProbe("two-cards-24")
    async with ledger.serve():
        capacity = (await ledger.stub.GetCapacity(pb.GetCapacityRequest())).capacity
        assert [card.ceiling.external_bytes for card in capacity.devices] == [641_728_512, 3_145_728]
        external = ledger.servicer._keeper.book.external
        # 8 of 64 GiB of host memory are in use; 25.6 are left to everything else.
        assert (external.host_bytes, dict(external.devices)) == (
            0,
            {card.device.device_id: 0 for card in capacity.devices},
        )


async def test_those_who_ask_at_once_share_a_measurement(new_ledger, tmp_path, monkeypatch) -> None:
    ledger = new_ledger(tmp_path)
    ledger.probe = RecordedProbe("mac-m3-max-64")
    async with ledger.serve():
        await ledger.stub.GetCapacity(pb.GetCapacityRequest())
        before = ledger.probe.looks
        await asyncio.gather(*(ledger.stub.GetCapacity(pb.GetCapacityRequest()) for _ in range(20)))
        assert ledger.probe.looks == before
        ledger.time += machine_desk.FRESH_S
        await asyncio.gather(*(ledger.stub.GetCapacity(pb.GetCapacityRequest()) for _ in range(20)))
        assert ledger.probe.looks == before + 1


# -- at random -------------------------------------------------------------------------------------------------------


class Told:
    """What clients were told: at every moment it must be on disk, and never more than the machine."""

    def __init__(self, ledger) -> None:
        self._ledger = ledger
        self.secrets: dict[str, str] = {}
        self.active: dict[str, int] = {}
        self.activations = 0
        self.failures: dict[str, int] = {}

    def check(self) -> None:
        stored = {lease.lease_id: lease for lease in self._ledger.store.load().leases}
        for lease_id, gib in self.active.items():
            assert stored[lease_id].state.value in ("ACTIVE", "VACATING"), lease_id
            assert stored[lease_id].charge.total_bytes >= gib * GIB
        for total in (sum(self.active.values()) * GIB, sum(lease.charge.total_bytes for lease in stored.values())):
            assert total <= 24 * GIB, "double use"

    def count(self, failure: RpcFailure) -> None:
        self.failures[failure.reason] = self.failures.get(failure.reason, 0) + 1


async def one_claim(ledger, told: Told, dice: random.Random, number: int) -> None:
    gib = dice.choice([1, 2, 5, 10, 20])
    request = ledger.request(gib, number % 7 + 1, f"r{number - dice.randrange(3)}")
    call = ledger.stub.Admit(request)
    if dice.random() < 0.15:
        asyncio.get_running_loop().call_later(dice.random() * 0.01, call.cancel)
    try:
        async for response in call:
            if response.WhichOneof("event") == "granted":
                break
            if dice.random() < 0.3:
                return
        else:
            return
        lease = response.granted.lease
        if lease.state != lease_pb2.LEASE_STATE_GRANTED or dice.random() < 0.1:
            return
        stored = {kept.lease_id: kept for kept in ledger.store.load().leases}
        # Told, so on disk; unless a retry by another process has been granted the same since.
        assert lease.lease_id in stored or ledger.servicer._keeper.book.view(lease.lease_id).lease.state == "RELEASED"
        credential = {"lease_id": lease.lease_id, "secret": response.granted.secret}
        activate = pb.ActivateLeaseRequest(**credential, process=request.holder.process)
        try:
            await ledger.stub.ActivateLease(activate)
        except grpc.aio.AioRpcError:
            await release(ledger, credential)
            raise
    finally:
        call.cancel()
    told.activations += 1
    told.active[lease.lease_id] = gib
    told.check()
    await asyncio.sleep(dice.random() * 0.01)
    del told.active[lease.lease_id]
    await release(ledger, credential)


async def release(ledger, credential: dict[str, str]) -> None:
    """Until it is answered (rule 7)."""
    while True:
        try:
            await ledger.stub.ReleaseLease(pb.ReleaseLeaseRequest(**credential))
            return
        except grpc.aio.AioRpcError as error:
            failure = RpcFailure.from_rpc_error(error)
            if failure.reason != "STORE_UNAVAILABLE":
                assert failure.reason in ("LEASE_NOT_FOUND", "LEASE_SECRET_MISMATCH"), failure
                return
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_interleaving_with_a_failing_disk_tells_what_is_not_on_it(ledger, seed: int) -> None:
    """WEIGHBRIDGE_INTERLEAVING_CLAIMS sets how many claims are made (default 150 for each seed)."""
    claims = int(os.environ.get("WEIGHBRIDGE_INTERLEAVING_CLAIMS", "150"))
    dice, told = random.Random(seed), Told(ledger)

    def numbers() -> Iterator[int]:
        for number in itertools.count():
            # On a fast machine the disk may have been full at no claim's commit yet: seen once.
            if number >= claims and told.failures.get("STORE_UNAVAILABLE"):
                return
            yield number

    left = numbers()

    async def disk() -> None:
        while True:
            # The ledger's own next look, four times a second, would come after most of the claims.
            ledger.servicer._keeper.committer.retry()
            await asyncio.sleep(dice.random() * 0.06)
            fault = dice.choice(["full", "slow"])
            if fault == "full":
                ledger.store.fail_with = "database or disk is full"
            else:
                ledger.store.gate.clear()
            await asyncio.sleep(dice.random() * 0.02)
            ledger.store.fail_with = None
            ledger.store.gate.set()

    async def client() -> None:
        for number in left:
            try:
                await one_claim(ledger, told, dice, number)
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
                told.failures["CANCELLED"] = told.failures.get("CANCELLED", 0) + 1
            except grpc.aio.AioRpcError as error:
                told.count(RpcFailure.from_rpc_error(error))

    failing = asyncio.create_task(disk())
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(client() for _ in range(8)))
    failing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await failing
    ledger.store.fail_with = None
    ledger.store.gate.set()
    keeper = ledger.servicer._keeper
    await until(lambda: not ledger.committed and not keeper.book.queue_depth, "all is given back")
    keeper.committer.retry()
    assert await keeper.committer.durable() is None
    assert ledger.store.load().leases == ()
    # Usually a quarter; fewer on a busy machine, where the disk fails more often for each claim.
    assert told.activations > claims / 15

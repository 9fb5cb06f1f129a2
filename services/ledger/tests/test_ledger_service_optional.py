"""Optional bytes over the wire: granted from what is left, asked back for a claim that waits (rule 4)."""

from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

from services.ledger.tests.holders import LONG_TERM, next_of

GIB = 2**30


def with_optional(ledger, gib: float, optional_gib: float, pid: int) -> pb.AdmitRequest:
    request = ledger.request(gib, pid)
    request.claim.optional_host_bytes = int(optional_gib * GIB)
    request.term.FromSeconds(LONG_TERM["seconds"])
    return request


async def cached(ledger, pid: int = 1) -> tuple[str, str]:
    """An active lease of 10 GiB and all the 14 GiB that are left, of 20 that it would like."""
    call = ledger.stub.Admit(with_optional(ledger, 10, 20, pid))
    granted = (await call.read()).granted
    assert granted.lease.charge.host_bytes == 24 * GIB
    assert granted.lease.charge.optional_bytes == 14 * GIB
    credential = granted.lease.lease_id, granted.secret
    await ledger.stub.ActivateLease(
        pb.ActivateLeaseRequest(lease_id=credential[0], secret=credential[1], process=ledger.process(pid))
    )
    return credential


async def test_optional_bytes_are_granted_from_what_is_left_and_asked_back_once(ledger) -> None:
    lease_id, secret = await cached(ledger)
    stream = ledger.stub.KeepAlive()
    beat = pb.KeepAliveRequest(lease_id=lease_id, secret=secret, load_complete=True)
    await stream.write(beat)
    assert (await stream.read()).HasField("renewed")
    call = ledger.admit(5, 2)
    assert (await call.read()).HasField("queued")
    shrink = await stream.read()
    assert (shrink.lease_id, shrink.shrink.optional_bytes) == (lease_id, 14 * GIB)
    assert shrink.shrink.deadline.seconds == 1_000_010
    # The next renewal does not ask again.
    await stream.write(beat)
    assert (await stream.read()).HasField("renewed")
    await stream.write(beat)
    assert (await stream.read()).HasField("renewed")
    resized = await ledger.stub.ResizeLease(
        pb.ResizeLeaseRequest(lease_id=lease_id, secret=secret, claim={"host_bytes": 10 * GIB})
    )
    assert (resized.lease.charge.host_bytes, resized.lease.charge.optional_bytes) == (10 * GIB, 0)
    assert (await next_of(call, "granted")).lease.charge.host_bytes == 5 * GIB
    stream.cancel()


async def test_who_opens_its_stream_after_it_was_asked_hears_it_with_its_first_renewal(ledger) -> None:
    lease_id, secret = await cached(ledger)
    call = ledger.admit(5, 2)
    await call.read()
    stream = ledger.stub.KeepAlive()
    await stream.write(pb.KeepAliveRequest(lease_id=lease_id, secret=secret))
    heard = [(await stream.read()).WhichOneof("event") for _ in range(2)]
    assert heard == ["renewed", "shrink"]
    call.cancel()
    stream.cancel()


async def test_a_request_for_optional_bytes_is_no_change_for_those_who_watch(ledger) -> None:
    await cached(ledger)
    watch = ledger.stub.Watch(pb.WatchRequest())
    first = await watch.read()
    call = ledger.admit(5, 2)
    await call.read()
    call.cancel()
    told = [await watch.read() for _ in range(2)]
    assert [one.kind for one in told] == [pb.CHANGE_KIND_QUEUED, pb.CHANGE_KIND_RELEASED]
    assert [one.revision for one in told] == [first.revision + 1, first.revision + 2]
    watch.cancel()

"""Holders of leases as tests over the wire need them: loaded, and there long enough to be asked to vacate."""

import grpc
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

LONG_TERM = {"seconds": 600}
"""These holders need no renewal while a test lets time pass."""

RESIDENCY_S = 30
"""The least time that a model stays after it was loaded (rule 22), where that took no time."""


class Resident:
    """A loaded model that has been there long enough to be asked to vacate."""

    def __init__(self, ledger, lease_id: str, secret: str, stream) -> None:
        self._ledger = ledger
        self.lease_id = lease_id
        self.secret = secret
        self.stream = stream

    @property
    def credential(self) -> dict[str, str]:
        return {"lease_id": self.lease_id, "secret": self.secret}

    async def begin_use(self) -> str:
        return (await self._ledger.stub.BeginUse(pb.BeginUseRequest(**self.credential))).use_id

    async def heard(self) -> pb.KeepAliveResponse:
        return await self.stream.read()

    async def seen(self) -> lease_pb2.Lease:
        return (await self._ledger.stub.GetLease(pb.GetLeaseRequest(lease_id=self.lease_id))).lease

    async def release(self) -> lease_pb2.Lease:
        return await self._ledger.release(self.lease_id, self.secret)


async def loaded(ledger, gib: float, pid: int, *engines: int, model: str = "", **more) -> Resident:
    """A lease whose engine has just said that it is loaded."""
    lease_id, secret = await ledger.active(gib, pid, *engines, purpose={"model_name": model}, term=LONG_TERM, **more)
    stream = ledger.stub.KeepAlive()
    await stream.write(pb.KeepAliveRequest(lease_id=lease_id, secret=secret, load_complete=True))
    assert (await stream.read()).HasField("renewed")
    return Resident(ledger, lease_id, secret, stream)


async def resident(ledger, gib: float, pid: int, *engines: int, **more) -> Resident:
    """A lease that may be asked to vacate."""
    one = await loaded(ledger, gib, pid, *engines, **more)
    await ledger.pass_time(RESIDENCY_S + 1)
    return one


async def story(call, last: str) -> list[str]:
    """The kinds of events up to the first one of the kind `last`; several of one kind in a row are one."""
    kinds: list[str] = []
    while not kinds or kinds[-1] != last:
        kind = (await call.read()).WhichOneof("event")
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    return kinds


async def next_of(call, kind: str):
    """The next event of this kind; others before it are left out."""
    while True:
        response = await call.read()
        if response.WhichOneof("event") == kind:
            return getattr(response, kind)


async def read_to_the_end(call) -> None:
    """Reads until the call fails, however much it is told before."""
    while await call.read() is not grpc.aio.EOF:
        pass

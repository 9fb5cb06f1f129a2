"""A disk that is really full, as the system says it: files of the ledger's process may not grow any more."""

import asyncio
import signal
import sys

import grpc
import pytest
from weighbridge_common import processes
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of another process: prlimit")

MIB = 2**20


def limit_files(pid: int, size_bytes: int) -> None:
    """Writing beyond this size fails, in every file of the process."""
    import resource

    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes if size_bytes >= 0 else hard, hard))


async def test_a_full_disk_refuses_new_claims_and_loses_nothing_that_was_told(ledger_process, tmp_path) -> None:
    # Its log may be a file as well, and is not what this is about.
    ledger_process.environ["WEIGHBRIDGE_LEDGER_LOG_LEVEL"] = "error"
    stub = await ledger_process.start()
    me = processes.current().to_message()

    async def admit():
        """A grant that is held and not activated, and its open call."""
        call = stub.Admit(pb.AdmitRequest(holder={"name": "h", "process": me}, claim={"host_bytes": MIB}), timeout=30)
        return call, (await call.read()).granted

    async def activate(granted) -> None:
        await stub.ActivateLease(
            pb.ActivateLeaseRequest(lease_id=granted.lease.lease_id, secret=granted.secret, process=me)
        )

    _, first = await admit()
    await activate(first)
    full = (tmp_path / "data" / "ledger.db-wal").stat().st_size
    limit_files(ledger_process.process.pid, full + 64 * 1024)
    told = {first.lease.lease_id}
    while True:
        try:
            _, granted = await admit()
            told.add(granted.lease.lease_id)
            await activate(granted)
        except grpc.aio.AioRpcError as error:
            failure = RpcFailure.from_rpc_error(error)
            break
        assert len(told) < 1000, "never full"
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")

    # And fuller still: the next little thing would have fitted.
    limit_files(ledger_process.process.pid, full)
    # Nothing new is taken, also of those who would set the limit; who holds goes on, and whoever looks is answered.
    for refused in (admit(), stub.SetLimit(pb.SetLimitRequest(limit_bytes=5))):
        with pytest.raises(grpc.aio.AioRpcError) as again:
            await refused
        assert RpcFailure.from_rpc_error(again.value).reason == "STORE_UNAVAILABLE"
    beat = stub.KeepAlive()
    await beat.write(pb.KeepAliveRequest(lease_id=first.lease.lease_id, secret=first.secret))
    assert (await beat.read()).HasField("renewed")
    beat.cancel()
    held = {lease.lease_id for lease in (await stub.ListLeases(pb.ListLeasesRequest(page_size=1000))).leases}
    assert first.lease.lease_id in held

    # There is room again: claims are taken as soon as it is found out, and a kill then loses nothing.
    limit_files(ledger_process.process.pid, -1)
    async with asyncio.timeout(30):
        while True:
            try:
                call, granted = await admit()
                await activate(granted)
                break
            except grpc.aio.AioRpcError as error:
                assert RpcFailure.from_rpc_error(error).reason == "STORE_UNAVAILABLE"
                await asyncio.sleep(0.1)  # until the ledger's own next attempt, once a quarter of a second
    told.add(granted.lease.lease_id)
    del call
    await ledger_process.end(signal.SIGKILL)
    stub = await ledger_process.start()
    leases = (await stub.ListLeases(pb.ListLeasesRequest(page_size=1000))).leases
    active = {lease.lease_id for lease in leases if lease.state == lease_pb2.LEASE_STATE_ACTIVE}
    assert {first.lease.lease_id, granted.lease.lease_id} <= active <= told
    # What is charged is what is held, each once.
    total = (await stub.GetCapacity(pb.GetCapacityRequest())).capacity.total
    assert total.committed_bytes == len(leases) * MIB
    assert total.limit_bytes == 0
    assert await ledger_process.end(signal.SIGTERM) == 0

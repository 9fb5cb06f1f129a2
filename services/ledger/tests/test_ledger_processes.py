"""The ledger as a process among processes: deaths free memory, a killed ledger comes back with what was committed."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from weighbridge_common import processes
from weighbridge_ledger.service.sweep import sweep
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

GIB = 2**30
PATIENCE_S = 30
"""A bound for tests that would hang, not an expectation."""


@pytest.fixture
def sleeper() -> Iterator:
    """Starts processes that do nothing, and leaves none behind."""
    started: list[subprocess.Popen] = []

    def start() -> subprocess.Popen:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


async def activate(stub, holder: int, *engines: int, gib: int = 40, request_id: str = "") -> tuple[str, str]:
    """A lease held by process `holder`."""
    identity = processes.identify(holder).to_message()
    call = stub.Admit(
        pb.AdmitRequest(
            request_id=request_id, holder={"name": "h", "process": identity}, claim={"host_bytes": gib * GIB}
        )
    )
    granted = (await call.read()).granted
    await stub.ActivateLease(
        pb.ActivateLeaseRequest(
            lease_id=granted.lease.lease_id,
            secret=granted.secret,
            process=identity,
            engine_processes=[processes.identify(engine).to_message() for engine in engines],
        )
    )
    return granted.lease.lease_id, granted.secret


async def released(watch) -> lease_pb2.Lease:
    """The next lease that ends."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = await watch.read()
            if message.lease.state == lease_pb2.LEASE_STATE_RELEASED:
                return message.lease


async def test_a_lease_whose_processes_have_died_gives_its_bytes_back(new_ledger, tmp_path, sleeper) -> None:
    """Real processes, the real sweep: first the holder dies, and its engine keeps the bytes; then the engine."""
    async with new_ledger(tmp_path, real_processes=True).serve() as ledger:
        await holder_then_engine_die(ledger, sleeper)


async def holder_then_engine_die(ledger, sleeper) -> None:
    holder, engine = sleeper(), sleeper()
    watch = ledger.stub.Watch(pb.WatchRequest())
    await watch.read()
    lease_id, _ = await activate(ledger.stub, holder.pid, engine.pid, gib=10)
    holder.kill()
    holder.wait()
    await sweep(ledger.servicer._keeper)
    assert ledger.committed == 10
    engine.kill()
    engine.wait()
    await sweep(ledger.servicer._keeper)
    ended = await released(watch)
    assert (ended.lease_id, ended.end_reason.reason) == (lease_id, "PROCESSES_DEAD")
    assert ledger.committed == 0
    watch.cancel()


async def test_a_waiter_is_granted_when_the_holder_in_its_way_is_killed(ledger_process, sleeper) -> None:
    stub = await ledger_process.start()
    holder = sleeper()
    await activate(stub, holder.pid)
    waiting = stub.Admit(
        pb.AdmitRequest(
            holder={"name": "w", "process": processes.current().to_message()}, claim={"host_bytes": 40 * GIB}
        ),
        timeout=PATIENCE_S,
    )
    assert (await waiting.read()).HasField("queued")
    holder.kill()
    holder.wait()
    while (response := await waiting.read()).HasField("queued"):
        pass
    assert response.granted.lease.charge.host_bytes == 40 * GIB
    waiting.cancel()
    assert await ledger_process.end(signal.SIGTERM) == 0


async def test_a_killed_ledger_comes_back_with_what_was_committed(ledger_process, sleeper) -> None:
    stub = await ledger_process.start()
    living, dying = sleeper(), sleeper()
    await stub.SetLimit(pb.SetLimitRequest(limit_bytes=45 * GIB))
    kept, secret = await activate(stub, living.pid, gib=20, request_id="kept")
    await activate(stub, dying.pid, gib=20)
    epoch = (await stub.GetCapacity(pb.GetCapacityRequest())).capacity.epoch
    await ledger_process.end(signal.SIGKILL)
    dying.kill()
    dying.wait()

    stub = await ledger_process.start()
    capacity = (await stub.GetCapacity(pb.GetCapacityRequest())).capacity
    assert capacity.epoch != epoch
    assert capacity.total.limit_bytes == 45 * GIB
    # What is really held, no more and no less: the dead were swept before anybody was served.
    assert capacity.total.committed_bytes == 20 * GIB
    beat = stub.KeepAlive()
    await beat.write(pb.KeepAliveRequest(lease_id=kept, secret=secret))
    assert (await beat.read()).HasField("renewed")
    beat.cancel()
    failure = await failure_of(stub.Watch(pb.WatchRequest(epoch=epoch, revision=1)).read())
    assert failure.reason == "REVISION_COMPACTED"
    attached = await stub.AttachLease(
        pb.AttachLeaseRequest(lease_id=kept, process=processes.identify(living.pid).to_message())
    )
    assert attached.lease.state == lease_pb2.LEASE_STATE_ACTIVE
    lease = await stub.ReleaseLease(pb.ReleaseLeaseRequest(lease_id=kept, secret=attached.secret))
    assert lease.lease.state == lease_pb2.LEASE_STATE_RELEASED
    assert (await stub.GetCapacity(pb.GetCapacityRequest())).capacity.total.committed_bytes == 0
    assert await ledger_process.end(signal.SIGTERM) == 0
    assert not (ledger_process.folder / "run" / "ledger.sock").exists()


async def test_a_second_ledger_on_the_same_data_is_refused(ledger_process, tmp_path) -> None:
    await ledger_process.start()
    second = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "weighbridge_ledger"],
        env={**ledger_process.environ, "WEIGHBRIDGE_RUN_DIR": str(tmp_path / "other")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert second.returncode == 1
    assert "Another ledger" in second.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WEIGHBRIDGE_LEDGER_MACHINE", "a large one"),
        ("WEIGHBRIDGE_LEDGER_TERM_S", "soon"),
        ("WEIGHBRIDGE_LEDGER_QUEUE_BOUND", "0"),
    ],
)
async def test_a_wrong_setting_stops_the_start_by_its_name(
    ledger_process, name: str, value: str, tmp_path: Path
) -> None:
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "weighbridge_ledger"],
        env={**ledger_process.environ, name: value},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 2
    assert name in ended.stderr
    assert not (tmp_path / "data").exists()


async def failure_of(call) -> RpcFailure:
    """How a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return RpcFailure.from_rpc_error(error.value)

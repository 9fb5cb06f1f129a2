"""A ledger as a process for benchmarks, and the callers' side of it."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import grpc
from google.protobuf import empty_pb2
from weighbridge_common import processes
from weighbridge_proto.channel import CHANNEL_OPTIONS
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2, ledger_service_pb2_grpc
from weighbridge_proto.memory.v1 import requirement_pb2

from benchmarks.floor import FloorStub

PATIENCE_S = 60
"""A bound for what would hang."""

CLAIM_BYTES = 1 << 20
"""Small on a machine of 1 TiB: nothing here waits for memory."""

ME = processes.current()
"""Looked up once, as a client does, and not for each claim."""

_ME_MESSAGE = ME.to_message()

_numbers = count(1)


@contextlib.contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """(run folder, data folder), removed afterwards. Paths of sockets must be short; and the data lies in the current
    folder, not in /tmp: a temporary file system in memory would make syncs free."""
    with tempfile.TemporaryDirectory(prefix="wb-") as sockets, tempfile.TemporaryDirectory(dir=".") as data:
        yield Path(sockets) / "run", Path(data)


def start(run_dir: Path, data_dir: Path, module: str = "benchmarks.ledger_server") -> "subprocess.Popen[bytes]":
    """Start a ledger that owns a machine of 1 TiB."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHBRIDGE_")}
    return subprocess.Popen(
        [sys.executable, "-m", module],
        env=environ
        | {
            "WEIGHBRIDGE_RUN_DIR": str(run_dir),
            "WEIGHBRIDGE_LEDGER_DATA_DIR": str(data_dir),
            "WEIGHBRIDGE_LEDGER_MACHINE": "cpu:1024",
            "WEIGHBRIDGE_LEDGER_LOG_LEVEL": "warning",
        },
    )


@contextlib.contextmanager
def running() -> Iterator[tuple[str, Path]]:
    """A ledger with the floor beside it: (what a client dials, a folder on its disk)."""
    with folders() as (run_dir, data_dir):
        server = start(run_dir, data_dir)
        try:
            yield f"unix:{run_dir}/ledger.sock", data_dir
        finally:
            server.terminate()
            server.wait(timeout=PATIENCE_S)


def new_request() -> ledger_service_pb2.AdmitRequest:
    """A claim that no other call has made."""
    return ledger_service_pb2.AdmitRequest(
        request_id=f"benchmark-{next(_numbers)}",
        holder=lease_pb2.Holder(name="benchmark", process=_ME_MESSAGE),
        purpose=lease_pb2.Purpose(engine_kind="mlx", model_name="benchmark"),
        claim=requirement_pb2.Claim(host_bytes=CLAIM_BYTES),
    )


class Client:
    """One connection to the ledger."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.ledger = ledger_service_pb2_grpc.LedgerServiceStub(channel)
        self.floor = FloorStub(channel)

    async def admit(
        self, request: ledger_service_pb2.AdmitRequest | None = None
    ) -> tuple[grpc.aio.UnaryStreamCall, ledger_service_pb2.AdmitGranted]:
        """An open Admit call and its grant, which is on disk. Cancelling the call frees it."""
        call = self.ledger.Admit(request or new_request())
        answer = await call.read()
        assert answer.HasField("granted")
        return call, answer.granted

    async def admit_and_leave(self, request: ledger_service_pb2.AdmitRequest | None = None) -> None:
        """An admission, given back by ending its call."""
        call, _ = await self.admit(request)
        call.cancel()

    async def live(self) -> None:
        """A whole life: Admit, ActivateLease, ReleaseLease."""
        _, granted = await self.admit()
        lease_id, secret = granted.lease.lease_id, granted.secret
        await self.ledger.ActivateLease(
            ledger_service_pb2.ActivateLeaseRequest(lease_id=lease_id, secret=secret, process=_ME_MESSAGE)
        )
        await self.ledger.ReleaseLease(ledger_service_pb2.ReleaseLeaseRequest(lease_id=lease_id, secret=secret))

    async def read_empty_stream(self, request: empty_pb2.Empty) -> None:
        """The empty stream's one message and its end."""
        stream = self.floor.empty_stream(request)
        assert await stream.read() is not grpc.aio.EOF
        assert await stream.read() is grpc.aio.EOF

    async def until_nothing_is_leased(self) -> None:
        """Asks until what was left behind has been freed."""
        while (await self.ledger.ListLeases(ledger_service_pb2.ListLeasesRequest())).leases:
            pass


@contextlib.asynccontextmanager
async def connected(target: str, clients: int = 1) -> AsyncIterator[list[Client]]:
    """So many clients, each with a connection of its own, once the ledger answers all of them."""
    options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    async with contextlib.AsyncExitStack() as channels:
        found = []
        for _ in range(clients):
            channel = grpc.aio.insecure_channel(target, options=options)
            found.append(Client(await channels.enter_async_context(channel)))
        for client in found:
            await client.ledger.GetCapacity(
                ledger_service_pb2.GetCapacityRequest(), wait_for_ready=True, timeout=PATIENCE_S
            )
        yield found

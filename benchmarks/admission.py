"""One admission, from request to grant on disk, against an empty server stream on the same server."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
from google.protobuf import empty_pb2
from weighbridge_common import processes
from weighbridge_proto.channel import open_channel
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2, ledger_service_pb2_grpc
from weighbridge_proto.memory.v1 import requirement_pb2

from benchmarks.ledger_server import EMPTY_SERVICE
from benchmarks.measure import Comparison

ROUNDS = 300
WARMUP = 30
CLAIM_BYTES = 1 << 30


def _request(number: int, me: processes.ProcessIdentity) -> ledger_service_pb2.AdmitRequest:
    return ledger_service_pb2.AdmitRequest(
        request_id=f"benchmark-{number}",
        holder=lease_pb2.Holder(
            name="benchmark",
            process=me.to_message(),
        ),
        purpose=lease_pb2.Purpose(engine_kind="mlx", model_name="benchmark"),
        claim=requirement_pb2.Claim(host_bytes=CLAIM_BYTES),
    )


async def _measure(target: str, scratch: Path) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of admissions, empty streams and raw syncs, taken in turn."""
    admissions: list[float] = []
    streams: list[float] = []
    syncs: list[float] = []
    page = os.urandom(4096)
    me = processes.current()  # as a client does: once, not for each claim
    async with open_channel(target) as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)
        ledger = ledger_service_pb2_grpc.LedgerServiceStub(channel)
        empty = channel.unary_stream(
            f"/{EMPTY_SERVICE}/Stream",
            request_serializer=empty_pb2.Empty.SerializeToString,
            response_deserializer=empty_pb2.Empty.FromString,
        )
        with (scratch / "raw").open("wb", buffering=0) as raw:
            for number in range(WARMUP + ROUNDS):
                # Before either of the two a call that the ledger answers: neither finds the server colder.
                await ledger.ListLeases(ledger_service_pb2.ListLeasesRequest())
                start = time.perf_counter()
                call = ledger.Admit(_request(number, me))
                answer = await call.read()
                admitted = time.perf_counter()
                assert answer.HasField("granted")
                # Ends the stream, which frees the grant: done before anything else is timed.
                call.cancel()
                while (await ledger.ListLeases(ledger_service_pb2.ListLeasesRequest())).leases:
                    pass

                stream_start = time.perf_counter()
                stream = empty(empty_pb2.Empty())
                assert await stream.read() is not grpc.aio.EOF
                stream_end = time.perf_counter()
                await stream.read()

                sync_start = time.perf_counter()
                raw.write(page)
                os.fdatasync(raw.fileno())
                sync_end = time.perf_counter()
                if number >= WARMUP:
                    admissions.append((admitted - start) * 1e3)
                    streams.append((stream_end - stream_start) * 1e3)
                    syncs.append((sync_end - sync_start) * 1e3)
    return admissions, streams, syncs


def run() -> Iterator[Comparison]:
    """p50 of an admission against p50 of the empty stream, and of one raw sync beside them."""
    # The current folder, not /tmp: a temporary file system in memory would make syncs free.
    with tempfile.TemporaryDirectory(prefix="wb-") as sockets, tempfile.TemporaryDirectory(dir=".") as data:
        target = f"unix:{sockets}/run/ledger.sock"
        server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ledger_server"],
            env={k: v for k, v in os.environ.items() if not k.startswith("WEIGHBRIDGE_")}
            | {
                "WEIGHBRIDGE_RUN_DIR": f"{sockets}/run",
                "WEIGHBRIDGE_LEDGER_DATA_DIR": data,
                "WEIGHBRIDGE_LEDGER_MACHINE": "cpu:1024",
                "WEIGHBRIDGE_LEDGER_LOG_LEVEL": "warning",
            },
        )
        try:
            admissions, streams, syncs = asyncio.run(_measure(target, Path(data)))
        finally:
            server.terminate()
            server.wait(timeout=30)
    yield Comparison(
        "admission, request to grant on disk (p50)", "ms", admissions,
        "an empty server stream on the same server with the same interceptors (p50)", streams,
        "at most 2", lambda ratio: ratio <= 2,
    )  # fmt: skip
    yield Comparison(
        "the empty stream (p50)", "ms", streams, "one raw 4 KiB write with fdatasync on the same disk (p50)", syncs, ""
    )

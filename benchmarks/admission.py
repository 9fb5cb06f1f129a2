"""Admissions, from request to grant on disk, against an empty server stream on the same server: one alone, and 32 at
once."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf import empty_pb2
from weighbridge_proto.ledger.v1.ledger_service_pb2 import AdmitRequest

from benchmarks.ledger_client import Client, connected, new_request, running
from benchmarks.measure import Comparison

T = TypeVar("T")

ROUNDS = 1000
WARMUP = 50
ROUNDS_PER_LIFE = 4
"""A whole life is measured in every fourth round: it has no goal."""

CLIENTS = 32
BURST = 640
"""Calls of one burst, of all clients together: 20 each."""
BURSTS = 11

HELD = 160
"""Admissions of one burst that are kept until it is over, of all clients together: 5 each. A server serves 512 calls at
once (`max_concurrent_calls`), and a grant that was not activated is one."""
HELD_BURSTS = 44


@dataclass
class _Times:
    """Milliseconds."""

    admissions: list[float] = field(default_factory=list)
    lives: list[float] = field(default_factory=list)
    streams: list[float] = field(default_factory=list)
    syncs: list[float] = field(default_factory=list)


async def _one_at_a_time(client: Client, scratch: Path) -> _Times:
    """Admissions, whole lives, empty streams and raw syncs, taken in turn."""
    times = _Times()
    page = os.urandom(4096)
    with (scratch / "raw").open("wb", buffering=0) as raw:
        for number in range(-WARMUP, ROUNDS):
            # Before either of the two a call that the ledger answers: neither finds the server colder.
            request = new_request()
            await client.until_nothing_is_leased()
            start = time.perf_counter()
            call, _ = await client.admit(request)
            admission_ms = (time.perf_counter() - start) * 1e3
            # Ends the stream, which frees the grant: done before anything else is timed.
            call.cancel()
            nothing = empty_pb2.Empty()
            await client.until_nothing_is_leased()
            start = time.perf_counter()
            stream = client.floor.empty_stream(nothing)
            await stream.read()
            stream_ms = (time.perf_counter() - start) * 1e3
            await stream.read()

            start = time.perf_counter()
            raw.write(page)
            os.fdatasync(raw.fileno())
            sync_ms = (time.perf_counter() - start) * 1e3

            if number < 0:
                continue
            times.admissions.append(admission_ms)
            times.streams.append(stream_ms)
            times.syncs.append(sync_ms)
            if number % ROUNDS_PER_LIFE == 0:
                start = time.perf_counter()
                await client.live()
                times.lives.append((time.perf_counter() - start) * 1e3)
    return times


async def per_second(
    clients: Sequence[Client], work: Callable[[Client, T], Awaitable[None]], new: Callable[[], T], times: int
) -> float:
    """How often `work` ends in a second while each client has one in flight, over so many times in all.

    Args:
        clients: who works.
        work: one call.
        new: what it sends, made before the time begins.
        times: calls of all clients together.
    """

    async def one(client: Client, requests: Sequence[T]) -> None:
        for request in requests:
            await work(client, request)

    parts = [[new() for _ in range(times // len(clients))] for _ in clients]
    start = time.perf_counter()
    await asyncio.gather(*map(one, clients, parts))
    return times / (time.perf_counter() - start)


@dataclass
class _Rates:
    """Calls per second, of all clients together."""

    admissions: list[float] = field(default_factory=list)
    streams_beside: list[float] = field(default_factory=list)
    """Empty streams, as many and in turn with those."""
    rounds: list[float] = field(default_factory=list)
    """Admissions that are given back before their client asks again."""
    streams: list[float] = field(default_factory=list)


async def _all_at_once(clients: Sequence[Client]) -> _Rates:
    """Admissions alone, admissions with their giving back, and empty streams, in turn."""
    rates = _Rates()
    for number in range(-1, HELD_BURSTS):
        held: list[grpc.aio.UnaryStreamCall] = []

        async def keep(client: Client, request: AdmitRequest, held: list[grpc.aio.UnaryStreamCall] = held) -> None:
            call, _ = await client.admit(request)
            held.append(call)

        admitted = await per_second(clients, keep, new_request, HELD)
        for call in held:
            call.cancel()
        await clients[0].until_nothing_is_leased()
        streamed = await per_second(clients, Client.read_empty_stream, empty_pb2.Empty, HELD)
        if number >= 0:
            rates.admissions.append(admitted)
            rates.streams_beside.append(streamed)
    for number in range(-1, BURSTS):
        gone_round = await per_second(clients, Client.admit_and_leave, new_request, BURST)
        await clients[0].until_nothing_is_leased()
        streamed = await per_second(clients, Client.read_empty_stream, empty_pb2.Empty, BURST)
        if number >= 0:
            rates.rounds.append(gone_round)
            rates.streams.append(streamed)
    return rates


async def _measure(target: str, scratch: Path) -> tuple[_Times, _Rates]:
    async with connected(target) as (client,):
        times = await _one_at_a_time(client, scratch)
    async with connected(target, CLIENTS) as clients:
        return times, await _all_at_once(clients)


def run() -> Iterator[Comparison]:
    """One at a time and 32 at once, each against the empty stream; one raw sync stands beside them."""
    with running() as (target, scratch):
        times, rates = asyncio.run(_measure(target, scratch))
    floor = "an empty server stream on the same server with the same interceptors"
    yield Comparison(
        "admission, request to grant on disk (p50)", "ms", times.admissions, f"{floor} (p50)", times.streams,
        "at most 2", lambda ratio: ratio <= 2,
    )  # fmt: skip
    yield Comparison(
        "admission, request to grant on disk (p99)", "ms", times.admissions, f"{floor} (p99)", times.streams, "",
        at=0.99,
    )  # fmt: skip
    yield Comparison(
        "the empty stream (p50)", "ms", times.streams,
        "one raw 4 KiB write with fdatasync on the same disk (p50)", times.syncs, "",
    )  # fmt: skip
    yield Comparison(
        "a whole life: Admit, ActivateLease, ReleaseLease (p50)", "ms", times.lives, f"{floor} (p50)", times.streams, ""
    )
    same = f"the same {CLIENTS} clients with the empty stream"
    yield Comparison(
        f"durable admissions with {CLIENTS} clients in flight", "per s", rates.admissions,
        same, rates.streams_beside, "at least 0.5", lambda ratio: ratio >= 0.5,
    )  # fmt: skip
    yield Comparison(
        "the same, each given back before its client asks again: two commits and a call that is cut off", "per s",
        rates.rounds, same, rates.streams, "",
    )  # fmt: skip

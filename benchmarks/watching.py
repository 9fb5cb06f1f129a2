"""What watchers cost: one change told to 100 of them, and how late the ledger's event loop is while they watch and 32
clients admit."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc
from google.protobuf import empty_pb2, wrappers_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2

from benchmarks.admission import CLIENTS, per_second
from benchmarks.floor import REPEATS
from benchmarks.ledger_client import Client, connected, new_request, running
from benchmarks.measure import Comparison

WATCHERS = 100
ROUNDS = 7
CHANGES = 100
"""Changes of one round: half as many admissions, each granted and given back."""
ADMISSIONS = 1280
EMPTY_STREAMS = 4 * ADMISSIONS
"""As many as take about as long."""


@dataclass
class _Figures:
    told_to_all_us: list[float] = field(default_factory=list)
    """Processor time of the ledger for one change."""
    told_to_one_us: list[float] = field(default_factory=list)
    message_us: list[float] = field(default_factory=list)
    """Processor time for one message to one more watcher."""
    floor_us: list[float] = field(default_factory=list)
    lags_ms: list[float] = field(default_factory=list)
    floor_lags_ms: list[float] = field(default_factory=list)


class _Watcher:
    """Reads one watch and counts."""

    def __init__(self, client: Client) -> None:
        self._call = client.ledger.Watch(ledger_service_pb2.WatchRequest())
        self.bytes_per_change = 0
        self.revision = 0
        self._until = 0
        self._reached = asyncio.Event()

    async def begin(self) -> None:
        """Read the snapshot."""
        first = await self._call.read()
        assert first.HasField("snapshot")
        self.revision = first.revision

    async def read(self) -> None:
        """Read changes until the watch is cancelled."""
        while (change := await self._call.read()) is not grpc.aio.EOF:
            assert change.revision == self.revision + 1
            self.revision = change.revision
            self.bytes_per_change = change.ByteSize()
            if self.revision >= self._until:
                self._reached.set()

    async def reach(self, revision: int) -> None:
        """Wait until everything up to `revision` has been read."""
        self._until = revision
        while self.revision < revision:
            self._reached.clear()
            await self._reached.wait()

    def end(self) -> None:
        """Stop watching."""
        self._call.cancel()


@contextlib.asynccontextmanager
async def _watching(clients: Sequence[Client]) -> AsyncIterator[list[_Watcher]]:
    watchers = [_Watcher(client) for client in clients]
    for watcher in watchers:
        await watcher.begin()
    reading = [asyncio.create_task(watcher.read()) for watcher in watchers]
    try:
        yield watchers
    finally:
        for watcher in watchers:
            watcher.end()
        await asyncio.gather(*reading, return_exceptions=True)


async def _cpu_us(client: Client, work: Callable[[], Awaitable[None]]) -> float:
    before = await client.floor.used()
    await work()
    return ((await client.floor.used()).cpu_s - before.cpu_s) * 1e6


async def _cpu_us_per_change(changer: Client, watching: Sequence[Client]) -> tuple[float, int]:
    """(processor time of the ledger per change until all have read it, bytes of a change)."""
    async with _watching(watching) as watchers:

        async def change_and_tell() -> None:
            goal = watchers[0].revision + CHANGES
            for _ in range(CHANGES // 2):
                await changer.admit_and_leave()
            await asyncio.gather(*(watcher.reach(goal) for watcher in watchers))

        return await _cpu_us(changer, change_and_tell) / CHANGES, watchers[0].bytes_per_change


async def _cpu_us_per_floor_message(client: Client, size: int) -> float:
    async def read_all() -> None:
        count = 0
        async for _ in client.floor.repeat(wrappers_pb2.BytesValue(value=bytes(size))):
            count += 1
        assert count == REPEATS

    return await _cpu_us(client, read_all) / REPEATS


async def _lags_ms(client: Client, work: Callable[[], Awaitable[float]]) -> list[float]:
    await client.floor.used()
    await work()
    return (await client.floor.used()).lags_ms


async def _measure(target: str) -> _Figures:
    figures = _Figures()
    async with connected(target) as (changer,), connected(target, WATCHERS) as others:
        for number in range(-1, ROUNDS):
            to_all, _ = await _cpu_us_per_change(changer, others)
            to_one, size = await _cpu_us_per_change(changer, others[:1])
            floor = await _cpu_us_per_floor_message(others[0], size)
            if number >= 0:
                figures.told_to_all_us.append(to_all)
                figures.told_to_one_us.append(to_one)
                figures.message_us.append((to_all - to_one) / (WATCHERS - 1))
                figures.floor_us.append(floor)
        async with connected(target, CLIENTS) as clients, _watching(others) as watchers:
            figures.floor_lags_ms = await _lags_ms(
                changer,
                lambda: per_second(clients, Client.read_empty_stream, empty_pb2.Empty, EMPTY_STREAMS),
            )
            figures.lags_ms = await _lags_ms(
                changer, lambda: per_second(clients, Client.admit_and_leave, new_request, ADMISSIONS)
            )
            last = max(watcher.revision for watcher in watchers)
            await asyncio.gather(*(watcher.reach(last) for watcher in watchers))
    return figures


def run() -> Iterator[Comparison]:
    """Processor time of the ledger for each change and each message, then the lag of its event loop."""
    with running() as (target, _):
        figures = asyncio.run(_measure(target))
    yield Comparison(
        f"one change told to {WATCHERS} watchers (processor time of the ledger)", "µs", figures.told_to_all_us,
        "the same change told to 1", figures.told_to_one_us, "",
    )  # fmt: skip
    yield Comparison(
        "one change told to one watcher more (processor time of the ledger)", "µs", figures.message_us,
        "one message as long of a stream that does nothing else", figures.floor_us, "",
    )  # fmt: skip
    yield Comparison(
        f"lag of the ledger's event loop while {CLIENTS} clients admit and {WATCHERS} watch (p99)", "ms",
        figures.lags_ms, f"the same clients with the empty stream, and {WATCHERS} who watch nothing happen (p99)",
        figures.floor_lags_ms, "", at=0.99,
    )  # fmt: skip

"""A ledger that is killed with 10,000 leases: how long until it answers again, what memory and a page of them take, and
how late its event loop is while it watches over them. Against one that is killed with none."""

import asyncio
import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psutil
from weighbridge_ledger.book import Ask, Book, Ceilings, Claim, Home, Moment, Policy
from weighbridge_ledger.store import SqliteStore
from weighbridge_ledger.store.sqlite import DATABASE
from weighbridge_proto.ledger.v1 import ledger_service_pb2

from benchmarks.ledger_client import CLAIM_BYTES, ME, PATIENCE_S, connected, folders, start
from benchmarks.measure import Comparison

LEASES = 10_000
ROUNDS = 5
WATCHED_S = 2.0
"""Eight sweeps."""
MIB = 2**20


@dataclass
class _Figures:
    ready_s: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    lags_ms: list[float] = field(default_factory=list)
    page_ms: list[float] = field(default_factory=list)


def _fill(data_dir: Path) -> None:
    """Write what a ledger would have written that granted and activated so many leases to this process."""
    numbers = count()
    now = Moment(time.monotonic(), time.time())
    book = Book(
        Ceilings(LEASES * CLAIM_BYTES), Policy(), Home(ME.boot_id, ME.pid_namespace),
        new_id=lambda: secrets.token_hex(16), new_secret=lambda: secrets.token_hex(16), spread=lambda: 0.5, now=now,
    )  # fmt: skip
    longest_s = Policy().max_term_s
    for _ in range(LEASES):
        ask = Ask(f"held-{next(numbers)}", ME, Claim(CLAIM_BYTES), holder_name="benchmark", term_s=longest_s)
        lease_id = book.admit(ask, now).lease.lease_id
        secret = book.secret_of(lease_id)
        assert secret is not None
        book.activate(lease_id, secret, ME, (), now)
    store = SqliteStore(data_dir / DATABASE)
    store.begin_epoch()
    store.commit(book.drain().writes)
    store.close()


class _Ledger:
    """One that is killed again and again."""

    def __init__(self, run_dir: Path, data_dir: Path, leases: int) -> None:
        self._folders = run_dir, data_dir
        self._socket = run_dir / "ledger.sock"
        self._leases = leases
        self._process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None
            self._socket.unlink(missing_ok=True)

    async def start(self, into: _Figures | None) -> None:
        """Start it, and measure from there."""
        begun = time.perf_counter()
        self._process = start(*self._folders)
        while not self._socket.exists():
            assert self._process.poll() is None, "the ledger has not started"
            await asyncio.sleep(0.001)
        async with connected(f"unix:{self._socket}") as (client,):
            ready_s = time.perf_counter() - begun
            await client.admit_and_leave()  # something for the next start to find in the log
            if into is None:
                return
            into.ready_s.append(ready_s)
            into.rss_mib.append(psutil.Process(self._process.pid).memory_info().rss / MIB)
            asked = time.perf_counter()
            page = await client.ledger.ListLeases(ledger_service_pb2.ListLeasesRequest(page_size=50))
            into.page_ms.append((time.perf_counter() - asked) * 1e3)
            assert len(page.leases) >= min(self._leases, 50)
            await client.floor.used()
            await asyncio.sleep(WATCHED_S)
            into.lags_ms.extend((await client.floor.used()).lags_ms)


async def _measure(many: _Ledger, none: _Ledger) -> tuple[_Figures, _Figures]:
    with_many, with_none = _Figures(), _Figures()
    for number in range(-1, ROUNDS):
        for ledger, into in ((many, with_many), (none, with_none)):
            await ledger.start(into if number >= 0 else None)
            ledger.kill()
    return with_many, with_none


def run() -> Iterator[Comparison]:
    """Starts after SIGKILL with 10,000 leases and with none, in turn."""
    with folders() as full, folders() as empty:
        _fill(full[1])
        many, none = _Ledger(*full, LEASES), _Ledger(*empty, 0)
        try:
            with_many, with_none = asyncio.run(_measure(many, none))
        finally:
            many.kill()
            none.kill()
    leases = f"{LEASES:,} leases"
    yield Comparison(
        f"start after SIGKILL with {leases}, until GetCapacity is answered", "s", with_many.ready_s,
        "the same with none", with_none.ready_s, "",
    )  # fmt: skip
    yield Comparison(
        f"memory of the ledger with {leases}", "MiB", with_many.rss_mib, "with none", with_none.rss_mib, ""
    )
    yield Comparison(f"a page of 50 of {leases}", "ms", with_many.page_ms, "a page of none", with_none.page_ms, "")
    yield Comparison(
        f"lag of the event loop of a ledger that watches over {leases} (p99)", "ms", with_many.lags_ms,
        "over none (p99)", with_none.lags_ms, "", at=0.99,
    )  # fmt: skip

"""A file system that is really full, and one that is almost: a small one of its own, mounted without privileges."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from weighbridge_common import processes
from weighbridge_ledger.book import Charge, Claim, Lease, LeaseState
from weighbridge_ledger.book.records import PutLease
from weighbridge_ledger.store import SqliteStore, StoreError
from weighbridge_ledger.store.sqlite import PROBE_BYTES
from weighbridge_ledger.store.unusable import ELSEWHERE
from weighbridge_proto.channel import open_channel
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2_grpc
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

MIB, KIB = 2**20, 2**10
PATIENCE_S = 30

HAS_ROOM_FOR_LITTLE = 48 * KIB
"""Room for a dozen small commits of a page or two, and not for a batch of admissions."""


ATTEMPTS_S = 1.5
"""Long enough for some of the ledger's own attempts, one each quarter of a second."""


class SmallDisk:
    """4 MiB of memory as a file system at `folder`, seen by those that are started through `enter`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        mount = f"mount -t tmpfs -o size=4m small {folder} && echo mounted && exec sleep infinity"
        self._keeper = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout is not None
        self.mounted = self._keeper.stdout.readline() == "mounted\n"

    def enter(self, *argv: str) -> list[str]:
        """A command that sees the file system."""
        return ["nsenter", "--preserve-credentials", "--user", "--mount", f"--target={self._keeper.pid}", *argv]

    @property
    def seen_from_here(self) -> Path:
        """The folder, for this process."""
        return Path(f"/proc/{self._keeper.pid}/root{self.folder}")

    def fill(self, leave: int = 0) -> None:
        """Write until there is no room, then give `leave` bytes back."""
        filler = self.seen_from_here / "filler"
        with filler.open("ab", buffering=0) as file:
            try:
                while file.write(b"\xa5" * 4096) == 4096:
                    pass
            except OSError as full:
                assert full.errno == 28  # ENOSPC
        with filler.open("r+b") as file:
            file.truncate(filler.stat().st_size - leave)

    def empty(self) -> None:
        """Give all room back."""
        (self.seen_from_here / "filler").unlink()

    def forbid_writing(self) -> None:
        """Mount it anew, for reading only."""
        subprocess.run(self.enter("mount", "-o", "remount,ro", str(self.folder)), check=True)

    def end(self) -> None:
        """Unmount it: it goes with the last process that sees it."""
        self._keeper.kill()
        self._keeper.communicate()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A small file system."""
    if not sys.platform.startswith("linux"):
        pytest.skip("user namespaces are Linux's")
    (tmp_path / "data").mkdir()
    made = SmallDisk(tmp_path / "data")
    try:
        if not made.mounted:
            pytest.skip("this system lets nobody mount in a namespace of their own")
        yield made
    finally:
        made.end()


class LedgerOnIt:
    """The ledger's process on the small file system."""

    def __init__(self, disk: SmallDisk, environ: dict[str, str], folder: Path) -> None:
        self.disk, self.environ, self.folder = disk, environ, folder
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: grpc.aio.Channel | None = None
        self.me = processes.current().to_message()

    async def start(self) -> None:
        self.process = await asyncio.to_thread(
            subprocess.Popen, self.disk.enter(sys.executable, "-m", "weighbridge_ledger"), env=self.environ
        )
        self.channel = open_channel(f"unix:{self.folder}/run/ledger.sock")
        self.stub = ledger_service_pb2_grpc.LedgerServiceStub(self.channel)
        await self.stub.GetCapacity(pb.GetCapacityRequest(), wait_for_ready=True, timeout=PATIENCE_S)

    async def end(self, number: signal.Signals) -> int:
        assert self.process is not None and self.channel is not None
        self.process.send_signal(number)
        code = await asyncio.to_thread(self.process.wait, PATIENCE_S)
        await self.channel.close()
        return code

    async def active(self):
        """A grant of 1 MiB, activated."""
        call = self.stub.Admit(
            pb.AdmitRequest(holder={"name": "h", "process": self.me}, claim={"host_bytes": MIB}), timeout=PATIENCE_S
        )
        granted = (await call.read()).granted
        await self.stub.ActivateLease(
            pb.ActivateLeaseRequest(lease_id=granted.lease.lease_id, secret=granted.secret, process=self.me)
        )
        return granted

    async def refused(self) -> bool:
        """Whether a new claim is refused for the disk."""
        try:
            await self.active()
        except grpc.aio.AioRpcError as error:
            failure = RpcFailure.from_rpc_error(error)
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
            return True
        return False

    async def shrink(self, granted, size: int) -> None:
        """A commit of one row."""
        await self.stub.ResizeLease(
            pb.ResizeLeaseRequest(lease_id=granted.lease.lease_id, secret=granted.secret, claim={"host_bytes": size})
        )


@pytest.fixture
async def ledger_on_it(disk: SmallDisk, ledger_process, tmp_path: Path) -> AsyncIterator[LedgerOnIt]:
    """A ledger whose data folder is the small file system."""
    environ = {**ledger_process.environ, "WEIGHBRIDGE_LEDGER_LOG_LEVEL": "error"}
    ledger = LedgerOnIt(disk, environ, tmp_path)
    await ledger.start()
    yield ledger
    if ledger.process is not None and ledger.process.poll() is None:
        ledger.process.kill()
        ledger.process.wait()
    if ledger.channel is not None:
        await ledger.channel.close()


async def test_a_disk_that_is_full_refuses_new_claims_until_there_is_room_for_them(
    ledger_on_it: LedgerOnIt, disk: SmallDisk
) -> None:
    ledger = ledger_on_it
    held = await ledger.active()
    disk.fill()
    told = {held.lease.lease_id}
    while not await ledger.refused():
        told = {lease.lease_id for lease in (await ledger.stub.ListLeases(pb.ListLeasesRequest())).leases}
        assert len(told) < 1000, "never full"

    # A little room: what is small is written, and the next claim would be small as well. It is refused all the same:
    # with the first that was let in, admissions would be open for everybody, and fail one by one.
    disk.empty()
    disk.fill(leave=HAS_ROOM_FOR_LITTLE)
    size, shrunk = MIB, 0
    until = time.monotonic() + ATTEMPTS_S
    while time.monotonic() < until or not shrunk:
        size -= 1
        try:
            await ledger.shrink(held, size)
            shrunk += 1
        except grpc.aio.AioRpcError as error:
            assert RpcFailure.from_rpc_error(error).reason == "STORE_UNAVAILABLE"
        assert await ledger.refused()

    # Room again: admissions open by themselves.
    disk.empty()
    async with asyncio.timeout(PATIENCE_S):
        while await ledger.refused():  # until the ledger's own next attempt, once a quarter of a second
            pass
    kept = {lease.lease_id: lease for lease in (await ledger.stub.ListLeases(pb.ListLeasesRequest())).leases}
    await ledger.end(signal.SIGKILL)

    await ledger.start()
    leases = {lease.lease_id: lease for lease in (await ledger.stub.ListLeases(pb.ListLeasesRequest())).leases}
    assert told <= set(leases) == set(kept)
    assert leases[held.lease.lease_id].charge.host_bytes == size
    assert {lease.state for lease in leases.values()} == {lease_pb2.LEASE_STATE_ACTIVE}
    assert await ledger.end(signal.SIGTERM) == 0


async def test_a_start_on_a_full_disk_is_refused_and_goes_well_once_there_is_room(
    ledger_on_it: LedgerOnIt, disk: SmallDisk
) -> None:
    ledger = ledger_on_it
    held = await ledger.active()
    await ledger.end(signal.SIGKILL)
    disk.fill()
    said = await refused_start(disk, ledger.environ)
    assert f"The disk of {disk.folder} is full" in said
    assert f"Make room there, or {ELSEWHERE}." in said
    disk.empty()
    await ledger.start()
    leases = (await ledger.stub.ListLeases(pb.ListLeasesRequest())).leases
    assert [lease.lease_id for lease in leases] == [held.lease.lease_id]
    assert await ledger.end(signal.SIGTERM) == 0


async def refused_start(disk: SmallDisk, environ: dict[str, str]) -> str:
    """What a ledger says that cannot start."""
    argv = disk.enter(sys.executable, "-m", "weighbridge_ledger")
    done = await asyncio.to_thread(
        subprocess.run, argv, env=environ, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode not in (0, -signal.SIGSEGV, -signal.SIGBUS)
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("leave", [0, 8 * KIB, 48 * KIB, 100 * KIB])
async def test_a_first_start_on_a_full_disk_says_that_it_is_full(disk: SmallDisk, ledger_process, leave: int) -> None:
    """SQLite says "disk I/O error" or "database or disk is full", by which file has no room."""
    disk.fill(leave)
    said = await refused_start(disk, ledger_process.environ)
    assert f"The disk of {disk.folder} is full" in said
    assert f"Make room there, or {ELSEWHERE}." in said


async def test_a_start_on_a_disk_that_cannot_be_written_says_what_to_do(disk: SmallDisk, ledger_process) -> None:
    disk.forbid_writing()
    said = await refused_start(disk, ledger_process.environ)
    assert f"may not write to its data folder {disk.folder}: Read-only file system." in said
    assert f"Let its user write there, or {ELSEWHERE}." in said


LOG_WITHOUT_DATABASE = """
import pathlib, sys
from weighbridge_ledger.book import Claim
from weighbridge_ledger.book.records import PutTicket, Ticket
from weighbridge_ledger.store import SqliteStore, StoreError
store = SqliteStore(pathlib.Path(sys.argv[1]) / "ledger.db")
store.commit([PutTicket(Ticket(f"r{n:040}", Claim(3), n, 1.5, 4)) for n in range(14_000)])
store._db.execute("PRAGMA wal_checkpoint(RESTART)")
print("log written", flush=True)
sys.stdin.readline()
try:
    store.probe()
    print("there is room")
except StoreError as error:
    print(error)
print(len(store.load().tickets))
"""


def test_room_in_the_log_alone_is_no_room(disk: SmallDisk) -> None:
    """The log is overwritten where it lies. What it holds has to go into the database, and that has to grow."""
    argv = disk.enter(sys.executable, "-c", LOG_WITHOUT_DATABASE, str(disk.folder))
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "log written\n"
    assert (disk.seen_from_here / "ledger.db-wal").stat().st_size > 4 * PROBE_BYTES
    disk.fill()
    said, _ = child.communicate("\n", timeout=PATIENCE_S)
    assert said.splitlines() == ["database or disk is full", "14000"]


def test_what_is_small_fits_where_a_probe_does_not(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ledger.db")
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + PROBE_BYTES // 4096 // 2}")
    lease = Lease("l", "", 2, 1, LeaseState.ACTIVE, Claim(1), processes.current(), charge=Charge(1))
    store.commit([PutLease(lease)])
    for _ in range(2):
        with pytest.raises(StoreError, match="full"):
            store.probe()
    store.commit([PutLease(lease)])
    assert store.load().leases == (lease,)
    assert store._db.execute("SELECT COUNT(*) FROM meta").fetchone() == (0,)
    store.close()

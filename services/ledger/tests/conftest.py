"""A book with a clock that only the test moves, and short words for its verbs. Sizes in tests are small integers."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc
import pytest
from weighbridge_common import processes
from weighbridge_common.processes import ProcessIdentity
from weighbridge_common.server import ServerContext, start_server
from weighbridge_ledger.book import (
    Ask,
    Book,
    Ceilings,
    Claim,
    DeviceWant,
    Event,
    Home,
    Lease,
    LeaseState,
    Moment,
    Policy,
    Refused,
)
from weighbridge_ledger.book.admission import Admission
from weighbridge_ledger.health.policy import HealthPolicy
from weighbridge_ledger.machine.ceilings import Sharing
from weighbridge_ledger.machine.model import UNMEASURED, Device, LiveMemory, Machine, Pool, Source
from weighbridge_ledger.service.app import assemble
from weighbridge_ledger.service.servicer import LedgerServicer
from weighbridge_ledger.settings import LedgerSettings
from weighbridge_ledger.store import MemoryStore
from weighbridge_proto.channel import open_channel
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb
from weighbridge_proto.ledger.v1 import ledger_service_pb2_grpc

# Helpers lie beside the tests, and pytest's importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

HOME = Home("boot-1", "pid:[1]")
START_WALL = 1_000_000.0


class World:
    """One book, its committed store, its clock and the processes that are alive."""

    def __init__(self, ceilings: Ceilings | int, policy: Policy | None = None) -> None:
        self.ceilings = Ceilings(ceilings) if isinstance(ceilings, int) else ceilings
        self.policy = policy or Policy()
        self.time = 0.0
        self.store = MemoryStore()
        self.events: list[Event] = []
        self.dead: set[ProcessIdentity] = set()
        self._ids = itertools.count(1)
        self.book = self._new_book()

    def _new_book(self) -> Book:
        return Book(
            self.ceilings,
            self.policy,
            HOME,
            new_id=lambda: f"lease-{next(self._ids)}",
            new_secret=lambda: f"secret-{next(self._ids)}",
            spread=lambda: 0.5,
            now=self.now,
        )

    @property
    def now(self) -> Moment:
        return Moment(self.time, START_WALL + self.time)

    def drain(self) -> list[Event]:
        """Commit and tell what the last verb left."""
        drained = self.book.drain()
        if drained.writes:
            self.store.commit(drained.writes)
        self.events += drained.events
        return list(drained.events)

    def pass_time(self, seconds: float) -> None:
        """Time passes with the ledger awake: it looks at the clock every half second."""
        until = self.time + seconds
        while self.time < until:
            self.time = min(until, self.time + 0.5)
            self.book.tick(self.now)
            self.drain()

    def stand_still(self, seconds: float) -> None:
        """Time passes while the ledger does not run."""
        self.time += seconds

    def restart(self) -> None:
        """The ledger dies and comes back with what was committed, and nothing else."""
        self.book = self._new_book()
        self.book.restore(self.store.load(), self.now)
        self.drain()

    @staticmethod
    def process(pid: int, *, boot: str = HOME.boot_id, namespace: str = HOME.pid_namespace) -> ProcessIdentity:
        return ProcessIdentity(pid, 100 + pid, boot, namespace)

    def ask(
        self, size: int, pid: int = 1, request_id: str = "", devices: dict[str, int] | None = None, **more: object
    ) -> Ask:
        wants = tuple(DeviceWant(device, amount) for device, amount in (devices or {}).items())
        holder = more.pop("holder", self.process(pid))
        return Ask(request_id, holder, Claim(size, wants), **more)  # type: ignore[arg-type]

    def admit(self, size: int, pid: int = 1, request_id: str = "", **more: object) -> Admission:
        try:
            return self.book.admit(self.ask(size, pid, request_id, **more), self.now)  # type: ignore[arg-type]
        finally:
            self.drain()

    def secret(self, lease_id: str) -> str:
        secret = self.book.secret_of(lease_id)
        assert secret is not None
        return secret

    def active(self, size: int, pid: int = 1, *engines: int, **more: object) -> tuple[str, str]:
        """A lease that was granted and activated: (id, secret)."""
        admission = self.admit(size, pid, **more)  # type: ignore[arg-type]
        assert admission.lease.state is LeaseState.GRANTED
        lease_id = admission.lease.lease_id
        secret = self.secret(lease_id)
        self.book.activate(
            lease_id, secret, admission.lease.holder, tuple(self.process(engine) for engine in engines), self.now
        )
        self.drain()
        return lease_id, secret

    def resident(self, size: int, pid: int = 1, *engines: int, **more: object) -> tuple[str, str]:
        """An active lease whose engine has loaded, and which nobody uses: (id, secret)."""
        lease_id, secret = self.active(size, pid, *engines, term_s=600, **more)  # type: ignore[arg-type]
        self.book.renew(lease_id, secret, None, self.now, load_complete=True)
        self.drain()
        return lease_id, secret

    def rest(self) -> None:
        """Long enough that everybody who is not in use has been idle, and is past the minimum residency."""
        self.pass_time(self.policy.min_residency_s + self.policy.idle_s)

    def begin_use(self, lease_id: str, secret: str) -> str:
        try:
            return self.book.begin_use(lease_id, secret, "", self.now)
        finally:
            self.drain()

    def end_use(self, lease_id: str, secret: str, use: str) -> None:
        self.book.end_use(lease_id, secret, use, self.now)
        self.drain()

    def vacating(self) -> list[str]:
        """The leases that were asked to vacate, in the order of asking for them."""
        return [lease_id for lease_id in self.book.lease_ids() if self.state(lease_id) is LeaseState.VACATING]

    def wait_codes(self, lease_id: str) -> list[str]:
        """What a claim waits for, by its codes."""
        waiting = self.book.waiting_for(lease_id)
        assert waiting is not None
        return [reason.code.value for reason in waiting[2]]

    def release(self, lease_id: str, secret: str) -> Lease:
        try:
            return self.book.release(lease_id, secret, self.is_alive, self.now)
        finally:
            self.drain()

    def is_alive(self, process: ProcessIdentity) -> bool | None:
        return process not in self.dead if HOME.sees(process) else None

    def die(self, *pids: int) -> None:
        """Processes die, and the sweep sees it."""
        self.dead |= {self.process(pid) for pid in pids}
        self.book.processes_died(frozenset(self.dead & self.book.processes_to_watch()), self.now)
        self.drain()

    def state(self, lease_id: str) -> LeaseState:
        view = self.book.view(lease_id)
        assert view is not None
        return view.lease.state

    def suspect(self, lease_id: str) -> bool:
        view = self.book.view(lease_id)
        assert view is not None
        return view.lease.suspect

    def committed(self) -> int:
        return self.book.committed().total_bytes

    def refused(self, verb: Callable[[], object]) -> str:
        """The reason for which `verb` is refused."""
        with pytest.raises(Refused) as refused:
            verb()
        self.drain()
        return refused.value.reason.value


@pytest.fixture
def new_world() -> type[World]:
    """The class of worlds."""
    return World


GIB = 2**30


class DeclaredProbe:
    """A machine that was declared: nothing is measured. 40 GiB of RAM without a card: a host share of 24 GiB."""

    def __init__(self, ram_gib: int = 40, cards: Sequence[Device] = ()) -> None:
        self.machine = Machine(
            "node", Pool.DISCRETE if cards else Pool.CPU, ram_gib * GIB, tuple(cards), Source.DECLARED
        )
        self.findings = ()

    async def live(self) -> LiveMemory:
        return UNMEASURED


class GatedStore(MemoryStore):
    """A store whose commits wait while its gate is closed, as on a slow disk."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def commit(self, writes) -> None:
        assert self.gate.wait(30)
        super().commit(writes)


class Ledger:
    """A ledger on a real socket with a clock that only the test moves."""

    def __init__(
        self,
        folder: Path,
        policy: Policy | None = None,
        *,
        real_processes: bool = False,
        sharing: Sharing = Sharing.AUTO,
    ) -> None:
        self.folder = folder
        self.sharing = sharing
        self.health = HealthPolicy()
        self.store = GatedStore()
        self.real_processes = real_processes
        self.policy = policy or Policy()
        self.time = 0.0
        self.dead: set[ProcessIdentity] = set()
        self.probe = DeclaredProbe()
        self.servicer: LedgerServicer
        self.channel: grpc.aio.Channel
        self.stub: ledger_service_pb2_grpc.LedgerServiceAsyncStub
        self.stop: Callable

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator["Ledger"]:
        settings = LedgerSettings(run_dir=str(self.folder), data_dir=self.folder / "data", grace_s=0.5)
        async with await start_server(settings, "ledger", self._build) as running:
            self.stop = running.stop
            self.channel = open_channel(running.target)
            self.stub = ledger_service_pb2_grpc.LedgerServiceStub(self.channel)
            try:
                yield self
            finally:
                self.store.gate.set()
                await self.channel.close()

    async def _build(self, context: ServerContext) -> LedgerServicer:
        self.servicer = await assemble(
            self.probe,
            self.store,
            self.policy,
            clock=lambda: Moment(self.time, START_WALL + self.time),
            is_alive=processes.is_alive if self.real_processes else self._is_alive,
            home=None if self.real_processes else HOME,
            health=self.health,
            sharing=self.sharing,
        )
        context.add(ledger_service_pb2_grpc.add_LedgerServiceServicer_to_server, self.servicer)
        self.servicer.start(context.stopping, context.set_serving)
        return self.servicer

    def _is_alive(self, process: ProcessIdentity) -> bool | None:
        return process not in self.dead if HOME.sees(process) else None

    async def pass_time(self, seconds: float) -> None:
        until = self.time + seconds
        while self.time < until:
            self.time = min(until, self.time + 0.5)
            self.servicer._keeper.run(lambda book, now: book.tick(now))
        await self.servicer._keeper.committer.durable()

    @property
    def committed(self) -> int:
        return self.servicer._keeper.book.committed().total_bytes // GIB

    @staticmethod
    def process(pid: int):
        return World.process(pid).to_message()

    def request(self, gib: float, pid: int = 1, request_id: str = "", **more) -> pb.AdmitRequest:
        return pb.AdmitRequest(
            request_id=request_id,
            holder={"name": f"holder-{pid}", "process": self.process(pid)},
            claim={"host_bytes": int(gib * GIB)},
            **more,
        )

    def admit(self, gib: float, pid: int = 1, request_id: str = "", **more):
        return self.stub.Admit(self.request(gib, pid, request_id, **more))

    async def granted(self, gib: float, pid: int = 1, request_id: str = "", **more):
        """An open Admit call and its grant."""
        call = self.admit(gib, pid, request_id, **more)
        response = await call.read()
        assert response.WhichOneof("event") == "granted", response
        return call, response.granted

    async def active(self, gib: float, pid: int = 1, *engines: int, request_id: str = "", **more):
        """An activated lease: (lease id, secret)."""
        call, granted = await self.granted(gib, pid, request_id, **more)
        await self.stub.ActivateLease(
            pb.ActivateLeaseRequest(
                lease_id=granted.lease.lease_id,
                secret=granted.secret,
                process=self.process(pid),
                engine_processes=[self.process(engine) for engine in engines],
            )
        )
        assert await call.read() is grpc.aio.EOF
        return granted.lease.lease_id, granted.secret

    async def release(self, lease_id: str, secret: str):
        return (await self.stub.ReleaseLease(pb.ReleaseLeaseRequest(lease_id=lease_id, secret=secret))).lease

    async def leases(self):
        return list((await self.stub.ListLeases(pb.ListLeasesRequest())).leases)

    @staticmethod
    async def failure(call) -> RpcFailure:
        """How a call or a read fails."""
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        return RpcFailure.from_rpc_error(error.value)


@pytest.fixture
def new_ledger() -> type[Ledger]:
    """The class of ledgers."""
    return Ledger


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    """A ledger of 24 GiB that serves."""
    async with Ledger(tmp_path).serve() as serving:
        yield serving


PATIENCE_S = 30
"""A bound for tests that would hang, not an expectation."""


class LedgerProcess:
    """`python -m weighbridge_ledger` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("WEIGHBRIDGE_")},
            "WEIGHBRIDGE_RUN_DIR": str(folder / "run"),
            "WEIGHBRIDGE_LEDGER_DATA_DIR": str(folder / "data"),
            "WEIGHBRIDGE_LEDGER_MACHINE": "unified:64",
            "WEIGHBRIDGE_LEDGER_GRACE_S": "1",
        }
        self.process: subprocess.Popen | None = None
        self.channel: grpc.aio.Channel | None = None

    async def start(self):
        await self.running()
        self.channel = open_channel(f"unix:{self.folder}/run/ledger.sock")
        stub = ledger_service_pb2_grpc.LedgerServiceStub(self.channel)
        await stub.GetCapacity(pb.GetCapacityRequest(), wait_for_ready=True, timeout=PATIENCE_S)
        return stub

    async def restart_by(self, number: signal.Signals) -> None:
        """End the process and start another one; channels to its socket find the new one by themselves."""
        assert self.process is not None
        self.process.send_signal(number)
        await asyncio.to_thread(self.process.wait, PATIENCE_S)
        await self.running()

    async def running(self) -> None:
        """Start the process unless it runs."""
        if self.process is None or self.process.poll() is not None:
            self.process = await asyncio.to_thread(
                subprocess.Popen, [sys.executable, "-m", "weighbridge_ledger"], env=self.environ
            )

    async def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        assert self.channel is not None
        self.process.send_signal(number)
        code = await asyncio.to_thread(self.process.wait, PATIENCE_S)
        await self.channel.close()
        return code


@pytest.fixture
async def ledger_process(tmp_path: Path) -> AsyncIterator[LedgerProcess]:
    """A ledger that can be started and ended."""
    # Unix socket paths are short; pytest's folders may not be.
    ledger = LedgerProcess(tmp_path)
    yield ledger
    if ledger.process is not None and ledger.process.poll() is None:
        ledger.process.kill()
        ledger.process.wait()
    if ledger.channel is not None:
        with contextlib.suppress(Exception):
            await ledger.channel.close()

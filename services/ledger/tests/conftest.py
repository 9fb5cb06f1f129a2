"""A book with a clock that only the test moves, and short words for its verbs. Sizes in tests are small integers."""

import itertools
from collections.abc import Callable

import pytest
from weighbridge_common.processes import ProcessIdentity
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
from weighbridge_ledger.store import MemoryStore

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

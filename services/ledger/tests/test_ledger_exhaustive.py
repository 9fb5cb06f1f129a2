"""Every history of a few clients and a small machine, up to some length: no byte is used twice, none is lost.

Breadth first, and a state that was reached before is not followed again, so what breaks is told by its shortest trace.
The real book is searched, with its real store and times of a few seconds. WEIGHBRIDGE_BOOK_DEPTH adds steps to the
length; each makes it about three times as long.
"""

import os
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace

import pytest
from book_search import branch, check_ceilings, check_sums, picture
from weighbridge_ledger.book import Ceilings, Claim, DeviceWant, LeaseState, Policy, Refused

DEEPER = int(os.environ.get("WEIGHBRIDGE_BOOK_DEPTH", "0"))

STEP_S = 2.0
POLICY = Policy(
    term_s=4.0,
    min_term_s=4.0,
    activate_by_s=4.0,
    grace_s=4.0,
    vacate_s=4.0,
    max_wait_s=8.0,
    ticket_s=4.0,
    protect_passes=1,
    protect_after_s=4.0,
    age_s=4.0,
    idle_s=2.0,
    min_residency_s=2.0,
    max_residency_s=2.0,
    longest_load_s=6.0,
)
LONG_AGO_S = 10.0
RANK = {state: rank for rank, state in enumerate(LeaseState)}
ENDED = LeaseState.RELEASED


@dataclass
class Client:
    """What one client knows and does. It asks twice at most, and is started anew once at most."""

    number: int
    size: int
    place: str = "host"
    """The host, a card, or any card (empty)."""
    exclusive: bool = False
    process: int = 1
    """Which of its processes; the one before may still be there, and is told nothing any more."""
    attempt: int = 1
    alive: bool = True
    silent: bool = False
    """Stopped, or asleep: it says nothing until it attaches again."""
    lease_id: str = ""
    stream: int = -1
    secret: str = ""
    in_use: bool = False
    engine_bytes: int = 0
    """What its engine may use; 0: there is none."""
    old: tuple[tuple[str, str], ...] = ()
    """Leases and secrets that were replaced or given back: a late message may carry them."""

    @property
    def pid(self) -> int:
        return 10 * self.number + self.process

    @property
    def engine_pid(self) -> int:
        return 100 * self.attempt + self.pid

    @property
    def request_id(self) -> str:
        return f"request-{self.number}-{self.attempt}"


@dataclass
class State:
    """A world, its clients, and how it came about."""

    world: object
    clients: list[Client]
    trace: tuple[str, ...] = ()
    ranks: dict[str, int] = field(default_factory=dict)

    def next(self, step: str) -> "State":
        return State(branch(self.world), [copy(client) for client in self.clients], (*self.trace, step), self.ranks)

    def lease(self, client: Client) -> LeaseState:
        view = self.world.book.view(client.lease_id) if client.lease_id else None
        return ENDED if view is None else view.lease.state

    def suspect(self, client: Client) -> bool:
        return self.lease(client).charged and self.world.suspect(client.lease_id)

    def picture(self) -> tuple:
        names = {client.lease_id: client.number for client in self.clients if client.lease_id}
        clients = tuple(
            (
                client.process,
                client.attempt,
                client.alive,
                client.silent,
                client.lease_id in names and self.lease(client),
                client.stream >= 0,
                self.knows_the_secret(client),
                client.in_use,
                client.engine_bytes,
            )
            for client in self.clients
        )
        return (clients, picture(self.world, names, LONG_AGO_S))

    def knows_the_secret(self, client: Client) -> bool:
        entry = self.world.book._entries.get(client.lease_id)
        return entry is not None and self.world.book._holds_secret(entry, client.secret)


Step = Callable[[State, Client], None]


# -- what a client may do ----------------------------------------------------------------------------------------------


def ask(state: State, client: Client) -> None:
    on_host, devices = (client.size, {}) if client.place == "host" else (0, {client.place: client.size})
    admission = state.world.admit(
        on_host, client.pid, client.request_id, devices=devices, exclusive=client.exclusive, priority=client.number
    )
    client.lease_id, client.stream = admission.lease.lease_id, admission.stream


def hang_up(state: State, client: Client) -> None:
    state.world.book.stream_ended(client.lease_id, client.stream, state.world.now)
    client.stream = -1


def activate(state: State, client: Client) -> None:
    world = state.world
    engine = world.process(client.engine_pid)
    lease = world.book.activate(client.lease_id, client.secret, world.process(client.pid), (engine,), world.now)
    client.engine_bytes = lease.charge.total_bytes


def loaded(state: State, client: Client) -> None:
    state.world.book.renew(client.lease_id, client.secret, None, state.world.now, load_complete=True)


def begin(state: State, client: Client) -> None:
    state.world.book.begin_use(client.lease_id, client.secret, "use", state.world.now)
    client.in_use = True


def end(state: State, client: Client) -> None:
    state.world.book.end_use(client.lease_id, client.secret, "use", state.world.now)
    client.in_use = False


def grow(state: State, client: Client) -> None:
    world = state.world
    cards = world.book.view(client.lease_id).lease.charge.devices
    size = client.size + 1
    claim = Claim(0, (DeviceWant(cards[0][0], size),)) if cards else Claim(size)
    lease = world.book.resize(client.lease_id, client.secret, claim, world.now)
    client.engine_bytes = lease.charge.total_bytes


def release(state: State, client: Client) -> None:
    state.world.release(client.lease_id, client.secret)


def fall_silent(state: State, client: Client) -> None:
    client.silent = True


def attach(state: State, client: Client) -> None:
    world = state.world
    _, secret = world.book.attach(client.lease_id, world.process(client.pid), client.secret, world.now)
    client.old = (*client.old, (client.lease_id, client.secret))
    client.secret = secret
    client.silent = False


def lose_the_engine(state: State, client: Client) -> None:
    client.engine_bytes = 0
    state.world.die(client.engine_pid)


def die(state: State, client: Client) -> None:
    """Its engine lives on as an orphan."""
    client.alive = False
    state.world.die(client.pid)
    hang_up(state, client)


def start_anew(state: State, client: Client) -> None:
    """Another process asks for the same request, and knows nothing. The one before need not be dead."""
    other = replace(client, process=client.process + 1, alive=True, silent=False, secret="")
    ask(state, other)
    other.old = (*client.old, (client.lease_id, client.secret))
    state.clients[state.clients.index(client)] = other


def steps_of(state: State, client: Client) -> Iterator[Step]:
    lease = state.lease(client)
    if client.engine_bytes:
        yield lose_the_engine
    if client.process == 1 and client.lease_id and not client.engine_bytes and not client.in_use:
        yield start_anew
    if not client.alive:
        return
    if client.silent:
        if lease.charged:
            yield attach
        return
    if lease is ENDED:
        if client.attempt <= 2:
            yield ask
        return
    if lease in (LeaseState.QUEUED, LeaseState.GRANTED):
        yield hang_up if client.stream >= 0 else ask
    if lease is LeaseState.GRANTED:
        yield activate
    elif lease.charged:
        yield fall_silent
        yield release
        yield die
        yield end if client.in_use else begin
        yield loaded
        if client.engine_bytes == client.size:
            yield grow


def pass_time(state: State) -> None:
    """Two seconds, in which everybody who can renews."""
    world = state.world
    world.pass_time(STEP_S)
    for client in state.clients:
        heard = client.alive and not client.silent and state.knows_the_secret(client) and not state.suspect(client)
        if heard and state.lease(client) in (LeaseState.ACTIVE, LeaseState.VACATING):
            world.book.renew(client.lease_id, client.secret, None, world.now)
    world.drain()


def restart(state: State) -> None:
    state.world.restart()
    for client in state.clients:
        client.stream = -1


# -- the search --------------------------------------------------------------------------------------------------------


def followers(state: State) -> Iterator[State]:
    for index, client in enumerate(state.clients):
        for step in steps_of(state, client):
            after = state.next(f"{step.__name__} {client.number}")
            try:
                step(after, after.clients[index])
            except Refused:
                after.world.drain()
                assert after.picture() == state.picture(), f"refused, and yet: {after.trace}"
                continue
            yield settled(after)
    for move in (pass_time, restart):
        after = state.next(move.__name__)
        move(after)
        yield settled(after)


def settled(state: State) -> State:
    """Commit, tell, and let each client learn what its streams told it."""
    state.world.drain()
    for client in state.clients:
        lease = state.lease(client)
        told = state.world.book.secret_of(client.lease_id) if client.stream >= 0 else None
        if told is not None and told != client.secret:
            if client.secret:
                client.old = (*client.old, (client.lease_id, client.secret))
            client.secret = told
        if client.lease_id and lease is ENDED:
            if client.secret:
                client.old = (*client.old, (client.lease_id, client.secret))
                client.attempt += 1
            client.lease_id = client.secret = ""
            client.stream, client.in_use = -1, False
    return state


def check(before: State, state: State) -> None:
    """What holds after every step."""
    world = state.world
    check_ceilings(world)
    check_sums(world)
    assert sum(client.engine_bytes for client in state.clients) <= world.ceilings.total_bytes, "bytes are used twice"
    for client in state.clients:
        assert not client.engine_bytes or state.lease(client).charged, f"engine of {client.number} without a charge"
    state.ranks = dict(before.ranks)
    for event in world.events:
        if event.lease is not None:
            rank = RANK[event.lease.state]
            assert rank >= state.ranks.get(event.lease.lease_id, 0), "a state went back"
            state.ranks[event.lease.lease_id] = rank


def check_late_messages(state: State) -> None:
    """Late messages with secrets that are no longer theirs change nothing."""
    seen = state.picture()
    world = state.world
    for client in state.clients:
        for lease_id, secret in client.old:
            if (lease_id, secret) == (client.lease_id, client.secret):
                continue
            process = world.process(client.pid)
            for late in (
                lambda book, now, i=lease_id, s=secret, p=process: book.activate(i, s, p, (), now),
                lambda book, now, i=lease_id, s=secret: book.renew(i, s, None, now, load_complete=True),
                lambda book, now, i=lease_id, s=secret: book.begin_use(i, s, "late", now),
                lambda book, now, i=lease_id, s=secret: book.resize(i, s, Claim(0), now),
                lambda book, now, i=lease_id, s=secret: book.release(i, s, lambda _: False, now),
            ):
                try:
                    late(world.book, world.now)
                except Refused:
                    continue
                finally:
                    world.drain()
                    assert state.picture() == seen, "a late message changed something"


def check_the_end(state: State) -> None:
    """When everybody is dead, nothing stays charged and nobody waits. Ends the state."""
    world = state.world
    for client in state.clients:
        if client.stream >= 0:
            hang_up(state, client)
    for view in world.book.charged():
        world.dead |= set(view.lease.processes)
    world.die()
    world.pass_time(POLICY.activate_by_s)
    world.die(*(10 * client.number + process for client in state.clients for process in (1, 2)))
    assert world.committed() == 0
    assert world.book.queue_depth == 0


def search(world, clients: tuple[Client, ...], begin_with: tuple[str, ...], steps: int) -> int:
    """How many states there are within so many steps after `begin_with`; each of them is checked."""
    start = State(world, [copy(client) for client in clients])
    for step in begin_with:
        start = next(after for after in followers(start) if after.trace[-1] == step)
    seen = {start.picture()}
    frontier = {start.picture(): start}
    for left in reversed(range(steps)):
        coming = {}
        for before, state in frontier.items():
            for after in followers(state):
                seen_as = after.picture()
                if seen_as in seen:
                    continue
                seen.add(seen_as)
                try:
                    check(state, after)
                    check_late_messages(after)
                    check_the_end(after.next("everybody dies") if left else after)
                except (AssertionError, Refused) as broken:
                    raise AssertionError(f"after {', '.join(after.trace)}: {broken}") from broken
                coming[seen_as] = after
            assert state.picture() == before, "a branch has changed what it came from: the copy shares something"
        frontier = coming
    return len(seen)


TWO_CARDS = Ceilings(2, {"a": 2, "b": 2})
SHARED_GPU = Ceilings(4, has_shared_gpu=True)


@pytest.mark.parametrize(
    ("ceilings", "clients", "begin_with", "steps"),
    [
        pytest.param(Ceilings(4), (Client(1, 2), Client(2, 3)), (), 5, id="two clients"),
        pytest.param(
            Ceilings(4),
            (Client(1, 2), Client(2, 3)),
            ("ask 1", "activate 1", "ask 2"),
            4,
            id="one runs and one waits",
        ),
        pytest.param(
            Ceilings(4),
            (Client(1, 2), Client(2, 2)),
            ("ask 1", "activate 1", "ask 2", "activate 2"),
            3,
            id="two run",
        ),
        pytest.param(
            Ceilings(2),
            (Client(1, 1), Client(2, 1), Client(3, 2)),
            ("ask 1", "activate 1", "loaded 1", "ask 3"),
            3,
            id="three clients",
        ),
        pytest.param(
            TWO_CARDS,
            (Client(1, 1, "a"), Client(2, 1, "b"), Client(3, 2, "")),
            ("ask 1", "activate 1", "ask 2", "activate 2", "ask 3"),
            3,
            id="two run on a card each and one waits for any",
        ),
        pytest.param(
            SHARED_GPU,
            (Client(1, 1, exclusive=True), Client(2, 2)),
            ("ask 1", "activate 1", "loaded 1", "ask 2"),
            4,
            id="one runs alone and one waits",
        ),
    ],
)
def test_no_byte_is_used_twice_or_lost_in_any_history(
    new_world, ceilings: Ceilings, clients: tuple[Client, ...], begin_with: tuple[str, ...], steps: int
) -> None:
    states = search(new_world(ceilings, POLICY), clients, begin_with, steps + DEEPER)
    assert states > 100  # else the search has not searched

"""Others that keep a claim waiting: everything that fair holders can do around one book, followed second by second.

They do whatever they like at every second: ask, use, end, stay idle, leave, grow, even restart the ledger. Yet they are
fair: a busy spell ends, a pin is not for ever, who was asked leaves when nothing of it is in use, a grant is taken up.
"""

import os
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass

from book_search import branch, check_ceilings, check_sums, picture
from weighbridge_ledger.book import Ask, Claim, Credential, DeviceWant, LeaseState, Policy, Refused

DEEPER = int(os.environ.get("WEIGHBRIDGE_BOOK_DEPTH", "0"))
"""Seconds more to prepare the machine; each makes a search a few times as long."""

SECOND = 1.0
BUSY_S = 2
"""A busy spell is over after so long."""
PINNED_S = 3
"""Who is pinned leaves after so long, when nothing of it is in use."""
POLICY = Policy(
    term_s=1000.0,
    min_term_s=1000.0,
    max_term_s=1000.0,
    activate_by_s=1000.0,
    longest_load_s=1000.0,
    max_wait_s=1000.0,
    ticket_s=1000.0,
    vacate_s=2.0,
    protect_passes=2,
    protect_after_s=4.0,
    age_s=2.0,
    idle_s=1.0,
    min_residency_s=2.0,
    max_residency_s=2.0,
    optional_step_bytes=1,
    shrink_s=2.0,
)
BACKGROUND, NORMAL, INTERACTIVE = 1, 2, 3


@dataclass(frozen=True)
class Role:
    """What somebody claims, and how it behaves."""

    size: int
    places: tuple[str, ...] = ("host",)
    """Where it may claim it, as it likes: the host, a card, or any card (empty)."""
    priority: int = NORMAL
    pinned: bool = False
    """It leaves when it has had its lease for long enough."""
    exclusive: bool = False
    stays: bool = False
    """A model: it is kept when a use ends. Else a job, which then is over."""
    stubborn: bool = False
    """It does not leave when it is asked to, or ever."""
    stretches: bool = False
    """It may grow by one while it is in use, and shrinks again before a busy spell has passed."""
    replaces: bool = False
    """It may claim one more in the place of what it has."""
    optional: int = 0
    """Wanted on top, and given back when that is asked for."""


@dataclass
class Player:
    """Somebody in a role, at some moment."""

    role: Role
    pid: int
    request_id: str = ""
    """Its place in the order is kept over restarts."""
    lease_id: str = ""
    old_id: str = ""
    """The lease that it wants to replace."""
    busy_s: int | None = None
    """For how long it has been in use; None: it is not."""
    pinned_s: int = 0
    """For how long it has had its lease, if that is pinned."""
    grown_s: int | None = None
    """For how long it has been larger; None: it is not."""

    @property
    def used_id(self) -> str:
        """The lease that it uses, or would."""
        return self.old_id or self.lease_id


@dataclass
class State:
    """A world, its players, and how it came about."""

    world: object
    players: list[Player]
    trace: tuple[str, ...] = ()

    def next(self, step: str) -> "State":
        return State(branch(self.world), [copy(player) for player in self.players], (*self.trace, step))

    def lease(self, lease_id: str) -> LeaseState:
        view = self.world.book.view(lease_id) if lease_id else None
        return LeaseState.RELEASED if view is None else view.lease.state

    def picture(self) -> tuple:
        names = {player.lease_id: player.pid for player in self.players}
        names |= {player.old_id: -player.pid for player in self.players if player.old_id}
        players = ((player.busy_s, player.pinned_s, player.grown_s) for player in self.players)
        return (*players, picture(self.world, names, LONG_AGO_S))


LONG_AGO_S = POLICY.protect_after_s
Step = Callable[[State, Player], None]


# -- what the others may do --------------------------------------------------------------------------------------------


def nothing(state: State, player: Player) -> None:
    pass


def ask_for(place: str) -> Step:
    def ask(state: State, player: Player) -> None:
        claim_at(state, player, place, player.role.size)

    return ask


def claim_at(state: State, player: Player, place: str, size: int, **more: object) -> None:
    role, world = player.role, state.world
    if place == "host":
        claim = Claim(size, optional_host_bytes=role.optional)
    else:
        claim = Claim(0, (DeviceWant(place, size, role.optional),))
    ask = Ask(
        player.request_id,
        world.process(player.pid),
        claim,
        priority=role.priority,
        pinned=role.pinned,
        exclusive=role.exclusive,
        **more,
    )
    try:
        player.lease_id = world.book.admit(ask, world.now).lease.lease_id
    finally:
        world.drain()


def replace_it(state: State, player: Player) -> None:
    world = state.world
    player.old_id = player.lease_id
    own = Credential(player.old_id, world.secret(player.old_id))
    claim_at(state, player, player.role.places[0], player.role.size + 1, replaces=own)


def begin(state: State, player: Player) -> None:
    world = state.world
    world.book.begin_use(player.used_id, world.secret(player.used_id), "use", world.now)
    player.busy_s = 0


def end(state: State, player: Player) -> None:
    world = state.world
    if player.grown_s is not None:
        shrink(state, player)
    world.book.end_use(player.used_id, world.secret(player.used_id), "use", world.now)
    player.busy_s = None


def leave(state: State, player: Player) -> None:
    state.world.release(player.used_id, state.world.secret(player.used_id))
    player.busy_s = player.grown_s = None


def grow(state: State, player: Player) -> None:
    if resized(state, player, player.role.size + 1):
        player.grown_s = 0


def shrink(state: State, player: Player) -> None:
    assert resized(state, player, player.role.size)
    player.grown_s = None


def resized(state: State, player: Player, size: int) -> bool:
    world = state.world
    cards = world.book.view(player.lease_id).lease.charge.devices
    claim = Claim(0, (DeviceWant(cards[0][0], size),)) if cards else Claim(size)
    try:
        world.book.resize(player.lease_id, world.secret(player.lease_id), claim, world.now)
    except Refused:
        return False
    finally:
        world.drain()
    return True


def steps_of(state: State, player: Player) -> Iterator[Step]:
    """All that it may do in this second; what fairness demands by now is all that is left then."""
    role, lease = player.role, state.lease(player.used_id)
    if not lease.charged:
        yield nothing
        if lease is LeaseState.RELEASED and not player.request_id:
            yield from map(ask_for, role.places)
        return
    if player.busy_s is not None:
        if player.busy_s < BUSY_S and (player.grown_s is None or player.grown_s < BUSY_S):
            yield nothing
            if role.stretches and player.grown_s is None:
                yield grow
        if player.grown_s is not None:
            yield shrink
        yield end if role.stays else leave
        return
    if not role.stubborn and not player.old_id and lease is LeaseState.ACTIVE:
        yield leave
        if player.pinned_s >= PINNED_S:
            return
    yield nothing
    if lease is LeaseState.ACTIVE:
        yield begin
        if role.replaces and not player.old_id and not player.request_id:
            yield replace_it


def be_fair(state: State) -> None:
    """Grants are taken up, loaded and used; who was asked leaves when nothing of it is in use."""
    again = True
    while again:
        again = False
        state.world.drain()
        for player in state.players:
            if player.old_id and state.lease(player.old_id) is LeaseState.RELEASED:
                player.old_id = ""
            if state.lease(player.lease_id) is LeaseState.GRANTED:
                take_up(state, player)
                again = True
            elif leaves(state, player):
                leave(state, player)
                again = True
            elif gives_back(state, player):
                assert resized(state, player, player.role.size)
                again = True


def take_up(state: State, player: Player) -> None:
    world, secret = state.world, state.world.secret(player.lease_id)
    world.book.activate(player.lease_id, secret, world.process(player.pid), (), world.now)
    world.book.renew(player.lease_id, secret, None, world.now, load_complete=True)
    player.pinned_s = 0
    begin(state, player)


def leaves(state: State, player: Player) -> bool:
    asked = state.lease(player.used_id) is LeaseState.VACATING
    return asked and player.busy_s is None and not player.role.stubborn


def gives_back(state: State, player: Player) -> bool:
    view = state.world.book.view(player.lease_id)
    return view is not None and view.shrink is not None


def pass_a_second(state: State) -> None:
    state.world.time += SECOND
    state.world.book.tick(state.world.now)
    for player in state.players:
        if player.busy_s is not None:
            player.busy_s += 1
        if player.role.pinned and not player.role.stubborn:
            player.pinned_s = min(player.pinned_s + 1, PINNED_S)
        if player.grown_s is not None:
            player.grown_s += 1


def restart(state: State) -> None:
    """Holders say anew what they use; who waited asks again at once, in the order of waiting. (Heard earlier, others
    get what is free before the ledger knows who waited: again and again, if it is restarted again and again.)"""
    world = state.world
    waiting = [player for player in state.players if state.lease(player.lease_id) is LeaseState.QUEUED]
    waiting.sort(key=lambda player: world.book.view(player.lease_id).queue_position)
    world.restart()
    for player in state.players:
        if state.lease(player.lease_id).charged:
            world.book.attach(player.lease_id, world.process(player.pid), "", world.now)
            if player.busy_s is not None and state.lease(player.lease_id) is LeaseState.ACTIVE:
                world.book.begin_use(player.lease_id, world.secret(player.lease_id), "use", world.now)
    for player in waiting:
        claim_at(state, player, player.role.places[0], player.role.size)


# -- the search --------------------------------------------------------------------------------------------------------


def seconds_after(state: State, *, restarts: bool) -> Iterator[State]:
    """All that the players can do in one second, in their order."""
    after = [state.next("|")]
    for index in range(len(state.players)):
        more = []
        for one in after:
            for step in list(steps_of(one, one.players[index])):
                if step is nothing:
                    more.append(one)
                    continue
                two = one.next(f"{step.__name__} {index + 1}")
                step(two, two.players[index])
                be_fair(two)
                more.append(two)
        after = more
    if restarts:
        for one in list(after):
            two = one.next("restart")
            restart(two)
            be_fair(two)
            after.append(two)
    for one in after:
        pass_a_second(one)
        be_fair(one)
        check_sums(one.world)
        check_ceilings(one.world)
        yield one


def longest_wait(
    world, others: tuple[Role, ...], waiter: Role, *, prepare_s: int, bound_s: int, restarts: bool = False
) -> tuple[int, tuple[str, ...]]:
    """After how many seconds nobody is left in whose history `waiter` still waits; and if there is a history in which
    it waits for `bound_s` seconds, that history.

    Args:
        world: an empty machine.
        others: who plays.
        waiter: who asks then, once, and wants nothing but its grant. Who is to replace a lease plays until then.
        prepare_s: how long the others play before.
        bound_s: how long the rules let it wait.
        restarts: whether the ledger may be started anew at every second.
    """
    players = [Player(role, pid) for pid, role in enumerate((*others, waiter), start=1)]
    if not waiter.replaces:
        players[-1].request_id = "w"
    start = State(world, players)
    prepared = {start.picture(): start}
    frontier = [start]
    for _ in range(prepare_s + DEEPER):
        coming = {}
        for state in frontier:
            for after in seconds_after(state, restarts=False):
                coming.setdefault(after.picture(), after)
        frontier = [after for seen_as, after in coming.items() if seen_as not in prepared]
        prepared |= coming
    waiting: dict[tuple, State] = {}
    for state in prepared.values():
        keep(waiting, asking(state))
    for second in range(bound_s):
        if not waiting:
            return second, ()
        coming = {}
        for state in waiting.values():
            for after in seconds_after(state, restarts=restarts):
                keep(coming, after)
        waiting = coming
    return bound_s, next((state.trace for state in waiting.values()), ())


def asking(state: State) -> State:
    """The state in which the last player has asked."""
    asked = state.next("w asks")
    waiter = asked.players[-1]
    if not waiter.role.replaces:
        claim_at(asked, waiter, waiter.role.places[0], waiter.role.size)
    elif asked.lease(waiter.lease_id) is LeaseState.ACTIVE:
        waiter.request_id = "w"
        replace_it(asked, waiter)
    be_fair(asked)
    return asked


def keep(waiting: dict[tuple, State], state: State) -> None:
    waiter = state.players[-1]
    if waiter.request_id and state.lease(waiter.lease_id) is LeaseState.QUEUED:
        waiting.setdefault(state.picture(), state)

"""Books with as many leases and waiters as one likes, and one admission after another on them: each kind of crowd leans
on another index of the book."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count

from weighbridge_common.processes import ProcessIdentity
from weighbridge_ledger.book import (
    Ask,
    Book,
    Ceilings,
    Claim,
    DeviceWant,
    EventKind,
    Home,
    Moment,
    Policy,
)

GIB = 2**30
A_FEW_BYTES = 2**16
"""10,000 times this are less than 1 GiB."""
CARDS = 4
HOLDER = ProcessIdentity(1, 1, "boot", "pid:[1]")
BACKGROUND, NORMAL, INTERACTIVE = 1, 2, 3
STEP_S = 1e-5
"""Time that passes with each verb: so little that nobody ages while a crowd gathers."""

AT_ONCE = {"min_residency_s": 0.0, "max_residency_s": 0.0, "idle_s": 0.0}
"""Policy under which whoever is idle may be asked to vacate."""


def _claim(card: str | None = None, *, gib: int = 1, optional_bytes: int = 0) -> Claim:
    """So much host memory, or of a card (empty: any)."""
    if card is None:
        return Claim(gib * GIB, optional_host_bytes=optional_bytes)
    return Claim(0, (DeviceWant(card, gib * GIB),))


def _card(number: int) -> str:
    return f"card-{number % CARDS}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of crowd. Asks are made by number, from 0 to below the size and then from 0 again."""

    name: str
    lease: Callable[[int], Ask] = lambda number: _ask()
    """Who holds: together they fill the machine."""
    waiter: Callable[[int], Ask] = lambda number: _ask()
    newcomer: Callable[[int], Ask] | None = None
    """Whose admission is measured; None: one more waiter, while the first one is granted what is released."""
    busy: bool = False
    """Whether all leases are in use."""
    policy: Callable[[int], Mapping[str, float]] = lambda size: {}
    """What differs from the usual policy in a crowd of that size."""
    cards: int = 0
    spare_cards: int = 0
    """Cards beside these that nobody is on."""
    lease_bytes: int = GIB
    """What each lease is charged: the machine has as much as all of them."""
    free_bytes: int = 0
    """Host memory beyond that."""
    one_load_at_a_time: bool = False
    """The latest lease goes on loading, and nobody else may load until then, whatever is free."""
    first_leaves: bool = False
    """Who has held longest is the next to release, not who was granted last."""
    limited: bool = False
    """The person's limit is what reaches its end."""

    def ceilings(self, size: int) -> Ceilings:
        """A machine that `size` leases fill."""
        cards = {_card(number): math.ceil((size - number) / self.cards) * GIB for number in range(self.cards)}
        spare = {f"spare-{number}": GIB for number in range(self.spare_cards)}
        host = 0 if self.cards else size * self.lease_bytes + self.free_bytes
        limit = size * GIB if self.limited else None
        if self.limited:
            cards = {card: 2 * capacity for card, capacity in cards.items()}
        return Ceilings(
            host,
            cards | spare,
            limit_bytes=limit,
            has_shared_gpu=self.one_load_at_a_time,
            one_start_at_a_time=self.one_load_at_a_time,
        )


def _ask(claim: Claim | None = None, *, priority: int = NORMAL, pinned: bool = False) -> Ask:
    return Ask("", HOLDER, claim or _claim(), priority=priority, pinned=pinned)


class Crowd:
    """A book in the state of a scenario.

    Args:
        scenario: the kind of crowd.
        size: how many hold, and how many wait.
    """

    def __init__(self, scenario: Scenario, size: int) -> None:
        self._scenario = scenario
        self._size = size
        self._turn = 0
        self._numbers = count()
        self._ids = count()
        self._time = 0.0
        self._held: dict[str, str] = {}
        """Secrets by lease, in the order of their grants."""
        self._asked: list[str] = []
        self._granted: list[str] = []
        bounds: dict[str, float] = {"queue_bound": 2 * size + 1}
        self.book = Book(
            scenario.ceilings(size),
            Policy(**(bounds | dict(scenario.policy(size)))),  # type: ignore[arg-type]
            Home(HOLDER.boot_id, HOLDER.pid_namespace),
            new_id=lambda: f"lease-{next(self._ids):08}",
            new_secret=lambda: f"secret-{next(self._ids)}",
            spread=lambda: 0.5,
            now=self._now(),
        )
        for number in range(size):
            if scenario.one_load_at_a_time and number:
                self._finish_load(next(reversed(self._held)))
            self._admit(scenario.lease(number))
            self._take_up(self._granted.pop())
        for number in range(size):
            self._admit(scenario.waiter(number))
        assert self._is_whole(), "a crowd holds and waits as it should"

    def admit_one(self) -> None:
        """One claim is admitted, activated and released, while the crowd stays as large as it is.

        Where nobody gets past those who wait, the claim joins them, and the first of them gets what is released: by
        whoever was asked to vacate for it, or by the latest holder, so that the others stay what they are (or by the
        first one, so that every card has its turn).
        """
        self._admit((self._scenario.newcomer or self._scenario.waiter)(self._turn))
        self._turn = (self._turn + 1) % self._size
        if self._granted:
            self._take_up(granted := self._granted.pop())
            self._release(granted)
        elif self._scenario.one_load_at_a_time:
            self._finish_load(next(reversed(self._held)))
            self._take_up(self._granted.pop())
            self._release(next(iter(self._held)))
        else:
            self._release(self._asked[0] if self._asked else self._next_to_leave())
            self._take_up(self._granted.pop())
        assert self._is_whole(), "the crowd stays as it is"

    def _is_whole(self) -> bool:
        return self.book.lease_count == self.book.queue_depth == self._size

    def _next_to_leave(self) -> str:
        return next(iter(self._held) if self._scenario.first_leaves else reversed(self._held))

    def _now(self) -> Moment:
        return Moment(self._time, self._time)

    def _step(self) -> Moment:
        self._time += STEP_S
        return self._now()

    def _admit(self, ask: Ask) -> None:
        self.book.admit(replace(ask, request_id=f"request-{next(self._numbers)}"), self._step())
        self._note()

    def _take_up(self, lease_id: str) -> None:
        """Activate a grant, load, and use it or not."""
        secret = self.book.secret_of(lease_id)
        assert secret is not None
        self._held[lease_id] = secret
        self.book.activate(lease_id, secret, HOLDER, (), self._step())
        self._note()
        if self._scenario.busy:
            self.book.begin_use(lease_id, secret, "", self._now())
            self._note()
        elif not self._scenario.one_load_at_a_time:
            self._finish_load(lease_id)

    def _finish_load(self, lease_id: str) -> None:
        self.book.renew(lease_id, self._held[lease_id], None, self._now(), load_complete=True)
        self._note()

    def _release(self, lease_id: str) -> None:
        self.book.release(lease_id, self._held.pop(lease_id), lambda process: False, self._step())
        self._note()

    def _note(self) -> None:
        for event in self.book.drain().events:
            if event.lease is None:
                continue
            if event.kind is EventKind.GRANTED:
                self._granted.append(event.lease.lease_id)
            elif event.kind is EventKind.VACATING:
                self._asked.append(event.lease.lease_id)
            elif event.kind is EventKind.RELEASED and event.lease.lease_id in self._asked:
                self._asked.remove(event.lease.lease_id)


SCENARIOS = (
    Scenario("all leases busy", busy=True),
    Scenario("all idle, and younger than their minimum residency"),
    Scenario(
        "all idle, and of higher priority",
        lease=lambda number: _ask(priority=INTERACTIVE),
        waiter=lambda number: _ask(priority=BACKGROUND),
        policy=lambda size: AT_ONCE,
    ),
    Scenario("all pinned", lease=lambda number: _ask(pinned=True), waiter=lambda number: _ask(pinned=True)),
    Scenario("all idle: one is asked to vacate for each admission", policy=lambda size: AT_ONCE),
    Scenario(
        "one alone may be asked, among idle ones of higher priority",
        lease=lambda number: _ask(priority=INTERACTIVE if number else BACKGROUND),
        waiter=lambda number: _ask(priority=BACKGROUND),
        policy=lambda size: AT_ONCE,
    ),
    Scenario(
        "waiters of every priority, each of which ages while it waits",
        busy=True,
        waiter=lambda number: _ask(priority=BACKGROUND + number % 3),
        # Who waits for the whole crowd before it is raised by one level on its way, in a small crowd and in a large.
        policy=lambda size: {"age_s": size * 3 * STEP_S / 1.5},
    ),
    Scenario(
        "protected waiters, which plan over busy holders too",
        busy=True,
        policy=lambda size: {"protect_after_s": 0.0},
    ),
    Scenario(
        "a protected waiter that nobody may overtake, with room for each of those behind it",
        lease=lambda number: _ask(_claim(gib=2), pinned=True),
        waiter=lambda number: _ask(_claim(gib=2), priority=INTERACTIVE, pinned=True) if number == 0 else _ask(),
        newcomer=lambda number: _ask(_claim(gib=2), priority=INTERACTIVE, pinned=True),
        policy=lambda size: {"protect_after_s": 0.0},
        lease_bytes=2 * GIB,
        free_bytes=GIB,
    ),
    Scenario(
        "room for everybody, and one load at a time",
        lease=lambda number: _ask(),
        free_bytes=10**6 * GIB,
        one_load_at_a_time=True,
    ),
    Scenario(
        "protected waiters, and one holder among those of higher priority",
        lease=lambda number: _ask(priority=INTERACTIVE if number else BACKGROUND),
        waiter=lambda number: _ask(priority=BACKGROUND),
        policy=lambda size: AT_ONCE | {"protect_after_s": 0.0},
    ),
    Scenario(
        "leases with optional bytes, too few to help",
        lease=lambda number: _ask(_claim(optional_bytes=A_FEW_BYTES)),
        busy=True,
        policy=lambda size: {"optional_step_bytes": A_FEW_BYTES},
        lease_bytes=GIB + A_FEW_BYTES,
    ),
    Scenario(
        "a card that nobody waits for",
        lease=lambda number: _ask(_claim("card-0")),
        waiter=lambda number: _ask(_claim("card-0")),
        newcomer=lambda number: _ask(_claim("spare-0")),
        busy=True,
        cards=1,
        spare_cards=1,
    ),
    Scenario(
        f"{CARDS} cards, each waiter for one of them",
        lease=lambda number: _ask(_claim(_card(number))),
        waiter=lambda number: _ask(_claim(_card(number))),
        busy=True,
        first_leaves=True,
        cards=CARDS,
    ),
    Scenario(
        f"{CARDS} cards, each waiter for any of them",
        lease=lambda number: _ask(_claim(_card(number))),
        waiter=lambda number: _ask(_claim("")),
        busy=True,
        first_leaves=True,
        cards=CARDS,
    ),
    Scenario(
        f"{CARDS} cards, each waiter for any of them, idle holders",
        lease=lambda number: _ask(_claim(_card(number))),
        waiter=lambda number: _ask(_claim("")),
        policy=lambda size: AT_ONCE,
        cards=CARDS,
    ),
    Scenario(
        f"{CARDS} cards under the person's limit",
        lease=lambda number: _ask(_claim(_card(number))),
        waiter=lambda number: _ask(_claim(_card(number))),
        busy=True,
        first_leaves=True,
        cards=CARDS,
        limited=True,
    ),
)

"""What drives a book in a history: how verbs are sent, what clients remember, and what must hold after each verb."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize
from weighbridge_ledger.book import (
    GPU,
    HOST,
    Ask,
    Ceilings,
    DeviceWant,
    LeaseState,
    Moment,
    Observed,
    Policy,
    Refused,
)
from weighbridge_ledger.book.charging import Usage

from services.ledger.tests.explore.shadow import Shadow

QUICK = Policy(
    term_s=6,
    min_term_s=6,
    activate_by_s=6,
    grace_s=8,
    vacate_s=8,
    ticket_s=20,
    max_wait_s=1000,
    queue_bound=6,
    protect_passes=3,
    protect_after_s=20,
    age_s=15,
    min_residency_s=6,
    max_residency_s=16,
    longest_load_s=30,
    shrink_s=4,
    optional_step_bytes=1,
)
"""The numbers of the rules made short, so that more happens in fifty steps."""

TICK_S = 2.0
"""Below half of every term: beyond that the book takes itself for stopped."""

MACHINES = {
    "cpu": [Ceilings(8), Ceilings(8, limit_bytes=5)],
    "unified": [Ceilings(8, has_shared_gpu=True), Ceilings(8, has_shared_gpu=True, limit_bytes=6)],
    "mac": [Ceilings(8, has_shared_gpu=True, exclusive_heeded=False, one_start_at_a_time=True)],
    "cards": [
        Ceilings(6, {"a": 4, "b": 4}),
        Ceilings(6, {"a": 4, "b": 4}, spill_allowed=True),
        Ceilings(6, {"a": 4, "b": 4}, limit_bytes=7),
        Ceilings(6, {"a": 4}),
    ],
    "unequal cards": [Ceilings(8, {"a": 2, "b": 5}), Ceilings(8, {"a": 2, "b": 5}, spill_allowed=True)],
}
"""By machine, the ceilings that it may have: what a person sets, and a card that is taken out."""

NAMED_CARDS = [
    (DeviceWant("a", 1),),
    (DeviceWant("a", 2, 2),),
    (DeviceWant("b", 1, 3),),
    (DeviceWant("b", 3),),
    (DeviceWant("b", 4),),
    (DeviceWant("a", 6),),
    (DeviceWant("a", 2), DeviceWant("b", 2)),
]
ANY_CARDS = [
    (DeviceWant("", 1),),
    (DeviceWant("", 2, 2),),
    (DeviceWant("", 3),),
    (DeviceWant("", 5),),
    (DeviceWant("", 1), DeviceWant("", 2)),
    (DeviceWant("a", 1), DeviceWant("", 2)),
]

ENDED_KEPT = 3
"""Clients of leases that have ended which go on trying."""


@dataclass
class Held:
    """What a client knows of a claim that it made."""

    ask: Ask
    lease_id: str
    stream: int
    secrets: list[str] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)


class Driver(RuleBasedStateMachine):
    """Every verb goes through `do`, which lets a bystander judge what was told and where that has led."""

    world_type: Any
    seen: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []
        self.pids = iter(range(1, 1_000_000))
        self.before: dict[str, int] = {}
        self.sound = True
        """Nothing is to be seen at the end of a history that broke off in the middle."""
        self.refusal = ""
        """Why the last verb that was refused was refused."""

    @initialize(machine=st.sampled_from(sorted(MACHINES)))
    def begin(self, machine: str) -> None:
        """A machine of this kind, with nothing on it."""
        self.ceilings = MACHINES[machine]
        self.world = self.world_type(self.ceilings[0], QUICK)
        self.shadow = Shadow(self.ceilings[0], QUICK, self.world.dead)

    # -- how verbs are sent and judged -----------------------------------------------------------------------------

    @property
    def book(self) -> Any:
        return self.world.book

    @property
    def now(self) -> Moment:
        return self.world.now  # type: ignore[no-any-return]

    def do(
        self,
        verb: Callable[[], Any],
        *,
        then: Callable[[Any], None] | None = None,
        ask: Ask | None = None,
        given_back: Collection[str] = (),
    ) -> Any:
        """The answer to a verb; None if it was refused. `then` tells the bystander what only the caller knows."""
        try:
            answer = verb()
        except Refused as refused:
            self.seen[refused.reason] += 1
            self.refusal = refused.reason
            assert self.world.drain() == [], f"refused ({refused}), and changed something"
            return None
        events = self.world.drain()
        self.sound = False
        if then is not None:
            then(answer)
        self.shadow.follow(events, ask=ask, given_back=given_back)
        self.check()
        return answer

    def check(self) -> None:
        """What holds after every verb."""
        self.sound = False
        for held in self.held:
            secret = self.book.secret_of(held.lease_id)
            if secret is not None and secret not in held.secrets:
                held.secrets.append(secret)
        views = list(self.book.charged())
        self._sums_are_right(views)
        stored = {lease.lease_id: lease for lease in self.world.store.load().leases}
        assert stored == {view.lease.lease_id: view.lease for view in views}, "what is committed is not in the book"
        now = self.world.time
        for view in views:
            assert view.vacate_deadline is None or view.overdue is (view.vacate_deadline <= now), view
        self.shadow.compare(self.book)
        self.sound = True

    def _sums_are_right(self, views: list[Any]) -> None:
        usage = Usage()
        for view in views:
            assert view.lease.state.charged
            usage.add(view.lease.charge)
        sums, ceilings = self.book.committed(), self.book.ceilings
        assert (sums.host_bytes, sums.total_bytes) == (usage.host_bytes, usage.total_bytes)
        assert sums.devices == {device: size for device, size in usage.devices.items() if size}
        for device in ("a", "b", GPU):
            there = [view.lease.charge for view in views if device in view.lease.charge.occupies]
            assert len(there) < 2 or not any(charge.exclusive for charge in there), f"not alone on {device}: {there}"
        after = {pool: sums.on(pool) for pool in (HOST, "a", "b")} | {"all": sums.total_bytes}
        for pool, size in after.items():
            ceiling = ceilings.total_bytes if pool == "all" else ceilings.pool_bytes(pool)
            assert size <= max(ceiling, self.before.get(pool, 0)), f"{pool} was raised to {size} above {ceiling}"
        self.before = after

    def everything(self) -> object:
        """All there is to see, for verbs that must change nothing."""
        return [self.book.view(lease_id) for lease_id in self.book.lease_ids()], self.book.committed()

    def pick(self, index: int, *states: LeaseState) -> Held | None:
        """One of the clients, with a lease in one of these states if any are named."""
        chosen = [held for held in self.held if not states or self.state(held) in states]
        return chosen[index % len(chosen)] if chosen else None

    def state(self, held: Held) -> LeaseState | None:
        """Where its lease stands; None: forgotten."""
        view = self.book.view(held.lease_id)
        return None if view is None else view.lease.state

    def process(self, held: Held) -> Any:
        """The process that holds it."""
        return held.ask.holder

    # -- asking ----------------------------------------------------------------------------------------------------

    def admit(self, ask: Ask) -> Held | None:
        """One call of Admit."""
        ended = [held for held in self.held if self.state(held) in (LeaseState.RELEASED, None)]
        for held in ended[:-ENDED_KEPT]:
            self.held.remove(held)
        admission = self.do(
            lambda: self.book.admit(ask, self.now), then=lambda answer: self.shadow.asked_again(answer.lease), ask=ask
        )
        if admission is None:
            return None
        known = next((held for held in self.held if held.lease_id == admission.lease.lease_id), None)
        if known is None:
            known = Held(ask, admission.lease.lease_id, admission.stream)
            self.held.append(known)
        known.ask, known.stream = ask, admission.stream
        self.check()
        return known

    def activate_and_load(self, held: Held, *, engine: bool = True) -> None:
        """GRANTED → ACTIVE, and loaded."""
        engines = (self.world.process(next(self.pids)),) if engine else ()
        secret = held.secrets[-1]
        if self.do(lambda: self.book.activate(held.lease_id, secret, self.process(held), engines, self.now)):
            self.renew(held, load_complete=True)

    def renew(self, held: Held, observed: Observed | None = None, *, load_complete: bool = False) -> None:
        """One beat of KeepAlive."""

        def then(_: object) -> None:
            self.shadow.heard(held.lease_id)
            if observed is not None:
                self.shadow.observed(held.lease_id, observed)

        secret = held.secrets[-1]
        self.do(lambda: self.book.renew(held.lease_id, secret, observed, self.now, load_complete), then=then)

    def begin_use(self, held: Held) -> None:
        """A use of its own name."""
        use, secret = f"use-{next(self.pids)}", held.secrets[-1]
        begun = self.do(
            lambda: self.book.begin_use(held.lease_id, secret, use, self.now),
            then=lambda _: self.shadow.began(held.lease_id, use),
        )
        if begun:
            held.uses.append(use)

    def end_use(self, held: Held) -> None:
        """The use begun first."""
        if held.uses:
            use, secret = held.uses.pop(0), held.secrets[-1]
            self.do(
                lambda: self.book.end_use(held.lease_id, secret, use, self.now),
                then=lambda _: self.shadow.ended(held.lease_id, use),
            )

    def release(self, held: Held) -> None:
        """Its holder gives it back."""
        secret = held.secrets[-1]
        self.do(
            lambda: self.book.release(held.lease_id, secret, self.world.is_alive, self.now), given_back={held.lease_id}
        )

    def attach(self, held: Held) -> None:
        """Its own process comes back, having lost the secret."""
        self.do(lambda: self.book.attach(held.lease_id, self.process(held), "", self.now))

    def die(self, held: Held, *, engines_too: bool) -> None:
        """Its processes die, and the sweep sees it."""
        view = self.book.view(held.lease_id)
        engines = view.lease.engines if view is not None and engines_too else ()
        self.world.dead |= {self.process(held), *engines}
        dead = frozenset(self.world.dead & self.book.processes_to_watch())
        self.do(lambda: self.book.processes_died(dead, self.now))

    def pass_time(self, seconds: float, *, renewing: bool) -> None:
        """Time passes with the ledger awake, and its holders too if they renew."""
        until = self.world.time + seconds
        while self.world.time < until:
            self.world.time = min(until, self.world.time + TICK_S)
            self.shadow.scene.now = self.world.time
            self.do(lambda: self.book.tick(self.now))
            if renewing:
                self.renew_all()

    def renew_all(self) -> None:
        """Every living holder whose term is half over renews."""
        for held in self.held:
            view = self.book.view(held.lease_id)
            if (
                view is not None
                and view.lease.state in (LeaseState.ACTIVE, LeaseState.VACATING)
                and not view.lease.suspect
                and view.deadline - self.world.time <= QUICK.term_s / 2
                and self.process(held) not in self.world.dead
            ):
                self.renew(held)

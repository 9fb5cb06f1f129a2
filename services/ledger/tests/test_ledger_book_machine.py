"""The book in random interleavings of everything that can happen to it, judged by an oracle (see `explore`).

WEIGHBRIDGE_BOOK_STEPS sets how many steps are tried, in histories of 50 (default 10,000; `make explore`: a million).
"""

import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from weighbridge_ledger.book import (
    GPU,
    Ask,
    Claim,
    Credential,
    DeviceWant,
    External,
    Hold,
    LeaseState,
    Observed,
    Reason,
    Refused,
)
from weighbridge_ledger.book.events import EventKind

from services.ledger.tests.explore.fairness import everybody_is_served
from services.ledger.tests.explore.machine import ANY_CARDS, NAMED_CARDS, Driver, Held

STEPS_PER_HISTORY = 50

SLOW_TERM_S = 9

INDEX = st.integers(0, 30)
SELDOM = st.sampled_from([False, False, False, True])
OPTIONAL = st.sampled_from([0, 2, 5])

UNWELL = Hold("DEVICE_UNHEALTHY", "It is hot.", refuses_use=True)
PANIC = Hold("GPU_PANIC", "It panicked.")
HOLDS = st.sampled_from([{}, {}, {"a": UNWELL}, {GPU: UNWELL}, {"": PANIC}])

GRANTED, ACTIVE, VACATING = LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.VACATING


@dataclass(frozen=True)
class Whims:
    """What a client wants besides bytes."""

    priority: int
    pinned: bool
    exclusive: bool
    loads: bool
    """It activates and loads at once what is granted at once."""
    retriable: bool
    cpu_only: bool
    foreign: bool
    """It lives in another pid namespace."""
    limited: bool
    """It has a memory limit of its own."""
    impatient: bool
    slow: bool
    """It has a longer term."""


WHIMS = st.builds(
    Whims,
    priority=st.sampled_from([1, 1, 2, 3]),
    pinned=SELDOM,
    exclusive=SELDOM,
    loads=st.booleans(),
    retriable=st.booleans(),
    cpu_only=SELDOM,
    foreign=SELDOM,
    limited=SELDOM,
    impatient=SELDOM,
    slow=SELDOM,
)


class BookMachine(Driver):
    """Rules for everything that clients, engines, devices, people and the kernel can do to a book."""

    def somebody(self) -> bool:
        return bool(self.held)

    # -- asking ----------------------------------------------------------------------------------------------------

    @rule(host=st.integers(0, 6), optional=OPTIONAL, whims=WHIMS)
    def claim_on_the_host(self, host: int, optional: int, whims: Whims) -> None:
        self.claim(Claim(host, (), optional, cpu_only=whims.cpu_only), whims)

    @rule(host=st.sampled_from([0, 0, 1, 4]), wishes=st.sampled_from(NAMED_CARDS), whims=WHIMS)
    def claim_cards(self, host: int, wishes: tuple[DeviceWant, ...], whims: Whims) -> None:
        self.claim(Claim(host, wishes), whims)

    @rule(host=st.sampled_from([0, 0, 1, 4]), wishes=st.sampled_from(ANY_CARDS), whims=WHIMS)
    def claim_any_card(self, host: int, wishes: tuple[DeviceWant, ...], whims: Whims) -> None:
        self.claim(Claim(host, wishes), whims)

    @precondition(somebody)
    @rule(index=INDEX, replaces=st.booleans(), more=st.integers(-1, 3), whims=WHIMS)
    def claim_with_a_lease_of_its_own(self, index: int, replaces: bool, more: int, whims: Whims) -> None:
        """It replaces that lease, a pinned one if there is any, grown by so much; or keeps it busy meanwhile."""
        mine = self.pick(index, ACTIVE, VACATING)
        pinned = [held for held in self.held if held.ask.pinned and self.state(held) is ACTIVE]
        if replaces and pinned:
            mine = pinned[index % len(pinned)]
        if mine is not None and mine.secrets:
            credential = Credential(mine.lease_id, mine.secrets[-1])
            wishes = mine.ask.claim.devices if replaces else ()
            claim = Claim(max(0, (mine.ask.claim.host_bytes if replaces else 0) + more), wishes)
            if replaces:
                self.claim(claim, whims, holder=self.process(mine), replaces=credential)
            else:
                self.claim(claim, whims, holder=self.process(mine), while_holding=(credential,))

    def claim(self, claim: Claim, whims: Whims, **more: Any) -> None:
        """Look what would happen, and ask."""
        cards = self.book.ceilings.devices
        if not cards or any(want.device_id not in ("", *cards) for want in claim.devices):
            claim = replace(claim, devices=())
        pid = next(self.pids)
        namespace = {"namespace": "pid:[2]"} if whims.foreign else {}
        ask = Ask(
            request_id=f"r{pid}" if whims.retriable else "",
            holder=more.pop("holder", self.world.process(pid, **namespace)),
            claim=claim,
            priority=whims.priority,
            pinned=whims.pinned,
            exclusive=whims.exclusive,
            memory_limit_bytes=5 if whims.limited else 0,
            max_wait_s=10 if whims.impatient else None,
            term_s=SLOW_TERM_S if whims.slow else None,
            **more,
        )
        held = self.look_and_admit(ask)
        if whims.loads and held is not None and self.state(held) is GRANTED:
            self.activate_and_load(held, engine=pid % 2 == 0)

    def look_and_admit(self, ask: Ask) -> Held | None:
        """A what-if changes nothing, and comes true when it is asked for at once."""
        before = self.everything()
        try:
            preview = self.book.preview(ask, self.now)
        except Refused:
            preview = None
        assert self.world.drain() == []
        assert self.everything() == before, "looking changed something"
        held = self.admit(ask)
        if preview is not None and ask.replaces is None:
            granted = held is not None and self.state(held) is GRANTED
            assert granted is (preview.charge is not None and not preview.evict), preview
            if granted:
                assert self.book.view(held.lease_id).lease.charge == preview.charge
            assert (preview.refusal is not None) is (held is None and self.refusal is Reason.CLAIM_EXCEEDS_CAPACITY)
        return held

    @precondition(somebody)
    @rule(index=INDEX, other_process=SELDOM)
    def ask_again(self, index: int, other_process: bool) -> None:
        held = self.pick(index)
        if held is not None and held.ask.request_id:
            holder = self.world.process(next(self.pids)) if other_process else self.process(held)
            self.admit(replace(held.ask, holder=holder))

    @precondition(somebody)
    @rule(index=INDEX, engine=st.booleans())
    def activate(self, index: int, engine: bool) -> None:
        held = self.pick(index, GRANTED, ACTIVE)
        if held is not None and held.secrets:
            engines = (self.world.process(next(self.pids)),) if engine else ()
            secret, process = held.secrets[-1], self.process(held)
            self.do(lambda: self.book.activate(held.lease_id, secret, process, engines, self.now))

    @precondition(somebody)
    @rule(index=INDEX, newest=st.booleans())
    def end_stream(self, index: int, newest: bool) -> None:
        held = self.pick(index)
        if held is not None:
            stream = held.stream if newest else held.stream - 1
            self.do(lambda: self.book.stream_ended(held.lease_id, stream, self.now))

    @precondition(somebody)
    @rule(index=INDEX, observed=st.none() | st.integers(0, 9), load_complete=st.booleans())
    def renew_one(self, index: int, observed: int | None, load_complete: bool) -> None:
        held = self.pick(index, ACTIVE, VACATING)
        if held is not None and held.secrets:
            seen = None if observed is None else Observed(observed)
            self.renew(held, seen, load_complete=load_complete)

    @precondition(somebody)
    @rule(index=INDEX)
    def come_back(self, index: int) -> None:
        held = self.pick(index)
        if held is not None:
            self.attach(held)

    @precondition(somebody)
    @rule(index=INDEX)
    def use(self, index: int) -> None:
        held = self.pick(index, ACTIVE)
        if held is not None and held.secrets:
            self.begin_use(held)

    @precondition(somebody)
    @rule(index=INDEX)
    def stop_using(self, index: int) -> None:
        users = [held for held in self.held if held.uses and held.secrets]
        if users:
            self.end_use(users[index % len(users)])

    @precondition(somebody)
    @rule(
        index=INDEX,
        host=st.integers(-2, 2),
        card=st.integers(-2, 2),
        optional=st.booleans(),
        exclusive=st.sampled_from([None, None, True, False]),
    )
    def resize(self, index: int, host: int, card: int, optional: bool, exclusive: bool | None) -> None:
        held = self.pick(index, ACTIVE, VACATING)
        if held is None or not held.secrets:
            return
        charge = self.book.view(held.lease_id).lease.charge
        spilled = dict(charge.spilled)
        wants = tuple(
            DeviceWant(device, max(0, size + spilled.get(device, 0) + card), 2 if optional else 0)
            for device, size in charge.devices
        )
        claim = Claim(max(0, charge.host_bytes - sum(spilled.values()) + host), wants, 2 if optional else 0)
        secret = held.secrets[-1]
        self.do(lambda: self.book.resize(held.lease_id, secret, claim, self.now, exclusive))

    @precondition(somebody)
    @rule(index=INDEX)
    def give_back(self, index: int) -> None:
        held = self.pick(index)
        if held is not None and held.secrets:
            self.release(held)

    @precondition(somebody)
    @rule(index=INDEX, data=st.data())
    def a_stale_secret_changes_nothing(self, index: int, data: Any) -> None:
        stale = [held for held in self.held if len(held.secrets) > 1 and self.book.view(held.lease_id) is not None]
        if not stale:
            return
        held = stale[index % len(stale)]
        lease_id, process, now, book = held.lease_id, self.process(held), self.now, self.book
        secret = data.draw(st.sampled_from(held.secrets[:-1]))
        mine = Credential(lease_id, secret)
        ask = Ask("", process, Claim(1), priority=3)
        before = self.everything()
        verbs = [
            lambda: book.activate(lease_id, secret, process, (), now),
            lambda: book.activate(lease_id, held.secrets[-1], self.world.process(999_999), (), now),
            lambda: book.renew(lease_id, secret, Observed(9), now, True),
            lambda: book.begin_use(lease_id, secret, "", now),
            lambda: book.end_use(lease_id, secret, held.uses[0] if held.uses else "", now),
            lambda: book.resize(lease_id, secret, Claim(0), now, True),
            lambda: book.release(lease_id, secret, lambda _: False, now),
            lambda: book.attach(lease_id, self.world.process(999_999), "", now),
            lambda: book.admit(replace(ask, replaces=mine), now),
            lambda: book.admit(replace(ask, while_holding=(mine,)), now),
        ]
        if secret != held.secrets[-2]:
            verbs.append(lambda: book.attach(lease_id, process, secret, now))
        for verb in verbs:
            refused = False
            try:
                verb()
            except Refused:
                refused = True
            assert refused, "a stale secret was heeded"
        assert self.world.drain() == []
        assert self.everything() == before

    @precondition(somebody)
    @rule(index=INDEX, engines_too=st.booleans())
    def kill(self, index: int, engines_too: bool) -> None:
        held = self.pick(index)
        if held is not None:
            self.die(held, engines_too=engines_too)
            if self.state(held) in (ACTIVE, VACATING):
                # An operator's word counts only where nobody is seen alive.
                self.do(lambda: self.book.release_by_operator(held.lease_id, self.world.is_alive, self.now))

    @rule(seconds=st.sampled_from([0.5, 2, 2, 6, 8, 20]), renewing=st.sampled_from([True, True, True, False]))
    def time_passes(self, seconds: float, renewing: bool) -> None:
        self.pass_time(seconds, renewing=renewing)

    @rule(seconds=st.sampled_from([2, 4, 1000]))
    def ledger_stands_still(self, seconds: float) -> None:
        suspects = {view.lease.lease_id for view in self.book.charged() if view.lease.suspect}
        self.world.stand_still(seconds)
        self.shadow.scene.now = self.world.time
        self.shadow.stood_still(seconds)
        self.do(lambda: self.book.tick(self.now))
        if seconds > SLOW_TERM_S / 2:
            # Nobody could renew meanwhile, so nobody is silent.
            assert {view.lease.lease_id for view in self.book.charged() if view.lease.suspect} <= suspects

    @rule(host=st.integers(0, 4), card=st.sampled_from([0, 0, 2]), samples=st.integers(1, 4))
    def others_take(self, host: int, card: int, samples: int) -> None:
        external = External(host, {"a": card} if card else {})
        for _ in range(samples):
            self.do(lambda: self.book.set_external(external, self.now), then=lambda _: self.shadow.measured(external))

    @rule(holds=HOLDS)
    def devices_fall_ill(self, holds: dict[str, Hold]) -> None:
        self.do(lambda: self.book.set_holds(holds, self.now), then=lambda _: self.shadow.held(holds))

    @rule(index=INDEX)
    def new_ceilings(self, index: int) -> None:
        self.world.ceilings = self.ceilings[index % len(self.ceilings)]
        self.do(lambda: self.book.set_ceilings(self.world.ceilings, self.now))

    @rule()
    def restart(self) -> None:
        before = self.book.committed()
        self.world.restart()
        assert self.book.committed() == before, "a restart keeps the charges"
        for held in self.held:
            held.stream = -1
            held.uses.clear()
        self.shadow.restarted()
        self.check()

    def teardown(self) -> None:
        """Everybody who waits is served if holders are fair; and when all are dead, nothing stays charged."""
        if not hasattr(self, "world") or not self.sound:
            return
        everybody_is_served(self)
        for held in list(self.held):
            self.do(lambda held=held: self.book.stream_ended(held.lease_id, held.stream, self.now))
        for view in list(self.book.charged()):
            self.world.dead |= set(view.lease.processes)
        dead = frozenset(self.world.dead & self.book.processes_to_watch())
        self.do(lambda: self.book.processes_died(dead, self.now))
        # Those whom nobody sees have a term, doubled by a restart, and the grace.
        self.pass_time(2 * SLOW_TERM_S + self.world.policy.grace_s, renewing=False)
        assert self.world.committed() == 0
        assert self.book.queue_depth == 0
        self.seen.update(self.shadow.told)


@pytest.mark.timeout(
    900
)  # All of it is computing: half a minute on an idle core, and a multiple of that on a busy one.
def test_the_book_holds_in_every_interleaving(new_world) -> None:
    steps = int(os.environ.get("WEIGHBRIDGE_BOOK_STEPS", "10000"))
    seen: Counter[str] = Counter()
    machine = type("BookMachine", (BookMachine,), {"world_type": new_world, "seen": seen})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(1, steps // STEPS_PER_HISTORY),
            stateful_step_count=STEPS_PER_HISTORY,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    missed = [kind for kind in EventKind if not seen[kind]]
    assert not missed, f"histories in which these never happen prove little: {missed}"

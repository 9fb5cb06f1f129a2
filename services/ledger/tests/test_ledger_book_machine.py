"""The book in random interleavings: asks, retries, activations, silence, deaths, releases, resizes, limits, restarts.

WEIGHBRIDGE_BOOK_EXAMPLES sets how many histories of 50 steps are tried (default 100, so 5,000 steps).
"""

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from weighbridge_ledger.book import HOST, Ceilings, Charge, Claim, External, LeaseState, Observed, Policy, Refused
from weighbridge_ledger.book.charging import Usage, price
from weighbridge_ledger.book.events import EventKind

RANK = {state: rank for rank, state in enumerate(LeaseState)}

CEILINGS = [
    Ceilings(8),
    Ceilings(8, limit_bytes=5),
    Ceilings(6, {"a": 4, "b": 4}),
    Ceilings(6, {"a": 4, "b": 4}, spill_allowed=True),
    Ceilings(6, {"a": 4, "b": 4}, limit_bytes=7),
]

DEVICES = st.sampled_from([{}, {}, {"a": 1}, {"a": 3}, {"b": 4}, {"a": 2, "b": 2}, {"": 2}, {"a": 6}])
POLICY = Policy(queue_bound=6, protect_passes=3)


@dataclass
class Held:
    """What a client knows of its lease."""

    lease_id: str
    pid: int
    request_id: str
    stream: int
    secrets: list[str] = field(default_factory=list)


def book_machine(new_world):
    """The state machine over one of these worlds."""

    class BookMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = new_world(Ceilings(6, {"a": 4, "b": 4}), POLICY)
            self.held: list[Held] = []
            self.ranks: dict[str, int] = {}
            self.before: dict[str, int] = {}
            self.pids = iter(range(1, 10_000))
            self.seen_events = 0

        def pick(self, index: int) -> Held | None:
            return self.held[index % len(self.held)] if self.held else None

        def learn_secrets(self) -> None:
            for held in self.held:
                secret = self.world.book.secret_of(held.lease_id)
                if secret is not None and secret not in held.secrets:
                    held.secrets.append(secret)

        def attempt(self, verb) -> None:
            try:
                verb()
            except Refused:
                pass
            finally:
                self.world.drain()
                self.learn_secrets()

        @rule(host=st.integers(0, 5), devices=DEVICES, retriable=st.booleans())
        def admit(self, host: int, devices: dict[str, int], retriable: bool) -> None:
            pid = next(self.pids)
            request_id = f"r{pid}" if retriable else ""
            if "a" in devices and "a" not in self.world.book.ceilings.devices:
                devices = {}

            def verb() -> None:
                admission = self.world.admit(host, pid, request_id, devices=devices)
                self.held.append(Held(admission.lease.lease_id, pid, request_id, admission.stream))

            self.attempt(verb)

        @rule(index=st.integers(0, 30), other_process=st.booleans())
        def retry(self, index: int, other_process: bool) -> None:
            held = self.pick(index)
            if held is None or not held.request_id:
                return
            view = self.world.book.view(held.lease_id)
            claim = None if view is None else view.lease.claim
            if claim is None:
                return
            pid = next(self.pids) if other_process else held.pid

            def verb() -> None:
                admission = self.world.book.admit(
                    self.world.ask(
                        claim.host_bytes, pid, held.request_id, {w.device_id: w.required_bytes for w in claim.devices}
                    ),
                    self.world.now,
                )
                if admission.lease.lease_id == held.lease_id:
                    held.pid, held.stream = pid, admission.stream
                else:
                    self.held.append(Held(admission.lease.lease_id, pid, held.request_id, admission.stream))

            self.attempt(verb)

        @rule(index=st.integers(0, 30), engine=st.booleans())
        def activate(self, index: int, engine: bool) -> None:
            held = self.pick(index)
            if held is None or not held.secrets:
                return
            engines = (self.world.process(1000 + next(self.pids)),) if engine else ()
            process = self.world.process(held.pid)
            self.attempt(
                lambda: self.world.book.activate(held.lease_id, held.secrets[-1], process, engines, self.world.now)
            )

        @rule(index=st.integers(0, 30), newest=st.booleans())
        def end_stream(self, index: int, newest: bool) -> None:
            held = self.pick(index)
            if held is None:
                return
            stream = held.stream if newest else held.stream - 1
            self.attempt(lambda: self.world.book.stream_ended(held.lease_id, stream, self.world.now))

        @rule(index=st.integers(0, 30), observed=st.none() | st.integers(0, 9))
        def renew(self, index: int, observed: int | None) -> None:
            held = self.pick(index)
            if held is None or not held.secrets:
                return
            seen = None if observed is None else Observed(observed)
            self.attempt(lambda: self.world.book.renew(held.lease_id, held.secrets[-1], seen, self.world.now))

        @rule(index=st.integers(0, 30))
        def attach(self, index: int) -> None:
            held = self.pick(index)
            if held is not None:
                process = self.world.process(held.pid)
                self.attempt(lambda: self.world.book.attach(held.lease_id, process, "", self.world.now))

        @rule(index=st.integers(0, 30), host=st.integers(0, 6))
        def resize(self, index: int, host: int) -> None:
            held = self.pick(index)
            if held is None or not held.secrets:
                return
            self.attempt(lambda: self.world.book.resize(held.lease_id, held.secrets[-1], Claim(host), self.world.now))

        @rule(index=st.integers(0, 30))
        def release(self, index: int) -> None:
            held = self.pick(index)
            if held is not None and held.secrets:
                self.attempt(lambda: self.world.release(held.lease_id, held.secrets[-1]))

        @rule(index=st.integers(0, 30), data=st.data())
        def stale_secret_changes_nothing(self, index: int, data) -> None:
            held = self.pick(index)
            if held is None or self.world.book.view(held.lease_id) is None:
                return
            current = self.world.book.secret_of(held.lease_id)
            stale = [secret for secret in held.secrets if secret != current] if current else []
            if not stale:
                return
            secret = data.draw(st.sampled_from(stale))
            world, process = self.world, self.world.process(held.pid)
            before = world.book.view(held.lease_id)
            for verb in (
                lambda: world.book.activate(held.lease_id, secret, process, (), world.now),
                lambda: world.book.renew(held.lease_id, secret, Observed(9), world.now),
                lambda: world.book.begin_use(held.lease_id, secret, "", world.now),
                lambda: world.book.resize(held.lease_id, secret, Claim(0), world.now),
                lambda: world.book.release(held.lease_id, secret, lambda _: False, world.now),
            ):
                with pytest.raises(Refused):
                    verb()
            assert world.book.view(held.lease_id) == before
            world.drain()

        @rule(index=st.integers(0, 30), engines_too=st.booleans())
        def kill(self, index: int, engines_too: bool) -> None:
            held = self.pick(index)
            if held is None:
                return
            view = self.world.book.view(held.lease_id)
            engines = view.lease.engines if view is not None and engines_too else ()
            self.world.die(held.pid, *(engine.pid for engine in engines))
            self.learn_secrets()

        @rule(seconds=st.sampled_from([0.5, 2, 9.5, 15, 31, 61]))
        def time_passes(self, seconds: float) -> None:
            self.world.pass_time(seconds)
            self.learn_secrets()

        @rule(seconds=st.sampled_from([3, 20, 1000]))
        def ledger_stands_still(self, seconds: float) -> None:
            suspects = {view.lease.lease_id for view in self.world.book.charged() if view.lease.suspect}
            self.world.stand_still(seconds)
            self.world.book.tick(self.world.now)
            self.world.drain()
            if seconds > 10:
                # Longer than half of every term here: nothing may have expired meanwhile.
                assert {view.lease.lease_id for view in self.world.book.charged() if view.lease.suspect} == suspects

        @rule(host=st.integers(0, 4))
        def external_use(self, host: int) -> None:
            self.world.book.set_external(External(host), self.world.now)
            self.world.drain()
            self.learn_secrets()

        @rule(ceilings=st.sampled_from(CEILINGS[2:]))
        def new_ceilings(self, ceilings: Ceilings) -> None:
            self.world.ceilings = ceilings
            self.world.book.set_ceilings(ceilings, self.world.now)
            self.world.drain()
            self.learn_secrets()

        @rule()
        def restart(self) -> None:
            before = self.world.book.committed()
            self.world.restart()
            self.world.book.set_ceilings(self.world.ceilings, self.world.now)
            assert self.world.book.committed() == before
            for held in self.held:
                held.stream = -1
            self.learn_secrets()

        @invariant()
        def no_transition_raises_a_sum_above_its_ceiling(self) -> None:
            sums, ceilings = self.world.book.committed(), self.world.book.ceilings
            now = {pool: sums.on(pool) for pool in (HOST, "a", "b")} | {"all": sums.total_bytes}
            for pool, size in now.items():
                ceiling = ceilings.total_bytes if pool == "all" else ceilings.pool_bytes(pool)
                assert size <= max(ceiling, self.before.get(pool, 0)), (pool, size, ceiling)
            self.before = now

        @invariant()
        def the_running_sums_are_the_sums(self) -> None:
            usage = Usage()
            for view in self.world.book.charged():
                assert view.lease.state.charged
                usage.add(view.lease.charge)
            sums = self.world.book.committed()
            assert (sums.host_bytes, sums.total_bytes) == (usage.host_bytes, usage.total_bytes)
            assert sums.devices == {device: size for device, size in usage.devices.items() if size}

        @invariant()
        def what_is_committed_is_what_is_in_the_book(self) -> None:
            stored = {lease.lease_id: lease for lease in self.world.store.load().leases}
            assert stored == {view.lease.lease_id: view.lease for view in self.world.book.charged()}

        @invariant()
        def states_never_go_back(self) -> None:
            for event in self.world.events[self.seen_events :]:
                if event.lease is None:
                    continue
                rank = RANK[event.lease.state]
                assert rank >= self.ranks.get(event.lease.lease_id, 0), event
                self.ranks[event.lease.lease_id] = rank
            self.seen_events = len(self.world.events)

        @invariant()
        def nobody_who_could_be_granted_waits_first(self) -> None:
            """No lost waiter: the first in the queue harms nobody, so it waits only while it does not fit."""
            book = self.world.book
            first = next(iter(book._queue), None)
            if first is not None:
                fits = price(first.claim, book.ceilings, book._external, book._usage)
                assert not isinstance(fits, Charge), first

        @invariant()
        def every_wait_and_every_grant_was_told(self) -> None:
            told = {e.lease.lease_id for e in self.world.events if e.kind in (EventKind.QUEUED, EventKind.GRANTED)}
            assert set(self.world.book.lease_ids()) <= told

        def teardown(self) -> None:
            """When everyone is dead, nothing stays charged and nobody waits."""
            world = self.world
            for held in self.held:
                world.book.stream_ended(held.lease_id, held.stream, world.now)
            for view in list(world.book.charged()):
                world.dead |= set(view.lease.processes)
            world.die()
            world.pass_time(POLICY.activate_by_s + 1)
            world.die(*(held.pid for held in self.held))
            assert world.committed() == 0
            assert world.book.queue_depth == 0

    return BookMachine


def test_the_book_holds_in_every_interleaving(new_world) -> None:
    examples = int(os.environ.get("WEIGHBRIDGE_BOOK_EXAMPLES", "100"))
    run_state_machine_as_test(
        book_machine(new_world),
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

"""Traces across what interrupts a rule: a ledger killed between commit and tell, clocks that are set, a ledger that
stood still, pids that are used again, claims that come and go by the thousand."""

from dataclasses import replace

import pytest
from weighbridge_ledger.book import Ceilings, Claim, DeviceWant, EventKind, LeaseState, Moment, Policy, ReleaseCause
from weighbridge_ledger.book.core import NUMBERS_AHEAD, STALE_TIMERS

QUEUED, GRANTED, ACTIVE, VACATING = LeaseState.QUEUED, LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.VACATING
HOUR = 3600.0


# -- killed between commit and tell: the caller repeats what was never answered --------------------------------------


def test_a_grant_that_was_committed_and_not_told_goes_to_another_process_with_another_secret(new_world) -> None:
    world = new_world(4)
    untold = world.admit(3, 1, "r").lease
    secret = world.secret(untold.lease_id)
    world.restart()
    again = world.admit(3, 2, "r").lease
    assert again.lease_id == untold.lease_id
    assert world.secret(again.lease_id) != secret
    assert (
        world.refused(lambda: world.book.activate(untold.lease_id, secret, world.process(1), (), world.now))
        == "LEASE_SECRET_MISMATCH"
    )
    assert world.committed() == 3


def test_an_activation_that_was_committed_and_not_told_can_be_repeated(new_world) -> None:
    world = new_world(4)
    lease_id, secret = world.active(3, 1, 11)
    world.restart()
    assert world.book.activate(lease_id, secret, world.process(1), (world.process(11),), world.now).state is ACTIVE


def test_a_release_that_was_committed_and_not_told_can_be_repeated(new_world) -> None:
    world = new_world(4)
    lease_id, secret = world.active(3)
    world.release(lease_id, secret)
    world.restart()
    assert world.release(lease_id, secret).state is LeaseState.RELEASED
    assert world.refused(lambda: world.release(lease_id, "wrong")) == "LEASE_SECRET_MISMATCH"


def test_an_attach_that_was_committed_and_not_told_can_be_repeated_with_the_old_secret(new_world) -> None:
    world = new_world(4)
    lease_id, old = world.active(3)
    world.book.attach(lease_id, world.process(1), old, world.now)
    world.drain()
    world.restart()
    assert world.refused(lambda: world.book.renew(lease_id, old, None, world.now)) == "LEASE_SECRET_MISMATCH"
    _, new = world.book.attach(lease_id, world.process(1), old, world.now)
    assert world.book.renew(lease_id, new, None, world.now).lease.state is ACTIVE


def test_fences_rise_over_restarts_although_numbers_are_reserved_ahead(new_world) -> None:
    world = new_world(10)
    fences = []
    for round_ in range(5):
        lease_id, secret = world.active(1, round_ + 1)
        fences.append(world.book.view(lease_id).lease.fence)
        world.release(lease_id, secret)
        if round_ % 2:
            world.restart()
    assert fences == sorted(set(fences))
    assert fences[-1] - fences[0] <= 5 * 2 + 2 * NUMBERS_AHEAD


def test_numbers_are_reserved_before_the_last_of_them_is_given_out(new_world) -> None:
    world = new_world(1)
    for pid in range(1, NUMBERS_AHEAD + 10):
        admission = world.admit(1, pid)
        assert admission.lease.fence <= world.store.load().counter
        world.book.stream_ended(admission.lease.lease_id, admission.stream, world.now)
        world.drain()


# -- clocks that are set ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-2 * HOUR, 2 * HOUR, 400 * 24 * HOUR])
def test_a_wall_clock_that_is_set_moves_nothing(new_world, jump: float) -> None:
    """Terms, places and remembered requests run on the monotonic clock; the wall clock is for people."""
    world = new_world(4)
    ended, secret = world.active(1, 1, request_id="ended")
    world.release(ended, secret)
    held, _ = world.active(3, 2)
    waiting = world.admit(2, 3, "w")

    def now() -> Moment:
        return Moment(world.time, world.now.wall + jump)

    world.book.tick(now())
    assert not world.suspect(held)
    assert world.refused(lambda: world.book.admit(world.ask(1, 1, "ended"), now())) == "REQUEST_ENDED"
    assert world.state(waiting.lease.lease_id) is QUEUED
    world.book.stream_ended(waiting.lease.lease_id, waiting.stream, now())
    again = world.book.admit(world.ask(2, 3, "w"), now())
    assert again.lease.sequence == waiting.lease.sequence
    # It has waited for no time at all, so it is not protected: a claim of 1 may still pass it.
    assert world.book.admit(world.ask(1, 4), now()).lease.state is GRANTED
    world.book.stream_ended(again.lease.lease_id, again.stream, now())
    world.time += 2
    for _ in range(30):
        world.book.tick(now())
        world.time += 2
    assert world.book.admit(world.ask(2, 3, "w"), now()).lease.sequence > waiting.lease.sequence


def test_a_grant_that_nobody_activated_keeps_its_place_but_waits_anew(new_world) -> None:
    """Else a client that takes grants and never activates would be protected for ever."""
    world = new_world(2)
    first = world.admit(2, 1, "never").lease
    world.pass_time(10)
    world.active(1, 2, term_s=600)
    again = world.admit(2, 1, "never").lease
    assert again.sequence == first.sequence
    world.pass_time(55)
    assert world.admit(1, 3).lease.state is GRANTED  # 65 s after it was first asked for, 55 s after it waits again


# -- a ledger that stood still ---------------------------------------------------------------------------------------


def test_a_ledger_that_stood_still_gives_those_who_vacate_their_time_again(new_world) -> None:
    """Nobody could be heard meanwhile: bytes that may be back in a moment are not overdue."""
    world = new_world(4)
    a, secret = world.active(3, 1, 11, term_s=600)
    world.release(a, secret)
    world.stand_still(HOUR)
    world.book.tick(world.now)
    assert EventKind.OVERDUE not in [event.kind for event in world.drain()]
    world.pass_time(29.5)
    assert EventKind.OVERDUE not in [event.kind for event in world.events]
    world.pass_time(0.5)
    assert EventKind.OVERDUE in [event.kind for event in world.events]


def test_a_ledger_that_stood_still_ends_no_wait(new_world) -> None:
    world = new_world(1)
    world.active(1)
    waiting = world.admit(1, 2, max_wait_s=30).lease
    world.pass_time(10)
    world.stand_still(HOUR)
    world.book.tick(world.now)
    world.pass_time(19.5)
    assert world.state(waiting.lease_id) is QUEUED
    world.pass_time(0.5)
    assert world.book.view(waiting.lease_id).cause == ReleaseCause.WAITED_TOO_LONG


# -- who is who ------------------------------------------------------------------------------------------------------


def test_a_pid_that_is_used_again_is_another_process(new_world) -> None:
    world = new_world(4)
    later = replace(world.process(1), start_time=999)
    active, secret = world.active(1, 1, request_id="active")
    granted = world.admit(1, 1, "granted").lease
    assert world.refused(lambda: world.book.attach(active, later, secret, world.now)) == "LEASE_SECRET_MISMATCH"
    assert world.refused(lambda: world.admit(1, request_id="active", holder=later)) == "REQUEST_IN_USE"
    before = world.secret(granted.lease_id)
    world.admit(1, request_id="granted", holder=later)
    assert world.secret(granted.lease_id) != before


def test_the_end_of_an_older_stream_does_not_free_the_grant_that_a_retry_took_over(new_world) -> None:
    """Rule 9, while GRANTED."""
    world = new_world(4)
    first = world.admit(3, 1, "r")
    retry = world.admit(3, 2, "r")
    world.book.stream_ended(first.lease.lease_id, first.stream, world.now)
    assert world.state(first.lease.lease_id) is GRANTED
    world.book.stream_ended(first.lease.lease_id, retry.stream, world.now)
    assert world.committed() == 0


def test_a_holder_stays_connected_while_one_of_its_streams_is_open(new_world) -> None:
    world = new_world(4)
    lease_id, _ = world.active(3)
    for change in (+1, +1, -1):
        world.book.connected(lease_id, change)
    assert world.book.view(lease_id).connected


def test_an_engine_that_can_be_seen_frees_the_lease_of_a_holder_that_cannot(new_world) -> None:
    world = new_world(4)
    foreign = world.process(1, namespace="pid:[2]")
    lease_id = world.admit(3, holder=foreign).lease.lease_id
    secret = world.secret(lease_id)
    world.book.activate(lease_id, secret, foreign, (world.process(11),), world.now)
    assert world.release(lease_id, secret).state is VACATING
    world.die(11)
    assert world.committed() == 0


def test_a_holder_of_another_host_is_not_taken_for_dead_because_its_boot_is_another(new_world) -> None:
    world = new_world(4)
    elsewhere, engine = (world.process(pid, boot="boot-2") for pid in (1, 11))
    lease_id = world.admit(3, holder=elsewhere).lease.lease_id
    world.book.activate(lease_id, world.secret(lease_id), elsewhere, (engine,), world.now)
    assert not world.book.processes_to_watch()
    world.book.processes_died(frozenset({elsewhere, engine}), world.now)
    assert world.committed() == 3


def test_an_engine_that_cannot_be_looked_at_just_now_is_not_dead(new_world) -> None:
    """A ledger without a free file descriptor cannot read /proc: a release then waits for proof."""
    world = new_world(4)
    lease_id, secret = world.active(3, 1, 11)
    assert world.book.release(lease_id, secret, lambda _: None, world.now).state is VACATING
    assert world.committed() == 3


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_growing_by_a_card_named_twice_charges_both(new_world) -> None:
    world = new_world(Ceilings(8, {"a": 8}))
    lease_id, secret = world.active(0, 1, devices={"a": 1})
    claim = Claim(0, (DeviceWant("a", 2), DeviceWant("a", 3)))
    assert world.book.resize(lease_id, secret, claim, world.now).charge.on("a") == 5


def test_nobody_grows_beyond_the_limit_of_its_own_container(new_world) -> None:
    world = new_world(10)
    lease_id, secret = world.active(3, 1, memory_limit_bytes=4)
    assert world.book.resize(lease_id, secret, Claim(4), world.now).charge.total_bytes == 4
    assert world.refused(lambda: world.book.resize(lease_id, secret, Claim(5), world.now)) == "CANNOT_GROW"
    assert world.committed() == 4


def test_a_waiter_that_may_spill_all_at_once_is_harmed_on_the_host_too(new_world) -> None:
    """Rule 16 after the person allowed spilling: w (4, of which 2 on the card) now waits for host memory as well."""
    world = new_world(Ceilings(4, {"a": 4}))
    world.active(0, 1, devices={"a": 2}, term_s=600)
    b, secret = world.active(4, 2, term_s=600)
    world.admit(0, 9, devices={"a": 4})
    world.pass_time(61)
    world.book.set_ceilings(Ceilings(4, {"a": 4}, spill_allowed=True), world.now)
    world.book.resize(b, secret, Claim(3), world.now)
    assert world.admit(1, 3).lease.state is QUEUED


# -- nothing piles up ------------------------------------------------------------------------------------------------


def test_claims_that_come_and_go_leave_a_bounded_trail(new_world) -> None:
    policy = Policy(ended_kept=50, tickets_kept=20, released_kept=30)
    world = new_world(2, policy)
    world.active(1, 1, term_s=600)
    for number in range(1, 1001):
        waiting = world.admit(2, number, f"waits-{number}")
        world.book.stream_ended(waiting.lease.lease_id, waiting.stream, world.now)
        world.drain()
        world.release(*world.active(1, number, request_id=f"ends-{number}", term_s=600))
    book, stored = world.book, world.store.load()
    assert (len(stored.ended), len(stored.tickets), len(stored.leases)) == (50, 20, 1)
    assert len(book.lease_ids(include_released=True)) == 1 + 30
    assert len(book._timers) <= STALE_TIMERS + 2 * 2
    assert len(book._by_request) + len(book._queued) + len(book._overruns) == 0
    assert len(book._memories._ended_requests) == 50


def test_timers_of_the_living_survive_the_sweeping_of_stale_ones(new_world) -> None:
    world = new_world(2)
    held, _ = world.active(1, 1)
    waiting = world.admit(2, 2, max_wait_s=12).lease
    for number in range(2 * STALE_TIMERS):
        admission = world.admit(2, 3, f"r{number}")
        world.book.stream_ended(admission.lease.lease_id, admission.stream, world.now)
    world.pass_time(12)
    assert world.book.view(waiting.lease_id).cause == ReleaseCause.WAITED_TOO_LONG
    world.pass_time(3)
    assert world.suspect(held)

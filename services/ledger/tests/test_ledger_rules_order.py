"""Rules 15 and 16 of the admission book: order and passing.

Each with the trace that breaks a book without it. C is a ceiling, A, B, w are claims.
"""

import pytest
from weighbridge_ledger.book import Ceilings, EventKind, LeaseState, Policy, Refused, ReleaseCause

QUEUED, GRANTED = LeaseState.QUEUED, LeaseState.GRANTED


def test_waiters_are_granted_in_the_order_of_asking(new_world) -> None:
    world = new_world(2)
    a, secret = world.active(2)
    waiters = [world.admit(2, pid).lease.lease_id for pid in (2, 3, 4)]
    assert [world.book.waiting_for(waiter)[0] for waiter in waiters] == [1, 2, 3]
    world.release(a, secret)
    assert [world.state(waiter) for waiter in waiters] == [GRANTED, QUEUED, QUEUED]


def test_the_queue_is_bounded_and_says_when_to_retry(new_world) -> None:
    world = new_world(1, Policy(queue_bound=2))
    world.active(1)
    world.admit(1, 2)
    world.admit(1, 3)
    with pytest.raises(Refused) as refused:
        world.book.admit(world.ask(1, 4), world.now)
    assert refused.value.reason == "QUEUE_FULL"
    assert refused.value.retry_after_s == 5.0


def test_a_call_without_a_deadline_waits_ten_minutes(new_world) -> None:
    world = new_world(1)
    world.active(1, term_s=600)
    waiting = world.admit(1, 2).lease
    world.pass_time(599.5)
    assert world.state(waiting.lease_id) is QUEUED
    world.pass_time(0.5)
    assert world.book.view(waiting.lease_id).cause == ReleaseCause.WAITED_TOO_LONG


def test_a_claim_cancelled_while_queued_leaves_no_lease_and_lets_the_next_pass(new_world) -> None:
    world = new_world(4)
    world.active(3)
    big = world.admit(4, 2)
    small = world.admit(1, 3)
    assert small.lease.state is GRANTED  # one harmful pass over the big one
    world.book.stream_ended(big.lease.lease_id, big.stream, world.now)
    world.drain()
    assert world.book.queue_depth == 0
    assert not world.store.load().tickets


def test_overtaking_is_bounded(new_world) -> None:
    """Rule 16. Unlimited: C=2, two 1s alternate, w=2 never (L). After 8 passes nobody overtakes w any more."""
    world = new_world(2)
    held = [world.active(1, 1), world.active(1, 2)]
    w = world.admit(2, 9).lease
    for round_ in range(8):
        world.release(*held.pop(0))
        held.append(world.active(1, 10 + round_))
    world.release(*held.pop(0))
    assert world.admit(1, 30).lease.state is QUEUED
    world.release(*held.pop(0))
    assert world.state(w.lease_id) is GRANTED


def test_a_waiter_of_a_minute_is_not_overtaken(new_world) -> None:
    world = new_world(2)
    world.active(1, 1, term_s=600)
    world.admit(2, 9)
    assert world.admit(1, 2).lease.state is GRANTED
    world.pass_time(60)  # the grant of 1 has lapsed by now
    assert world.committed() == 1
    assert world.admit(1, 3).lease.state is QUEUED


def test_a_harmless_claim_passes_even_a_protected_waiter(new_world) -> None:
    """w still fits beside p once all pending bytes are back."""
    world = new_world(4)
    a, secret = world.active(3, 1, 11, term_s=600)
    world.admit(3, 9)
    world.pass_time(61)
    assert world.admit(1, 2).lease.state is QUEUED  # beside A, which does not leave, w never fits beside it
    world.release(a, secret)  # now A's 3 are pending: 1 + 3 fit
    assert world.state(world.book.lease_ids()[2]) is GRANTED


def test_a_claim_on_another_card_passes(new_world) -> None:
    world = new_world(Ceilings(4, {"a": 4, "b": 4}))
    world.active(0, 1, devices={"a": 4}, term_s=600)
    world.admit(0, 2, devices={"a": 2})
    world.pass_time(61)
    assert world.admit(0, 3, devices={"b": 2}).lease.state is GRANTED


def test_overdue_bytes_are_not_hoped_for(new_world) -> None:
    """Rule 18. Overdue still counted: a 3-of-4 claim waits 1,087 s instead of 206 (P)."""
    world = new_world(4)
    a, secret = world.active(3, 1, 11, term_s=600)
    world.admit(3, 9, term_s=600)
    world.pass_time(61)
    world.release(a, secret)
    world.pass_time(30)
    assert any(event.kind is EventKind.OVERDUE for event in world.events)
    assert world.admit(1, 2).lease.state is QUEUED
    assert world.committed() == 3


def test_beyond_the_look_ahead_the_order_is_strict(new_world) -> None:
    world = new_world(10, Policy(look_ahead=2))
    world.active(9)
    for pid in (2, 3):
        world.admit(5, pid)
    assert world.admit(1, 4).lease.state is QUEUED

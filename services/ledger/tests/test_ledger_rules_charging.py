"""Rules 1 to 4 of the admission book: charging, static refusal, ceilings, external use.

Each with the trace that breaks a book without it. C is a ceiling, A, B, w are claims.
"""

import pytest
from weighbridge_ledger.book import Ceilings, EventKind, External, LeaseState, Refused, ReleaseCause

QUEUED, GRANTED, VACATING = LeaseState.QUEUED, LeaseState.GRANTED, LeaseState.VACATING


# -- 1, 2, 4: charging, static refusal, ceilings ----------------------------------------------------------------------


def test_a_vacating_lease_is_charged(new_world) -> None:
    """Rule 1. VACATING uncharged: A asked but loaded, B granted → double use (S)."""
    world = new_world(4)
    a, secret = world.active(3, 1, 11)
    world.release(a, secret)
    assert world.state(a) is VACATING
    assert world.committed() == 3
    assert world.admit(2, 2).lease.state is QUEUED


def test_a_claim_beyond_the_ceiling_is_refused_and_disturbs_nobody(new_world) -> None:
    world = new_world(4)
    world.active(3)
    waiting = world.admit(2, 2).lease
    before = world.book.waiting_for(waiting.lease_id)
    with pytest.raises(Refused) as refused:
        world.book.admit(world.ask(5, 3), world.now)
    assert refused.value.reason == "CLAIM_EXCEEDS_CAPACITY"
    assert refused.value.metadata["missing_bytes"] == "1"
    assert not world.drain()
    assert world.book.waiting_for(waiting.lease_id) == before


def test_twenty_then_twenty_in_thirty_two(new_world) -> None:
    """The reference broker's first rows: 20 granted; a second 20 is not; released, nothing is committed."""
    world = new_world(32)
    first, secret = world.active(20)
    assert world.admit(20, 2).lease.state is QUEUED
    assert world.committed() == 20
    world.release(first, secret)
    assert world.committed() == 20  # the second one, now


def test_lowering_a_ceiling_evicts_nobody_and_admits_nobody_until_below(new_world) -> None:
    """Rule 4, and the reference broker's row: budget 20, reserve 12, set 10: committed 12, even 1 is denied."""
    world = new_world(20)
    lease, secret = world.active(12)
    world.book.set_ceilings(Ceilings(10), world.now)
    assert world.committed() == 12
    waiting = world.admit(1, 2)
    assert waiting.lease.state is QUEUED
    world.release(lease, secret)
    assert world.state(waiting.lease.lease_id) is GRANTED


def test_a_waiter_that_a_lowered_ceiling_makes_impossible_is_told_so(new_world) -> None:
    world = new_world(20)
    world.active(12)
    waiting = world.admit(15, 2).lease
    world.book.set_ceilings(Ceilings(10), world.now)
    released = [event for event in world.drain() if event.kind is EventKind.RELEASED]
    assert [(event.lease.lease_id, event.cause) for event in released] == [
        (waiting.lease_id, ReleaseCause.EXCEEDS_CAPACITY)
    ]


def test_an_empty_claim_and_an_unknown_card_are_refused(new_world) -> None:
    world = new_world(Ceilings(4, {"gpu": 4}))
    assert world.refused(lambda: world.admit(0)) == "CLAIM_EMPTY"
    assert world.refused(lambda: world.admit(1, devices={"other": 1})) == "DEVICE_UNKNOWN"


def test_a_claim_must_fit_its_holders_own_limit_too(new_world) -> None:
    world = new_world(10)
    assert world.refused(lambda: world.admit(5, memory_limit_bytes=4)) == "CLAIM_EXCEEDS_CAPACITY"
    assert world.admit(4, memory_limit_bytes=4).lease.state is GRANTED


# -- 3: external use --------------------------------------------------------------------------------------------------


def test_a_granted_but_unloaded_lease_counts_beside_external_use(new_world) -> None:
    """Rule 3. "Free ≥ bytes": C=4, 2 granted but not loaded, B=3 passes."""
    world = new_world(4)
    world.active(2)
    assert world.admit(3, 2).lease.state is QUEUED


def test_external_use_makes_a_claim_wait_and_never_refuses_it(new_world) -> None:
    """Measured − charged: outside 1, A 1 unloaded, B=3 passes, total 5 (E). With E=1 it waits instead."""
    world = new_world(4)
    world.book.set_external(External(1), world.now)
    world.active(1)
    waiting = world.admit(3, 2).lease
    assert waiting.state is QUEUED
    _, _, reasons = world.book.waiting_for(waiting.lease_id)
    assert [(reason.code, reason.missing_bytes) for reason in reasons] == [("EXTERNAL_USE", 1)]
    world.book.set_external(External(0), world.now)
    world.drain()
    assert world.state(waiting.lease_id) is GRANTED

"""Rules 21 and 23 of the admission book: use and size.

Each with the trace that breaks a book without it. C is a ceiling, A, B, w are claims.
"""

from weighbridge_ledger.book import Claim, LeaseState, Observed, Policy, Reason
from weighbridge_ledger.service.failures import code_of

QUEUED, GRANTED, ACTIVE, VACATING = LeaseState.QUEUED, LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.VACATING


def test_vacating_never_goes_back(new_world) -> None:
    """Rule 21. Late KeepAlive(busy) after Release: ACTIVE for ever (S)."""
    world = new_world(4)
    a, secret = world.active(3, 1, 11)
    world.release(a, secret)
    renewal = world.book.renew(a, secret, None, world.now)
    assert renewal.lease.state is VACATING
    assert renewal.vacate_deadline == world.time + 30
    assert world.refused(lambda: world.book.begin_use(a, secret, "", world.now)) == "LEASE_VACATING"
    engine = (world.process(12),)
    assert (
        world.refused(lambda: world.book.activate(a, secret, world.process(1), engine, world.now)) == "LEASE_VACATING"
    )


def test_uses_are_counted_once_each(new_world) -> None:
    world = new_world(4)
    a, secret = world.active(3)
    assert world.book.begin_use(a, secret, "u", world.now) == "u"
    world.book.begin_use(a, secret, "u", world.now)
    other = world.book.begin_use(a, secret, "", world.now)
    assert world.book.view(a).uses == 2
    assert world.book.end_use(a, secret, "u", world.now) == 1
    assert world.book.end_use(a, secret, "u", world.now) == 1
    assert world.book.end_use(a, secret, other, world.now) == 0


def test_uses_that_are_never_ended_are_bounded(new_world) -> None:
    world = new_world(4, Policy(uses_per_lease=2))
    a, secret = world.active(3)
    for use in ("u", "v", "u"):
        world.book.begin_use(a, secret, use, world.now)
    assert world.refused(lambda: world.book.begin_use(a, secret, "w", world.now)) == "TOO_MANY_USES"


def test_every_reason_of_the_book_has_a_code() -> None:
    assert {reason for reason in Reason if code_of(reason).value[0] > 0} == set(Reason)


def test_growth_is_answered_at_once(new_world) -> None:
    """Rule 23. Waiting: C=4, two hold 2 and want 3, deadlock."""
    world = new_world(4)
    a, secret_a = world.active(2, 1)
    b, secret_b = world.active(2, 2)
    for lease, secret in ((a, secret_a), (b, secret_b)):
        assert world.refused(
            lambda lease=lease, secret=secret: world.book.resize(lease, secret, Claim(3), world.now)
        ) == ("CANNOT_GROW")
    world.book.resize(b, secret_b, Claim(1), world.now)
    assert world.book.resize(a, secret_a, Claim(3), world.now).charge.total_bytes == 3


def test_growth_counts_as_a_pass_and_does_not_starve_a_waiter(new_world) -> None:
    """Ignoring the queue: holders grow and shrink in turn, w never (L)."""
    world = new_world(4)
    a, secret_a = world.active(1, 1)
    b, secret_b = world.active(2, 2)
    w = world.admit(2, 9).lease
    for _ in range(8):
        world.book.resize(a, secret_a, Claim(2), world.now)
        world.book.resize(a, secret_a, Claim(1), world.now)
    assert world.refused(lambda: world.book.resize(a, secret_a, Claim(2), world.now)) == "CANNOT_GROW"
    world.release(b, secret_b)
    assert world.state(w.lease_id) is GRANTED


def test_shrinking_lets_a_waiter_in(new_world) -> None:
    world = new_world(4)
    a, secret = world.active(3)
    w = world.admit(2, 2).lease
    world.book.resize(a, secret, Claim(2), world.now)
    assert world.state(w.lease_id) is GRANTED


def test_an_observation_above_the_grant_is_an_upward_resize(new_world) -> None:
    world = new_world(4)
    a, secret = world.active(2)
    renewal = world.book.renew(a, secret, Observed(3), world.now)
    assert renewal.out_of_grant is None
    assert world.committed() == 3


def test_what_is_in_use_above_the_ceiling_is_told_and_given_to_nobody(new_world) -> None:
    world = new_world(4)
    a, secret = world.active(2, 1)
    world.active(1, 2)
    renewal = world.book.renew(a, secret, Observed(4), world.now)
    assert renewal.out_of_grant is not None
    assert renewal.out_of_grant.reason == "OUT_OF_GRANT"
    assert world.committed() == 3
    waiting = world.admit(1, 3).lease
    assert waiting.state is QUEUED
    world.book.renew(a, secret, Observed(2), world.now)
    assert world.state(waiting.lease_id) is GRANTED


def test_previews_change_nothing(new_world) -> None:
    world = new_world(4)
    world.active(3)
    assert world.book.preview(world.ask(1), world.now).charge is not None
    assert [reason.code for reason in world.book.preview(world.ask(2), world.now).reasons] == ["BYTES_HELD"]
    never = world.book.preview(world.ask(5), world.now).refusal
    assert never is not None
    assert never.reason == "CLAIM_EXCEEDS_CAPACITY"
    assert not world.drain()
    assert world.committed() == 3

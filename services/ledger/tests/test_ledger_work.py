"""How much the book does for one admission, counted and not timed: it must not follow the number of leases and waiters,
and must end."""

import pytest

ROUNDED_DOWN_S = 101.176
"""(101.176 + 30.0) - 101.176 is 29.999999999999986, and (101.176 + 60.0) - 101.176 is 59.999999999999986."""


@pytest.mark.timeout(20)
def test_a_waiter_whose_age_is_rounded_down_is_looked_at_once(new_world) -> None:
    # One in 12,500 waiters kept the ledger looking at it for ever: due at since + 30 s, and 29.99… s old by then.
    world = new_world(2)
    world.time = ROUNDED_DOWN_S
    world.book.tick(world.now)
    world.active(2, pid=1)
    waiting = world.admit(2, pid=2, priority=1).lease.lease_id
    for _ in range(2):
        world.time += 30.0
        world.book.tick(world.now)
    view = world.book.view(waiting)
    assert view is not None
    assert view.level == 3


def test_a_waiter_is_protected_at_the_moment_for_which_a_look_was_set(new_world) -> None:
    world = new_world(4)
    world.time = ROUNDED_DOWN_S
    world.book.tick(world.now)
    world.active(3, pid=1)
    waiting = world.admit(4, pid=2).lease.lease_id
    world.time = ROUNDED_DOWN_S + 60.0
    world.book.tick(world.now)
    passing_by = world.admit(1, pid=3).lease
    assert world.state(passing_by.lease_id) == "QUEUED"
    assert world.state(waiting) == "QUEUED"

"""How much the book does for one admission, counted and not timed: it must not follow the number of leases and waiters,
and must end."""

import statistics
import sys
from pathlib import Path
from types import FrameType

import pytest
import weighbridge_ledger.book

from benchmarks.crowd import SCENARIOS, Crowd, Scenario

BOOK = str(Path(weighbridge_ledger.book.__file__).parent)
FEW, MANY, VERY_MANY = 10, 1_000, 10_000
ADMISSIONS = 9
ROUNDED_DOWN_S = 101.176
"""(101.176 + 30.0) - 101.176 is 29.999999999999986, and (101.176 + 60.0) - 101.176 is 59.999999999999986."""


def lines_per_admission(scenario: Scenario, size: int) -> float:
    """How many lines of the book one admission runs through, each turn of a loop anew. The median: now and then one of
    them throws out timers of what is over."""
    crowd = Crowd(scenario, size)
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> object:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(BOOK):
            return None
        lines += event == "line"
        return count

    counts = []
    before = sys.gettrace()
    for _ in range(ADMISSIONS):
        crowd.admit_one()  # one that is not counted: whatever is remembered of the last one is in place
        lines = 0
        sys.settrace(count)
        try:
            crowd.admit_one()
        finally:
            sys.settrace(before)
        counts.append(lines)
    return statistics.median(counts)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_work_of_an_admission_does_not_follow_how_many_hold_and_wait(scenario: Scenario) -> None:
    few, many = lines_per_admission(scenario, FEW), lines_per_admission(scenario, MANY)
    assert 0 < many <= 2 * few


@pytest.mark.parametrize("scenario", SCENARIOS[::4], ids=lambda scenario: scenario.name)
def test_nor_does_it_follow_them_to_ten_thousand(scenario: Scenario) -> None:
    few, many = lines_per_admission(scenario, FEW), lines_per_admission(scenario, VERY_MANY)
    assert 0 < many <= 2 * few


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

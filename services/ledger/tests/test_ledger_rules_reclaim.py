"""Rules 3, 4, 17 to 20 and 22: which card a waiter aims at, who is asked to give bytes back, and who is not."""

from dataclasses import replace

import pytest
from weighbridge_ledger.book import Ceilings, External, LeaseState, Observed, Policy

LONG = 600.0
"""A term that needs no renewal while a test lets time pass."""

POLICY = Policy(optional_step_bytes=1)


def resident(world, size: int, pid: int, *engines: int, priority: int = 2, **more) -> tuple[str, str]:
    """A loaded holder. It may be asked once `grow_old` has passed."""
    lease_id, secret = world.active(size, pid, *engines, term_s=LONG, priority=priority, **more)
    world.book.renew(lease_id, secret, None, world.now, load_complete=True)
    world.drain()
    return lease_id, secret


def grow_old(world) -> None:
    world.pass_time(POLICY.min_residency_s)


def waits(world, size: int, pid: int = 99, priority: int = 2, **more) -> str:
    admission = world.admit(size, pid, priority=priority, **more)
    assert admission.lease.state is LeaseState.QUEUED
    return admission.lease.lease_id


def asked(world) -> list[str]:
    return [view.lease.lease_id for view in world.book.charged() if view.lease.state is LeaseState.VACATING]


def test_an_idle_holder_is_asked_and_its_bytes_go_to_the_waiter(new_world) -> None:
    world = new_world(4, POLICY)
    holder = resident(world, 3, 1)
    grow_old(world)
    waiter = waits(world, 2)
    assert asked(world) == [holder[0]]
    assert world.book.asked_for(waiter) == ((holder[0],), world.time + POLICY.vacate_s)
    world.release(*holder)
    assert world.state(waiter) is LeaseState.GRANTED


@pytest.mark.parametrize("spare", ["pinned", "busy", "silent", "young", "loading", "more urgent", "not activated"])
def test_nobody_is_asked_who_is(new_world, spare: str) -> None:
    world = new_world(4, POLICY)
    urgent = 3 if spare == "more urgent" else 2
    if spare == "not activated":
        world.admit(4, 1)
    elif spare == "loading":
        world.active(4, 1, term_s=LONG)
        grow_old(world)
    elif spare == "silent":
        lease_id, secret = world.active(4, 1)
        world.book.renew(lease_id, secret, None, world.now, load_complete=True)
        grow_old(world)
    else:
        lease_id, secret = resident(world, 4, 1, priority=urgent, pinned=spare == "pinned")
        if spare == "busy":
            world.book.begin_use(lease_id, secret, "", world.now)
        if spare != "young":
            grow_old(world)
    waits(world, 1)
    assert asked(world) == []


def test_who_stopped_a_moment_ago_is_asked_two_seconds_later(new_world) -> None:
    world = new_world(4, POLICY)
    lease_id, secret = resident(world, 4, 1)
    use = world.book.begin_use(lease_id, secret, "", world.now)
    grow_old(world)
    world.book.end_use(lease_id, secret, use, world.now)
    waits(world, 1)
    world.pass_time(POLICY.idle_s - 0.5)
    assert asked(world) == []
    world.pass_time(0.5)
    assert asked(world) == [lease_id]


def test_nobody_is_asked_if_it_would_not_suffice(new_world) -> None:
    world = new_world(4, POLICY)
    resident(world, 2, 1)
    resident(world, 2, 2, pinned=True)
    grow_old(world)
    waits(world, 3)
    assert asked(world) == []


def test_the_fewest_bytes_that_suffice_are_asked_for(new_world) -> None:
    world = new_world(10, POLICY)
    holders = [resident(world, size, pid)[0] for pid, size in enumerate((5, 3, 2), start=1)]
    grow_old(world)
    waits(world, 3)
    assert asked(world) == [holders[1]]


def test_only_the_first_who_waits_asks_and_not_for_more_than_is_coming(new_world) -> None:
    world = new_world(4, POLICY)
    first, second = resident(world, 2, 1), resident(world, 2, 2)
    grow_old(world)
    waits(world, 2, 98)
    waits(world, 2, 99)
    assert asked(world) == [first[0]]
    world.release(*first)  # the second waiter is the first now
    assert asked(world) == [second[0]]


def test_who_does_not_go_in_time_is_no_longer_hoped_for_and_another_one_is_asked(new_world) -> None:
    world = new_world(4, POLICY)
    stubborn, other = resident(world, 2, 1), resident(world, 2, 2)
    grow_old(world)
    waiter = waits(world, 2)
    assert asked(world) == [stubborn[0]]
    world.pass_time(POLICY.vacate_s)
    assert asked(world) == [stubborn[0], other[0]]
    assert [reason.code.value for reason in world.book.waiting_for(waiter)[2]] == [
        "HOLDER_DID_NOT_VACATE",
        "BYTES_HELD",
    ]


def test_a_model_that_loaded_slowly_stays_longer(new_world) -> None:
    world = new_world(4, POLICY)
    lease_id, secret = world.active(4, 1, term_s=LONG)
    world.pass_time(25)
    world.book.renew(lease_id, secret, None, world.now, load_complete=True)
    waits(world, 1)
    world.pass_time(49.5)  # twice its load time
    assert asked(world) == []
    world.pass_time(0.5)
    assert asked(world) == [lease_id]


def test_a_protected_waiter_asks_the_idle_now_and_the_busy_when_they_stop(new_world) -> None:
    world = new_world(4, POLICY)
    idle, busy = resident(world, 2, 1), resident(world, 2, 2)
    use = world.book.begin_use(*busy, "", world.now)
    waits(world, 4)
    world.pass_time(POLICY.protect_after_s)
    assert asked(world) == [idle[0]]
    world.book.end_use(*busy, use, world.now)
    assert asked(world) == [idle[0], busy[0]]


def test_after_a_restart_nobody_is_asked_who_has_not_been_heard(new_world) -> None:
    """Its uses were lost with the ledger: it may be in the middle of a render."""
    world = new_world(4, POLICY)
    lease_id, secret = resident(world, 4, 1)
    grow_old(world)
    world.restart()
    waits(world, 1)
    world.pass_time(5)
    assert asked(world) == []
    world.book.renew(lease_id, secret, None, world.now)
    world.pass_time(POLICY.idle_s)
    assert asked(world) == [lease_id]


def test_a_rise_of_other_programs_blocks_at_once_and_makes_nobody_leave_before_it_is_steady(new_world) -> None:
    world = new_world(10, POLICY)
    holder = resident(world, 4, 1)
    grow_old(world)
    for sample in range(POLICY.steady_samples):
        world.book.set_external(External(4), world.now)
        if sample == 0:
            waits(world, 4)
        world.drain()
        assert asked(world) == ([holder[0]] if sample == POLICY.steady_samples - 1 else [])


def test_samples_taken_while_something_loads_do_not_make_a_rise_steady(new_world) -> None:
    """What an engine that loads has taken may be told late as its own."""
    world = new_world(10, POLICY)
    resident(world, 3, 1)
    grow_old(world)
    loading, secret = world.active(1, 2, term_s=LONG)
    world.book.set_external(External(3), world.now)
    waits(world, 6)
    for _ in range(2 * POLICY.steady_samples):
        world.book.set_external(External(3), world.now)
    assert asked(world) == []
    world.book.renew(loading, secret, None, world.now, load_complete=True)
    for _ in range(POLICY.steady_samples):
        assert asked(world) == []
        world.book.set_external(External(3), world.now)
    assert len(asked(world)) == 1


def test_a_fall_of_other_programs_counts_at_once(new_world) -> None:
    world = new_world(10, POLICY)
    for _ in range(POLICY.steady_samples):
        world.book.set_external(External(5), world.now)
    resident(world, 4, 1)
    grow_old(world)
    world.book.set_external(External(0), world.now)
    assert world.admit(6, 2).lease.state is LeaseState.GRANTED


def test_what_is_used_above_a_grant_is_no_other_program(new_world) -> None:
    """An overrun is known at once; only measurements have to be steady."""
    world = new_world(10, POLICY)
    over, secret = resident(world, 4, 1, pinned=True)
    holder = resident(world, 5, 2)
    grow_old(world)
    world.book.renew(over, secret, Observed(6), world.now)
    waits(world, 2)
    assert asked(world) == [holder[0]]


def test_a_waiter_aims_at_the_card_where_least_is_missing(new_world) -> None:
    world = new_world(Ceilings(10, {"a": 4, "b": 4}), POLICY)
    world.active(0, 1, devices={"a": 4}, term_s=LONG)
    world.active(0, 2, devices={"b": 3}, term_s=LONG)
    waiter = waits(world, 0, devices={"": 3})
    view = world.book.waiting_for(waiter)
    assert view is not None
    assert view[2][0].lease_ids == ("lease-3",)  # the one on b


def test_a_waiter_takes_whichever_card_is_free_first(new_world) -> None:
    world = new_world(Ceilings(10, {"a": 4, "b": 4}), POLICY)
    first = world.active(0, 1, devices={"a": 4}, term_s=LONG)
    world.active(0, 2, devices={"b": 3}, term_s=LONG)
    waiter = waits(world, 0, devices={"": 3})
    world.release(*first)
    lease = world.book.view(waiter).lease
    assert (lease.state, lease.charge.devices) == (LeaseState.GRANTED, (("a", 3),))


def test_a_waiter_asks_on_the_card_where_asking_helps(new_world) -> None:
    world = new_world(Ceilings(10, {"a": 4, "b": 4}), POLICY)
    busy = resident(world, 0, 1, devices={"a": 2})
    world.book.begin_use(*busy, "", world.now)
    idle = resident(world, 0, 2, devices={"b": 4})
    grow_old(world)
    waits(world, 0, devices={"": 3})
    assert asked(world) == [idle[0]]


def test_a_claim_for_any_card_does_not_spill_from_a_small_one_because_the_large_one_is_in_use(new_world) -> None:
    world = new_world(Ceilings(10, {"large": 8, "small": 2}), POLICY)
    world.active(0, 1, devices={"large": 4}, term_s=LONG)
    waits(world, 0, devices={"": 6})


def test_a_load_on_the_processor_keeps_samples_from_being_steady_too(new_world) -> None:
    world = new_world(10, POLICY)
    holder = resident(world, 4, 1)
    grow_old(world)
    enter = world.ask(1, 2)
    loading = world.book.admit(replace(enter, claim=replace(enter.claim, cpu_only=True), term_s=LONG), world.now)
    world.book.set_external(External(4), world.now)
    waits(world, 4)
    for _ in range(POLICY.steady_samples):
        world.book.set_external(External(4), world.now)
    assert asked(world) == []
    world.book.stream_ended(loading.lease.lease_id, loading.stream, world.now)
    for _ in range(POLICY.steady_samples):
        world.book.set_external(External(4), world.now)
    assert asked(world) == [holder[0]]

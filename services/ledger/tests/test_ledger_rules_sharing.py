"""Rules 4 and 24 to 26: optional bytes, taking the place of a lease, asking while holding, and being alone."""

from collections.abc import Callable

import pytest
from weighbridge_ledger.book import Ask, Ceilings, Claim, DeviceWant, LeaseState, Observed, Policy
from weighbridge_ledger.book.states import Credential

LONG = 600.0
POLICY = Policy(optional_step_bytes=2)
TWO_CARDS = Ceilings(10, {"a": 8, "b": 8})
SHARED = Ceilings(10, has_shared_gpu=True)


def enter(world, claim: Claim, pid: int = 1, **more) -> str:
    """The lease of a claim; activated if it was granted."""
    admission = world.book.admit(Ask("", world.process(pid), claim, term_s=LONG, **more), world.now)
    world.drain()
    lease_id = admission.lease.lease_id
    if admission.lease.state is LeaseState.GRANTED:
        world.book.activate(lease_id, world.secret(lease_id), world.process(pid), (), world.now)
        world.drain()
    return lease_id


def credential(world, lease_id: str) -> Credential:
    return Credential(lease_id, world.secret(lease_id))


def grow_old(world, *lease_ids: str) -> None:
    for lease_id in lease_ids:
        world.book.renew(lease_id, world.secret(lease_id), None, world.now, load_complete=True)
    world.pass_time(POLICY.min_residency_s)


def charge(world, lease_id: str):
    return world.book.view(lease_id).lease.charge


# -- optional bytes ----------------------------------------------------------------------------------------------------


def test_optional_bytes_are_granted_from_what_is_left_in_steps(new_world) -> None:
    world = new_world(10, POLICY)
    lease_id = enter(world, Claim(5, optional_host_bytes=8))
    assert (charge(world, lease_id).host_bytes, charge(world, lease_id).optional_bytes) == (9, 4)


def test_all_optional_bytes_are_granted_where_they_fit_whatever_the_step(new_world) -> None:
    world = new_world(10, POLICY)
    assert charge(world, enter(world, Claim(5, optional_host_bytes=3))).optional_bytes == 3


def test_optional_bytes_are_only_what_those_who_wait_do_not_require(new_world) -> None:
    world = new_world(10, POLICY)
    enter(world, Claim(5))
    waiter = enter(world, Claim(6), 2)
    assert world.state(waiter) is LeaseState.QUEUED
    assert charge(world, enter(world, Claim(3, optional_host_bytes=2), 3)).optional_bytes == 0


def test_optional_bytes_do_not_spill(new_world) -> None:
    world = new_world(TWO_CARDS, POLICY)
    lease_id = enter(world, Claim(0, (DeviceWant("a", 5, 8),)))
    assert charge(world, lease_id).devices == (("a", 7),)
    assert charge(world, lease_id).host_bytes == 0


def test_optional_bytes_make_nobody_leave(new_world) -> None:
    world = new_world(10, POLICY)
    holder = enter(world, Claim(6))
    grow_old(world, holder)
    enter(world, Claim(4, optional_host_bytes=4), 2)
    assert world.state(holder) is LeaseState.ACTIVE


def test_optional_bytes_are_asked_back_before_anybody_has_to_go(new_world) -> None:
    world = new_world(10, POLICY)
    holder = enter(world, Claim(4, optional_host_bytes=4))
    idle = enter(world, Claim(2), 2)
    grow_old(world, holder, idle)
    waiter = enter(world, Claim(3), 3)
    view = world.book.view(holder)
    assert (view.shrink, world.state(idle)) == ((4, world.time + POLICY.shrink_s), LeaseState.ACTIVE)
    world.book.resize(holder, world.secret(holder), Claim(4), world.now)
    assert world.state(waiter) is LeaseState.GRANTED


def test_who_does_not_give_optional_bytes_back_is_not_asked_again_and_others_are_asked_to_go(new_world) -> None:
    world = new_world(10, POLICY)
    holder = enter(world, Claim(4, optional_host_bytes=4), pinned=True)
    idle = enter(world, Claim(2), 2)
    grow_old(world, holder, idle)
    enter(world, Claim(2), 3)
    world.pass_time(POLICY.shrink_s)
    assert (world.book.view(holder).shrink, world.state(idle)) == (None, LeaseState.VACATING)
    assert [event.kind.value for event in world.events].count("SHRINK_ASKED") == 1


def test_required_bytes_grow_into_optional_ones_first(new_world) -> None:
    world = new_world(10, POLICY)
    lease_id = enter(world, Claim(6, optional_host_bytes=4))
    world.book.resize(lease_id, world.secret(lease_id), Claim(8, optional_host_bytes=4), world.now)
    assert (charge(world, lease_id).host_bytes, charge(world, lease_id).optional_bytes) == (10, 2)


# -- taking the place of a lease ---------------------------------------------------------------------------------------


def test_a_replacement_is_granted_when_the_old_one_is_gone(new_world) -> None:
    world = new_world(4, POLICY)
    old = enter(world, Claim(3), pinned=True)
    secret = world.secret(old)
    world.book.begin_use(old, secret, "", world.now)
    new = enter(world, Claim(4), replaces=credential(world, old))
    assert (world.state(old), world.state(new)) == (LeaseState.VACATING, LeaseState.QUEUED)
    world.release(old, secret)
    assert (world.state(new), world.committed()) == (LeaseState.GRANTED, 4)


def test_the_old_one_serves_until_nothing_else_is_missing(new_world) -> None:
    world = new_world(4, POLICY)
    old = enter(world, Claim(2))
    other = enter(world, Claim(2), 2)
    new = enter(world, Claim(3), replaces=credential(world, old))
    grow_old(world, old, other)
    assert (world.state(old), world.state(other)) == (LeaseState.ACTIVE, LeaseState.VACATING)
    world.release(other, world.secret(other))
    assert world.state(old) is LeaseState.VACATING
    world.release(old, world.secret(old))
    assert world.state(new) is LeaseState.GRANTED


def test_a_claim_that_gives_up_leaves_the_old_one_as_it_was(new_world) -> None:
    world = new_world(4, POLICY)
    old = enter(world, Claim(2), pinned=True)
    other = enter(world, Claim(2), 2, pinned=True)
    admission = world.book.admit(
        Ask("", world.process(1), Claim(3), term_s=LONG, replaces=credential(world, old)), world.now
    )
    world.book.stream_ended(admission.lease.lease_id, admission.stream, world.now)
    grow_old(world, old, other)
    enter(world, Claim(1), 3)
    assert world.state(old) is LeaseState.ACTIVE  # and pinned again


def test_a_lease_that_has_ended_is_no_hindrance(new_world) -> None:
    world = new_world(4, POLICY)
    old = enter(world, Claim(3))
    mine = credential(world, old)
    world.release(old, mine.secret)
    assert world.state(enter(world, Claim(4), replaces=mine)) is LeaseState.ACTIVE


def test_a_preview_counts_the_caller_s_own_lease_as_gone(new_world) -> None:
    world = new_world(4, POLICY)
    old = enter(world, Claim(3))
    ask = Ask("", world.process(1), Claim(4), replaces=credential(world, old))
    assert world.book.preview(ask, world.now).charge.total_bytes == 4
    assert world.committed() == 3


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda mine: Credential(mine.lease_id, "wrong"), "LEASE_SECRET_MISMATCH"),
        (lambda mine: Credential("unknown", mine.secret), "LEASE_NOT_FOUND"),
    ],
)
@pytest.mark.parametrize("option", ["replaces", "while_holding"])
def test_nobody_names_a_lease_that_is_not_its_own(new_world, option: str, spoil: Callable, reason: str) -> None:
    world = new_world(4, POLICY)
    named = spoil(credential(world, enter(world, Claim(3))))
    more = {option: named if option == "replaces" else (named,)}
    ask = Ask("", world.process(1), Claim(2), **more)
    assert world.refused(lambda: world.book.admit(ask, world.now)) == reason
    other = Ask("", world.process(2), Claim(2), replaces=credential(world, "lease-1"))
    assert world.refused(lambda: world.book.admit(other, world.now)) == "LEASE_SECRET_MISMATCH"


# -- asking while holding ----------------------------------------------------------------------------------------------


def test_who_keeps_a_lease_busy_does_not_wait_for_one_in_use(new_world) -> None:
    world = new_world(4, POLICY)
    mine, other = enter(world, Claim(2)), enter(world, Claim(2), 2)
    for lease_id in (mine, other):
        world.book.begin_use(lease_id, world.secret(lease_id), "", world.now)
    ask = Ask("", world.process(1), Claim(2), while_holding=(credential(world, mine),))
    assert world.refused(lambda: world.book.admit(ask, world.now)) == "WAIT_WHILE_HOLDING"
    assert world.book.queue_depth == 0


def test_who_keeps_a_lease_busy_waits_for_what_comes_back(new_world) -> None:
    world = new_world(4, POLICY)
    mine, idle = enter(world, Claim(2)), enter(world, Claim(2), 2)
    grow_old(world, mine, idle)
    world.book.begin_use(mine, world.secret(mine), "", world.now)
    new = enter(world, Claim(2), while_holding=(credential(world, mine),))
    assert (world.state(new), world.state(idle)) == (LeaseState.QUEUED, LeaseState.VACATING)
    world.release(idle, world.secret(idle))
    assert world.state(new) is LeaseState.GRANTED


def test_it_is_told_when_what_it_waited_for_does_not_come_back(new_world) -> None:
    world = new_world(4, POLICY)
    mine, idle = enter(world, Claim(2)), enter(world, Claim(2), 2)
    grow_old(world, mine, idle)
    world.book.begin_use(mine, world.secret(mine), "", world.now)
    new = enter(world, Claim(2), while_holding=(credential(world, mine),))
    world.pass_time(POLICY.vacate_s)
    assert (world.state(new), world.book.view(new).cause) == (LeaseState.RELEASED, "WOULD_WAIT_FOR_USE")


# -- being alone -------------------------------------------------------------------------------------------------------


def gpu(size: int) -> Claim:
    return Claim(size)


def on_a(size: int) -> Claim:
    return Claim(0, (DeviceWant("a", size),))


PLACES = pytest.mark.parametrize(("ceilings", "claim"), [(SHARED, gpu), (TWO_CARDS, on_a)], ids=["unified", "card"])


@PLACES
def test_nobody_joins_one_that_is_alone(new_world, ceilings: Ceilings, claim) -> None:
    world = new_world(ceilings, POLICY)
    alone = enter(world, claim(2), exclusive=True)
    other = enter(world, claim(1), 2)
    assert world.state(other) is LeaseState.QUEUED
    assert world.book.waiting_for(other)[2][0].code.value == "EXCLUSIVE_USE"
    world.release(alone, world.secret(alone))
    assert world.state(other) is LeaseState.GRANTED


@PLACES
def test_idle_residents_leave_for_one_that_must_be_alone(new_world, ceilings: Ceilings, claim) -> None:
    world = new_world(ceilings, POLICY)
    residents = [enter(world, claim(1), pid) for pid in (1, 2)]
    grow_old(world, *residents)
    alone = enter(world, claim(2), 3, exclusive=True)
    assert [world.state(one) for one in residents] == [LeaseState.VACATING, LeaseState.VACATING]
    for one in residents:
        world.release(one, world.secret(one))
    assert world.state(alone) is LeaseState.GRANTED


def test_what_runs_on_the_processor_stays_beside_one_that_is_alone_on_the_gpu(new_world) -> None:
    """As "the whole ceiling" it would have to go."""
    world = new_world(SHARED, POLICY)
    processor = enter(world, Claim(3, cpu_only=True))
    grow_old(world, processor)
    alone = enter(world, Claim(3), 2, exclusive=True)
    assert (world.state(processor), world.state(alone)) == (LeaseState.ACTIVE, LeaseState.ACTIVE)
    assert world.state(enter(world, Claim(3, cpu_only=True), 3)) is LeaseState.ACTIVE


def test_being_alone_on_one_card_concerns_no_other(new_world) -> None:
    world = new_world(TWO_CARDS, POLICY)
    enter(world, on_a(2), exclusive=True)
    assert world.state(enter(world, Claim(0, (DeviceWant("b", 2),)), 2)) is LeaseState.ACTIVE
    assert charge(world, enter(world, Claim(0, (DeviceWant("", 2),)), 3)).devices == (("b", 2),)


def test_where_engines_coexist_the_wish_to_be_alone_is_ignored(new_world) -> None:
    world = new_world(Ceilings(10, has_shared_gpu=True, exclusive_heeded=False), POLICY)
    enter(world, Claim(2), exclusive=True)
    assert world.state(enter(world, Claim(2), 2, exclusive=True)) is LeaseState.ACTIVE


def test_the_wish_is_dropped_at_will_and_raised_only_when_alone(new_world) -> None:
    world = new_world(SHARED, POLICY)
    lease_id = enter(world, Claim(2), exclusive=True)
    waiter = enter(world, Claim(2), 2)
    secret = world.secret(lease_id)
    world.book.resize(lease_id, secret, Claim(2), world.now, exclusive=False)
    assert world.state(waiter) is LeaseState.GRANTED
    assert (
        world.refused(lambda: world.book.resize(lease_id, secret, Claim(2), world.now, exclusive=True)) == "CANNOT_GROW"
    )
    world.release(waiter, world.secret(waiter))
    world.book.resize(lease_id, secret, Claim(2), world.now, exclusive=True)
    assert charge(world, lease_id).exclusive


def test_raising_the_wish_does_not_overtake_a_protected_waiter(new_world) -> None:
    world = new_world(SHARED, POLICY)
    lease_id = enter(world, Claim(8))
    waiter = enter(world, Claim(4), 2)
    world.pass_time(POLICY.protect_after_s)
    assert world.state(waiter) is LeaseState.QUEUED
    secret = world.secret(lease_id)
    assert (
        world.refused(lambda: world.book.resize(lease_id, secret, Claim(8), world.now, exclusive=True)) == "CANNOT_GROW"
    )


# -- the holder's own limit --------------------------------------------------------------------------------------------


def test_a_claim_must_fit_its_holder_s_own_limit_too(new_world) -> None:
    world = new_world(10, POLICY)
    assert world.refused(lambda: world.admit(5, memory_limit_bytes=4)) == "CLAIM_EXCEEDS_CAPACITY"


def test_what_spills_counts_against_the_holder_s_limit(new_world) -> None:
    world = new_world(TWO_CARDS, POLICY)
    assert world.refused(lambda: world.admit(0, devices={"a": 12}, memory_limit_bytes=3)) == "CLAIM_EXCEEDS_CAPACITY"
    assert world.admit(0, devices={"a": 12}, memory_limit_bytes=4).lease.state is LeaseState.GRANTED


def test_optional_bytes_stay_beneath_the_holder_s_limit(new_world) -> None:
    world = new_world(10, POLICY)
    lease_id = enter(world, Claim(4, optional_host_bytes=6), memory_limit_bytes=6)
    assert charge(world, lease_id).host_bytes == 6


def test_a_lease_that_was_asked_for_optional_bytes_is_still_asked_to_go_for_its_replacement(new_world) -> None:
    world = new_world(6, POLICY)
    old = enter(world, Claim(1, optional_host_bytes=2))
    enter(world, Claim(1), 2)
    waiter = enter(world, Claim(4), 3)  # for which the optional bytes are asked back
    assert world.book.view(old).shrink is not None
    world.book.begin_use(old, world.secret(old), "", world.now)
    new = enter(world, Claim(4), replaces=credential(world, old), priority=2)
    assert (world.state(waiter), world.state(new)) == (LeaseState.QUEUED, LeaseState.QUEUED)
    assert world.state(old) is LeaseState.VACATING


def test_a_claim_for_several_cards_takes_them_the_other_way_round_where_the_best_harms_somebody(new_world) -> None:
    world = new_world(Ceilings(6, {"a": 4, "b": 4}), POLICY)
    for pid, want in enumerate((DeviceWant("a", 1), DeviceWant("b", 2)), 1):
        enter(world, Claim(0, (want,)), pid, pinned=True)
    idle = enter(world, Claim(6), 3)
    grow_old(world, idle)
    waits = enter(world, Claim(1, (DeviceWant("b", 1),)), 4)
    assert [world.state(one) for one in (idle, waits)] == [LeaseState.VACATING, LeaseState.QUEUED]
    # Of 3 and 2 bytes, 2 on "b" would leave the most on "a", and none for whoever is vacated for.
    several = enter(world, Claim(0, (DeviceWant("", 1), DeviceWant("", 2))), 5)
    assert world.state(several) is LeaseState.ACTIVE
    assert charge(world, several).devices == (("a", 2), ("b", 1))
    world.release(idle, world.secret(idle))
    assert world.state(waits) is LeaseState.GRANTED


def test_what_was_in_use_above_a_grant_is_in_nobodys_way_twice_once_it_is_granted(new_world) -> None:
    """Counted as held from outside and as growth, it would harm the protected claim, and its engine would be ended."""
    world = new_world(8, POLICY)
    enter(world, Claim(4), 1, pinned=True)
    replaced = enter(world, Claim(1), 2)
    grows = enter(world, Claim(1), 3)
    renew = world.book.renew
    assert renew(grows, world.secret(grows), Observed(5), world.now).out_of_grant.reason == "OUT_OF_GRANT"
    waits = enter(world, Claim(1), 2, replaces=credential(world, replaced))
    world.pass_time(POLICY.protect_after_s)
    assert world.state(waits) is LeaseState.QUEUED
    # 4 pinned, 2 in use and 1 for the claim that waits: 7 of 8.
    assert renew(grows, world.secret(grows), Observed(2), world.now).out_of_grant is None
    assert charge(world, grows).host_bytes == 2

"""Faults of the book that its random exploration found, each by the shortest history that shows it."""

import pytest
from weighbridge_ledger.book import (
    GPU,
    Ask,
    Ceilings,
    Claim,
    Credential,
    DeviceWant,
    Hold,
    LeaseState,
    Observed,
    Policy,
)

GRANTED, QUEUED, VACATING = LeaseState.GRANTED, LeaseState.QUEUED, LeaseState.VACATING


def test_a_what_if_promises_nothing_on_optional_bytes(new_world) -> None:
    """It said NOW where the claim then had to wait for optional bytes, which their holder may keep."""
    world = new_world(4, Policy(optional_step_bytes=1))
    holder = world.book.admit(Ask("", world.process(1), Claim(2, optional_host_bytes=2)), world.now).lease
    world.book.activate(holder.lease_id, world.secret(holder.lease_id), world.process(1), (), world.now)
    assert world.committed() == 4
    ask = world.ask(2, 2)
    what_if = world.book.preview(ask, world.now)
    assert what_if.charge is None
    assert [reason.code for reason in what_if.reasons] == ["BYTES_HELD"]
    assert world.book.admit(ask, world.now).lease.state is QUEUED


def test_a_wish_to_be_alone_is_kept_where_it_changes_no_charge(new_world) -> None:
    """Where engines coexist it changes no charge, and was forgotten by the next restart."""
    world = new_world(Ceilings(4, has_shared_gpu=True, exclusive_heeded=False))
    lease, secret = world.active(2)
    world.book.resize(lease, secret, Claim(2), world.now, exclusive=True)
    world.drain()
    world.restart()
    assert world.book.view(lease).lease.exclusive


def test_a_holder_without_engines_that_was_asked_is_freed_by_its_death(new_world) -> None:
    """VACATING looked at engines alone: without any on record, its bytes stayed charged for ever."""
    world = new_world(4)
    lease, secret = world.active(3)
    world.book.renew(lease, secret, None, world.now, load_complete=True)
    for _ in range(16):
        world.pass_time(2)
        world.book.renew(lease, secret, None, world.now)
    world.admit(2, 2)
    assert world.state(lease) is VACATING
    world.die(1)
    assert world.committed() == 2


def test_a_claim_larger_than_its_card_asks_on_the_host_for_what_spills(new_world) -> None:
    """Victims were looked for on the card alone, where nobody was: it waited beside an idle model on the host."""
    world = new_world(Ceilings(6, {"a": 4, "b": 4}))
    lease, secret = world.active(5, 1)
    world.book.renew(lease, secret, None, world.now, load_complete=True)
    for _ in range(16):
        world.pass_time(2)
        world.book.renew(lease, secret, None, world.now)
    waiting = world.admit(0, 2, devices={"a": 6}).lease
    assert world.state(lease) is VACATING
    world.release(lease, secret)
    assert world.book.view(waiting.lease_id).lease.charge.spilled == (("a", 2),)


def test_a_reclaim_is_in_flight_for_as_long_as_a_standstill_made_it(new_world) -> None:
    """Those who were asked got their time again, the waiter's protection did not: what they left was given away."""
    world = new_world(6)
    lease, secret = world.active(1, 1)
    claim = Ask("", world.process(1), Claim(6), replaces=Credential(lease, secret))
    waiting = world.book.admit(claim, world.now).lease
    assert world.state(lease) is VACATING
    world.pass_time(20)
    world.stand_still(20)
    world.book.tick(world.now)
    assert world.book.asked_for(waiting.lease_id) == ((lease,), 70)
    assert world.admit(3, 2).lease.state is QUEUED


def test_optional_bytes_that_were_asked_back_are_counted_once_for_whoever_replaces_their_lease(new_world) -> None:
    """Once as coming back and once with the lease: small claims harmed the waiter again and again, uncounted."""
    world = new_world(6, Policy(protect_passes=1, optional_step_bytes=1))
    old = world.book.admit(Ask("", world.process(1), Claim(2, optional_host_bytes=3)), world.now).lease.lease_id
    secret = world.secret(old)
    world.book.activate(old, secret, world.process(1), (), world.now)
    world.admit(3, 2)
    assert world.book.view(old).shrink is not None
    new = Ask("", world.process(1), Claim(6), replaces=Credential(old, secret))
    assert world.book.admit(new, world.now).lease.state is QUEUED
    lease, secret = world.active(1, 3)
    world.release(lease, secret)
    assert world.admit(1, 4).lease.state is QUEUED


@pytest.mark.parametrize(
    ("ceilings", "optional", "observed"),
    [
        # Optional bytes were given up for as many of those in use, and the rest was forgotten.
        (Ceilings(5), 3, Observed(6)),
        # A place on the host was charged for what is on the card, and another one with each renewal.
        (Ceilings(5, {"a": 2}, spill_allowed=True), 0, Observed(0, devices=(("a", 3),))),
    ],
)
def test_what_is_in_use_is_granted_where_it_is_or_counts_as_above_the_grant(
    new_world, ceilings, optional, observed
) -> None:
    world = new_world(ceilings, Policy(optional_step_bytes=1))
    wants = (DeviceWant("a", 2),) if ceilings.devices else ()
    ask = Ask("", world.process(1), Claim(0 if wants else 1, wants, optional))
    lease = world.book.admit(ask, world.now).lease.lease_id
    secret = world.secret(lease)
    world.book.activate(lease, secret, world.process(1), (), world.now)
    charge = world.book.view(lease).lease.charge
    for _ in range(2):
        assert world.book.renew(lease, secret, observed, world.now).out_of_grant is not None
        assert world.book.view(lease).lease.charge == charge
    world.book.renew(lease, secret, Observed(), world.now)
    assert world.admit(1, 2).lease.state is GRANTED


def test_who_waits_for_an_unwell_device_keeps_no_memory_from_others(new_world) -> None:
    """It did where it did not fit either: a claim on the processor waited behind a GPU that rested."""
    world = new_world(Ceilings(8, has_shared_gpu=True))
    world.active(5, 1)
    big = world.admit(4, 2).lease
    world.pass_time(60)
    small = world.book.admit(Ask("", world.process(3), Claim(1, cpu_only=True)), world.now).lease
    assert small.state is QUEUED
    world.book.set_holds({GPU: Hold("DEVICE_UNHEALTHY", "It is hot.")}, world.now)
    assert world.state(small.lease_id) is GRANTED
    assert world.state(big.lease_id) is QUEUED

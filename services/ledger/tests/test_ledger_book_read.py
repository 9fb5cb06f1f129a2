"""Faults of the book that reading it line by line found, each by the shortest history that shows it."""

import pytest
from weighbridge_ledger.book import (
    Ask,
    Ceilings,
    Claim,
    Credential,
    DeviceWant,
    Hold,
    LeaseState,
    Observed,
    Policy,
    reclaiming,
)
from weighbridge_ledger.book.charging import price

GRANTED, QUEUED, VACATING = LeaseState.GRANTED, LeaseState.QUEUED, LeaseState.VACATING

HOT = Hold("DEVICE_UNHEALTHY", "It is hot.")


def test_a_load_that_was_given_up_and_hangs_keeps_others_from_loading_for_ten_minutes_at_most(new_world) -> None:
    """Released before it had loaded, its engine never ends: nobody was let load on that machine ever again."""
    world = new_world(Ceilings(8, has_shared_gpu=True, one_start_at_a_time=True))
    hanging, secret = world.active(1, 1, 11)
    assert world.release(hanging, secret).state is VACATING
    world.pass_time(300)
    waiting = world.admit(1, 2).lease.lease_id
    world.pass_time(world.policy.longest_load_s - 301)
    assert world.wait_codes(waiting) == ["LOADS_ONE_AT_A_TIME"]
    world.pass_time(1)
    assert world.state(waiting) is GRANTED


def test_names_of_devices_that_holders_make_up_do_not_pile_up(new_world) -> None:
    """Each renewal may name 64 of them, and every decision added up all that had ever been named."""
    world = new_world(4)
    lease, secret = world.active(1)
    for number in range(100):
        world.book.renew(lease, secret, Observed(devices=((f"made-up-{number}", 1),)), world.now)
    assert len(world.book._overruns.on_top_of(world.book.external).devices) == 1
    world.book.renew(lease, secret, Observed(), world.now)
    assert world.book._overruns.on_top_of(world.book.external) == world.book.external


def test_who_takes_any_card_is_seen_behind_many_who_wait_for_the_one_it_aims_at(new_world) -> None:
    """It stood beyond the look-ahead of card a, and so nobody saw that it was the first for card b."""
    world = new_world(Ceilings(0, {"a": 2, "b": 2}), Policy(look_ahead=2))
    world.active(0, 1, devices={"a": 2}, term_s=600)
    other, secret = world.active(0, 2, devices={"b": 2}, term_s=600)
    for _ in range(3):
        world.admit(0, 3, devices={"a": 2})
    floating = world.admit(0, 4, devices={"": 2}).lease.lease_id
    world.release(other, secret)
    assert world.state(floating) is GRANTED


def test_a_claim_that_keeps_a_lease_busy_does_not_wait_for_that_very_lease(new_world) -> None:
    """Idle for the moment, it counted as one that can be asked, and nobody asks it for its own holder's claim: that
    waited for ten minutes instead of being refused."""
    world = new_world(4)
    lease, secret = world.resident(2)
    world.rest()
    own = Credential(lease, secret)
    assert world.refused(lambda: world.admit(3, while_holding=(own,))) == "WAIT_WHILE_HOLDING"
    other, other_secret = world.active(2, 2)
    assert world.refused(lambda: world.admit(4, while_holding=(own,), replaces=own)) == "WAIT_WHILE_HOLDING"
    world.release(other, other_secret)
    assert world.admit(4, while_holding=(own,), replaces=own).lease.state is QUEUED


def test_who_waits_for_an_unwell_device_keeps_nobody_from_growing_or_from_waiting_beside_a_use(new_world) -> None:
    """New claims overtook it freely; growth and claims that keep a lease busy were refused for its sake."""
    world = new_world(Ceilings(4, {"a": 4}))
    lease, secret = world.active(1, term_s=600)
    leaving, leaving_secret = world.active(2, 2, 12)
    world.book.set_holds({"a": HOT}, world.now)
    world.admit(4, 3, devices={"a": 1})
    world.pass_time(world.policy.protect_after_s)
    assert world.book.resize(lease, secret, Claim(2), world.now).charge.host_bytes == 2
    world.release(leaving, leaving_secret)
    assert world.state(leaving) is VACATING
    assert world.admit(1, while_holding=(Credential(lease, secret),)).lease.state is QUEUED


def test_nobody_is_asked_on_an_unwell_card_for_who_takes_any(new_world) -> None:
    """Where nobody could be asked on the card it aimed at, an idle model left the unwell one, in vain."""
    world = new_world(Ceilings(0, {"a": 4, "b": 3}))
    world.begin_use(*world.resident(0, 1, devices={"a": 4}))
    world.resident(0, 2, devices={"b": 3})
    world.rest()
    world.book.set_holds({"b": HOT}, world.now)
    world.admit(0, 3, devices={"": 2})
    assert world.vacating() == []


def test_who_takes_any_card_does_not_wait_for_an_unwell_one_beside_idle_models_on_another(new_world) -> None:
    """The what-if named whom it would evict, and the claim then waited for the card where least was missing to cool."""
    world = new_world(Ceilings(0, {"a": 4, "b": 4}))
    idle, _ = world.resident(0, 1, devices={"b": 4})
    world.rest()
    world.book.set_holds({"a": HOT}, world.now)
    assert world.book.preview(world.ask(0, 2, devices={"": 2}), world.now).evict == (idle,)
    world.admit(0, 2, devices={"": 2})
    assert world.vacating() == [idle]


def test_who_takes_any_card_asks_nobody_where_an_earlier_claim_is_the_first_to_ask(new_world) -> None:
    """In each pool only the first who waits asks (rule 18): it asked where it was the second."""
    world = new_world(Ceilings(0, {"a": 1, "b": 2}))
    world.begin_use(*world.resident(0, 1, devices={"a": 1}))
    world.begin_use(*world.resident(0, 2, devices={"b": 1}))
    world.resident(0, 3, devices={"b": 1})
    world.rest()
    world.admit(0, 4, devices={"b": 2})
    world.admit(0, 5, devices={"": 1})
    assert world.vacating() == []


def test_optional_bytes_on_another_card_are_not_asked_back_for_who_makes_others_vacate(new_world) -> None:
    """Whenever anybody had to vacate, everybody with optional bytes anywhere was asked for them."""
    world = new_world(Ceilings(4, {"a": 4, "b": 4}), Policy(optional_step_bytes=1))
    there, _ = with_optional(world, 1, Claim(0, (DeviceWant("b", 1, 2),)))
    here, _ = with_optional(world, 2, Claim(0, (DeviceWant("a", 1, 1),)))
    on_host, _ = with_optional(world, 3, Claim(1, optional_host_bytes=2))
    idle, _ = world.resident(0, 4, devices={"a": 2})
    world.rest()
    world.admit(0, 5, devices={"a": 3})
    assert world.vacating() == [idle]
    asked = {one for one in (there, here, on_host) if world.book.view(one).shrink is not None}
    assert asked == {here}


def test_growth_fits_its_holders_own_limit_with_what_spills(new_world) -> None:
    """The limit was held against what was asked of the host: what spilled there went beyond it."""
    world = new_world(Ceilings(8, {"a": 6}, spill_allowed=True))
    lease, secret = world.active(0, devices={"a": 4}, memory_limit_bytes=1)
    larger = Claim(0, (DeviceWant("a", 8),))
    assert world.refused(lambda: world.book.resize(lease, secret, larger, world.now)) == "CANNOT_GROW"
    assert world.book.resize(lease, secret, Claim(0, (DeviceWant("a", 7),)), world.now).charge.host_bytes == 1


@pytest.mark.parametrize("why", ["alone there", "unwell", "wants to be alone"])
def test_who_takes_any_two_cards_takes_two_that_it_can_have(new_world, why: str) -> None:
    """It was tried on one pair only, the one with the least room left, and waited beside two empty cards."""
    world = new_world(Ceilings(0, {"a": 4, "b": 4, "c": 4}))
    world.active(0, 1, devices={"a": 1}, exclusive=why == "alone there")
    if why == "unwell":
        world.book.set_holds({"a": HOT}, world.now)
    wants = Claim(0, (DeviceWant("", 3), DeviceWant("", 2)))
    ask = Ask("", world.process(2), wants, exclusive=why == "wants to be alone")
    lease = world.book.admit(ask, world.now).lease
    assert lease.state is GRANTED
    assert dict(lease.charge.devices).keys() == {"b", "c"}


def test_a_claim_that_waits_for_busy_holders_is_not_planned_anew_over_all_of_them_at_each_use(
    new_world, monkeypatch
) -> None:
    """Each BeginUse looked at every one of them as long as a protected claim waited: 130 ms beside 10,000."""
    world = new_world(100)
    busy = [world.resident(1, pid) for pid in range(1, 101)]
    for lease, secret in busy:
        world.begin_use(lease, secret)
    world.admit(100, 101)
    world.rest()
    world.rest()
    looks = []
    monkeypatch.setattr(reclaiming, "price", lambda *values, **more: looks.append(1) or price(*values, **more))
    use = world.begin_use(*busy[0])
    assert len(looks) < 10
    world.end_use(*busy[0], next(iter(world.book._entries[busy[0][0]].uses)))
    world.end_use(*busy[0], use)
    assert world.vacating() == [busy[0][0]]


def with_optional(world, pid: int, claim: Claim) -> tuple[str, str]:
    """A resident whose claim has optional bytes, all of them granted."""
    lease = world.book.admit(Ask("", world.process(pid), claim, term_s=600), world.now).lease
    assert lease.charge.optional_bytes == claim.optional_bytes
    secret = world.secret(lease.lease_id)
    world.book.activate(lease.lease_id, secret, world.process(pid), (), world.now)
    world.book.renew(lease.lease_id, secret, None, world.now, load_complete=True)
    world.drain()
    return lease.lease_id, secret

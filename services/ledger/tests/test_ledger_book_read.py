"""Faults of the book that reading it line by line found, each by the shortest history that shows it."""

from weighbridge_ledger.book import Ceilings, LeaseState, Observed

GRANTED, QUEUED, VACATING = LeaseState.GRANTED, LeaseState.QUEUED, LeaseState.VACATING


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

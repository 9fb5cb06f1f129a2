"""Loads one at a time where the platform needs it: two models that are mapped for Metal at once can panic macOS. Only
loads exclude each other; what is loaded runs side by side."""

from dataclasses import replace

import pytest
from weighbridge_common.settings import parse
from weighbridge_ledger.book import Ceilings, LeaseState
from weighbridge_ledger.book.states import Claim
from weighbridge_ledger.machine.ceilings import ceilings_for
from weighbridge_ledger.machine.declared import parse_spec
from weighbridge_ledger.machine.model import Machine, Pool
from weighbridge_ledger.settings import LedgerSettings

METAL = Ceilings(10, has_shared_gpu=True, one_start_at_a_time=True)
ANYWHERE = Ceilings(10, has_shared_gpu=True)


@pytest.fixture
def world(new_world):
    return new_world(METAL)


def wait_codes(world, lease_id: str) -> list[str]:
    waiting = world.book.waiting_for(lease_id)
    assert waiting is not None
    return [reason.code.value for reason in waiting[2]]


def loading(world) -> int:
    """Leases that may be loading: granted or active, and not said to have finished."""
    return sum(
        view.lease.state in (LeaseState.GRANTED, LeaseState.ACTIVE) and not view.lease.loaded_wall
        for view in world.book.charged()
    )


def loaded(world, lease_id: str, secret: str) -> None:
    world.book.renew(lease_id, secret, None, world.now, load_complete=True)
    world.drain()


def test_a_load_waits_for_the_one_before(world) -> None:
    world.active(3)
    second = world.admit(3, pid=2).lease
    assert second.state is LeaseState.QUEUED
    assert wait_codes(world, second.lease_id) == ["LOADS_ONE_AT_A_TIME"]


def test_it_waits_for_a_grant_that_is_not_activated_yet_too(world) -> None:
    # Two grants in one moment would both be activated, and both load.
    world.admit(3)
    assert world.admit(3, pid=2).lease.state is LeaseState.QUEUED


def test_a_load_that_is_complete_lets_the_next_one_start(world) -> None:
    first, secret = world.active(3)
    second = world.admit(3, pid=2).lease.lease_id
    loaded(world, first, secret)
    assert (world.state(first), world.state(second)) == (LeaseState.ACTIVE, LeaseState.GRANTED)


def test_a_first_use_means_that_it_is_loaded(world) -> None:
    first, secret = world.active(3)
    second = world.admit(3, pid=2).lease.lease_id
    world.book.begin_use(first, secret, "", world.now)
    world.drain()
    assert world.state(second) is LeaseState.GRANTED


@pytest.mark.parametrize(("ceilings", "overlap"), [(METAL, 1), (ANYWHERE, 2)])
def test_serialised_loads_overlap_1_and_others_2(new_world, ceilings: Ceilings, overlap: int) -> None:
    world = new_world(ceilings)
    world.admit(3)
    world.admit(3, pid=2)
    assert loading(world) == overlap


def test_three_load_one_after_the_other_in_the_order_of_asking(world) -> None:
    first, secret = world.active(3)
    waiting = [world.admit(3, pid=pid).lease.lease_id for pid in (2, 3)]
    order = []
    while waiting:
        loaded(world, first, secret)
        assert loading(world) == 1
        (first,) = (lease_id for lease_id in waiting if world.state(lease_id) is LeaseState.GRANTED)
        waiting.remove(first)
        order.append(first)
        secret = world.secret(first)
        world.book.activate(first, secret, world.book.view(first).lease.holder, (), world.now)
        world.drain()
    assert order == sorted(order)


def test_a_ledger_that_is_started_anew_knows_who_is_loading(world) -> None:
    # The engine that it was told of goes on mapping its weights while the ledger is away.
    first, secret = world.active(3)
    world.restart()
    second = world.admit(3, pid=2).lease.lease_id
    assert world.state(second) is LeaseState.QUEUED
    loaded(world, first, secret)
    assert world.state(second) is LeaseState.GRANTED


def test_what_was_loaded_before_a_restart_holds_nobody(world) -> None:
    loaded(world, *world.active(3))
    world.restart()
    assert world.admit(3, pid=2).lease.state is LeaseState.GRANTED


# -- a load that fails does not wedge the others -----------------------------------------------------------------------


def test_a_grant_that_nobody_activates(world) -> None:
    world.admit(3)
    second = world.admit(3, pid=2).lease.lease_id
    world.pass_time(world.policy.activate_by_s)
    assert world.state(second) is LeaseState.GRANTED


def test_a_load_that_failed_and_was_released(world) -> None:
    first, secret = world.active(3)
    second = world.admit(3, pid=2).lease.lease_id
    world.release(first, secret)
    assert world.state(second) is LeaseState.GRANTED


def test_a_load_whose_processes_died(world) -> None:
    world.active(3, 1, 10)
    second = world.admit(3, pid=2).lease.lease_id
    world.die(1, 10)
    assert world.state(second) is LeaseState.GRANTED


def test_a_load_that_takes_longer_than_any_load_does(world) -> None:
    # Its engine has hung, or nobody told its end.
    first, secret = world.active(3)
    while world.time < world.policy.longest_load_s - 10:
        world.pass_time(10)
        world.book.renew(first, secret, None, world.now)
    second = world.admit(3, pid=2).lease.lease_id
    world.pass_time(9)
    assert world.state(second) is LeaseState.QUEUED
    world.pass_time(1)
    assert world.state(second) is LeaseState.GRANTED


# -- what is no load on the GPU ----------------------------------------------------------------------------------------


def admit_on_the_processor(world, size: int, pid: int):
    ask = replace(world.ask(size, pid), claim=Claim(size, cpu_only=True))
    admission = world.book.admit(ask, world.now)
    world.drain()
    return admission.lease


def test_a_load_on_the_processor_does_not_wait(world) -> None:
    world.active(3)
    assert admit_on_the_processor(world, 3, pid=2).state is LeaseState.GRANTED


def test_a_load_on_the_processor_holds_nobody(world) -> None:
    admit_on_the_processor(world, 3, pid=1)
    assert world.admit(3, pid=2).lease.state is LeaseState.GRANTED


def test_who_waits_for_bytes_too_is_told_of_both(world) -> None:
    world.active(8)
    second = world.admit(8, pid=2).lease.lease_id
    assert wait_codes(world, second) == ["LOADS_ONE_AT_A_TIME", "BYTES_HELD"]


# -- what a person says about it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "on_a_mac", "elsewhere"), [("auto", True, False), ("always", True, True), ("never", False, False)]
)
def test_a_persons_word_goes_before_the_platforms(word: str, on_a_mac: bool, elsewhere: bool) -> None:
    # A machine that was declared does not say that it is a Mac.
    one_load = parse(LedgerSettings, {"WEIGHBRIDGE_LEDGER_ONE_LOAD_AT_A_TIME": word}).one_load()
    mac = Machine("n", Pool.UNIFIED, 2**36, platform="darwin/arm64")
    found = [
        ceilings_for(machine, one_load=one_load).one_start_at_a_time for machine in (mac, parse_spec("unified:64"))
    ]
    assert found == [on_a_mac, elsewhere]

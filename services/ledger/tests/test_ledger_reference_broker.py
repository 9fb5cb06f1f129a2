"""The reference system's broker, row by row with its own figures (GiB), on this book.

Where it denies a reservation for what others hold, this ledger lets the claim wait: "denied" there is "waits" here.
The rows whose rule is another one here are not tests; docs/ledger-reports.md says why.
"""

import math

import pytest
from weighbridge_ledger.book import Ceilings, Claim, DeviceWant, LeaseState
from weighbridge_ledger.machine.ceilings import automatic_ceilings, ceilings_for, fast_bytes
from weighbridge_ledger.machine.declared import parse_spec
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

QUEUED, GRANTED = LeaseState.QUEUED, LeaseState.GRANTED
GIB = 2**30
CARD_32 = "discrete:64+32"


def on_card(gib: float) -> dict[str, int]:
    return {"0": int(gib * GIB)}


def card_world(new_world, spec: str = CARD_32, *, spill: bool | None = None):
    return new_world(ceilings_for(parse_spec(spec), None, spill))


def missing(world, gib: float) -> int:
    """Bytes that a claim on the card would wait for; 0 if it would be granted at once."""
    preview = world.book.preview(world.ask(0, 99, devices=on_card(gib)), world.now)
    assert preview.refusal is None
    return 0 if preview.charge is not None else preview.reasons[0].missing_bytes


# -- one pool ---------------------------------------------------------------------------------------------------------


def test_a_reservation_is_charged_once_and_a_second_one_waits(new_world) -> None:
    """Budget 32: 20 is granted, then 20 is not, and 20 stay committed; what is missing is 40 − 32."""
    world = new_world(32)
    world.active(20)
    waiting = world.admit(20, 2).lease
    assert (waiting.state, world.committed()) == (QUEUED, 20)
    assert world.book.waiting_for(waiting.lease_id)[2][0].missing_bytes == 40 - 32


def test_a_release_leaves_nothing_and_one_of_an_unknown_lease_changes_nothing(new_world) -> None:
    world = new_world(32)
    lease, secret = world.active(20)
    assert world.refused(lambda: world.release("unknown", secret)) == "LEASE_NOT_FOUND"
    assert world.committed() == 20
    world.release(lease, secret)
    assert world.committed() == 0


def test_growing_counts_the_old_bytes_once(new_world) -> None:
    """Budget 32: 10, then 25 in its place: 25, not 35. And 20 → 30 is 30 against 32, not 50."""
    world = new_world(32)
    lease, secret = world.active(10)
    world.book.resize(lease, secret, Claim(25), world.now)
    assert world.committed() == 25
    world.book.resize(lease, secret, Claim(20), world.now)
    world.book.resize(lease, secret, Claim(30), world.now)
    assert world.committed() == 30


def test_a_growth_that_is_refused_leaves_the_old_bytes(new_world) -> None:
    """10 and 18 in 32; 10 → 20 is refused, 28 stay committed."""
    world = new_world(32)
    lease, secret = world.active(10, 1)
    world.active(18, 2)
    assert world.refused(lambda: world.book.resize(lease, secret, Claim(20), world.now)) == "CANNOT_GROW"
    assert world.committed() == 28
    assert world.book.view(lease).lease.charge.total_bytes == 10


def test_what_is_committed_is_the_sum_of_the_leases(new_world) -> None:
    """4, 30 and 12: 46. They are listed in the order of asking here, not by size."""
    world = new_world(64)
    ids = [world.active(size, pid)[0] for pid, size in enumerate((4, 30, 12), start=1)]
    assert world.committed() == 46
    assert world.book.lease_ids() == ids


def test_an_automatic_ceiling_is_in_force_without_anybody_setting_one(new_world) -> None:
    """64 GiB without a card: ⌊0.6 · 64⌋, to the byte."""
    share = math.floor(64 * GIB * 0.6)
    ceilings = automatic_ceilings(parse_spec("cpu:64"))
    assert (ceilings.host_bytes, ceilings.limit_bytes) == (share, None)
    world = new_world(ceilings)
    assert world.refused(lambda: world.admit(share + 1)) == "CLAIM_EXCEEDS_CAPACITY"
    assert world.admit(share).lease.state is GRANTED


def test_a_limit_counts_at_once_and_clearing_it_restores_the_automatic_ceiling(new_world) -> None:
    """16 GiB unified, automatically 11.2. There a limit of 14 raises it and 13 pass; here a limit never raises a
    ceiling (it may be wrong, the memory is not), so the row is turned: 13 are refused under 14, under none, and a limit
    of 10 refuses 11, which pass without one."""
    machine = parse_spec("unified:16")
    world = new_world(automatic_ceilings(machine))
    assert world.book.ceilings.total_bytes == math.floor(11.2 * GIB)

    def under(limit_gib: int | None, gib: int) -> bool:
        limit = None if limit_gib is None else limit_gib * GIB
        world.book.set_ceilings(ceilings_for(machine, limit), world.now)
        return world.book.preview(world.ask(gib * GIB), world.now).charge is not None

    assert [under(14, 13), under(None, 13)] == [False, False]
    assert [under(10, 11), under(None, 11)] == [False, True]


def test_a_lowered_budget_evicts_nobody_and_lets_nobody_in(new_world) -> None:
    """Budget 20, reserve 12, set 10: 12 stay committed, even 1 waits; after the release 1 is granted."""
    world = new_world(20)
    lease, secret = world.active(12)
    world.book.begin_use(lease, secret, "", world.now)
    world.book.set_ceilings(Ceilings(10), world.now)
    assert world.committed() == 12
    one = world.admit(1, 2).lease
    assert one.state is QUEUED
    world.release(lease, secret)
    assert world.state(one.lease_id) is GRANTED
    assert world.committed() == 1


# -- a card: 64 GiB of RAM, 32 GiB card, spilling off unless said -----------------------------------------------------


def test_a_model_larger_than_the_card_loads_alone(new_world) -> None:
    world = card_world(new_world)
    lease = world.admit(0, devices=on_card(40)).lease
    assert lease.state is GRANTED
    assert lease.charge.total_bytes == 40 * GIB
    assert lease.charge.on("0") == math.floor(30.4 * GIB)


def test_a_second_model_must_fit_the_card_beside_the_first(new_world) -> None:
    """20 on it: 5 go on, 12 wait (with the reason of the card's rule), 20 stay committed."""
    world = card_world(new_world)
    world.active(0, 1, devices=on_card(20))
    assert missing(world, 5) == 0
    waiting = world.admit(0, 2, devices=on_card(12)).lease
    assert waiting.state is QUEUED
    assert world.committed() == 20 * GIB
    reason = world.book.waiting_for(waiting.lease_id)[2][0]
    assert "spilling" in reason.message
    assert "smaller" not in reason.message


def test_what_is_missing_on_a_card_is_never_more_than_others_hold_there(new_world) -> None:
    """20 on it: 12 miss some of the 20; 40, which fit alone only, miss the 20 and no more; 20 → 25 miss nothing."""
    world = card_world(new_world)
    lease, secret = world.active(0, 1, devices=on_card(20))
    assert 0 < missing(world, 12) <= 20 * GIB
    assert missing(world, 40) == 20 * GIB
    grown = world.book.resize(lease, secret, Claim(0, (DeviceWant("0", 25 * GIB),)), world.now)
    assert grown.charge.on("0") == 25 * GIB


def test_with_spilling_both_go_on(new_world) -> None:
    """20 + 12: 32 committed, 1.6 of them in host memory."""
    world = card_world(new_world, spill=True)
    world.active(0, 1, devices=on_card(20))
    second = world.admit(0, 2, devices=on_card(12)).lease
    assert second.state is GRANTED
    assert world.committed() == 32 * GIB
    assert second.charge.spilled_bytes == 32 * GIB - math.floor(30.4 * GIB)


def test_the_choice_about_spilling_counts_at_once(new_world) -> None:
    """true → false → none: allowed, not, not. What automatic means on a card is no."""
    machine = parse_spec(CARD_32)
    world = card_world(new_world)
    world.active(0, 1, devices=on_card(20))
    allowed = []
    for choice in (True, False, None):
        ceilings = ceilings_for(machine, None, choice)
        world.book.set_ceilings(ceilings, world.now)
        allowed.append((ceilings.spill_allowed, missing(world, 12) == 0))
    assert allowed == [(True, True), (False, False), (False, False)]
    assert fast_bytes(world.book.ceilings) == math.floor(30.4 * GIB)


async def test_the_choice_about_spilling_is_told_with_the_capacity_and_outlives_other_wishes(
    new_ledger, tmp_path
) -> None:
    ledger = new_ledger(tmp_path)
    ledger.probe.machine = parse_spec(CARD_32, node_id="node")
    async with ledger.serve():

        async def told(**wish) -> bool:
            return (await ledger.stub.SetLimit(pb.SetLimitRequest(**wish))).capacity.spill_allowed

        assert [await told(), await told(spill_allowed=True), await told(limit_bytes=50 * GIB)] == [False, True, True]
        assert await told(spill_allowed=False) is False


def test_a_small_card_does_not_spill_by_itself_either() -> None:
    """12 GiB card, 32 GiB of RAM: automatically off."""
    assert automatic_ceilings(parse_spec("discrete:32+12")).spill_allowed is False


@pytest.mark.parametrize(("limit", "fast"), [(12, 12.0), (None, 22.8)])
def test_a_limit_lowers_the_card_and_none_restores_it(new_world, limit: int | None, fast: float) -> None:
    """12 on a 24 GiB card: 12 are fast memory; none: 22.8. A model of 13 fits under the second only."""
    ceilings = ceilings_for(parse_spec("discrete:64+24"), None if limit is None else limit * GIB)
    assert fast_bytes(ceilings) == math.floor(fast * GIB)
    world = new_world(ceilings)
    preview = world.book.preview(world.ask(0, devices=on_card(13)), world.now)
    assert (preview.charge is None) == (limit == 12)

"""The reference system's pool of engines and its arbiter of the GPU, row by row where they hold here.

Its pool evicts; this ledger asks idle holders to vacate (rules 18 to 22). Its arbiter knows slots (chat, images, video)
and lends the GPU to one of them; here that is a claim for exclusive use, and one mechanism with the rest (rule 26).
Sizes are GiB where the row has them.
"""

from dataclasses import replace

import pytest
from weighbridge_ledger.book import Ask, Ceilings, EventKind, LeaseState, Observed
from weighbridge_ledger.book.states import GPU, Hold, Moment
from weighbridge_ledger.health.panics import Panic, panic_hold
from weighbridge_ledger.health.policy import HealthPolicy
from weighbridge_ledger.machine.ceilings import automatic_ceilings, ceilings_for
from weighbridge_ledger.machine.declared import parse_spec
from weighbridge_ledger.machine.model import Machine, Pool

QUEUED, GRANTED, ACTIVE, VACATING = LeaseState.QUEUED, LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.VACATING
GIB = 2**30
CARD_32 = parse_spec("discrete:64+32")


def use(world, lease: str, secret: str) -> None:
    """One turn: begun and ended, and idle again for long enough to be asked."""
    world.end_use(lease, secret, world.begin_use(lease, secret))
    world.pass_time(world.policy.idle_s)


def on_card(gib: int) -> dict[str, int]:
    return {"0": gib * GIB}


# -- the pool ---------------------------------------------------------------------------------------------------------


def test_three_requests_for_one_engine_are_one_charge(new_world) -> None:
    """3 parallel ensures = 1 build; a second bind of the same model in a budget of 12: one entry, 10 committed."""
    world = new_world(12)
    leases = {world.admit(10, 1, "qwen").lease.lease_id for _ in range(3)}
    assert len(leases) == 1
    assert world.committed() == 10


def test_the_least_recently_used_one_makes_room(new_world) -> None:
    """Budget 25: a and b of 10, a is used, c of 10: b goes."""
    world = new_world(25)
    a, b = world.resident(10, 1), world.resident(10, 2)
    world.rest()
    use(world, *a)
    c = world.admit(10, 3).lease
    assert world.vacating() == [b[0]]
    world.release(*b)
    assert world.state(c.lease_id) is GRANTED
    assert world.committed() == 20


def test_a_claim_that_only_the_card_s_rule_keeps_out_asks_the_first_one(new_world) -> None:
    """64 GiB of RAM, 32 GiB card, spilling off: 20, then 20: the first goes, 20 committed."""
    world = new_world(automatic_ceilings(CARD_32))
    first = world.resident(0, 1, devices=on_card(20))
    world.rest()
    second = world.admit(0, 2, devices=on_card(20)).lease
    assert world.vacating() == [first[0]]
    world.release(*first)
    assert world.state(second.lease_id) is GRANTED
    assert world.committed() == 20 * GIB


def test_with_spilling_both_stay(new_world) -> None:
    world = new_world(ceilings_for(CARD_32, None, True))
    world.resident(0, 1, devices=on_card(20))
    world.rest()
    assert world.admit(0, 2, devices=on_card(20)).lease.state is GRANTED
    assert world.vacating() == []
    assert world.committed() == 40 * GIB


def test_forty_alone_are_loaded_and_nobody_is_asked(new_world) -> None:
    world = new_world(automatic_ceilings(CARD_32))
    assert world.admit(0, devices=on_card(40)).lease.state is GRANTED


def test_memory_is_committed_until_the_engine_is_gone(new_world) -> None:
    """While an engine shuts down, its 10 are still committed; then none."""
    world = new_world(12)
    lease, secret = world.resident(10, 1, 11)
    world.release(lease, secret)
    assert world.committed() == 10
    world.die(11)
    assert world.committed() == 0


def test_a_busy_one_is_left_alone_and_an_idle_one_is_asked(new_world) -> None:
    """Unloading an idle engine works, a busy one is refused and keeps its 10; of both only the idle one is released."""
    world = new_world(20)
    idle, busy = world.resident(10, 1), world.resident(10, 2)
    world.begin_use(*busy)
    world.rest()
    world.admit(10, 3)
    assert world.vacating() == [idle[0]]
    assert world.state(busy[0]) is ACTIVE
    assert world.committed() == 20


def test_an_idle_one_is_preferred_to_an_older_busy_one(new_world) -> None:
    world = new_world(20)
    older = world.resident(10, 1)
    world.begin_use(*older)
    world.pass_time(5)
    idle = world.resident(10, 2)
    world.rest()
    world.admit(10, 3)
    assert world.vacating() == [idle[0]]


def test_a_model_larger_than_the_budget_is_refused_before_anything_is_built(new_world) -> None:
    """14 in 10: denied, the builder is never called: no grant, no charge, no queue, and a friendly text."""
    world = new_world(Ceilings(10 * GIB, ram_bytes=16 * GIB))
    preview = world.book.preview(world.ask(14 * GIB), world.now)
    assert preview.refusal is not None
    assert "14.00 GiB" in preview.refusal.message
    assert "10.00 GiB" in preview.refusal.message
    assert world.refused(lambda: world.admit(14 * GIB)) == "CLAIM_EXCEEDS_CAPACITY"
    assert (world.committed(), world.book.queue_depth, world.events) == (0, 0, [])


def test_an_engine_larger_than_its_estimate_is_told_to_stop(new_world) -> None:
    """Estimated 5, really 14, budget 10: it may not stay."""
    world = new_world(10)
    lease, secret = world.active(5)
    renewal = world.book.renew(lease, secret, Observed(14), world.now)
    assert renewal.out_of_grant is not None
    assert renewal.out_of_grant.reason == "OUT_OF_GRANT"
    assert world.committed() <= 10


@pytest.mark.parametrize(("need", "evicted"), [(30, 3), (10, 1)])
def test_as_many_are_asked_as_are_needed_and_all_at_once(new_world, need: int, evicted: int) -> None:
    """Budget 35 with 3 × 10 idle: 30 needs all three, asked at once; 10 needs the oldest alone."""
    world = new_world(35)
    residents = []
    for pid in (1, 2, 3):
        residents.append(world.resident(10, pid))
        world.pass_time(1)
    world.rest()
    waiting = world.admit(need, 4).lease
    assert world.vacating() == [lease for lease, _ in residents[:evicted]]
    for lease, secret in residents[:evicted]:
        world.release(lease, secret)
    assert world.state(waiting.lease_id) is GRANTED
    assert world.committed() == need + 10 * (3 - evicted)


def test_of_two_that_fit_alone_exactly_one_is_resident(new_world) -> None:
    """2 × 30 in 32, asked at once."""
    world = new_world(32)
    states = [world.book.admit(world.ask(30, pid), world.now).lease.state for pid in (1, 2)]
    assert states == [GRANTED, QUEUED]
    assert world.committed() == 30


def test_an_engine_that_does_not_go_in_thirty_seconds_keeps_its_bytes_and_the_waiter_is_told(new_world) -> None:
    """There a drain is given up after 30 s and the engine serves on; here it stays asked, charged and named."""
    world = new_world(32)
    holder = world.resident(30, 1, 11)
    world.rest()
    waiting = world.admit(30, 2).lease
    assert world.vacating() == [holder[0]]
    world.pass_time(29.5)
    codes = world.wait_codes(waiting.lease_id)
    assert "HOLDER_DID_NOT_VACATE" not in codes
    world.pass_time(0.5)
    reasons = world.book.waiting_for(waiting.lease_id)[2]
    assert [reason.lease_ids for reason in reasons if reason.code == "HOLDER_DID_NOT_VACATE"] == [(holder[0],)]
    assert (world.state(holder[0]), world.committed()) == (VACATING, 30)
    assert world.refused(lambda: world.begin_use(*holder)) == "LEASE_VACATING"


def test_changes_are_counted_by_leases(new_world) -> None:
    """1, 2, 1."""
    world = new_world(25)
    counts = []
    leases = []
    for pid in (1, 2):
        leases.append(world.active(10, pid))
        counts.append(world.book.lease_count)
    world.release(*leases[0])
    assert [*counts, world.book.lease_count] == [1, 2, 1]
    kinds = [event.kind for event in world.events if event.kind in (EventKind.GRANTED, EventKind.RELEASED)]
    assert kinds == [EventKind.GRANTED, EventKind.GRANTED, EventKind.RELEASED]


@pytest.mark.parametrize(("one_at_a_time", "at_once"), [(True, 1), (False, 2)])
def test_loads_overlap_only_where_they_may(new_world, one_at_a_time: bool, at_once: int) -> None:
    """Serialised: at most 1 load at a time; not: 2. A second load starts when the first has loaded."""
    world = new_world(Ceilings(32, has_shared_gpu=True, one_start_at_a_time=one_at_a_time))
    claims = [world.admit(10, pid, term_s=600).lease for pid in (1, 2)]
    states = [world.state(claim.lease_id) for claim in claims]
    assert states.count(GRANTED) == at_once
    if one_at_a_time:
        first, second = (claim.lease_id for claim in claims)
        assert world.wait_codes(second) == ["LOADS_ONE_AT_A_TIME"]
        secret = world.secret(first)
        world.book.activate(first, secret, world.process(1), (), world.now)
        world.pass_time(1)
        assert world.state(second) is QUEUED
        world.book.renew(first, secret, None, world.now, load_complete=True)
        world.drain()
        assert world.state(second) is GRANTED


def test_a_load_that_fails_does_not_wedge_the_next_one(new_world) -> None:
    world = new_world(Ceilings(32, has_shared_gpu=True, one_start_at_a_time=True))
    world.active(10, 1, 11)
    second = world.admit(10, 2).lease
    assert second.state is QUEUED
    world.die(1, 11)
    assert world.state(second.lease_id) is GRANTED


# -- the arbiter ------------------------------------------------------------------------------------------------------

UNIFIED = Ceilings(40, has_shared_gpu=True)
COEXIST = Ceilings(40, has_shared_gpu=True, exclusive_heeded=False)


def test_coexist_takes_no_notice_of_slots(new_world) -> None:
    """An image beside a chat: nobody is asked, both are on the GPU."""
    world = new_world(COEXIST)
    chat = world.resident(10, 1)
    world.rest()
    assert world.admit(10, 2, exclusive=True).lease.state is GRANTED
    assert (world.state(chat[0]), world.vacating()) == (ACTIVE, [])


def test_swap_asks_every_owner_on_the_device_and_none_elsewhere(new_world) -> None:
    """swap evicts the owners of all other slots; a model on the processor alone is on no slot."""
    world = new_world(UNIFIED)
    chats = [world.resident(5, 1), world.resident(5, 2)]
    processor = world.book.admit(_cpu_only(world, 5, 3), world.now).lease
    world.book.activate(processor.lease_id, world.secret(processor.lease_id), world.process(3), (), world.now)
    world.drain()
    world.rest()
    image = world.admit(10, 4, exclusive=True).lease
    assert image.state is QUEUED
    assert world.vacating() == [lease for lease, _ in chats]
    for chat in chats:
        world.release(*chat)
    assert world.state(image.lease_id) is GRANTED
    assert world.book.admit(_cpu_only(world, 5, 5), world.now).lease.state is GRANTED


def _cpu_only(world, size: int, pid: int) -> Ask:
    ask = world.ask(size, pid, term_s=600)
    return replace(ask, claim=replace(ask.claim, cpu_only=True))


def test_nobody_joins_one_that_is_alone_and_it_is_asked_when_it_is_idle(new_world) -> None:
    """A chat after an image: the image's slot is evicted in its turn."""
    world = new_world(UNIFIED)
    image = world.resident(10, 1, exclusive=True)
    world.rest()
    chat = world.admit(5, 2).lease
    assert chat.state is QUEUED
    assert world.vacating() == [image[0]]
    world.release(*image)
    assert world.state(chat.lease_id) is GRANTED


def test_a_holder_that_forgot_it_is_broken_by_proof_and_a_healthy_one_blocks(new_world) -> None:
    """There a lease older than 90 minutes is broken by the clock, whether its holder lives or not. Here its processes
    are asked: dead, it is freed; alive, it blocks for as long as it lives."""
    world = new_world(UNIFIED)
    world.active(10, 1, 11, exclusive=True)
    waiting = world.admit(5, 2, request_id="w").lease
    world.stand_still(2 * 3600)
    world.book.tick(world.now)
    world.drain()
    again = world.admit(5, 2, request_id="w").lease
    assert (again.state, world.committed()) == (QUEUED, 10)
    world.die(1, 11)
    assert world.state(again.lease_id) is GRANTED
    assert waiting.request_id == again.request_id


def test_a_gate_that_says_no_leaves_nothing_held(new_world) -> None:
    """A rejection by the device-health gate frees the lease: here the claim waits beside it and holds no bytes, and its
    end leaves none."""
    world = new_world(UNIFIED)
    world.book.set_holds({GPU: Hold("DEVICE_UNHEALTHY", "It is 90 °C.")}, world.now)
    waiting = world.admit(10, 1, exclusive=True, max_wait_s=60.0)
    assert waiting.lease.state is QUEUED
    assert world.committed() == 0
    assert world.wait_codes(waiting.lease.lease_id) == ["DEVICE_UNHEALTHY"]
    world.pass_time(60)
    world.book.set_holds({}, world.now)
    assert world.admit(10, 2, exclusive=True).lease.state is GRANTED


def test_the_gate_is_asked_in_both_policies(new_world) -> None:
    for ceilings in (UNIFIED, COEXIST):
        world = new_world(ceilings)
        world.book.set_holds({GPU: Hold("DEVICE_UNHEALTHY", "It is 90 °C.")}, world.now)
        assert world.admit(10).lease.state is QUEUED


@pytest.mark.parametrize(
    ("platform", "ram_gib", "pool", "coexist"),
    [
        ("darwin/arm64", 32, Pool.UNIFIED, True),
        ("darwin/arm64", 24, Pool.UNIFIED, True),
        ("darwin/arm64", 16, Pool.UNIFIED, False),
        ("darwin/x86_64", 32, Pool.CPU, False),
        ("windows/x86_64", 64, Pool.CPU, False),
        ("linux/x86_64", 64, Pool.CPU, False),
        ("linux/arm64", 121, Pool.UNIFIED, False),
    ],
)
def test_who_coexists_by_itself(platform: str, ram_gib: int, pool: Pool, coexist: bool) -> None:
    machine = Machine("n", pool, ram_gib * GIB, platform=platform)
    assert automatic_ceilings(machine).exclusive_heeded is not coexist


@pytest.mark.parametrize(("policy", "hours"), [(HealthPolicy(), 1), (HealthPolicy(panic_rest_s=3 * 3600), 3)])
def test_after_a_panic_loads_rest_for_as_long_as_was_said(policy: HealthPolicy, hours: int) -> None:
    """One hour unless said otherwise; three are passed through."""
    panic = Panic(at=1_000_000.0, seen_at=50.0)
    rest_s = hours * 3600.0
    held = [panic_hold(panic, Moment(50.0 + s, 1_000_000.0 + s), policy) is not None for s in (rest_s - 1, rest_s)]
    assert held == [True, False]

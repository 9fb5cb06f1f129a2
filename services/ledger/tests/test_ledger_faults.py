"""The faults that were found in the reference system's ledger, pool and arbiter, by their numbers: none of them here.

docs/ledger-reports.md has every number, with its test here or elsewhere, or the reason why no ledger can commit it.
"""

from dataclasses import replace

import pytest
from weighbridge_ledger.book import Ceilings, Claim, External, LeaseState, Observed
from weighbridge_ledger.book.states import GPU, Credential, Hold
from weighbridge_ledger.machine.ceilings import automatic_ceilings
from weighbridge_ledger.machine.declared import parse_spec

QUEUED, GRANTED, ACTIVE, VACATING = LeaseState.QUEUED, LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.VACATING
GIB = 2**30


def test_1_a_model_that_can_never_fit_asks_nobody_to_go(new_world) -> None:
    """It made room first and asked whether the model fits later: all idle engines were evicted, then it was denied."""
    world = new_world(32)
    residents = [world.resident(10, 1), world.resident(10, 2)]
    world.rest()
    assert world.refused(lambda: world.admit(33, 3)) == "CLAIM_EXCEEDS_CAPACITY"
    assert [world.state(lease) for lease, _ in residents] == [ACTIVE, ACTIVE]
    assert world.committed() == 20


def test_2_of_two_that_ask_at_once_only_one_passes_the_check(new_world) -> None:
    """A builder stood between check and reservation: both models passed the check."""
    world = new_world(32)
    both = [world.book.admit(world.ask(20, pid), world.now).lease.state for pid in (1, 2)]
    assert both == [GRANTED, QUEUED]


def test_2_what_is_serialised_is_the_load_and_not_its_registration(new_world) -> None:
    """Loads were serialised until the engine was registered; it was started, and loaded, by the first request."""
    world = new_world(Ceilings(32, has_shared_gpu=True, one_start_at_a_time=True))
    lease, secret = world.active(10, 1, 11, term_s=600)  # its engine has been let through its gate, and loads
    second = world.admit(10, 2, term_s=600).lease
    world.pass_time(20)
    assert world.state(second.lease_id) is QUEUED
    world.book.renew(lease, secret, None, world.now, load_complete=True)
    world.drain()
    assert world.state(second.lease_id) is GRANTED


def test_3_a_launch_that_fails_after_its_grant_leaves_nothing_reserved(new_world) -> None:
    """A rebuild that threw left a reservation without an entry, until the restart."""
    world = new_world(32)
    granted = world.admit(20)
    world.book.stream_ended(granted.lease.lease_id, granted.stream, world.now)
    assert world.committed() == 0
    world.active(20, 2, 12)
    world.die(2, 12)
    assert world.committed() == 0


def test_3_what_an_engine_really_takes_is_what_is_charged(new_world) -> None:
    """The rebuilt engine's bytes could differ from what was reserved."""
    world = new_world(32)
    lease, secret = world.active(20)
    world.book.renew(lease, secret, Observed(24), world.now)
    assert world.committed() == 24
    world.book.resize(lease, secret, Claim(18), world.now)
    world.book.renew(lease, secret, Observed(18), world.now)
    assert world.committed() == 18


def test_4_bytes_follow_the_process_and_not_an_entry(new_world) -> None:
    """An engine that was stopped when idle stayed charged; one that was registered counted, spawned or not."""
    world = new_world(32)
    lease, secret = world.active(20, 1, 11)
    world.dead.add(world.process(11))  # its host has stopped it, and lives on
    world.release(lease, secret)
    assert world.committed() == 0
    registered = world.admit(20, 2).lease
    world.pass_time(world.policy.activate_by_s)
    assert world.state(registered.lease_id) is LeaseState.RELEASED
    assert world.committed() == 0


@pytest.mark.parametrize("engine", ["llama", "mlx", "ds4", "sd", "video", "whisper"])
def test_5_every_kind_of_engine_is_in_the_ledger_and_takes_its_turn(new_world, engine: str) -> None:
    """One kind of engine could be evicted; two others stayed beside images, unpriced, and skipped the gate."""
    world = new_world(Ceilings(32, has_shared_gpu=True))
    chat = world.resident(20, 1, holder_name=f"engine-{engine}")
    world.rest()
    image = world.admit(10, 2, exclusive=True, holder_name="engine-sd").lease
    assert image.state is QUEUED
    assert world.vacating() == [chat[0]]
    world.book.set_holds({GPU: Hold("DEVICE_UNHEALTHY", "It is 90 °C.")}, world.now)
    world.release(*chat)
    assert world.state(image.lease_id) is QUEUED
    held = world.admit(1, 3, holder_name=f"engine-{engine}").lease
    assert "DEVICE_UNHEALTHY" in world.wait_codes(held.lease_id)


def test_6_reservations_outlive_the_ledger_and_not_their_processes(new_world) -> None:
    """No persistence, no lease, no heartbeat: a dead client could not be told from a silent one."""
    world = new_world(32)
    living, _ = world.active(10, 1, 11)
    dead, _ = world.active(12, 2, 12)
    world.restart()
    assert world.committed() == 22
    world.die(2, 12)
    assert (world.committed(), world.state(living)) == (10, ACTIVE)
    world.pass_time(30)
    assert world.suspect(living)
    assert world.state(dead) is LeaseState.RELEASED


def test_7_other_programs_change_what_is_granted(new_world) -> None:
    """The budget was derived once; what other programs took later never changed it."""
    world = new_world(32)
    world.book.set_external(External(10), world.now)
    waiting = world.admit(25).lease
    assert waiting.state is QUEUED
    world.book.set_external(External(5), world.now)
    world.drain()
    assert world.state(waiting.lease_id) is GRANTED


def test_8_a_working_set_larger_than_its_claim_keeps_a_second_model_out(new_world) -> None:
    """96 GiB were reserved "to block a second engine" under a ceiling of 96. Under one of 112 (128 GiB) a model of 16
    was admitted beside a working set of 105."""
    ceilings = automatic_ceilings(parse_spec("unified:128"))
    world = new_world(ceilings)
    lease, secret = world.active(96 * GIB)
    world.book.renew(lease, secret, Observed(105 * GIB), world.now)
    assert world.committed() == 105 * GIB
    assert world.admit(16 * GIB, 2).lease.state is QUEUED
    # Who means to be alone says so, and needs no figure for it.
    alone = new_world(ceilings)
    alone.active(96 * GIB, 1, exclusive=True)
    assert alone.admit(GIB, 2).lease.state is QUEUED


def test_10_every_use_counts_as_use(new_world) -> None:
    """Only turns that passed one function were counted: a hot model looked cold and was evicted."""
    world = new_world(32)
    hot, cold = world.resident(15, 1), world.resident(15, 2)
    world.rest()
    world.end_use(*hot, world.begin_use(*hot))
    world.pass_time(world.policy.idle_s)
    world.admit(10, 3)
    assert world.vacating() == [cold[0]]


def test_11_what_one_turn_asks_of_an_engine_besides_keeps_it_busy(new_world) -> None:
    """Turns that went past the queue were invisible: an engine that was streaming counted as idle."""
    world = new_world(32)
    lease, secret = world.resident(20, 1)
    outer = world.begin_use(lease, secret)
    world.begin_use(lease, secret)
    world.end_use(lease, secret, outer)
    world.rest()
    world.admit(20, 2)
    assert world.vacating() == []
    assert world.state(lease) is ACTIVE


def test_12_two_that_wait_for_each_other_do_not_wait_for_ever(new_world) -> None:
    """A turn on X that waited for Y while Y's start waited for X: a deadlock. Declared, the second is refused; not
    declared, both end at their deadlines."""
    world = new_world(32)
    x, y = world.resident(16, 1), world.resident(16, 2)
    for lease in (x, y):
        world.begin_use(*lease)
    world.rest()
    declared = world.ask(10, 1, while_holding=(Credential(*x),))
    assert world.refused(lambda: world.book.admit(declared, world.now)) == "WAIT_WHILE_HOLDING"
    waiting = [world.admit(10, pid, max_wait_s=30.0).lease for pid in (1, 2)]
    world.pass_time(30)
    assert [world.state(claim.lease_id) for claim in waiting] == [LeaseState.RELEASED] * 2
    assert [world.state(lease) for lease, _ in (x, y)] == [ACTIVE, ACTIVE]


def test_13_room_is_made_for_both_rules_before_a_busy_one_is_touched(new_world) -> None:
    """A batch sized by one of two rules evicted a busy engine while idle ones were left: 64+32 GiB, spilling off, two
    idle ones of 10 and a busy one of 10 on the card, and 20 to come."""
    world = new_world(automatic_ceilings(parse_spec("discrete:64+32")))
    on_card = {"0": 10 * GIB}
    busy = world.resident(0, 1, devices=on_card)
    world.begin_use(*busy)
    idle = [world.resident(0, pid, devices=on_card) for pid in (2, 3)]
    world.rest()
    waiting = world.admit(0, 4, devices={"0": 20 * GIB}).lease
    assert world.vacating() == [lease for lease, _ in idle]
    for lease in idle:
        world.release(*lease)
    assert world.state(waiting.lease_id) is GRANTED
    assert world.state(busy[0]) is ACTIVE


def test_22_the_late_release_of_one_that_was_thought_gone_frees_nobody_else(new_world) -> None:
    """A lease was known by its slot: broken after 90 minutes, it was freed for its new holder when the old released."""
    world = new_world(Ceilings(32, has_shared_gpu=True))
    old, old_secret = world.active(10, 1, 11, exclusive=True)
    world.die(1, 11)
    new, _ = world.active(10, 2, 12, exclusive=True)
    world.release(old, old_secret)
    assert world.refused(lambda: world.release(new, old_secret)) == "LEASE_SECRET_MISMATCH"
    assert (world.state(new), world.committed()) == (ACTIVE, 10)


def test_23_a_change_of_policy_while_waiting_skips_no_gate(new_world) -> None:
    """Who waited for the GPU when the policy became coexist went on without the device-health check."""
    world = new_world(Ceilings(32, has_shared_gpu=True))
    chat, secret = world.active(10, 1, term_s=600)
    world.begin_use(chat, secret)
    image = world.admit(10, 2, exclusive=True).lease
    world.book.set_holds({GPU: Hold("DEVICE_UNHEALTHY", "It is 90 °C.")}, world.now)
    world.book.set_ceilings(Ceilings(32, has_shared_gpu=True, exclusive_heeded=False), world.now)
    world.drain()
    assert world.state(image.lease_id) is QUEUED
    world.book.set_holds({}, world.now)
    world.drain()
    assert world.state(image.lease_id) is GRANTED


def test_24_nobody_holds_the_gpu_while_it_fetches_what_it_needs(new_world) -> None:
    """Video took its lease and then downloaded for minutes. Whoever is granted must activate at once, and is held at a
    gate then."""
    world = new_world(Ceilings(32, has_shared_gpu=True))
    world.admit(10, 1, exclusive=True)
    waiting = world.admit(10, 2).lease
    world.pass_time(world.policy.activate_by_s)
    assert world.state(waiting.lease_id) is GRANTED


def test_25_a_holder_that_does_not_let_go_is_waited_for_and_not_passed_over(new_world) -> None:
    """An evictor that threw was ignored: the next one loaded while the memory was still held."""
    world = new_world(32)
    holder = world.resident(20, 1, 11)
    world.rest()
    waiting = world.admit(20, 2, max_wait_s=300.0).lease
    assert world.vacating() == [holder[0]]
    world.pass_time(120)
    assert world.state(waiting.lease_id) is QUEUED
    assert world.committed() == 20
    assert "HOLDER_DID_NOT_VACATE" in world.wait_codes(waiting.lease_id)
    world.die(11)
    assert world.state(waiting.lease_id) is GRANTED


def test_26_switching_models_ends_no_turn_of_another(new_world) -> None:
    """The server was stopped for the new model before the lease was taken: a render in flight was killed. Here the new
    model waits in its place in the queue, and the old one serves until everything else is there."""
    world = new_world(32)
    other = world.active(16, 9, term_s=600)
    world.begin_use(*other)
    old = world.active(12, 1, 11, term_s=600)
    use = world.begin_use(*old)
    switch = world.admit(20, 1, replaces=Credential(*old)).lease
    assert switch.state is QUEUED
    assert world.state(old[0]) is ACTIVE  # 20 do not fit beside the other's 16 even without it
    world.end_use(*old, use)
    assert world.begin_use(*old)


def test_31_what_is_charged_is_the_peak_and_not_the_weights(new_world) -> None:
    """A render that held 9.4 GiB of a 12 GiB card was claimed with its 4.9 GiB of weights, beside a chat model of 5: it
    died at its first step. Claimed with its peak, it waits for the chat model."""
    card = automatic_ceilings(parse_spec("discrete:32+12"))

    def image_beside_chat(gib: float) -> LeaseState:
        world = new_world(card)
        world.active(0, 1, devices={"0": 5 * GIB})
        return world.admit(0, 2, devices={"0": int(gib * GIB)}).lease.state

    assert (image_beside_chat(4.9), image_beside_chat(9.4)) == (GRANTED, QUEUED)


def test_31_what_is_seen_above_its_claim_is_kept_from_others(new_world) -> None:
    world = new_world(automatic_ceilings(parse_spec("discrete:32+12")))
    lease, secret = world.active(0, 1, devices={"0": int(4.9 * GIB)})
    world.book.renew(lease, secret, Observed(devices=(("0", int(9.4 * GIB)),)), world.now)
    assert world.admit(0, 2, devices={"0": 5 * GIB}).lease.state is QUEUED


def test_39_a_process_is_known_by_more_than_its_number_or_path(new_world) -> None:
    """Killing by path shot another daemon's engine. Here the death of one process proves nothing about another that
    has its number now, or has it in another namespace."""
    world = new_world(32)
    world.active(20, 1, 11)
    later = world.process(11)
    reused = type(later)(later.pid, later.start_time + 1, later.boot_id, later.pid_namespace)
    elsewhere = world.process(11, namespace="pid:[2]")
    holder = world.process(1)
    for other in (reused, elsewhere):
        world.book.processes_died(frozenset({holder, other}), world.now)
        world.drain()
        assert world.committed() == 20
    world.book.processes_died(frozenset({holder, later}), world.now)
    assert world.committed() == 0


def test_40_bytes_of_a_killed_engine_are_free_when_it_has_vanished(new_world) -> None:
    """The next one started before the killed one's process had gone."""
    world = new_world(32)
    lease, secret = world.active(20, 1, 11)
    waiting = world.admit(20, 2).lease
    world.release(lease, secret)
    assert world.state(waiting.lease_id) is QUEUED
    world.die(11)
    assert world.state(waiting.lease_id) is GRANTED


def test_44_what_a_holder_reports_is_a_level_and_no_increment(new_world) -> None:
    """One engine's ticker is cumulative; summing it inflated its memory."""
    world = new_world(32)
    lease, secret = world.active(5)
    for seen in (2, 4, 7, 7, 7):
        world.book.renew(lease, secret, Observed(seen), world.now)
    assert world.committed() == 7


def test_49_what_is_merely_useful_never_displaces_what_is_needed(new_world) -> None:
    """A companion drafter pushed a resident launch into streaming: the extra belongs in the optional bytes."""
    world = new_world(32)
    world.active(20)
    claim = Claim(10, optional_host_bytes=2)
    granted = world.book.admit(replace(world.ask(10, 2), claim=claim), world.now).lease
    assert (granted.state, granted.charge.total_bytes, granted.charge.optional_bytes) == (GRANTED, 12, 2)
    world.book.activate(granted.lease_id, world.secret(granted.lease_id), world.process(2), (), world.now)
    waiting = world.admit(2, 3).lease
    shrink = world.book.view(granted.lease_id).shrink
    assert shrink is not None
    assert shrink[0] == 2
    assert waiting.state is QUEUED
    assert world.vacating() == []

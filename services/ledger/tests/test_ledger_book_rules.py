"""Each rule of the admission book with the trace that breaks a book without it. C is a ceiling, A, B, w are claims."""

import pytest
from weighbridge_ledger.book import (
    Ceilings,
    Claim,
    EventKind,
    External,
    LeaseState,
    Observed,
    Policy,
    Reason,
    Refused,
    ReleaseCause,
)
from weighbridge_ledger.service.failures import code_of

QUEUED, GRANTED, ACTIVE, VACATING = LeaseState.QUEUED, LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.VACATING


# -- 1, 2, 4: charging, static refusal, ceilings -------------------------------------------------------------------


def test_a_vacating_lease_is_charged(new_world) -> None:
    """Rule 1. VACATING uncharged: A asked but loaded, B granted → double use (S)."""
    world = new_world(4)
    a, secret = world.active(3, 1, 11)
    world.release(a, secret)
    assert world.state(a) is VACATING
    assert world.committed() == 3
    assert world.admit(2, 2).lease.state is QUEUED


def test_a_claim_beyond_the_ceiling_is_refused_and_disturbs_nobody(new_world) -> None:
    world = new_world(4)
    world.active(3)
    waiting = world.admit(2, 2).lease
    before = world.book.waiting_for(waiting.lease_id)
    with pytest.raises(Refused) as refused:
        world.book.admit(world.ask(5, 3), world.now)
    assert refused.value.reason == "CLAIM_EXCEEDS_CAPACITY"
    assert refused.value.metadata["missing_bytes"] == "1"
    assert not world.drain()
    assert world.book.waiting_for(waiting.lease_id) == before


def test_twenty_then_twenty_in_thirty_two(new_world) -> None:
    """The reference broker's first rows: 20 granted; a second 20 is not; released, nothing is committed."""
    world = new_world(32)
    first, secret = world.active(20)
    assert world.admit(20, 2).lease.state is QUEUED
    assert world.committed() == 20
    world.release(first, secret)
    assert world.committed() == 20  # the second one, now


def test_lowering_a_ceiling_evicts_nobody_and_admits_nobody_until_below(new_world) -> None:
    """Rule 4, and the reference broker's row: budget 20, reserve 12, set 10: committed 12, even 1 is denied."""
    world = new_world(20)
    lease, secret = world.active(12)
    world.book.set_ceilings(Ceilings(10), world.now)
    assert world.committed() == 12
    waiting = world.admit(1, 2)
    assert waiting.lease.state is QUEUED
    world.release(lease, secret)
    assert world.state(waiting.lease.lease_id) is GRANTED


def test_a_waiter_that_a_lowered_ceiling_makes_impossible_is_told_so(new_world) -> None:
    world = new_world(20)
    world.active(12)
    waiting = world.admit(15, 2).lease
    world.book.set_ceilings(Ceilings(10), world.now)
    released = [event for event in world.drain() if event.kind is EventKind.RELEASED]
    assert [(event.lease.lease_id, event.cause) for event in released] == [
        (waiting.lease_id, ReleaseCause.EXCEEDS_CAPACITY)
    ]


def test_an_empty_claim_and_an_unknown_card_are_refused(new_world) -> None:
    world = new_world(Ceilings(4, {"gpu": 4}))
    assert world.refused(lambda: world.admit(0)) == "CLAIM_EMPTY"
    assert world.refused(lambda: world.admit(1, devices={"other": 1})) == "DEVICE_UNKNOWN"


def test_a_claim_must_fit_its_holders_own_limit_too(new_world) -> None:
    world = new_world(10)
    assert world.refused(lambda: world.admit(5, memory_limit_bytes=4)) == "CLAIM_EXCEEDS_CAPACITY"
    assert world.admit(4, memory_limit_bytes=4).lease.state is GRANTED


# -- 3: external use -----------------------------------------------------------------------------------------------


def test_a_granted_but_unloaded_lease_counts_beside_external_use(new_world) -> None:
    """Rule 3. "Free ≥ bytes": C=4, 2 granted but not loaded, B=3 passes."""
    world = new_world(4)
    world.active(2)
    assert world.admit(3, 2).lease.state is QUEUED


def test_external_use_makes_a_claim_wait_and_never_refuses_it(new_world) -> None:
    """Measured − charged: outside 1, A 1 unloaded, B=3 passes, total 5 (E). With E=1 it waits instead."""
    world = new_world(4)
    world.book.set_external(External(1), world.now)
    world.active(1)
    waiting = world.admit(3, 2).lease
    assert waiting.state is QUEUED
    _, _, reasons = world.book.waiting_for(waiting.lease_id)
    assert [(reason.code, reason.missing_bytes) for reason in reasons] == [("EXTERNAL_USE", 1)]
    world.book.set_external(External(0), world.now)
    world.drain()
    assert world.state(waiting.lease_id) is GRANTED


# -- 5-9: grant, secret, retry -------------------------------------------------------------------------------------


def test_what_was_granted_is_in_the_store_before_anybody_can_be_told(new_world) -> None:
    """Rule 5. Told first, killed, B granted → double use (S)."""
    world = new_world(4)
    admission = world.book.admit(world.ask(3), world.now)
    drained = world.book.drain()
    assert [event.kind for event in drained.events] == [EventKind.GRANTED]
    world.store.commit(drained.writes)
    world.restart()
    assert world.committed() == 3
    assert world.state(admission.lease.lease_id) is GRANTED


def test_a_grant_that_nobody_activates_is_freed_at_the_deadline_itself(new_world) -> None:
    """Rule 6. No deadline: granted, restart, client gone: charged for ever (S)."""
    world = new_world(4)
    lease = world.admit(3).lease
    world.pass_time(9.5)
    assert world.state(lease.lease_id) is GRANTED
    world.pass_time(0.5)
    assert world.committed() == 0
    assert world.book.view(lease.lease_id).cause == ReleaseCause.NOT_ACTIVATED


def test_a_grant_is_freed_when_its_stream_ends(new_world) -> None:
    world = new_world(4)
    admission = world.admit(3)
    world.book.stream_ended(admission.lease.lease_id, admission.stream, world.now)
    assert world.committed() == 0


def test_late_activation_finds_nothing(new_world) -> None:
    """Spawn on grant: loaded, the deadline frees T1, B loads → double use: so activation after it must fail."""
    world = new_world(4)
    lease = world.admit(3).lease
    secret = world.secret(lease.lease_id)
    world.pass_time(10)
    assert (
        world.refused(lambda: world.book.activate(lease.lease_id, secret, world.process(1), (), world.now))
        == "LEASE_NOT_FOUND"
    )


def test_the_end_of_the_stream_after_activation_frees_nothing(new_world) -> None:
    world = new_world(4)
    admission = world.admit(3)
    lease_id = admission.lease.lease_id
    world.book.activate(lease_id, world.secret(lease_id), world.process(1), (), world.now)
    world.book.stream_ended(lease_id, admission.stream, world.now)
    assert world.state(lease_id) is ACTIVE


def test_activating_again_records_the_engine_held_at_its_gate(new_world) -> None:
    world = new_world(4)
    lease_id, secret = world.active(3)
    engine = world.process(11)
    world.book.activate(lease_id, secret, world.process(1), (engine,), world.now)
    world.book.activate(lease_id, secret, world.process(1), (engine,), world.now)
    assert world.book.view(lease_id).lease.engines == (engine,)


def test_a_retry_by_the_same_process_gets_the_same_lease_and_secret(new_world) -> None:
    """Rule 8."""
    world = new_world(4)
    first = world.admit(3, request_id="r")
    secret = world.secret(first.lease.lease_id)
    again = world.admit(3, request_id="r")
    assert again.lease.lease_id == first.lease.lease_id
    assert world.secret(first.lease.lease_id) == secret
    assert world.committed() == 3


def test_a_retry_by_another_process_gets_a_new_secret_and_the_old_one_is_void(new_world) -> None:
    """Same secret for both: A activates and releases, dies; A′ retries with T1; the late Release frees it, B granted →
    double use (S)."""
    world = new_world(4)
    first = world.admit(3, 1, "r")
    lease_id, old = first.lease.lease_id, world.secret(first.lease.lease_id)
    world.admit(3, 2, "r")
    new = world.secret(lease_id)
    assert new != old
    world.book.activate(lease_id, new, world.process(2), (), world.now)
    assert world.refused(lambda: world.release(lease_id, old)) == "LEASE_SECRET_MISMATCH"
    assert world.committed() == 3


def test_an_active_lease_is_not_handed_to_another_process(new_world) -> None:
    """ACTIVE handed to A′: orphan engine + new engine on one charge (S)."""
    world = new_world(4)
    world.active(3, 1, 11, request_id="r")
    assert world.refused(lambda: world.admit(3, 2, "r")) == "REQUEST_IN_USE"
    world.die(1, 11)
    assert world.refused(lambda: world.admit(3, 2, "r")) == "REQUEST_ENDED"


def test_the_same_request_id_with_another_claim_is_refused(new_world) -> None:
    world = new_world(4)
    world.admit(3, request_id="r")
    assert world.refused(lambda: world.admit(2, request_id="r")) == "REQUEST_ID_REUSED"


def test_a_request_activated_and_ended_is_not_granted_again(new_world) -> None:
    """Rule 9. Else a late Admit makes a ghost grant (S)."""
    world = new_world(4)
    lease_id, secret = world.active(3, request_id="r")
    world.release(lease_id, secret)
    assert world.refused(lambda: world.admit(3, request_id="r")) == "REQUEST_ENDED"
    world.restart()
    assert world.refused(lambda: world.admit(3, request_id="r")) == "REQUEST_ENDED"
    assert world.committed() == 0


def test_a_request_freed_unactivated_may_ask_again(new_world) -> None:
    world = new_world(4)
    world.admit(3, request_id="r")
    world.pass_time(10)
    assert world.admit(3, request_id="r").lease.state is GRANTED


def test_only_the_newest_stream_of_a_claim_cancels_it(new_world) -> None:
    """Rule 9. Else the old stream's end kills the retry."""
    world = new_world(4)
    world.active(3)
    first = world.admit(3, 2, "w")
    retry = world.admit(3, 2, "w")
    assert retry.lease.lease_id == first.lease.lease_id
    world.book.stream_ended(first.lease.lease_id, first.stream, world.now)
    assert world.state(first.lease.lease_id) is QUEUED
    world.book.stream_ended(first.lease.lease_id, retry.stream, world.now)
    assert world.book.queue_depth == 0


# -- 10-13: silence and proof --------------------------------------------------------------------------------------


def test_silence_marks_a_lease_and_frees_nothing(new_world) -> None:
    """Rule 10. Freed on expiry: silent A loaded, B loads → double use (S). At the deadline itself the term is over."""
    world = new_world(4)
    a, secret = world.active(3, 1, 11)
    world.admit(2, 2)
    world.pass_time(14.5)
    assert not world.suspect(a)
    world.pass_time(0.5)
    assert world.suspect(a)
    assert world.committed() == 3
    world.pass_time(100)
    assert world.committed() == 3
    assert world.refused(lambda: world.book.renew(a, secret, None, world.now)) == "LEASE_SUSPECT"
    assert world.refused(lambda: world.book.begin_use(a, secret, "", world.now)) == "LEASE_SUSPECT"


def test_renewing_in_time_keeps_a_lease(new_world) -> None:
    world = new_world(4)
    a, secret = world.active(3)
    for _ in range(10):
        world.pass_time(10)
        world.book.renew(a, secret, None, world.now)
    assert not world.suspect(a)


def test_the_loss_of_the_keep_alive_stream_only_clears_connected(new_world) -> None:
    world = new_world(4)
    a, secret = world.active(3)
    world.book.connected(a, +1)
    assert world.book.view(a).connected
    world.book.connected(a, -1)
    assert not world.book.view(a).connected
    assert world.book.renew(a, secret, None, world.now).lease.state is ACTIVE


def test_the_same_process_comes_back_with_a_new_secret(new_world) -> None:
    """Rule 11. KeepAlive reviving a dead secret: late T1 after T2 → charged twice (S)."""
    world = new_world(4)
    a, old = world.active(3)
    world.pass_time(15)
    lease, new = world.book.attach(a, world.process(1), old, world.now)
    assert (lease.state, lease.suspect, lease.charge.total_bytes) == (ACTIVE, False, 3)
    assert new != old
    assert world.refused(lambda: world.book.renew(a, old, None, world.now)) == "LEASE_SECRET_MISMATCH"
    world.book.renew(a, new, None, world.now)


def test_an_attach_whose_answer_was_lost_can_be_repeated(new_world) -> None:
    world = new_world(4)
    a, old = world.active(3)
    world.book.attach(a, world.process(1), old, world.now)
    _, newest = world.book.attach(a, world.process(1), old, world.now)
    world.book.renew(a, newest, None, world.now)
    assert world.refused(lambda: world.book.attach(a, world.process(1), "wrong", world.now)) == "LEASE_SECRET_MISMATCH"


def test_another_process_cannot_attach(new_world) -> None:
    world = new_world(4)
    a, secret = world.active(3)
    assert world.refused(lambda: world.book.attach(a, world.process(2), secret, world.now)) == "LEASE_SECRET_MISMATCH"


def test_a_lease_once_asked_to_vacate_is_attached_as_vacating(new_world) -> None:
    world = new_world(4)
    a, secret = world.active(3, 1, 11)
    world.release(a, secret)
    world.pass_time(15)
    lease, _ = world.book.attach(a, world.process(1), "", world.now)
    assert lease.state is VACATING


def test_attaching_after_the_end_finds_nothing(new_world) -> None:
    world = new_world(4)
    a, _ = world.active(3, 1, 11)
    world.die(1, 11)
    assert world.refused(lambda: world.book.attach(a, world.process(1), "", world.now)) == "LEASE_NOT_FOUND"


def test_the_clients_death_alone_frees_nothing(new_world) -> None:
    """Rule 12. Client pid only: orphan engine → double use (S)."""
    world = new_world(4)
    a, _ = world.active(3, 1, 11)
    world.die(1)
    world.pass_time(20)
    assert world.committed() == 3
    world.die(11)
    assert world.committed() == 0
    assert world.book.view(a).cause == ReleaseCause.PROCESSES_DEAD


def test_measured_memory_being_gone_is_no_proof(new_world) -> None:
    """Measured zero: stopped before loading, freed, wakes, loads → double use (S)."""
    world = new_world(4)
    a, secret = world.active(3, 1, 11)
    world.book.renew(a, secret, Observed(0), world.now)
    world.pass_time(60)
    assert world.suspect(a)
    assert world.committed() == 3


def test_a_foreign_holder_is_freed_after_term_and_grace(new_world) -> None:
    """Rule 12: it cannot be seen from here, so it kills its own engine when it cannot renew, and we wait for longer."""
    world = new_world(4)
    foreign = world.process(1, namespace="pid:[2]")
    admission = world.admit(3, holder=foreign)
    lease_id = admission.lease.lease_id
    world.book.activate(lease_id, world.secret(lease_id), foreign, (world.process(11, namespace="pid:[2]"),), world.now)
    world.die(1, 11)
    world.pass_time(15)
    assert world.suspect(lease_id)
    world.pass_time(world.policy.grace_s - 0.5)
    assert world.committed() == 3
    world.pass_time(0.5)
    assert world.committed() == 0
    assert world.book.view(lease_id).cause == ReleaseCause.FENCED


def test_a_foreign_holder_is_believed_when_it_releases(new_world) -> None:
    """It is the only witness of its engine, and the one who fences it."""
    world = new_world(4)
    foreign, engine = (world.process(pid, namespace="pid:[2]") for pid in (1, 11))
    lease_id = world.admit(3, holder=foreign).lease.lease_id
    secret = world.secret(lease_id)
    world.book.activate(lease_id, secret, foreign, (engine,), world.now)
    assert world.release(lease_id, secret).state is LeaseState.RELEASED
    assert world.committed() == 0


def test_release_while_an_engine_lives_is_vacating_until_it_is_gone(new_world) -> None:
    """Rule 13. Trusted → double use (S)."""
    world = new_world(4)
    a, secret = world.active(3, 1, 11)
    assert world.release(a, secret).state is VACATING
    assert world.release(a, secret).state is VACATING
    world.die(11)
    assert world.committed() == 0
    assert world.release(a, secret).state is LeaseState.RELEASED


def test_release_after_the_engine_is_gone_frees_at_once_although_the_host_lives(new_world) -> None:
    world = new_world(4)
    a, secret = world.active(3, 1, 11)
    world.dead.add(world.process(11))
    assert world.release(a, secret).state is LeaseState.RELEASED
    assert world.committed() == 0


def test_an_operators_word_is_not_taken_against_what_is_seen(new_world) -> None:
    world = new_world(4)
    a, _ = world.active(3, 1, 11)
    assert world.refused(lambda: world.book.release_by_operator(a, world.is_alive, world.now)) == "PROCESS_ALIVE"
    world.dead |= {world.process(1), world.process(11)}
    world.book.release_by_operator(a, world.is_alive, world.now)
    assert world.committed() == 0


# -- 14: restart ---------------------------------------------------------------------------------------------------


def test_a_restart_keeps_states_charges_and_fences_and_gives_new_terms(new_world) -> None:
    world = new_world(10)
    a, _ = world.active(3, 1)
    b, secret = world.active(2, 2, 12)
    world.release(b, secret)
    granted = world.admit(1, 3).lease
    world.restart()
    assert [world.state(lease) for lease in (a, b, granted.lease_id)] == [ACTIVE, VACATING, GRANTED]
    assert world.committed() == 6
    # The spread of these worlds is a half: terms of 15 s end after 22.5 s; a grant gets one more activate_by.
    world.pass_time(9.5)
    assert world.state(granted.lease_id) is GRANTED
    world.pass_time(0.5)
    assert world.book.view(granted.lease_id).cause == ReleaseCause.NOT_ACTIVATED
    world.pass_time(12)
    assert not world.suspect(a)
    world.pass_time(0.5)
    assert world.suspect(a)


def test_fences_rise_across_restarts(new_world) -> None:
    world = new_world(10)
    a, secret = world.active(3)
    fence = world.book.view(a).lease.fence
    world.release(a, secret)
    world.restart()
    assert world.admit(3).lease.fence > fence


def test_after_a_restart_the_old_secret_still_holds(new_world) -> None:
    world = new_world(10)
    a, secret = world.active(3)
    world.restart()
    assert world.book.renew(a, secret, None, world.now).lease.state is ACTIVE
    assert world.book.secret_of(a) is None


def test_after_a_restart_a_retry_by_the_same_process_gets_the_lease_back(new_world) -> None:
    world = new_world(10)
    first = world.admit(3, request_id="r").lease
    world.restart()
    again = world.admit(3, request_id="r").lease
    assert again.lease_id == first.lease_id
    world.book.activate(again.lease_id, world.secret(again.lease_id), world.process(1), (), world.now)


def test_a_queued_claim_does_not_survive_but_its_place_does(new_world) -> None:
    """A restored claim whose client is gone heads the queue for ever (S). Without the ticket, a restart every 45 s: the
    big claim got 34 grants, with it 234 (P)."""
    world = new_world(4)
    a, secret = world.active(3)
    world.admit(4, 2, "big")
    world.restart()
    assert world.book.queue_depth == 0
    world.admit(2, 3, "small")
    big = world.admit(4, 2, "big").lease
    assert world.book.waiting_for(big.lease_id)[0] == 1
    world.release(a, secret)
    assert world.state(big.lease_id) is GRANTED


def test_a_place_is_kept_for_a_minute(new_world) -> None:
    world = new_world(4)
    world.active(3, term_s=600)
    first = world.admit(4, 2, "big")
    sequence = first.lease.sequence
    world.book.stream_ended(first.lease.lease_id, first.stream, world.now)
    world.pass_time(59)
    again = world.admit(4, 2, "big")
    assert again.lease.sequence == sequence
    world.book.stream_ended(again.lease.lease_id, again.stream, world.now)
    world.pass_time(60)
    assert world.admit(4, 2, "big").lease.sequence > sequence


def test_a_ledger_that_stood_still_extends_terms_before_anything_expires(new_world) -> None:
    """Rule 14: SIGSTOP or sleep for longer than half a term."""
    world = new_world(10)
    a, secret = world.active(3)
    granted = world.admit(2, 2).lease
    world.stand_still(3600)
    assert world.book.renew(a, secret, None, world.now).lease.state is ACTIVE
    assert world.state(granted.lease_id) is GRANTED


# -- 15, 16: order and passing -------------------------------------------------------------------------------------


def test_waiters_are_granted_in_the_order_of_asking(new_world) -> None:
    world = new_world(2)
    a, secret = world.active(2)
    waiters = [world.admit(2, pid).lease.lease_id for pid in (2, 3, 4)]
    assert [world.book.waiting_for(waiter)[0] for waiter in waiters] == [1, 2, 3]
    world.release(a, secret)
    assert [world.state(waiter) for waiter in waiters] == [GRANTED, QUEUED, QUEUED]


def test_the_queue_is_bounded_and_says_when_to_retry(new_world) -> None:
    world = new_world(1, Policy(queue_bound=2))
    world.active(1)
    world.admit(1, 2)
    world.admit(1, 3)
    with pytest.raises(Refused) as refused:
        world.book.admit(world.ask(1, 4), world.now)
    assert refused.value.reason == "QUEUE_FULL"
    assert refused.value.retry_after_s == 5.0


def test_a_call_without_a_deadline_waits_ten_minutes(new_world) -> None:
    world = new_world(1)
    world.active(1, term_s=600)
    waiting = world.admit(1, 2).lease
    world.pass_time(599.5)
    assert world.state(waiting.lease_id) is QUEUED
    world.pass_time(0.5)
    assert world.book.view(waiting.lease_id).cause == ReleaseCause.WAITED_TOO_LONG


def test_a_claim_cancelled_while_queued_leaves_no_lease_and_lets_the_next_pass(new_world) -> None:
    world = new_world(4)
    world.active(3)
    big = world.admit(4, 2)
    small = world.admit(1, 3)
    assert small.lease.state is GRANTED  # one harmful pass over the big one
    world.book.stream_ended(big.lease.lease_id, big.stream, world.now)
    world.drain()
    assert world.book.queue_depth == 0
    assert not world.store.load().tickets


def test_overtaking_is_bounded(new_world) -> None:
    """Rule 16. Unlimited: C=2, two 1s alternate, w=2 never (L). After 8 passes nobody overtakes w any more."""
    world = new_world(2)
    held = [world.active(1, 1), world.active(1, 2)]
    w = world.admit(2, 9).lease
    for round_ in range(8):
        world.release(*held.pop(0))
        held.append(world.active(1, 10 + round_))
    world.release(*held.pop(0))
    assert world.admit(1, 30).lease.state is QUEUED
    world.release(*held.pop(0))
    assert world.state(w.lease_id) is GRANTED


def test_a_waiter_of_a_minute_is_not_overtaken(new_world) -> None:
    world = new_world(2)
    world.active(1, 1, term_s=600)
    world.admit(2, 9)
    assert world.admit(1, 2).lease.state is GRANTED
    world.pass_time(60)  # the grant of 1 has lapsed by now
    assert world.committed() == 1
    assert world.admit(1, 3).lease.state is QUEUED


def test_a_harmless_claim_passes_even_a_protected_waiter(new_world) -> None:
    """w still fits beside p once all pending bytes are back."""
    world = new_world(4)
    a, secret = world.active(3, 1, 11, term_s=600)
    world.admit(3, 9)
    world.pass_time(61)
    assert world.admit(1, 2).lease.state is QUEUED  # beside A, which does not leave, w never fits beside it
    world.release(a, secret)  # now A's 3 are pending: 1 + 3 fit
    assert world.state(world.book.lease_ids()[2]) is GRANTED


def test_a_claim_on_another_card_passes(new_world) -> None:
    world = new_world(Ceilings(4, {"a": 4, "b": 4}))
    world.active(0, 1, devices={"a": 4}, term_s=600)
    world.admit(0, 2, devices={"a": 2})
    world.pass_time(61)
    assert world.admit(0, 3, devices={"b": 2}).lease.state is GRANTED


def test_overdue_bytes_are_not_hoped_for(new_world) -> None:
    """Rule 18. Overdue still counted: a 3-of-4 claim waits 1,087 s instead of 206 (P)."""
    world = new_world(4)
    a, secret = world.active(3, 1, 11, term_s=600)
    world.admit(3, 9, term_s=600)
    world.pass_time(61)
    world.release(a, secret)
    world.pass_time(30)
    assert any(event.kind is EventKind.OVERDUE for event in world.events)
    assert world.admit(1, 2).lease.state is QUEUED
    assert world.committed() == 3


def test_beyond_the_look_ahead_the_order_is_strict(new_world) -> None:
    world = new_world(10, Policy(look_ahead=2))
    world.active(9)
    for pid in (2, 3):
        world.admit(5, pid)
    assert world.admit(1, 4).lease.state is QUEUED


# -- 21, 23: use and size ------------------------------------------------------------------------------------------


def test_vacating_never_goes_back(new_world) -> None:
    """Rule 21. Late KeepAlive(busy) after Release: ACTIVE for ever (S)."""
    world = new_world(4)
    a, secret = world.active(3, 1, 11)
    world.release(a, secret)
    renewal = world.book.renew(a, secret, None, world.now)
    assert renewal.lease.state is VACATING
    assert renewal.vacate_deadline == world.time + 30
    assert world.refused(lambda: world.book.begin_use(a, secret, "", world.now)) == "LEASE_VACATING"
    engine = (world.process(12),)
    assert (
        world.refused(lambda: world.book.activate(a, secret, world.process(1), engine, world.now)) == "LEASE_VACATING"
    )


def test_uses_are_counted_once_each(new_world) -> None:
    world = new_world(4)
    a, secret = world.active(3)
    assert world.book.begin_use(a, secret, "u", world.now) == "u"
    world.book.begin_use(a, secret, "u", world.now)
    other = world.book.begin_use(a, secret, "", world.now)
    assert world.book.view(a).uses == 2
    assert world.book.end_use(a, secret, "u", world.now) == 1
    assert world.book.end_use(a, secret, "u", world.now) == 1
    assert world.book.end_use(a, secret, other, world.now) == 0


def test_uses_that_are_never_ended_are_bounded(new_world) -> None:
    world = new_world(4, Policy(uses_per_lease=2))
    a, secret = world.active(3)
    for use in ("u", "v", "u"):
        world.book.begin_use(a, secret, use, world.now)
    assert world.refused(lambda: world.book.begin_use(a, secret, "w", world.now)) == "TOO_MANY_USES"


def test_every_reason_of_the_book_has_a_code() -> None:
    assert {reason for reason in Reason if code_of(reason).value[0] > 0} == set(Reason)


def test_growth_is_answered_at_once(new_world) -> None:
    """Rule 23. Waiting: C=4, two hold 2 and want 3, deadlock."""
    world = new_world(4)
    a, secret_a = world.active(2, 1)
    b, secret_b = world.active(2, 2)
    for lease, secret in ((a, secret_a), (b, secret_b)):
        assert world.refused(
            lambda lease=lease, secret=secret: world.book.resize(lease, secret, Claim(3), world.now)
        ) == ("CANNOT_GROW")
    world.book.resize(b, secret_b, Claim(1), world.now)
    assert world.book.resize(a, secret_a, Claim(3), world.now).charge.total_bytes == 3


def test_growth_counts_as_a_pass_and_does_not_starve_a_waiter(new_world) -> None:
    """Ignoring the queue: holders grow and shrink in turn, w never (L)."""
    world = new_world(4)
    a, secret_a = world.active(1, 1)
    b, secret_b = world.active(2, 2)
    w = world.admit(2, 9).lease
    for _ in range(8):
        world.book.resize(a, secret_a, Claim(2), world.now)
        world.book.resize(a, secret_a, Claim(1), world.now)
    assert world.refused(lambda: world.book.resize(a, secret_a, Claim(2), world.now)) == "CANNOT_GROW"
    world.release(b, secret_b)
    assert world.state(w.lease_id) is GRANTED


def test_shrinking_lets_a_waiter_in(new_world) -> None:
    world = new_world(4)
    a, secret = world.active(3)
    w = world.admit(2, 2).lease
    world.book.resize(a, secret, Claim(2), world.now)
    assert world.state(w.lease_id) is GRANTED


def test_an_observation_above_the_grant_is_an_upward_resize(new_world) -> None:
    world = new_world(4)
    a, secret = world.active(2)
    renewal = world.book.renew(a, secret, Observed(3), world.now)
    assert renewal.out_of_grant is None
    assert world.committed() == 3


def test_what_is_in_use_above_the_ceiling_is_told_and_given_to_nobody(new_world) -> None:
    world = new_world(4)
    a, secret = world.active(2, 1)
    world.active(1, 2)
    renewal = world.book.renew(a, secret, Observed(4), world.now)
    assert renewal.out_of_grant is not None
    assert renewal.out_of_grant.reason == "OUT_OF_GRANT"
    assert world.committed() == 3
    waiting = world.admit(1, 3).lease
    assert waiting.state is QUEUED
    world.book.renew(a, secret, Observed(2), world.now)
    assert world.state(waiting.lease_id) is GRANTED


def test_previews_change_nothing(new_world) -> None:
    world = new_world(4)
    world.active(3)
    assert world.book.preview(world.ask(1), world.now).charge is not None
    assert [reason.code for reason in world.book.preview(world.ask(2), world.now).reasons] == ["BYTES_HELD"]
    never = world.book.preview(world.ask(5), world.now).refusal
    assert never is not None
    assert never.reason == "CLAIM_EXCEEDS_CAPACITY"
    assert not world.drain()
    assert world.committed() == 3

"""Rules 10 to 14 of the admission book: silence, proof, restart.

Each with the trace that breaks a book without it. C is a ceiling, A, B, w are claims.
"""

from weighbridge_ledger.book import LeaseState, Observed, ReleaseCause

GRANTED, ACTIVE, VACATING = LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.VACATING


# -- 10-13: silence and proof -----------------------------------------------------------------------------------------


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


# -- 14: restart ------------------------------------------------------------------------------------------------------


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


def test_a_standstill_gives_those_who_were_asked_to_vacate_as_much_time_again(new_world) -> None:
    """Their terms are long, and so not begun anew: but they could not be heard either."""
    world = new_world(4)
    lease_id, _ = world.active(4, 1, 2, term_s=600)
    world.book.release(lease_id, world.secret(lease_id), world.is_alive, world.now)
    world.drain()
    world.stand_still(40)
    world.book.tick(world.now)
    view = world.book.view(lease_id)
    assert (view.overdue, view.vacate_deadline) == (False, 70.0)


def test_a_retry_by_another_process_is_held_to_its_own_limit(new_world) -> None:
    world = new_world(8)
    world.active(6, 1, term_s=600)
    world.admit(6, 2, "request")
    assert world.refused(lambda: world.admit(6, 3, "request", memory_limit_bytes=2)) == "CLAIM_EXCEEDS_CAPACITY"
    granted = world.admit(2, 4, "other")
    assert world.refused(lambda: world.admit(2, 5, "other", memory_limit_bytes=1)) == "CLAIM_EXCEEDS_CAPACITY"
    assert world.book.view(granted.lease.lease_id).lease.holder == world.process(4)

"""Rules 5 to 9 of the admission book: grant, secret, retry.

Each with the trace that breaks a book without it. C is a ceiling, A, B, w are claims.
"""

from weighbridge_ledger.book import EventKind, LeaseState, ReleaseCause

QUEUED, GRANTED, ACTIVE = LeaseState.QUEUED, LeaseState.GRANTED, LeaseState.ACTIVE


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

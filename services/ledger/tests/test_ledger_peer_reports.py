"""What was reported of other programs' schedulers and leases, each as a test of this ledger's book.

Named by project and number. docs/ledger-reports.md has every report that was looked at, with its test here or
elsewhere, or the reason why it is none of a ledger's. Sizes are GiB where a report has them.
"""

import pytest
from weighbridge_ledger.book import Ceilings, Claim, External, LeaseState, Policy, ReleaseCause
from weighbridge_ledger.book.states import Credential
from weighbridge_ledger.machine.ceilings import automatic_ceilings
from weighbridge_ledger.machine.declared import parse_spec
from weighbridge_ledger.machine.external import external_use, for_book, over_reserve
from weighbridge_ledger.machine.interpret import interpret
from weighbridge_ledger.machine.readings import Readings

QUEUED, GRANTED, ACTIVE, VACATING = LeaseState.QUEUED, LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.VACATING
RELEASED = LeaseState.RELEASED
GIB = 2**30


# -- refused although it would do -------------------------------------------------------------------------------------


def test_lmstudio_1562_what_is_replaced_is_not_counted_twice(new_world) -> None:
    """12.13 GiB on a 24 GiB machine were refused beside the model that they were to replace."""
    ceilings = automatic_ceilings(parse_spec("unified:24"))
    world = new_world(ceilings)
    size = int(12.13 * GIB)
    old = world.active(size, 1, 11, term_s=600)
    world.begin_use(*old)
    what_if = world.book.preview(world.ask(size, 1, replaces=Credential(*old)), world.now)
    assert what_if.charge is not None
    assert (what_if.charge.total_bytes, what_if.reasons) == (size, ())
    new = world.admit(size, 1, replaces=Credential(*old)).lease
    assert world.vacating() == [old[0]]
    world.die(11)
    assert world.state(new.lease_id) is GRANTED
    assert world.committed() == size


def test_lmstudio_1562_a_what_if_names_whom_a_model_would_take_the_place_of(new_world) -> None:
    world = new_world(automatic_ceilings(parse_spec("unified:24")))
    size = int(12.13 * GIB)
    old = world.resident(size, 1)
    world.rest()
    what_if = world.book.preview(world.ask(size, 2), world.now)
    assert what_if.charge is not None
    assert (what_if.charge.total_bytes, what_if.evict) == (size, (old[0],))
    assert world.state(old[0]) is ACTIVE


def test_lmstudio_1544_what_cannot_be_measured_refuses_nobody(new_world) -> None:
    """No estimate, so refused. What other programs hold counts nothing where it cannot be read, and that is said."""
    found = interpret(Readings("linux", ram_bytes=64 * GIB))
    ceilings = automatic_ceilings(found.machine)
    world = new_world(ceilings)
    outside = over_reserve(found.machine, ceilings, external_use(found.machine, found.live, [], {}))
    world.book.set_external(for_book(outside), world.now)
    assert world.admit(ceilings.host_bytes).lease.state is GRANTED
    assert "FREE_MEMORY_UNSUPPORTED" in [finding.reason for finding in found.live.findings]


# -- deadlocks and queues ---------------------------------------------------------------------------------------------


def test_ollama_17408_a_model_that_is_going_is_not_brought_back(new_world) -> None:
    """The victim of an eviction was used again while it unloaded, and stayed: 5.5 h without service. In both orders."""
    world = new_world(32)
    victim = world.resident(20, 1, 11)
    world.rest()
    waiting = world.admit(20, 2).lease
    assert world.vacating() == [victim[0]]
    assert world.refused(lambda: world.begin_use(*victim)) == "LEASE_VACATING"
    world.die(11)
    assert world.state(waiting.lease_id) is GRANTED

    world = new_world(32)
    victim = world.resident(20, 1, 11)
    world.rest()
    use = world.begin_use(*victim)  # just before
    waiting = world.admit(20, 2).lease
    assert world.vacating() == []
    world.end_use(*victim, use)
    world.pass_time(world.policy.idle_s)
    assert world.vacating() == [victim[0]]
    world.die(11)
    assert world.state(waiting.lease_id) is GRANTED


def test_ollama_14407_a_reload_waits_for_the_turn_in_flight(new_world) -> None:
    """A model was reloaded while it was busy, and hung."""
    world = new_world(32)
    old = world.active(20, 1, 11, term_s=600)
    use = world.begin_use(*old)
    new = world.admit(24, 1, replaces=Credential(*old)).lease
    assert world.refused(lambda: world.begin_use(*old)) == "LEASE_VACATING"  # no new turn
    world.end_use(*old, use)  # the one in flight is finished
    assert world.state(new.lease_id) is QUEUED
    world.die(11)
    assert world.state(new.lease_id) is GRANTED


def test_ollama_1641_an_engine_that_dies_of_memory_lets_the_next_one_in(new_world) -> None:
    """It hung after an engine had run out of memory."""
    world = new_world(32)
    world.active(30, 1, 11)
    waiting = world.admit(30, 2).lease
    world.die(11)  # killed by the system; its host lives on and answers for it
    assert world.state(waiting.lease_id) is QUEUED
    world.die(1)
    assert world.state(waiting.lease_id) is GRANTED


@pytest.mark.parametrize("request_first", [True, False])
def test_llama_swap_946_an_end_and_a_request_at_one_moment_leave_nobody_stuck(new_world, request_first: bool) -> None:
    """An idle unload raced a request; the request waited 30 h for a process that was not there."""
    world = new_world(32)
    lease, secret = world.resident(20, 1, 11)
    if request_first:
        use = world.begin_use(lease, secret)
        world.release(lease, secret)
        world.end_use(lease, secret, use)
    else:
        world.release(lease, secret)
        assert world.refused(lambda: world.begin_use(lease, secret)) == "LEASE_VACATING"
    again = world.admit(20, 3).lease
    assert again.state is QUEUED
    world.die(11)
    assert world.state(again.lease_id) is GRANTED
    assert world.refused(lambda: world.begin_use(lease, secret)) == "LEASE_NOT_FOUND"


TWO_CARDS = Ceilings(384 * GIB, {"2": 184_320, "3": 184_320})
"""MiB instead of bytes on the cards: the report's 184,320 MiB are a whole one."""


def test_tensorrt_model_connect_842_a_waiter_takes_the_card_that_is_free_first_and_keeps_its_place(new_world) -> None:
    """An exclusive claim for a whole card was pinned to card 2 when it was made. Card 3 was free first, and it waited
    on for card 2, 5400 s, until it gave up."""
    world = new_world(TWO_CARDS)
    two = world.active(0, 1, 11, devices={"2": 100_000}, term_s=600)
    three = world.active(0, 2, 12, devices={"3": 120_000}, term_s=600)
    for lease in (two, three):
        world.begin_use(*lease)
    big = world.admit(0, 3, devices={"": 184_320}, exclusive=True).lease
    later = world.admit(0, 4, devices={"": 150_000}).lease
    assert [world.book.waiting_for(claim.lease_id)[0] for claim in (big, later)] == [1, 2]
    world.die(2, 12)
    assert world.state(big.lease_id) is GRANTED
    assert world.book.view(big.lease_id).lease.charge.on("3") == 184_320
    assert world.state(later.lease_id) is QUEUED


def test_tensorrt_model_connect_842_younger_shared_jobs_do_not_starve_the_exclusive_one(new_world) -> None:
    """Shared jobs that came later kept joining each other on a card, which was never empty: strict passing ends it."""
    world = new_world(Ceilings(384 * GIB, {"0": 100}), Policy(protect_passes=8))
    held = [world.active(0, pid, devices={"0": 40}, term_s=600) for pid in (1, 2)]
    for lease in held:
        world.begin_use(*lease)
    alone = world.admit(0, 9, devices={"0": 100}, exclusive=True).lease
    passed = 0
    for pid in range(10, 40):
        world.release(*held.pop(0))
        young = world.admit(0, pid, devices={"0": 40}).lease
        if young.state is not GRANTED:
            break
        passed += 1
        secret = world.secret(young.lease_id)
        world.book.activate(young.lease_id, secret, world.process(pid), (), world.now)
        world.begin_use(young.lease_id, secret)
        held.append((young.lease_id, secret))
    assert passed <= 8
    world.release(*held.pop(0))
    assert world.state(alone.lease_id) is GRANTED


def test_localai_watchdog_a_deadline_is_a_refusal_and_never_a_load_anyway(new_world) -> None:
    """After 30 tries to make room it loaded anyway, into memory that was in use."""
    world = new_world(32)
    holder = world.resident(20, 1, 11)
    waiting = world.admit(20, 2, max_wait_s=60.0).lease
    world.pass_time(60)
    assert world.state(waiting.lease_id) is RELEASED
    assert world.book.view(waiting.lease_id).cause == ReleaseCause.WAITED_TOO_LONG
    assert world.committed() == 20
    assert world.state(holder[0]) in (ACTIVE, VACATING)


# -- thrash and eviction ----------------------------------------------------------------------------------------------


def test_ollama_8029_another_context_of_the_same_model_is_a_resize_and_no_reload(new_world) -> None:
    """Two clients with different contexts made one model flip between 3.1 and 13 GB, reloaded each time."""
    world = new_world(160)
    lease, secret = world.active(31, 1, 11, term_s=600)
    world.begin_use(lease, secret)
    fence = world.book.view(lease).lease.fence
    for size in (130, 31, 130):
        resized = world.book.resize(lease, secret, Claim(size), world.now)
        assert (resized.charge.total_bytes, resized.state, resized.fence) == (size, ACTIVE, fence)
    assert world.book.view(lease).lease.engines == (world.process(11),)


def test_ollama_6148_models_in_turn_do_not_take_the_card_from_each_other_at_once(new_world) -> None:
    """Reload ping-pong: what has just been loaded stays for at least 30 s, idle or not."""
    world = new_world(32)
    first = world.resident(20, 1)
    other = world.admit(20, 2).lease
    world.pass_time(29)
    assert world.vacating() == []
    world.pass_time(1)
    assert world.vacating() == [first[0]]
    assert world.state(other.lease_id) is QUEUED


@pytest.mark.parametrize(("load_s", "stays_s"), [(5, 30), (40, 80), (90, 120)])
def test_ollama_10948_what_took_long_to_load_stays_longer(new_world, load_s: int, stays_s: int) -> None:
    world = new_world(32)
    lease, secret = world.active(20, 1, term_s=600)
    world.pass_time(load_s)
    world.book.renew(lease, secret, None, world.now, load_complete=True)
    world.drain()
    # Asked for half a second before its residency ends: nobody is protected by then.
    world.pass_time(stays_s - 0.5)
    world.admit(20, 2)
    assert world.vacating() == []
    world.pass_time(0.5)
    assert world.vacating() == [lease]


def test_modelmesh_serving_341_what_was_used_seconds_ago_is_the_last_to_go(new_world) -> None:
    """Models that had been used "seconds ago" were evicted while older ones stayed."""
    world = new_world(30)
    models = [world.resident(10, pid) for pid in (1, 2, 3)]
    world.rest()
    for model in (models[2], models[0], models[1]):
        world.end_use(*model, world.begin_use(*model))
        world.pass_time(3)
    world.admit(10, 4)
    assert world.vacating() == [models[2][0]]


def test_modelmesh_serving_511_a_lone_model_is_not_evicted_for_one_that_fits_beside_it(new_world) -> None:
    """The only model on a machine of 64 GB was evicted."""
    world = new_world(automatic_ceilings(parse_spec("cpu:64")))
    lone = world.resident(10 * GIB, 1)
    world.rest()
    world.pass_time(500)  # idle for long, and heard of: it could be asked
    assert world.admit(20 * GIB, 2).lease.state is GRANTED
    assert (world.vacating(), world.state(lone[0])) == ([], ACTIVE)


def test_llama_swap_588_a_batch_is_not_torn_apart(new_world) -> None:
    """10 of 20 image requests were answered, then another model took its turn in the middle: gaps between the requests
    of a batch are shorter than what counts as idle."""
    world = new_world(32)
    images = world.resident(20, 1)
    world.rest()
    first = world.begin_use(*images)
    chat = world.admit(20, 2, max_wait_s=600.0).lease
    world.end_use(*images, first)
    for _ in range(19):
        world.pass_time(1)  # the client reads one image and asks for the next
        use = world.begin_use(*images)
        world.pass_time(1)
        world.end_use(*images, use)
    assert world.vacating() == []
    world.pass_time(world.policy.idle_s)
    assert world.vacating() == [images[0]]
    world.release(*images)
    assert world.state(chat.lease_id) is GRANTED


# -- leaks, leases ----------------------------------------------------------------------------------------------------


def test_ollama_11997_nobody_waits_for_memory_of_a_process_that_is_gone(new_world) -> None:
    """5 s were spent waiting for 18.8 GiB that were back already."""
    world = new_world(32)
    lease, secret = world.active(19, 1, 11)
    waiting = world.admit(19, 2).lease
    world.release(lease, secret)
    before = world.time
    world.die(11)
    assert world.state(waiting.lease_id) is GRANTED
    assert world.time == before


def test_ollama_9625_a_request_that_is_repeated_starts_no_second_engine(new_world) -> None:
    """Duplicates of one model were left running."""
    world = new_world(64)
    first = world.admit(20, 1, "llama")
    again = world.admit(20, 1, "llama")
    assert again.lease.lease_id == first.lease.lease_id
    world.book.activate(first.lease.lease_id, world.secret(first.lease.lease_id), world.process(1), (), world.now)
    assert world.admit(20, 1, "llama").lease.lease_id == first.lease.lease_id
    assert world.committed() == 20


def test_ollama_7606_one_that_never_stops_is_named_and_not_forgotten(new_world) -> None:
    """Models were "stopping" for good. Here they are overdue, whoever waits is told, and an operator ends them."""
    world = new_world(32)
    lease, secret = world.resident(20, 1, 11)
    waiting = world.admit(20, 2, max_wait_s=300.0).lease
    world.release(lease, secret)
    world.pass_time(world.policy.vacate_s)
    assert "HOLDER_DID_NOT_VACATE" in world.wait_codes(waiting.lease_id)
    world.dead |= {world.process(1), world.process(11)}
    world.book.release_by_operator(lease, world.is_alive, world.now)
    world.drain()
    assert world.state(waiting.lease_id) is GRANTED


def test_taos_1992_two_claims_of_six_do_not_pass_on_eight(new_world) -> None:
    """Both were judged by a heartbeat that was older than the first grant."""
    world = new_world(8)
    world.book.set_external(External(0), world.now)  # the last measurement, before either
    states = [world.admit(6, pid).lease.state for pid in (1, 2)]
    assert states == [GRANTED, QUEUED]


def test_taos_1992_a_renewal_does_not_bring_an_expired_lease_back(new_world) -> None:
    world = new_world(8)
    lease, secret = world.active(6)
    world.pass_time(15)
    assert world.refused(lambda: world.book.renew(lease, secret, None, world.now)) == "LEASE_SUSPECT"
    assert world.suspect(lease)


def test_taos_1992_a_holder_that_cannot_be_heard_keeps_its_bytes_while_its_task_runs(new_world) -> None:
    """A node that went offline lost its lease while its task went on."""
    world = new_world(8)
    lease, _ = world.active(6, 1, 11)
    world.pass_time(600)
    assert world.admit(6, 2).lease.state is QUEUED
    assert (world.state(lease), world.suspect(lease), world.committed()) == (ACTIVE, True, 6)


def test_taos_2988_an_id_is_no_authority(new_world) -> None:
    """Leases were released by id, by anybody, and freed before that was written down."""
    world = new_world(8)
    lease, secret = world.active(6)
    for wrong in ("", "guess", secret[:-1]):
        assert world.refused(lambda wrong=wrong: world.release(lease, wrong)) == "LEASE_SECRET_MISMATCH"
    assert world.committed() == 6
    world.book.release(lease, secret, world.is_alive, world.now)
    drained = world.book.drain()
    # What is told of the release is told after what is written of it: the keeper commits the one, then tells the other.
    assert drained.writes
    assert [event.lease.lease_id for event in drained.events if event.lease] == [lease]


def test_invoker_7243_an_expired_lease_of_a_living_holder_is_not_given_away(new_world) -> None:
    world = new_world(8)
    lease, _ = world.active(6, 1, 11)
    waiting = world.admit(6, 2, max_wait_s=100.0).lease
    world.pass_time(60)
    assert (world.suspect(lease), world.state(waiting.lease_id)) == (True, QUEUED)
    attached, _ = world.book.attach(lease, world.process(1), "", world.now)
    assert attached.charge.total_bytes == 6


@pytest.mark.parametrize(
    ("verdict", "suspect", "state"),
    [
        ("LIVE", False, ACTIVE),  # renews, whether it makes progress or not
        ("STALLED", True, ACTIVE),  # silent past its term, and its process is seen alive
        ("UNKNOWN", True, ACTIVE),  # silent, and its process cannot be seen: no verdict is made up
        ("DEAD", False, RELEASED),  # its processes are proven gone
    ],
)
def test_fak_13131_four_verdicts(new_world, verdict: str, suspect: bool, state: LeaseState) -> None:
    """A holder that made progress was taken for a wedged one. LIVE, STALLED, DEAD and UNKNOWN, and STALLED is never
    made up: here ACTIVE, SUSPECT with a process that is seen, RELEASED, and SUSPECT with one that cannot be seen."""
    world = new_world(8)
    namespace = "pid:[2]" if verdict == "UNKNOWN" else "pid:[1]"
    holder = world.process(1, namespace=namespace)
    granted = world.admit(6, holder=holder).lease
    secret = world.secret(granted.lease_id)
    world.book.activate(granted.lease_id, secret, holder, (), world.now)
    for _ in range(4):
        world.pass_time(5)
        if verdict == "LIVE":
            world.book.renew(granted.lease_id, secret, None, world.now)
    if verdict == "DEAD":
        world.die(1)
    assert (world.suspect(granted.lease_id), world.state(granted.lease_id)) == (suspect, state)
    assert (world.book.view(granted.lease_id).lease.foreign) == (verdict == "UNKNOWN")
    assert world.committed() == (0 if verdict == "DEAD" else 6)


def test_ray_66199_requests_queued_under_an_old_leader_are_not_granted_by_the_new_one(new_world) -> None:
    """After a failover those who waited were granted, with nobody left to use it: the queue dies with its epoch."""
    world = new_world(8)
    lease, secret = world.active(6)
    waiting = world.admit(6, 2, "w").lease
    world.restart()
    world.release(lease, secret)
    assert world.book.queue_depth == 0
    assert world.book.view(waiting.lease_id) is None
    assert world.committed() == 0

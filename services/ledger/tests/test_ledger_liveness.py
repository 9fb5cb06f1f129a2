"""Rules 15 to 26: whoever waits is granted, whatever the others do, as long as busy spells end and pins are finite.

Each test plays the cycle with which the others keep a waiter waiting for ever in a book without the rule (all of them
came out of an exhaustive search for unfair cycles), for as long as it takes, and holds the wait to the rule's bound.
C is a ceiling, w the waiter.
"""

from collections.abc import Iterator

import pytest
from book_players import Player, Stage
from weighbridge_ledger.book import Ceilings, LeaseState, Policy, Refused

POLICY = Policy()
BACKGROUND, NORMAL, INTERACTIVE = 1, 2, 3
MINUTE_S = POLICY.protect_after_s
JOB_S = 5.0
LOOK_S = 0.5
"""The world looks at its clock so often."""


def in_turn(running: Player, waiting: Player, job_s: float) -> Iterator[float]:
    """Of two jobs of which one fits at a time, each asks again as soon as it has ended."""
    while True:
        yield job_s
        running.leave()
        waiting.run()
        running.ask().run()
        running, waiting = waiting, running


def overlapping(first: Player, second: Player, job_s: float) -> Iterator[float]:
    """Two jobs, each of which asks again as soon as it has ended, while the other one runs."""
    while True:
        yield job_s / 2
        first.leave().ask().run()
        first, second = second, first


# -- order and passing -----------------------------------------------------------------------------------------------


def test_interactive_jobs_in_turn_let_a_background_claim_in(new_world) -> None:
    """Rule 15. No ageing: two interactive jobs alternate, background never (L). From 1 to 3 it takes twice 30 s."""
    stage = Stage(new_world(2))
    running = stage.player(2, priority=INTERACTIVE).ask().run()
    w = stage.player(2, priority=BACKGROUND).ask()
    waiting = stage.player(2, priority=INTERACTIVE).ask()
    waited = stage.play(in_turn(running, waiting, JOB_S), w, 2 * POLICY.age_s + JOB_S)
    assert waited > JOB_S  # at first, the interactive one went before it


@pytest.mark.parametrize("job_s", [JOB_S, 30.0])
def test_small_jobs_in_turn_let_a_claim_for_everything_in(new_world, job_s: float) -> None:
    """Rule 16. Unlimited: C=2, two 1s alternate, w=2 never (L). Short jobs run out of passes, long ones of time."""
    stage = Stage(new_world(2))
    jobs = [stage.player(1).ask().run() for _ in range(2)]
    w = stage.player(2).ask()
    until_protected = min(POLICY.protect_passes * job_s / 2, MINUTE_S)
    waited = stage.play(overlapping(*jobs, job_s), w, until_protected + job_s)
    assert waited > job_s  # at first, they passed it


@pytest.mark.parametrize("named", [True, False])
def test_jobs_that_change_cards_let_a_claim_for_any_whole_card_in(new_world, named: bool) -> None:
    """Rule 17. Ties flip: cards 2+2, three 1s, w=2 never (L). The jobs leave the full card for the other one."""
    stage = Stage(new_world(Ceilings(0, {"a": 2, "b": 2})))
    jobs = [stage.player(devices={device: 1}).ask().run() for device in ("a", "a", "b")]
    w = stage.player(devices={"": 2}).ask()

    def others() -> Iterator[float]:
        while True:
            yield JOB_S / 3
            leaving = jobs.pop(0)
            if leaving.state is LeaseState.ACTIVE:
                other = "a" if leaving.device == "b" else "b"
                leaving.leave().ask(devices={other if named else "": 1})
            leaving.run()
            jobs.append(leaving)

    stage.play(others(), w, MINUTE_S + JOB_S)


@pytest.mark.parametrize("kind", ["pinned", "silent", "stubborn"])
def test_a_claim_for_any_card_waits_for_no_card_that_will_not_come_back(new_world, kind: str) -> None:
    """Rule 17. Card 0 pinned, w waits there while card 1 cycles (L)."""
    stage = Stage(new_world(Ceilings(0, {"a": 2, "b": 2})))
    never = stage.player(devices={"a": 1}, pinned=kind == "pinned", term_s=POLICY.term_s).settle()
    never.stubborn = kind == "stubborn"
    if kind == "silent":
        never.begin().silent = True
    jobs = [stage.player(devices={"b": 1}).ask().run() for _ in range(2)]
    w = stage.player(devices={"": 2}).ask()
    hoped_s = {"pinned": 0.0, "silent": POLICY.term_s, "stubborn": POLICY.vacate_s}[kind]
    stage.play(overlapping(*jobs, JOB_S), w, hoped_s + MINUTE_S + JOB_S)
    assert w.device == "b"


# -- reclaim ---------------------------------------------------------------------------------------------------------


def test_an_idle_interactive_model_leaves_for_a_background_claim_that_has_aged(new_world) -> None:
    """Rule 19. Base priority: one idle interactive model blocks background for ever (L)."""
    stage = Stage(new_world(1))
    stage.player(1, priority=INTERACTIVE).settle()
    w = stage.player(1, priority=BACKGROUND).ask()

    def nobody() -> Iterator[float]:
        while True:
            yield LOOK_S

    waited = stage.play(nobody(), w, 2 * POLICY.age_s + LOOK_S)
    assert waited >= 2 * POLICY.age_s  # not before it had aged to the holder's level


def test_two_that_are_idle_in_turn_leave_one_after_the_other(new_world) -> None:
    """Rule 20. All at once only: C=2, two 1s idle in turn, never together, w=2 never (L)."""
    stage = Stage(new_world(2))
    first, second = (stage.player(1).settle() for _ in range(2))
    first.begin()
    w = stage.player(2).ask()

    def others() -> Iterator[float]:
        busy, idle = first, second
        while True:
            yield JOB_S
            if not idle.gone:
                idle.try_to_begin()
            yield LOOK_S
            if busy.use:
                busy.end()
            busy, idle = idle, busy

    waited = stage.play(others(), w, MINUTE_S + 2 * JOB_S)
    assert waited >= MINUTE_S  # until then nobody was asked: it would not have sufficed


def test_who_was_asked_cannot_be_used_again(new_world) -> None:
    """Rule 21. Decline when used again: idle, asked, busy, idle … w never (L). Whenever a use ends, the next begins."""
    stage = Stage(new_world(1))
    holder = stage.player(1).settle()
    w = stage.player(1).ask()
    assert holder.asked

    def others() -> Iterator[float]:
        while True:
            busy = not holder.gone and holder.try_to_begin()
            yield POLICY.idle_s
            if busy:
                holder.end()

    stage.play(others(), w, POLICY.idle_s)


def test_a_silent_holder_that_came_back_can_be_asked(new_world) -> None:
    """Rule 19: it is idle, and no longer suspect. Found by the search over all histories: it was asked a term later."""
    stage = Stage(new_world(1))
    holder = stage.player(1, term_s=POLICY.term_s).settle()
    holder.silent = True
    stage.pass_time(POLICY.term_s)
    assert stage.world.suspect(holder.lease_id)
    holder.attach()
    w = stage.player(1).ask()
    assert holder.asked
    stage.pass_time(LOOK_S)
    assert w.state is LeaseState.GRANTED


def test_what_holders_leave_for_a_waiter_is_taken_by_nobody_else(new_world) -> None:
    """Rule 16: protected while its reclaim is in flight. The first holder leaves at once, the second takes 20 s."""
    stage = Stage(new_world(2))
    _, slow = (stage.player(1).settle() for _ in range(2))
    slow.stubborn = True
    w = stage.player(2).ask()

    def others() -> Iterator[float]:
        newcomer = stage.player(1).ask()
        for _ in range(20):
            yield 1.0
            assert newcomer.waits
        slow.leave()
        while True:
            yield LOOK_S

    stage.play(others(), w, 20.0 + 2 * LOOK_S)


# -- growing, holding ------------------------------------------------------------------------------------------------


def test_holders_that_grow_and_shrink_in_turn_let_a_claim_in(new_world) -> None:
    """Rule 23. Ignoring the queue: holders grow and shrink in turn, w never (L). C=4, one of two is always at 2."""
    stage = Stage(new_world(4))
    small, large = (stage.player(1).ask().run() for _ in range(2))
    assert large.resize(2)
    w = stage.player(2).ask()

    def others() -> Iterator[float]:
        growing, shrinking = small, large
        while True:
            yield JOB_S
            growing.resize(2)
            shrinking.resize(1)
            growing, shrinking = shrinking, growing

    stage.play(others(), w, (POLICY.protect_passes + 1) * JOB_S)


def test_two_that_hold_two_of_four_and_want_three_are_answered_at_once(new_world) -> None:
    """Rule 23. Waiting: C=4, two hold 2 and want 3, deadlock (L)."""
    stage = Stage(new_world(4))
    holders = [stage.player(2).ask().run() for _ in range(2)]
    for _ in range(20):
        assert [holder.resize(3) for holder in holders] == [False, False]
        stage.pass_time(LOOK_S)
    assert [holder.state for holder in holders] == [LeaseState.ACTIVE, LeaseState.ACTIVE]
    holders[1].leave()
    assert holders[0].resize(3)


@pytest.mark.parametrize("busy", [False, True])
def test_two_pinned_models_that_both_grow_by_replacement_both_come_in(new_world, busy: bool) -> None:
    """Rule 24. Two pinned 2→3 on 4 halt otherwise (L): each keeps its pin and waits for the other one's bytes."""
    stage = Stage(new_world(4))
    old = [stage.player(2, pinned=True).settle() for _ in range(2)]
    if busy:
        for holder in old:
            holder.begin()
    new = [stage.player(3, pid=holder.pid).ask(replaces=holder.credential, pinned=True) for holder in old]

    def others() -> Iterator[float]:
        yield JOB_S
        if busy:
            for holder in old:
                holder.end()
        while True:
            yield LOOK_S
            for player in new:
                if player.state is LeaseState.GRANTED:
                    player.run()

    stage.play(others(), new[0], (MINUTE_S if busy else 0.0) + JOB_S + 2 * LOOK_S)
    new[0].leave()
    stage.play(others(), new[1], MINUTE_S + 2 * JOB_S)


def test_two_that_keep_a_lease_busy_and_want_more_are_not_left_waiting_for_each_other(new_world) -> None:
    """Rule 25. Each keeps 2 of 4 in use and asks for 1 more: nobody would ever end."""
    stage = Stage(new_world(4))
    holders = [stage.player(2).ask().run() for _ in range(2)]
    for holder in holders:
        with pytest.raises(Refused) as refused:
            stage.player(1, pid=holder.pid).ask(while_holding=(holder.credential,))
        assert refused.value.reason == "WAIT_WHILE_HOLDING"
    assert stage.world.book.queue_depth == 0


# -- exclusive use ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ceilings", "place"),
    [
        (Ceilings(0, {"a": 4}), {"devices": {"a": 1}}),
        (Ceilings(4, has_shared_gpu=True), {"size": 1}),
    ],
    ids=["card", "unified"],
)
def test_jobs_in_turn_let_a_claim_for_exclusive_use_in(new_world, ceilings: Ceilings, place: dict) -> None:
    """Rule 26. Unlimited passing starves it (L): bytes never lack, and the device is never empty."""
    stage = Stage(new_world(ceilings))
    jobs = [stage.player(**place).ask().run() for _ in range(2)]
    w = stage.player(**place, exclusive=True).ask()
    waited = stage.play(overlapping(*jobs, JOB_S), w, POLICY.protect_passes * JOB_S / 2 + JOB_S)
    assert waited > JOB_S


def test_idle_residents_leave_for_exclusive_use_and_it_leaves_for_them(new_world) -> None:
    """Rule 26: they are its victims, and it is theirs."""
    stage = Stage(new_world(Ceilings(4, has_shared_gpu=True)))
    resident = stage.player(1).settle()
    alone = stage.player(1, exclusive=True).ask()
    stage.pass_time(POLICY.idle_s)
    assert resident.gone
    alone.activate().loaded()
    stage.pass_time(POLICY.min_residency_s)
    resident.ask()
    assert resident.waits
    stage.pass_time(POLICY.idle_s)
    assert alone.gone
    assert resident.state is LeaseState.GRANTED

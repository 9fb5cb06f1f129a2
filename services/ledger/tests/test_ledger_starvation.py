"""Every way in which others can keep a claim waiting, as long as they are fair: none lasts longer than the rules allow.

From every state that the others can make, the claim asks, and all that they can do next is followed until no history is
left in which it still waits. The real book is searched, with times of a few seconds. WEIGHBRIDGE_BOOK_DEPTH adds
seconds in which the others prepare the machine before the claim asks.
"""

from dataclasses import replace

import pytest
from book_others import BACKGROUND, BUSY_S, INTERACTIVE, PINNED_S, POLICY, Role, longest_wait
from weighbridge_ledger.book import Ceilings, Policy

PROTECTED_S = int(POLICY.protect_after_s)
YOUNG_S = int(POLICY.min_residency_s)
ONE_CARD = Ceilings(0, {"a": 4})
TWO_CARDS = Ceilings(0, {"a": 2, "b": 2})
JOB, MODEL = Role(1), Role(1, stays=True)


@pytest.mark.parametrize(
    ("ceilings", "others", "waiter", "bound_s"),
    [
        pytest.param(Ceilings(2), (JOB, JOB), Role(2), PROTECTED_S + BUSY_S, id="jobs, everything"),
        # A use that began while it was young ends later.
        pytest.param(Ceilings(2), (MODEL, MODEL), Role(2), PROTECTED_S + YOUNG_S + BUSY_S, id="models, everything"),
        pytest.param(
            Ceilings(2),
            (replace(MODEL, priority=INTERACTIVE), replace(JOB, priority=INTERACTIVE)),
            Role(2, priority=BACKGROUND),
            PROTECTED_S + YOUNG_S + BUSY_S,
            id="interactive ones, background",
        ),
        pytest.param(
            Ceilings(3), (JOB, Role(2, stays=True)), Role(3), PROTECTED_S + YOUNG_S + BUSY_S, id="1 and 2 of 3"
        ),
        pytest.param(
            TWO_CARDS,
            (Role(1, ("a", "b")),) * 3,
            Role(2, ("",)),
            PROTECTED_S + BUSY_S,
            id="jobs on either card, a card",
        ),
        pytest.param(
            TWO_CARDS,
            (Role(1, ("a",), pinned=True, stays=True, stubborn=True), Role(1, ("a", "b"), stays=True)),
            Role(2, ("",)),
            PROTECTED_S + YOUNG_S + BUSY_S,
            id="one pinned to a card for ever, a card",
        ),
        pytest.param(
            ONE_CARD, (Role(1, ("a",)),) * 2, Role(1, ("a",), exclusive=True), PROTECTED_S + BUSY_S, id="jobs, alone"
        ),
        pytest.param(
            Ceilings(4, has_shared_gpu=True),
            (replace(MODEL, exclusive=True), JOB),
            Role(1, exclusive=True),
            PROTECTED_S + YOUNG_S + BUSY_S,
            id="one alone, another alone",
        ),
        pytest.param(
            Ceilings(3),
            (replace(MODEL, stubborn=True), MODEL),
            Role(2),
            PROTECTED_S + YOUNG_S + BUSY_S,
            id="one that does not leave, the rest",
        ),
        pytest.param(
            Ceilings(2, has_shared_gpu=True, one_start_at_a_time=True),
            (JOB, MODEL),
            Role(2),
            PROTECTED_S + YOUNG_S + BUSY_S,
            id="one start at a time",
        ),
        pytest.param(
            Ceilings(2),
            (replace(MODEL, pinned=True), JOB),
            Role(2),
            PROTECTED_S + PINNED_S + BUSY_S,
            id="a pinned model",
        ),
        pytest.param(
            Ceilings(3),
            (replace(JOB, stretches=True),) * 2,
            Role(2),
            PROTECTED_S + BUSY_S,
            id="jobs that grow and shrink",
        ),
        pytest.param(
            Ceilings(4),
            (Role(1, optional=3, pinned=True, stays=True), JOB),
            Role(3),
            PROTECTED_S + BUSY_S,
            id="one that has more than it needs, the rest",
        ),
        pytest.param(
            Ceilings(4),
            (Role(2, pinned=True, stays=True, replaces=True),),
            Role(2, pinned=True, stays=True, replaces=True),
            PROTECTED_S + PINNED_S + BUSY_S,
            id="two pinned models that grow",
        ),
    ],
)
def test_nothing_that_fair_holders_do_keeps_a_claim_waiting_beyond_the_rules(
    new_world, ceilings: Ceilings, others: tuple[Role, ...], waiter: Role, bound_s: int
) -> None:
    prepare_s = 4 - len(others)
    waited_s, history = longest_wait(new_world(ceilings, POLICY), others, waiter, prepare_s=prepare_s, bound_s=bound_s)
    assert not history, f"{waiter} still waits after {' '.join(history)}"
    assert waited_s > 1  # else the machine was never full


def test_no_restarts_of_the_ledger_keep_a_claim_waiting_beyond_the_rules(new_world) -> None:
    """Rule 14: its place is kept, and it goes on ageing."""
    world = new_world(Ceilings(2), POLICY)
    bound_s = PROTECTED_S + BUSY_S
    waited_s, history = longest_wait(world, (JOB, JOB), Role(2), prepare_s=2, bound_s=bound_s, restarts=True)
    assert not history, f"still waits after {' '.join(history)}"
    assert waited_s > 1


NEVER = 1_000_000


@pytest.mark.parametrize(
    ("without", "ceilings", "others", "waiter"),
    [
        pytest.param(
            replace(POLICY, protect_passes=NEVER, protect_after_s=float(NEVER)),
            Ceilings(2),
            (JOB, JOB),
            Role(2),
            id="unlimited passing",
        ),
        pytest.param(
            replace(POLICY, age_s=float(NEVER)),
            Ceilings(1),
            (replace(JOB, priority=INTERACTIVE),) * 2,
            Role(1, priority=BACKGROUND),
            id="no ageing",
        ),
    ],
)
def test_the_search_finds_the_cycles_of_a_book_without_the_rules(
    new_world, without: Policy, ceilings: Ceilings, others: tuple[Role, ...], waiter: Role
) -> None:
    """Rules 15 and 16, and that the search can fail."""
    _, history = longest_wait(new_world(ceilings, without), others, waiter, prepare_s=1, bound_s=12)
    assert history

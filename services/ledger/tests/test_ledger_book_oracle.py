"""The oracle of the explored book notices a book that breaks a rule: without that, exploring would prove nothing."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from weighbridge_ledger.book import ReleaseCause, passing
from weighbridge_ledger.book.core import BookCore
from weighbridge_ledger.book.settling import SettlingCore
from weighbridge_ledger.book.timing import TimedCore

from services.ledger.tests.test_ledger_book_machine import BookMachine

HISTORIES = 300
"""Twenty times as many as any of these took."""


def never_ages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TimedCore, "_level", lambda book, priority, since, now: priority)


def counts_no_passes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SettlingCore, "_count_passes", lambda book, passed: None)


def protects_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(passing, "protected", lambda waiter, now, policy: False)


def frees_the_silent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TimedCore, "_suspect", lambda book, entry, now: book._free(entry, ReleaseCause.PROCESSES_DEAD, now))


def asks_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SettlingCore, "_reclaim", lambda book, now: None)


def writes_no_charge_down(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BookCore, "_write", lambda book, entry: None)


@pytest.mark.parametrize(
    ("breaks", "finding"),
    [
        (never_ages, "^level of "),
        (counts_no_passes, "^passes of "),
        (protects_nobody, "^not to be granted"),
        (frees_the_silent, "^a process of it lives"),
        (asks_nobody, "(could be asked, and were not|and was not asked|nobody was asked)"),
        (writes_no_charge_down, "^what is committed is not in the book"),
    ],
)
def test_a_book_that_breaks_a_rule_is_found_out(
    new_world, monkeypatch: pytest.MonkeyPatch, breaks: Callable[[pytest.MonkeyPatch], None], finding: str
) -> None:
    breaks(monkeypatch)
    machine = type("BrokenMachine", (BookMachine,), {"world_type": new_world, "seen": Counter()})
    with pytest.raises(AssertionError, match=finding):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=HISTORIES,
                stateful_step_count=50,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )

"""What the ledger can be told about its rules."""

import pytest
from weighbridge_common.settings import SettingsError
from weighbridge_ledger.book.policy import Policy
from weighbridge_ledger.settings import LedgerSettings


def test_the_rules_have_the_numbers_that_were_set() -> None:
    settings = LedgerSettings(term_s=30, activate_by_s=5, queue_bound=7, max_wait_s=60, max_residency_s=45)
    policy = settings.policy()
    assert (policy.term_s, policy.activate_by_s, policy.queue_bound, policy.max_wait_s) == (30, 5, 7, 60)
    assert (policy.min_residency_s, policy.max_residency_s) == (30, 45)
    assert LedgerSettings().policy() == Policy()


def test_residencies_that_contradict_each_other_stop_the_start() -> None:
    with pytest.raises(SettingsError, match="WEIGHBRIDGE_LEDGER_MIN_RESIDENCY_S: must not be above"):
        LedgerSettings(min_residency_s=50, max_residency_s=40).policy()

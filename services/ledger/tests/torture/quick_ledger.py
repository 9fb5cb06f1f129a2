"""The ledger as a process, with the numbers of its rules made short: what takes minutes happens in seconds here, so
that every rule is met while clients are being killed."""

from dataclasses import replace

from weighbridge_common.server import run_service
from weighbridge_common.settings import load
from weighbridge_ledger.book import Policy
from weighbridge_ledger.service.app import build_ledger
from weighbridge_ledger.settings import LedgerSettings

TERM_S = 3.0
GRACE_S = 5.0


class QuickSettings(LedgerSettings):
    """Settings of a ledger in a hurry."""

    def policy(self) -> Policy:
        """Terms far above the period of the sweep (0.25 s), everything else shorter than them."""
        return replace(
            super().policy(),
            term_s=TERM_S,
            min_term_s=TERM_S,
            activate_by_s=TERM_S,
            grace_s=GRACE_S,
            vacate_s=2.0,
            ticket_s=5.0,
            protect_passes=4,
            protect_after_s=3.0,
            age_s=1.0,
            idle_s=0.2,
            min_residency_s=0.5,
            max_residency_s=2.0,
            shrink_s=0.5,
            optional_step_bytes=2**29,
        )


if __name__ == "__main__":
    run_service(load(QuickSettings), "ledger", build_ledger)

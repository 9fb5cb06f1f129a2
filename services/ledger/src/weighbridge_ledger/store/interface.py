"""What the ledger needs of a store. Seven verbs, so that a shared store for fleets can stand behind the same book.

`services/ledger/tests/test_ledger_store_contract.py` holds every store to what is promised here; another one is added
there by a line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weighbridge_ledger.book.records import Snapshot, Write


class StoreError(Exception):
    """A commit failed: the disk is full, or broken. Nothing of the batch was written; it may be tried again."""


class StoreRefusedError(Exception):
    """The store cannot be opened. The text says why and what to do; nothing was changed."""


OBSERVATIONS_KEPT = 10_000
"""Measured peaks whose number is lower than the latest by so much are forgotten: prices move with engine builds, and a
p95 needs tens, not thousands."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured peak of one launch: what was planned, claimed and granted for it, and what it took."""

    model_digest: str
    engine_build: str
    shape: str
    planned_bytes: int
    granted_bytes: int
    peak_bytes: int
    load_s: float
    observed_wall: float
    node_id: str
    lease_id: str
    number: int = 0
    """Given by the ledger, rising."""
    claimed_bytes: int = 0
    """What was required, host and devices together; 0: not known."""


@dataclass(frozen=True, slots=True)
class PutObservation:
    """Keep one observation, under the number that the ledger chose for it so as to know it before the commit.

    A lease has one. Told again, the later word takes the place of the earlier.
    """

    observation: Observation
    unless_recorded: bool = False
    """Only if its lease has none yet: the ledger's own word, which stands behind its holder's."""


AnyWrite = Write | PutObservation


class Store(Protocol):
    """Where one ledger keeps its book.

    All calls come from one thread at a time. Whoever opens a store has it alone until it closes it or dies: a second
    ledger on it is refused when it opens it.
    """

    def begin_epoch(self) -> str:
        """A name for this run of the ledger, committed before it is returned; never given twice, not even by another
        store.

        Raises:
            StoreError: it cannot be written.
        """

    def load(self) -> Snapshot:
        """Everything that was committed, and nothing else: not a part of a batch that failed or was interrupted.

        Raises:
            StoreRefusedError: a record cannot be understood. Nothing was changed: half a book is worse than none.
        """

    def commit(self, writes: Sequence[AnyWrite]) -> None:
        """Apply all writes in order, or none. They survive SIGKILL and a loss of power once this returns.

        To put a record twice, or to drop what is not there, is harmless: a batch whose answer was lost is sent again.
        The counter never goes back. Observations are kept while their number is among the latest OBSERVATIONS_KEPT.

        Raises:
            StoreError: none was applied, and the store goes on.
        """

    def probe(self) -> None:
        """Write as much as a batch of admissions needs, and take it back. Nothing of it is ever loaded.

        Raises:
            StoreError: there is no room for that.
        """

    def last_observation(self) -> int:
        """The highest number of an observation that is kept; 0: there is none."""

    def observations(
        self, model_digest: str, engine_build: str, shape: str, before: int | None, limit: int
    ) -> list[Observation]:
        """The latest observations with these properties (empty: any) and a number below `before`, latest first.

        Paging by the last number of a page finds every observation that was there at the first page once, whatever is
        recorded meanwhile.
        """

    def close(self) -> None:
        """Give everything back. Idempotent."""

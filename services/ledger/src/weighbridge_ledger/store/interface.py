"""What the ledger needs of a store. Six verbs, so that a shared store for fleets can stand behind the same book."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weighbridge_ledger.book.records import Snapshot, Write


class StoreError(Exception):
    """A commit failed: the disk is full, or broken. Nothing of the batch was written; it may be tried again."""


class StoreRefusedError(Exception):
    """The store cannot be opened. The text says why and what to do; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured peak of one launch."""

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
    """Given by the store, rising."""


@dataclass(frozen=True, slots=True)
class PutObservation:
    """Keep one observation. Its number is chosen by the ledger, so that it is known before the commit."""

    observation: Observation


AnyWrite = Write | PutObservation


class Store(Protocol):
    """All calls come from one thread at a time."""

    def begin_epoch(self) -> str:
        """A name for this run of the ledger, committed before it is returned; never given twice, not even by another
        store."""

    def load(self) -> Snapshot:
        """Everything that was committed.

        Raises:
            StoreRefusedError: it cannot be understood.
        """

    def commit(self, writes: Sequence[AnyWrite]) -> None:
        """Apply all writes in order or none. They survive a loss of power once this returns.

        Raises:
            StoreError: none was applied.
        """

    def last_observation(self) -> int:
        """The highest number of an observation; 0: there is none."""

    def observations(
        self, model_digest: str, engine_build: str, shape: str, before: int | None, limit: int
    ) -> list[Observation]:
        """The latest observations with these properties (empty: any) and a number below `before`, latest first."""

    def close(self) -> None:
        """Give everything back. Idempotent."""

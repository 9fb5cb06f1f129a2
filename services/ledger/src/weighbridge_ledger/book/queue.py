"""The claims that wait, in the order of asking (rule 15), with an index by pool so that looking ahead costs the same
with ten waiters and with ten thousand."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from weighbridge_ledger.book.states import Claim, Lease


@dataclass(slots=True)
class Waiter:
    """One queued lease."""

    lease: Lease
    claim: Claim
    pools: frozenset[str]
    stream: int
    """Number of its newest Admit stream: only that one cancels it (rule 9)."""
    first_wall: float
    """When it was first asked for, kept by its ticket over broken calls and restarts."""
    since: float
    """The same moment on the monotonic clock."""
    deadline: float
    timer: float | None = None
    """When the book looks at it next; another entry in the heap is stale."""
    passes: int = 0
    """Harmful overtakings suffered so far (rule 16)."""

    @property
    def sequence(self) -> int:
        """Place in the order of asking."""
        return self.lease.sequence


class WaitQueue:
    """Waiters by sequence. One bounded sorted list over all, one for each pool."""

    def __init__(self) -> None:
        self._waiters: dict[int, Waiter] = {}
        self._order: list[int] = []
        self._by_pool: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Waiter]:
        return (self._waiters[sequence] for sequence in self._order)

    def add(self, waiter: Waiter) -> None:
        """Insert by sequence; a retried claim takes its old place again."""
        self._waiters[waiter.sequence] = waiter
        insort(self._order, waiter.sequence)
        for pool in waiter.pools:
            insort(self._by_pool.setdefault(pool, []), waiter.sequence)

    def remove(self, sequence: int) -> Waiter:
        """Take one out. KeyError if it does not wait."""
        waiter = self._waiters.pop(sequence)
        _discard(self._order, sequence)
        for pool in waiter.pools:
            _discard(self._by_pool[pool], sequence)
        return waiter

    def get(self, sequence: int) -> Waiter | None:
        """The waiter with this sequence."""
        return self._waiters.get(sequence)

    def position(self, sequence: int) -> int:
        """1 for the first in the order of asking."""
        return bisect_left(self._order, sequence) + 1

    def blockers(self, claim_pools: frozenset[str], sequence: int, look_ahead: int) -> list[Waiter] | None:
        """Everyone who asked before `sequence` within the look-ahead; None when it lies beyond it in some pool."""
        for pool in claim_pools:
            if bisect_left(self._by_pool.get(pool, []), sequence) >= look_ahead:
                return None
        return [waiter for waiter, _ in self.head(look_ahead) if waiter.sequence < sequence]

    def head(self, look_ahead: int) -> list[tuple[Waiter, bool]]:
        """The first `look_ahead` waiters of every pool, in order, each with whether it may be granted.

        One that lies beyond the look-ahead in another of its pools is seen (it can be harmed) but not granted, because
        not everyone it might harm there is in view.
        """
        seen: dict[int, int] = {}
        for sequences in self._by_pool.values():
            for sequence in sequences[:look_ahead]:
                seen[sequence] = seen.get(sequence, 0) + 1
        return [(self._waiters[s], seen[s] == len(self._waiters[s].pools)) for s in sorted(seen)]


def _discard(ordered: list[int], value: int) -> None:
    at = bisect_left(ordered, value)
    if at < len(ordered) and ordered[at] == value:
        del ordered[at]

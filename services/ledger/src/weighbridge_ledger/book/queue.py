"""The claims that wait, in order (rule 15), with an index by pool so that looking ahead costs the same with ten waiters
and with ten thousand."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from weighbridge_ledger.book.charging import Usage
from weighbridge_ledger.book.states import Charge, Claim, Lease

NOTHING = Charge()

Key = tuple[int, int]
"""(−level, sequence): the highest level first, and the earliest within it."""


@dataclass(slots=True)
class Waiter:
    """One queued lease."""

    lease: Lease
    claim: Claim
    """What it waits for, with every card named: its target (rule 17)."""
    pools: frozenset[str]
    """Where the target may be charged."""
    stream: int
    """Number of its newest Admit stream: only that one cancels it (rule 9)."""
    first_wall: float
    """When it was first asked for, kept by its ticket over broken calls and restarts."""
    since: float
    """The same moment on the monotonic clock."""
    deadline: float
    required: Charge = NOTHING
    """What the target is charged on the empty machine: what others leave to it when they take optional bytes. Known
    once it waits."""
    level: int = 0
    """Its priority, raised by waiting (rule 15)."""
    timer: float | None = None
    """When the book looks at it next; another entry in the heap is stale."""
    passes: int = 0
    """Harmful overtakings suffered so far (rule 16)."""
    replaces: str = ""
    """The lease whose place it takes (rule 24); empty: none, or it has ended."""
    while_holding: frozenset[str] = frozenset()
    """The leases its caller keeps busy meanwhile (rule 25)."""
    asked: dict[str, None] = field(default_factory=dict)
    """The leases that were asked to vacate for it, in the order of asking."""
    asked_until: float = -1.0
    """Its reclaim is in flight until then (rule 16)."""
    hopeful_at: int = -1
    """The state of what nobody can be asked for at which its aim was last found to be worth keeping (rule 17)."""
    total_bytes: int = field(init=False)
    """All that it requires, on whichever cards."""
    floating: bool = field(init=False)
    """Whether it takes whichever card fits (rule 17)."""
    places: frozenset[str] = frozenset()
    """The pools and the devices that its target is on; kept by the queue."""

    def __post_init__(self) -> None:
        # Read for each of those who wait whenever something happens, and the same for its whole life.
        self.total_bytes = self.lease.claim.total_bytes
        self.floating = self.lease.claim.floating

    @property
    def sequence(self) -> int:
        """Place in the order of asking."""
        return self.lease.sequence

    @property
    def key(self) -> Key:
        """Place in the order of service."""
        return (-self.level, self.lease.sequence)


ANY_CARD = ""
"""The list of those who take any card: behind many who wait for the one they aim at, they are the first for another."""


class WaitQueue:
    """Waiters by key. One sorted list over all, one for each pool, and one of those who take any card."""

    def __init__(self) -> None:
        self._waiters: dict[int, Waiter] = {}
        self._order: list[Key] = []
        self._by_pool: dict[str, list[Key]] = {}
        self._head: tuple[int, list[Waiter]] | None = None
        """The last answer of `head` and the look-ahead of it, until somebody enters or leaves it."""
        self._waiting_at: dict[str, int] = {}
        self.awaited = Usage()
        """The required bytes of all who wait."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Waiter]:
        return (self._waiters[sequence] for _, sequence in self._order)

    def add(self, waiter: Waiter) -> None:
        """Insert by level and sequence; a retried claim takes its old place again."""
        key = waiter.key
        waiter.places = waiter.pools.union(waiter.required.occupies)
        self._waiters[waiter.sequence] = waiter
        insort(self._order, key)
        for pool in _lists_of(waiter):
            ordered = self._by_pool.setdefault(pool, [])
            at = bisect_left(ordered, key)
            ordered.insert(at, key)
            self._changed(at)
        for place in waiter.places:
            self._waiting_at[place] = self._waiting_at.get(place, 0) + 1
        self.awaited.add(waiter.required)

    def remove(self, sequence: int) -> Waiter:
        """Take one out. KeyError if it does not wait."""
        waiter = self._waiters.pop(sequence)
        key = waiter.key
        del self._order[bisect_left(self._order, key)]
        for pool in _lists_of(waiter):
            ordered = self._by_pool[pool]
            at = bisect_left(ordered, key)
            del ordered[at]
            self._changed(at)
        for place in waiter.places:
            self._waiting_at[place] -= 1
            if not self._waiting_at[place]:
                del self._waiting_at[place]
        self.awaited.remove(waiter.required)
        return waiter

    def get(self, sequence: int) -> Waiter | None:
        """The waiter with this sequence."""
        return self._waiters.get(sequence)

    def position(self, key: Key) -> int:
        """1 for the first in the order."""
        return bisect_left(self._order, key) + 1

    def in_view(self, pools: frozenset[str], key: Key, look_ahead: int) -> bool:
        """Whether everyone who comes before `key` in one of `pools` is within the look-ahead. Who lies beyond it is not
        granted: not everyone it might harm there is looked at."""
        return all(bisect_left(self._by_pool.get(pool, ()), key) < look_ahead for pool in pools)

    def head(self, look_ahead: int) -> list[Waiter]:
        """The first `look_ahead` waiters of every pool and for any card, in order. Not to be changed; it stays as it is
        when the queue changes."""
        if self._head is None or self._head[0] != look_ahead:
            seen: set[Key] = set()
            for keys in self._by_pool.values():
                seen.update(keys[:look_ahead])
            self._head = look_ahead, [self._waiters[sequence] for _, sequence in sorted(seen)]
        return self._head[1]

    def all_served(self, places: set[str]) -> bool:
        """Whether everybody waits at one of `places`."""
        return self._waiting_at.keys() <= places

    def _changed(self, at: int) -> None:
        """Somebody came or went at this place of a pool."""
        if self._head is not None and at < self._head[0]:
            self._head = None


def _lists_of(waiter: Waiter) -> frozenset[str]:
    return waiter.pools | {ANY_CARD} if waiter.floating else waiter.pools

"""Who could be asked to vacate: active, unpinned holders by recency, with sums, so that finding out that asking would
not help takes no look at each of them (rules 19, 20)."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import merge

from weighbridge_ledger.book.charging import Usage
from weighbridge_ledger.book.states import Charge


@dataclass(frozen=True, slots=True)
class Resident:
    """One holder that may be asked, now or later."""

    lease_id: str
    charge: Charge
    priority: int
    last_use: float
    """Since when it is idle, on the monotonic clock; infinite while it is in use, loading, or not heard of."""
    resident_until: float
    """The end of its minimum residency."""
    ripe: bool
    """Idle long enough, and past its minimum residency: it may be asked for anyone."""

    def may_be_asked(self, now: float) -> bool:
        """Whether it may be asked for a claim that is protected: idle for any time, and past its minimum residency."""
        return self.last_use < math.inf and self.resident_until <= now


class Residents:
    """The holders that may be asked, by pool and recency. Devices that a lease is on without bytes count as pools."""

    def __init__(self) -> None:
        self._known: dict[str, Resident] = {}
        self._by_pool: dict[str, list[tuple[float, str]]] = {}
        self._sums: dict[tuple[int, bool], Usage] = {}
        self._ripe_count = 0

    def get(self, lease_id: str) -> Resident | None:
        """One of them."""
        return self._known.get(lease_id)

    def put(self, resident: Resident) -> None:
        """Take one in, or what is new about it."""
        before = self._known.get(resident.lease_id)
        if before == resident:
            return
        if before is not None:
            self.drop(resident.lease_id)
        self._known[resident.lease_id] = resident
        for pool in _places(resident.charge):
            insort(self._by_pool.setdefault(pool, []), (resident.last_use, resident.lease_id))
        self._sum(resident).add(resident.charge)
        self._ripe_count += resident.ripe

    def drop(self, lease_id: str) -> None:
        """Take one out. Unknown: nothing happens."""
        resident = self._known.pop(lease_id, None)
        if resident is None:
            return
        key = (resident.last_use, lease_id)
        for pool in _places(resident.charge):
            ordered = self._by_pool[pool]
            del ordered[bisect_left(ordered, key)]
        self._sum(resident).remove(resident.charge)
        self._ripe_count -= resident.ripe

    def without(self, usage: Usage, level: int, *, ripe_only: bool) -> Usage:
        """What would be charged if everyone vacated who may be asked at `level`, at once or (not `ripe_only`) later."""
        for (priority, ripe), sums in self._sums.items():
            if priority <= level and (ripe or not ripe_only):
                usage = usage.less(sums)
        return usage

    def ripe(self, pools: Iterable[str], level: int) -> Iterator[Resident]:
        """Those who may be asked for anyone, least recently used first."""
        left = self._ripe_count
        for resident in self._in_order(pools):
            if left == 0 or resident.last_use == math.inf:
                return
            if resident.ripe:
                left -= 1
                if resident.priority <= level:
                    yield resident

    def staged(self, pools: Iterable[str], level: int, now: float) -> Iterator[Resident]:
        """Those who may be asked for a protected claim, least recently used first: at once, and then those who may be
        asked later. The young among the idle ones come in the order of their use, whichever they are."""
        pools = tuple(pools)
        for resident in self._in_order(pools):
            if resident.last_use == math.inf:
                break
            if resident.priority <= level and resident.resident_until <= now:
                yield resident
        for resident in self._in_order(pools):
            if resident.priority <= level and not resident.may_be_asked(now):
                yield resident

    def _in_order(self, pools: Iterable[str]) -> Iterator[Resident]:
        last = ""
        for _, lease_id in merge(*(self._by_pool.get(pool, ()) for pool in pools)):
            if lease_id != last:  # the same key in several pools comes out in a row
                last = lease_id
                yield self._known[lease_id]

    def _sum(self, resident: Resident) -> Usage:
        return self._sums.setdefault((resident.priority, resident.ripe), Usage())


def _places(charge: Charge) -> frozenset[str]:
    return charge.pools.union(charge.occupies)

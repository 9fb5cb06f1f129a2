"""Who could be asked to vacate: active, unpinned holders by recency, with sums, so that neither finding out that asking
would not help nor finding those who help takes a look at each of them (rules 19, 20)."""

import enum
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import merge

from weighbridge_common.immutable import immutable

from weighbridge_ledger.book.charging import Usage
from weighbridge_ledger.book.states import Charge


class Stage(enum.Enum):
    """How soon a holder may be asked."""

    RIPE = enum.auto()
    """Idle long enough, and past its minimum residency: for anyone."""
    SETTLED = enum.auto()
    """Idle, and past its minimum residency: for a claim that is protected."""
    YOUNG = enum.auto()
    """Idle, and not past it."""
    BUSY = enum.auto()
    """In use, loading, or not heard of."""


_NOW_IF_PROTECTED = (Stage.RIPE, Stage.SETTLED)
_LATER = (Stage.YOUNG, Stage.BUSY)


@immutable
class Resident:
    """One holder that may be asked, now or later."""

    lease_id: str
    charge: Charge
    priority: int
    last_use: float
    """Since when it is idle, on the monotonic clock; infinite while it is in use, loading, or not heard of."""
    resident_until: float
    """The end of its minimum residency."""
    stage: Stage
    """As it was when it was put in: to be put in again when that changes."""

    @property
    def ripe(self) -> bool:
        """Whether it may be asked for anyone."""
        return self.stage is Stage.RIPE

    def may_be_asked(self, now: float) -> bool:
        """Whether it may be asked for a claim that is protected: idle for any time, and past its minimum residency."""
        return self.last_use < math.inf and self.resident_until <= now


class Residents:
    """The holders that may be asked, by pool, priority, stage and recency. Devices that a lease is on without bytes are
    pools too."""

    def __init__(self) -> None:
        self._known: dict[str, Resident] = {}
        self._ordered: dict[tuple[str, int, Stage], list[tuple[float, str]]] = {}
        self._sums: dict[tuple[int, bool], Usage] = {}

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
            ordered = self._ordered.setdefault((pool, resident.priority, resident.stage), [])
            insort(ordered, (resident.last_use, resident.lease_id))
        self._sum(resident).add(resident.charge)

    def drop(self, lease_id: str) -> None:
        """Take one out. Unknown: nothing happens."""
        resident = self._known.pop(lease_id, None)
        if resident is None:
            return
        key = (resident.last_use, lease_id)
        for pool in _places(resident.charge):
            ordered = self._ordered[pool, resident.priority, resident.stage]
            del ordered[bisect_left(ordered, key)]
        self._sum(resident).remove(resident.charge)

    def without(self, usage: Usage, level: int, spared: Iterable[str], *, ripe_only: bool) -> Usage:
        """What would be charged if everyone but the spared ones vacated who may be asked at `level`, at once or (not
        `ripe_only`) later."""
        left = usage.copy()
        for (priority, ripe), sums in self._sums.items():
            if priority <= level and (ripe or not ripe_only):
                left.take_out(sums)
        for lease_id in spared:
            resident = self._known.get(lease_id)
            if resident is not None and resident.priority <= level and (resident.ripe or not ripe_only):
                left.add(resident.charge)
        return left

    def ripe(self, pools: Iterable[str], level: int) -> Iterator[Resident]:
        """Those who may be asked for anyone, least recently used first."""
        return self._in_order(pools, level, (Stage.RIPE,))

    def any_askable_now(self, pools: Iterable[str], level: int) -> bool:
        """Whether a protected claim could ask anybody at once."""
        return next(self._in_order(pools, level, _NOW_IF_PROTECTED), None) is not None

    def staged(self, pools: Iterable[str], level: int) -> Iterator[Resident]:
        """Those who may be asked for a protected claim, least recently used first: at once, and then those who may be
        asked later. The young among the idle ones come in the order of their use, whichever they are."""
        pools = tuple(pools)
        yield from self._in_order(pools, level, _NOW_IF_PROTECTED)
        yield from self._in_order(pools, level, _LATER)

    def _in_order(self, pools: Iterable[str], level: int, stages: tuple[Stage, ...]) -> Iterator[Resident]:
        priorities = {priority for priority, _ in self._sums if priority <= level}
        keys = [(pool, priority, stage) for pool in pools for priority in priorities for stage in stages]
        last = ""
        for _, lease_id in merge(*(self._ordered[key] for key in keys if key in self._ordered)):
            if lease_id != last:  # the same key in several pools comes out in a row
                last = lease_id
                yield self._known[lease_id]

    def _sum(self, resident: Resident) -> Usage:
        return self._sums.setdefault((resident.priority, resident.ripe), Usage())


def _places(charge: Charge) -> frozenset[str]:
    return charge.pools.union(charge.occupies)

"""Who could be asked for optional bytes: by recency, with sums, so that finding out whether that would help takes no
look at each of them (rule 4)."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import merge

from weighbridge_ledger.book.charging import Usage
from weighbridge_ledger.book.states import HOST, Charge


class Shrinkable:
    """Leases with optional bytes that were not asked back."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, Charge]] = {}
        self._by_pool: dict[str, list[tuple[float, str]]] = {}
        self._sum = Usage()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def put(self, lease_id: str, idle_since: float, charge: Charge) -> None:
        """Take one in, or what is new about it."""
        if self._known.get(lease_id) == (idle_since, charge):
            return
        self._forget(lease_id)
        self._known[lease_id] = idle_since, charge
        for pool in _optional_pools(charge):
            insort(self._by_pool.setdefault(pool, []), (idle_since, lease_id))
        self._sum.add_optional(charge)

    def drop(self, lease_id: str) -> None:
        """Take one out. Unknown: nothing happens."""
        self._forget(lease_id)
        self._known.pop(lease_id, None)

    def without(self, usage: Usage, spared: Iterable[str]) -> Usage | None:
        """What would be charged if all of them but the spared ones gave their optional bytes back; None: there is
        nobody else to be asked."""
        kept = [self._known[lease_id][1] for lease_id in spared if lease_id in self._known]
        if len(kept) == len(self._known):
            return None
        left = usage.copy()
        left.take_out(self._sum)
        for charge in kept:
            left.add_optional(charge)
        return left

    def in_order(self, pools: Iterable[str]) -> Iterator[tuple[str, Charge]]:
        """(lease, charge) of those with optional bytes in one of `pools`, longest idle first."""
        last = ""
        for _, lease_id in merge(*(self._by_pool.get(pool, ()) for pool in pools)):
            if lease_id != last:  # the same key in several pools comes out in a row
                last = lease_id
                yield lease_id, self._known[lease_id][1]

    def _forget(self, lease_id: str) -> None:
        known = self._known.get(lease_id)
        if known is not None:
            idle_since, charge = known
            for pool in _optional_pools(charge):
                ordered = self._by_pool[pool]
                del ordered[bisect_left(ordered, (idle_since, lease_id))]
            self._sum.add_optional(charge, -1)


def _optional_pools(charge: Charge) -> list[str]:
    pools = [device for device, _ in charge.optional_devices]
    return [HOST, *pools] if charge.optional_host_bytes else pools

"""Bytes that leases use above their grants and that could not be granted: charged to nobody, and given to nobody either
(rule 23). Summed up, so that no decision adds up all leases."""

from collections.abc import Mapping

from weighbridge_ledger.book.states import HOST, External

NOTHING: Mapping[str, int] = {}
"""No excess. Never written to."""


class Overruns:
    """By lease and by pool."""

    def __init__(self) -> None:
        self._by_lease: dict[str, dict[str, int]] = {}
        self._by_pool: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_lease)

    def set(self, lease_id: str, overrun: dict[str, int]) -> bool:
        """What one lease uses too much, by pool; empty: nothing. Returns whether that is news."""
        before = self._by_lease.pop(lease_id, {})
        if overrun:
            self._by_lease[lease_id] = overrun
        for sizes, sign in ((before, -1), (overrun, 1)):
            for pool, size in sizes.items():
                self._by_pool[pool] = self._by_pool.get(pool, 0) + sign * size
                if not self._by_pool[pool]:
                    del self._by_pool[pool]  # holders name the pools: names must not pile up
        return overrun != before

    def on_top_of(self, measured: External) -> External:
        """They count as held from outside, until they are gone."""
        if not self._by_lease:
            return measured
        devices = dict(measured.devices)
        for pool, size in self._by_pool.items():
            if pool != HOST:
                devices[pool] = devices.get(pool, 0) + size
        return External(measured.host_bytes + self._by_pool.get(HOST, 0), devices)

    def seen_from(self, lease_id: str, external: External, left: Mapping[str, int] = NOTHING) -> External:
        """What is held from outside, from the point of view of one lease: of its own excess only what is `left`."""
        own = self._by_lease.get(lease_id, NOTHING)
        if own == left:
            return external
        devices = dict(external.devices)
        for pool in (own.keys() | left.keys()) - {HOST}:
            devices[pool] = devices.get(pool, 0) + left.get(pool, 0) - own.get(pool, 0)
        return External(external.host_bytes + left.get(HOST, 0) - own.get(HOST, 0), devices)

"""What the ledger says about itself: metrics and one structured line for each thing that happens to a lease."""

import asyncio
from collections.abc import Iterable, Sequence

import structlog
from opentelemetry.metrics import CallbackOptions, Observation
from weighbridge_common.telemetry import meter

from weighbridge_ledger.book import HOST, Event, EventKind
from weighbridge_ledger.service.keeper import Keeper

_log = structlog.get_logger("weighbridge_ledger.lease")


class LedgerMetrics:
    """Counts decisions and waits; reports bytes and depth when they are collected. Free when telemetry is off."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._log = _log.bind()
        """Bound once: binding anew for each line would be half of what a line costs that is not wanted."""
        own = meter()
        self._decisions = own.create_counter(
            "weighbridge.admission.decisions", unit="{decision}", description="Claims by what became of them"
        )
        self._waits = own.create_histogram(
            "weighbridge.admission.wait", unit="s", description="From asking to the grant"
        )
        self._deficits = own.create_histogram(
            "weighbridge.admission.deficit", unit="By", description="Bytes that a claim missed when it began to wait"
        )
        self._evictions = own.create_histogram(
            "weighbridge.eviction.age", unit="s", description="From a holder's last use to being asked to vacate"
        )
        self._reclaims = own.create_counter(
            "weighbridge.reclaims", unit="{claim}", description="How often holders were asked to vacate for a claim"
        )
        own.create_observable_gauge(
            "weighbridge.lease.bytes", [self._bytes], unit="By", description="Bytes charged to leases, by pool"
        )
        own.create_observable_gauge(
            "weighbridge.capacity.bytes", [self._ceilings], unit="By", description="Ceilings in force, by pool"
        )
        own.create_observable_gauge(
            "weighbridge.admission.queue", [self._depth], unit="{claim}", description="Claims that wait"
        )
        keeper.listen(self.on_events)

    def refused(self, reason: str) -> None:
        """An Admit call ended without a lease, or its lease ended before it was activated."""
        self._decisions.add(1, {"weighbridge.decision": "refused", "weighbridge.reason": reason})

    def on_events(self, events: Sequence[Event]) -> None:
        """Count and log what was committed: after the calls that wait for the commit have been answered."""
        asyncio.get_running_loop().call_soon(self._count_and_log, tuple(events))

    def _count_and_log(self, events: tuple[Event, ...]) -> None:
        for event in events:
            lease = event.lease
            if lease is None:
                self._log.info("ceilings_changed")
                continue
            if event.kind is EventKind.GRANTED:
                self._decisions.add(1, {"weighbridge.decision": "granted", "weighbridge.reason": ""})
                self._waits.record(max(0.0, event.wall - lease.requested_wall))
            elif event.kind is EventKind.QUEUED:
                self._decisions.add(1, {"weighbridge.decision": "queued", "weighbridge.reason": ""})
                self._count_deficit(lease.lease_id)
            elif event.kind is EventKind.RECLAIMING:
                self._count_reclaim(event)
            tell = self._log.warning if event.kind in (EventKind.SUSPECTED, EventKind.OVERDUE) else self._log.info
            tell(
                f"lease_{event.kind.lower()}",
                lease_id=lease.lease_id,
                fence=lease.fence,
                bytes=lease.charge.total_bytes,
                claimed_bytes=lease.claim.total_bytes,
                holder=lease.holder_name,
                holder_pid=lease.holder.pid,
                model=lease.purpose.model_name,
                cause=None if event.cause is None else event.cause.value,
                **({"asked": event.asked} if event.asked else {}),
            )

    def _count_deficit(self, lease_id: str) -> None:
        waiting = self._keeper.book.waiting_for(lease_id)
        if waiting is not None and waiting[2]:
            self._deficits.record(max(reason.missing_bytes for reason in waiting[2]))

    def _count_reclaim(self, event: Event) -> None:
        self._reclaims.add(1)
        for lease_id in event.asked:
            view = self._keeper.book.view(lease_id)
            if view is not None:
                lease = view.lease
                last_used = max(view.last_use_wall, lease.loaded_wall, lease.activated_wall)
                self._evictions.record(max(0.0, event.wall - last_used))

    def _bytes(self, _options: CallbackOptions) -> Iterable[Observation]:
        sums = self._keeper.book.committed()
        yield Observation(sums.host_bytes, {"weighbridge.pool": HOST})
        for device, size in sums.devices.items():
            yield Observation(size, {"weighbridge.pool": device})

    def _ceilings(self, _options: CallbackOptions) -> Iterable[Observation]:
        ceilings = self._keeper.book.ceilings
        for pool in (HOST, *ceilings.devices):
            yield Observation(ceilings.pool_bytes(pool), {"weighbridge.pool": pool})

    def _depth(self, _options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(self._keeper.book.queue_depth)

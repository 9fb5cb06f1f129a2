"""The book: every verb in one place, and what can be read off it."""

from collections.abc import Iterator

from weighbridge_common.immutable import immutable

from weighbridge_ledger.book.admission import AdmissionVerbs
from weighbridge_ledger.book.entries import Released
from weighbridge_ledger.book.holding import HolderVerbs
from weighbridge_ledger.book.states import HOST, Ceilings, External, Lease, Moment, Observed
from weighbridge_ledger.book.upkeep import UpkeepVerbs


@immutable
class LeaseView:
    """A lease with everything that is known about it just now, except its secret."""

    lease: Lease
    queue_position: int = 0
    deadline: float | None = None
    """On the monotonic clock."""
    vacate_deadline: float | None = None
    overdue: bool = False
    """It was to vacate by then."""
    asked_by: str = ""
    """VACATING: the claim for which it was asked; empty: it was released."""
    shrink: tuple[int, float] | None = None
    """(bytes, monotonic deadline): optional bytes that were asked back."""
    level: int = 0
    """What waiting has raised its priority to."""
    replaces: str = ""
    """The lease whose place it waits to take."""
    uses: int = 0
    last_use_wall: float = 0.0
    connected: bool = False
    observed: Observed | None = None
    cause: str = ""
    released_wall: float = 0.0


@immutable
class Committed:
    """Sums of charges."""

    host_bytes: int
    devices: dict[str, int]
    total_bytes: int

    def on(self, pool: str) -> int:
        """The sum in one pool."""
        return self.host_bytes if pool == HOST else self.devices.get(pool, 0)


class Book(AdmissionVerbs, HolderVerbs, UpkeepVerbs):
    """Who holds which bytes of one machine.

    Verbs take the moment they happen at and leave what must be committed and told in `drain()`. They raise `Refused`
    and have then changed nothing. Not safe for concurrent use: one owner calls it, one verb at a time.
    """

    @property
    def ceilings(self) -> Ceilings:
        """The ceilings that admission uses now."""
        return self._ceilings

    @property
    def external(self) -> External:
        """What programs outside the ledger were last measured to hold."""
        return self._measured

    @property
    def queue_depth(self) -> int:
        """Claims that wait."""
        return len(self._queue)

    def overdue_wait_s(self, now: Moment) -> float:
        """For how long some claim has waited beyond its own deadline: 0, as long as time acts on this book."""
        return max(
            (now.monotonic - waiter.deadline for waiter in self._queue if waiter.deadline < now.monotonic), default=0.0
        )

    @property
    def lease_count(self) -> int:
        """Leases that are charged."""
        return len(self._entries)

    def committed(self) -> Committed:
        """What leases are charged."""
        devices = {device: size for device, size in self._usage.devices.items() if size}
        return Committed(self._usage.host_bytes, devices, self._usage.total_bytes)

    def secret_of(self, lease_id: str) -> str | None:
        """The secret to tell the holder; None after a restart or when there is no such lease."""
        entry = self._entries.get(lease_id)
        return None if entry is None else entry.secret

    def view(self, lease_id: str) -> LeaseView | None:
        """One lease, also a queued or a recently released one."""
        entry = self._entries.get(lease_id)
        if entry is not None:
            return LeaseView(
                entry.lease,
                deadline=entry.deadline,
                vacate_deadline=entry.vacate_deadline,
                overdue=entry.overdue,
                asked_by=entry.asked_by,
                shrink=None if entry.shrink is None else (entry.shrink.optional_bytes, entry.shrink.deadline),
                level=entry.lease.priority,
                uses=len(entry.uses),
                last_use_wall=entry.last_use_wall,
                connected=entry.keep_alives > 0,
                observed=entry.observed,
            )
        waiter = self._waiter(lease_id)
        if waiter is not None:
            return LeaseView(
                waiter.lease,
                queue_position=self._queue.position(waiter.key),
                deadline=waiter.deadline,
                level=waiter.level,
                replaces=waiter.replaces,
            )
        return next((_view_of(ended) for ended in reversed(self._released) if ended.lease.lease_id == lease_id), None)

    def lease_ids(self, *, include_released: bool = False, after: int = 0, most: int | None = None) -> list[str]:
        """Leases in the order of asking: all, or the first `most` of those with a sequence above `after`."""
        leases = [entry.lease for entry in self._entries.values()] + [waiter.lease for waiter in self._queue]
        if include_released:
            leases += [ended.lease for ended in self._released]
        ordered = sorted((lease.sequence, lease.lease_id) for lease in leases if lease.sequence > after)
        return [lease_id for _, lease_id in ordered[:most]]

    def charged(self) -> Iterator[LeaseView]:
        """The leases that are charged, in no particular order."""
        return (view for view in map(self.view, list(self._entries)) if view is not None)


def _view_of(ended: Released) -> LeaseView:
    return LeaseView(ended.lease, cause=ended.cause, released_wall=ended.wall)

"""Granting those who wait, after anything that may have made room (rules 16, 17, 25)."""

from collections.abc import Iterator
from itertools import takewhile

from weighbridge_ledger.book import passing
from weighbridge_ledger.book.charging import with_optional
from weighbridge_ledger.book.core import _ticket_of
from weighbridge_ledger.book.events import ReleaseCause
from weighbridge_ledger.book.queue import Waiter
from weighbridge_ledger.book.reclaiming import ReclaimCore, own_leases
from weighbridge_ledger.book.records import DropTicket, PutTicket
from weighbridge_ledger.book.states import Charge, Claim, Hold, Lease, Moment


class SettlingCore(ReclaimCore):
    """Grants in order, and asks for what is missing when nobody more can be granted."""

    def _settle(self, now: Moment) -> None:
        """Grant whoever can be granted; then let the first of those who cannot ask."""
        while self._unsettled or self._unasked:
            if not len(self._queue):
                self._unsettled = self._unasked = False
                return
            if self._unsettled and self._grant_next(now):
                continue
            self._unsettled = self._unasked = False
            self._reclaim(now)
            for sequence in list(self._careful):
                careful = self._queue.get(sequence)
                if careful is not None and not self._may_go_on_waiting(careful, now):
                    self._unqueue(careful, ReleaseCause.WOULD_WAIT_FOR_USE, now)

    def _grant_next(self, now: Moment) -> bool:
        """Grant the first in order who may be granted; False: nobody may."""
        grant = passing.next_grant(
            self._queue,
            self._machine(),
            self._aiming(now) if self._ceilings.devices else None,
            self._held_for if self._anything_held() else None,
            now.monotonic,
            self._policy,
        )
        if grant is None:
            return False
        waiter = grant.waiter
        self._count_passes(grant.passed)
        self._leave_queue(waiter, now)
        if waiter.lease.request_id:
            self._writes.append(DropTicket(waiter.lease.request_id))
        charge = self._with_optional(grant.charge, grant.target, waiter.lease)
        self._grant(waiter.lease, charge, waiter.stream, now)
        return True

    def _held_for(self, waiter: Waiter, target: Claim) -> Hold | None:
        return self._held(waiter.lease.claim, target)

    def _with_optional(self, charge: Charge, target: Claim, lease: Lease) -> Charge:
        """The charge of a grant, with what is left over of the claim's optional bytes (rule 4)."""
        return with_optional(
            charge,
            target,
            self._ceilings,
            self._external,
            self._usage,
            self._queue.awaited,
            self._policy.optional_step_bytes,
            lease.memory_limit_bytes,
        )

    def _count_passes(self, passed: tuple[Waiter, ...]) -> None:
        for waiter in passed:
            waiter.passes += 1
            if waiter.lease.request_id:
                self._writes.append(PutTicket(_ticket_of(waiter)))

    def _contenders(self) -> Iterator[Waiter]:
        """Those who wait and must not be harmed, in order: not those who wait for a device to get well."""
        for waiter in self._queue.head(self._policy.look_ahead):
            hold = self._held(waiter.lease.claim, waiter.claim)
            if hold is None or not hold.lasts:
                yield waiter

    def _ahead_of(self, waiter: Waiter) -> list[Waiter]:
        """Those before a claim whom it must not harm."""
        return list(takewhile(lambda other: other.key < waiter.key, self._contenders()))

    def _may_go_on_waiting(self, waiter: Waiter, now: Moment) -> bool:
        """Whether a claim whose caller keeps a lease busy waits only for bytes that come back or that idle holders can
        be asked for (rule 25). Waiting for one in use, it and that one's caller might wait for each other."""
        machine = self._machine()
        settled = self._residents.without(machine.settled_for(waiter), waiter.level, own_leases(waiter), ripe_only=True)
        floating = passing.bindings(waiter, machine, settled)
        ahead = self._ahead_of(waiter)
        for target in floating if waiter.floating else (waiter.claim,):
            charge = passing.price_of(waiter, target, self._ceilings, self._external, settled)
            if (
                isinstance(charge, Charge)
                and self._queue.in_view(charge.pools, waiter.key, self._policy.look_ahead)
                and passing.may_pass(ahead, charge, machine, now.monotonic, self._policy) is not None
            ):
                return True
        return False

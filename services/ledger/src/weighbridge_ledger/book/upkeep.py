"""What moves the book besides calls: time, deaths, measurements, ceilings, and a restart (rules 3, 4, 12, 14)."""

from weighbridge_common.processes import ProcessIdentity

from weighbridge_ledger.book.charging import pools_wanted, static_shortage
from weighbridge_ledger.book.core import BookCore
from weighbridge_ledger.book.entries import Entry, Place
from weighbridge_ledger.book.events import Event, EventKind, ReleaseCause
from weighbridge_ledger.book.records import DropTicket, Snapshot
from weighbridge_ledger.book.states import Ceilings, External, Lease, LeaseState, Moment


class UpkeepVerbs(BookCore):
    """Nobody calls these for one lease; the ledger calls them for all."""

    def tick(self, now: Moment) -> None:
        """Let time act. To be called more often than half of the shortest term, else it counts as a standstill."""
        self._advance(now)

    def processes_to_watch(self) -> frozenset[ProcessIdentity]:
        """The processes whose death would free something and can be known from here."""
        return frozenset(process for entry in self._entries.values() for process in self._witnesses(entry.lease))

    def processes_died(self, dead: frozenset[ProcessIdentity], now: Moment) -> None:
        """Frees every lease all of whose processes are among `dead`: the only proof that a silent holder's bytes are
        free (rule 12; the client's death alone would free an orphan engine's bytes). A VACATING lease needs only its
        engines' death: its holder has given it back (rule 13)."""
        self._advance(now)
        if dead:
            for entry in list(self._entries.values()):
                witnesses = self._witnesses(entry.lease)
                if witnesses and dead.issuperset(witnesses):
                    self._free(entry, ReleaseCause.PROCESSES_DEAD, now)
        self._settle(now)

    def set_ceilings(self, ceilings: Ceilings, now: Moment) -> None:
        """New ceilings: evicts nobody (rule 4). Waiters that can never be granted under them are told so."""
        self._advance(now)
        if ceilings == self._ceilings:
            return
        self._ceilings = ceilings
        self._unsettled = True
        self._events.append(Event(EventKind.CEILINGS_CHANGED, now.wall, ceilings=ceilings))
        for waiter in list(self._queue):
            if static_shortage(waiter.claim, ceilings) is not None:
                self._unqueue(waiter, ReleaseCause.EXCEEDS_CAPACITY, now)
            elif (pools := pools_wanted(waiter.claim, ceilings)) != waiter.pools:
                # What may spill now, or no longer may, competes in other pools.
                self._queue.remove(waiter.sequence)
                waiter.pools = pools
                self._queue.add(waiter)
        self._settle(now)

    def set_external(self, external: External, now: Moment) -> None:
        """What programs outside the ledger hold now. It makes claims wait and never refuses them (rule 3)."""
        self._advance(now)
        if external != self._measured:
            self._measured = external
            self._refresh_external()
        self._settle(now)

    def restore(self, snapshot: Snapshot, now: Moment) -> None:
        """Takes up what was committed before a restart; called once, on an empty book (rule 14).

        States and charges stay. Every survivor gets a term × (1..2), spread; GRANTED gets one more activate_by. The
        queue is not restored, because a claim whose client is gone would head it for ever (S): only its places are.
        """
        self._counter = self._counter_reserved = snapshot.counter
        for lease in sorted(snapshot.leases, key=lambda lease: lease.fence):
            entry = Entry(lease, now.monotonic, last_use_wall=now.wall)
            self._entries[lease.lease_id] = entry
            self._charge(entry)
            if lease.request_id:
                self._by_request[lease.request_id] = lease.lease_id
            if lease.state is LeaseState.VACATING:
                entry.vacate_deadline = now.monotonic
                self._pending.add(lease.charge)
            self._extend(entry, now)
            self._schedule(entry)
        expires = now.monotonic + self._policy.ticket_s
        for ticket in sorted(snapshot.tickets, key=lambda ticket: ticket.sequence):
            if ticket.request_id in self._by_request:
                self._writes.append(DropTicket(ticket.request_id))
            else:
                waited = min(max(0.0, now.wall - ticket.first_wall), self._policy.max_wait_s)
                self._places[ticket.request_id] = Place(ticket, now.monotonic - waited, expires)
        for ended in sorted(snapshot.ended, key=lambda ended: ended.ended_wall):
            self._remember(ended, now)
        self._looked_at = now.monotonic

    def _witnesses(self, lease: Lease) -> tuple[ProcessIdentity, ...]:
        """The processes all of whose deaths prove that the bytes of a lease are free; none where that cannot be known.

        A process that was seen from here when it was granted is dead after a reboot; one of another host or container
        only looks so, because its boot id or its pids are others.
        """
        needed = lease.engines if lease.state is LeaseState.VACATING else lease.processes
        return () if lease.foreign and not all(map(self._home.sees, needed)) else needed

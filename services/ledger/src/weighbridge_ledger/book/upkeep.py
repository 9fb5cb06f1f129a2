"""What moves the book besides calls: time, deaths, measurements, ceilings, and a restart (rules 3, 4, 12, 14)."""

from collections.abc import Iterable, Mapping

from weighbridge_common.processes import ProcessIdentity

from weighbridge_ledger.book.charging import NOTHING_USED, static_shortage
from weighbridge_ledger.book.entries import Entry
from weighbridge_ledger.book.events import Event, EventKind, ReleaseCause
from weighbridge_ledger.book.placing import on_cards
from weighbridge_ledger.book.queue import Waiter
from weighbridge_ledger.book.records import DropTicket, Snapshot
from weighbridge_ledger.book.states import (
    HOST,
    NO_EXTERNAL,
    Ceilings,
    Claim,
    External,
    Hold,
    LeaseState,
    Moment,
)
from weighbridge_ledger.book.timing import TimedCore


class UpkeepVerbs(TimedCore):
    """Nobody calls these for one lease; the ledger calls them for all."""

    def tick(self, now: Moment) -> None:
        """Let time act. To be called more often than half of the shortest term, else it counts as a standstill."""
        self._advance(now)

    def processes_to_watch(self) -> frozenset[ProcessIdentity]:
        """The processes whose death would free something and can be known from here."""
        return self._witnesses.processes()

    def processes_died(self, dead: frozenset[ProcessIdentity], now: Moment) -> None:
        """Frees every lease all of whose processes are among `dead`: the only proof that a silent holder's bytes are
        free (rule 12; the client's death alone would free an orphan engine's bytes). A VACATING lease needs only its
        engines' death, if it has any: its holder can start no more under it (rule 13)."""
        self._advance(now)
        freed = [self._entries[lease_id] for lease_id in self._witnesses.freed_by(dead)]
        for entry in sorted(freed, key=lambda entry: entry.lease.fence):
            self._free(entry, ReleaseCause.PROCESSES_DEAD, now)
        self._settle(now)

    def set_ceilings(self, ceilings: Ceilings, now: Moment) -> None:
        """New ceilings: evicts nobody (rule 4). Waiters that can never be granted under them are told so."""
        self._advance(now)
        if ceilings == self._ceilings:
            return
        self._ceilings = ceilings
        self._hopes += 1
        self._unsettled = True
        self._events.append(Event(EventKind.CEILINGS_CHANGED, now.wall, ceilings=ceilings))
        for waiter in list(self._queue):
            target = self._target_under(waiter, ceilings)
            if target is None:
                self._unqueue(waiter, ReleaseCause.EXCEEDS_CAPACITY, now)
            else:
                # What may spill now, or no longer may, competes in other pools.
                self._set_target(waiter, target)
        self._settle(now)

    def set_holds(self, holds: Mapping[str, Hold], now: Moment) -> None:
        """Where nothing may be loaded for a while, by device id (GPU: that of a unified machine; empty: nothing on any
        GPU). Claims wait for it; what is loaded stays."""
        self._advance(now)
        if holds != self._holds:
            self._holds = dict(holds)
            self._unsettled = True
        self._settle(now)

    def set_external(self, external: External, now: Moment) -> None:
        """What programs outside the ledger hold now; to be called with each measurement. It makes claims wait and never
        refuses them, and a rise makes nobody vacate before several measurements in a row agree while nothing loads:
        what a loading engine has taken may be told late as its own (rule 3)."""
        self._advance(now)
        if self._loading:
            self._samples.clear()
        else:
            self._samples.append(external)
        before = self._steady
        if len(self._samples) == self._policy.steady_samples:
            self._steady = _least(self._samples)
        else:
            self._steady = _least((self._steady, external))
        if external != self._measured:
            self._measured = external
            self._refresh_external()
        self._unsettled = self._unsettled or self._steady != before
        self._settle(now)

    def restore(self, snapshot: Snapshot, now: Moment) -> None:
        """Takes up what was committed before a restart; called once, on an empty book (rule 14).

        States and charges stay. Every survivor gets a term × (1..2), spread; GRANTED gets one more activate_by. The
        queue is not restored, because a claim whose client is gone would head it for ever (S): only its places are.
        """
        self._counter = self._counter_reserved = snapshot.counter
        for lease in sorted(snapshot.leases, key=lambda lease: lease.fence):
            entry = Entry(
                lease, now.monotonic, last_use_wall=now.wall, idle_since=now.monotonic, heard=not lease.state.charged
            )
            self._entries[lease.lease_id] = entry
            self._witnesses.put(lease)
            self._charge(entry)
            if lease.request_id:
                self._by_request[lease.request_id] = lease.lease_id
            if lease.state is LeaseState.VACATING:
                entry.vacate_deadline = now.monotonic
                self._pending.add(lease.charge)
            if lease.loaded_wall:
                stay = self._residency_s(lease.load_s)
                # Read off the wall clock, which may have been set: it moves this by one residency at most.
                entry.resident_until = now.monotonic + min(max(0.0, lease.loaded_wall + stay - now.wall), stay)
            elif lease.state is not LeaseState.VACATING:
                self._begin_loading(entry, now.monotonic)
            self._extend(entry, now)
            self._review(entry, now)
        expires = now.monotonic + self._policy.ticket_s
        for ticket in sorted(snapshot.tickets, key=lambda ticket: ticket.sequence):
            if ticket.request_id in self._by_request:
                self._writes.append(DropTicket(ticket.request_id))
            else:
                waited = min(max(0.0, now.wall - ticket.first_wall), self._policy.max_wait_s)
                self._memories.restore_place(ticket, now.monotonic - waited, expires)
        for ended in sorted(snapshot.ended, key=lambda ended: ended.ended_wall):
            self._memories.restore_ended(ended, now)
        self._looked_at = now.monotonic

    @staticmethod
    def _target_under(waiter: Waiter, ceilings: Ceilings) -> Claim | None:
        """What a waiter aims at under other ceilings; None: there it can never be granted."""
        empty = on_cards(waiter.lease.claim, ceilings, NO_EXTERNAL, NOTHING_USED)
        limit = waiter.lease.memory_limit_bytes
        if empty is None or static_shortage(empty, ceilings, limit) is not None:
            return None
        return waiter.claim if static_shortage(waiter.claim, ceilings, limit) is None else empty


def _least(samples: Iterable[External]) -> External:
    """The least of several samples, pool by pool."""
    first, *others = samples
    devices = dict(first.devices)
    host = first.host_bytes
    for sample in others:
        host = min(host, sample.on(HOST))
        devices = {device: min(size, sample.on(device)) for device, size in devices.items()}
    return External(host, devices)

"""The state of the book and its primitive transitions. The verbs in `admission`, `holding` and `upkeep` are built of
these; nothing else changes a charge."""

import hashlib
import hmac
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count

from weighbridge_ledger.book import passing
from weighbridge_ledger.book.charging import Usage
from weighbridge_ledger.book.entries import Entry, Place, Released, Remembered
from weighbridge_ledger.book.events import Event, EventKind, ReleaseCause
from weighbridge_ledger.book.passing import Machine
from weighbridge_ledger.book.policy import Policy
from weighbridge_ledger.book.queue import Waiter, WaitQueue
from weighbridge_ledger.book.records import (
    DropEnded,
    DropLease,
    DropTicket,
    Ended,
    PutCounter,
    PutEnded,
    PutLease,
    PutTicket,
    Ticket,
    Write,
)
from weighbridge_ledger.book.states import (
    HOST,
    NO_EXTERNAL,
    Ceilings,
    Charge,
    External,
    Home,
    Lease,
    LeaseState,
    Moment,
)

NUMBERS_AHEAD = 1024
"""Fences and sequences are reserved on disk so many at a time: one row less in the commit of almost every grant. A
restart skips what is left of them."""


STALE_TIMERS = 256
"""Timers of what is over that may lie about before they are thrown out."""


@dataclass(frozen=True, slots=True)
class Drained:
    """What a verb left behind: first the writes are committed, then the events are told (rule 5)."""

    writes: tuple[Write, ...]
    events: tuple[Event, ...]


def digest_of(secret: str) -> bytes:
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode()).digest()


class BookCore:
    """Leases, sums, queue and clocks of one machine's book.

    Args:
        ceilings: what the machine allows.
        policy: the numbers of the rules.
        home: the kernel whose processes can be seen from here.
        new_id: makes an opaque lease id.
        new_secret: makes a secret of 128 random bits.
        spread: a number in [0, 1), so that extended terms do not all end at once (rule 14).
        now: the moment of construction.
    """

    def __init__(
        self,
        ceilings: Ceilings,
        policy: Policy,
        home: Home,
        new_id: Callable[[], str],
        new_secret: Callable[[], str],
        spread: Callable[[], float],
        now: Moment,
    ) -> None:
        self._ceilings = ceilings
        self._policy = policy
        self._home = home
        self._new_id = new_id
        self._new_secret = new_secret
        self._spread = spread
        self._measured = NO_EXTERNAL
        self._external = NO_EXTERNAL
        self._entries: dict[str, Entry] = {}
        self._queue = WaitQueue()
        self._queued: dict[str, int] = {}
        self._by_request: dict[str, str] = {}
        self._by_pool: dict[str, dict[str, None]] = {}
        self._places: OrderedDict[str, Place] = OrderedDict()
        self._ended: OrderedDict[str, Remembered] = OrderedDict()
        self._ended_requests: dict[str, str] = {}
        self._released: deque[Released] = deque(maxlen=policy.released_kept)
        self._overruns: dict[str, dict[str, int]] = {}
        """Bytes seen in use above a grant, by lease and pool: not granted, but nobody else is granted them either."""
        self._usage = Usage()
        self._pending = Usage()
        self._counter = 0
        self._counter_reserved = 0
        self._streams = count(1)
        self._timers: list[tuple[float, int, str]] = []
        self._timer_numbers = count()
        self._writes: list[Write] = []
        self._events: list[Event] = []
        self._looked_at = now.monotonic
        self._unsettled = False

    # -- what is left behind ---------------------------------------------------------------------------------------

    def drain(self) -> Drained:
        """Everything that happened since the last drain. To be called after every verb, also after one that refused:
        time may have moved other leases."""
        if self._counter > self._counter_reserved:
            self._counter_reserved = self._counter + NUMBERS_AHEAD
            self._writes.append(PutCounter(self._counter_reserved))
        drained = Drained(tuple(self._writes), tuple(self._events))
        self._writes, self._events = [], []
        return drained

    def _tell(
        self, kind: EventKind, now: Moment, lease: Lease | None = None, cause: ReleaseCause | None = None
    ) -> None:
        self._events.append(Event(kind, now.wall, lease, cause))

    def _number(self) -> int:
        """The next number of the store-wide counter that gives fences and sequences."""
        self._counter += 1
        return self._counter

    # -- charges ---------------------------------------------------------------------------------------------------

    def _machine(self) -> Machine:
        return Machine(self._ceilings, self._external, self._usage, self._pending)

    def _charge(self, entry: Entry) -> None:
        """Start charging an entry's grant."""
        self._usage.add(entry.lease.charge)
        for pool in entry.lease.charge.pools:
            self._by_pool.setdefault(pool, {})[entry.lease.lease_id] = None

    def _recharge(self, entry: Entry, charge: Charge) -> None:
        """Replace an entry's charge by another one."""
        self._uncharge(entry)
        entry.lease = replace(entry.lease, charge=charge)
        self._charge(entry)
        if entry.vacate_deadline is not None and not entry.overdue:
            self._pending.add(charge)

    def _uncharge(self, entry: Entry) -> None:
        charge = entry.lease.charge
        self._usage.remove(charge)
        for pool in charge.pools:
            self._by_pool[pool].pop(entry.lease.lease_id, None)
        if entry.vacate_deadline is not None and not entry.overdue:
            self._pending.remove(charge)
        self._unsettled = True

    def _set_overrun(self, entry: Entry, overrun: dict[str, int]) -> None:
        """Bytes above the grant that could not be granted count as held from outside, until they are gone."""
        lease_id = entry.lease.lease_id
        if overrun == self._overruns.get(lease_id, {}):
            return
        if overrun:
            self._overruns[lease_id] = overrun
        else:
            del self._overruns[lease_id]
        self._refresh_external()

    def _refresh_external(self) -> None:
        host = self._measured.host_bytes
        devices = dict(self._measured.devices)
        for overrun in self._overruns.values():
            for pool, size in overrun.items():
                if pool == HOST:
                    host += size
                else:
                    devices[pool] = devices.get(pool, 0) + size
        self._external = External(host, devices)
        self._unsettled = True

    def _external_beside(self, entry: Entry) -> External:
        """What is held from outside, from the point of view of one lease: its own excess is its own."""
        own = self._overruns.get(entry.lease.lease_id)
        if not own:
            return self._external
        devices = {device: size - own.get(device, 0) for device, size in self._external.devices.items()}
        return External(self._external.host_bytes - own.get(HOST, 0), devices)

    # -- transitions -----------------------------------------------------------------------------------------------

    def _grant(self, waiting: Lease, charge: Charge, stream: int, now: Moment) -> Entry:
        """QUEUED → GRANTED: charged, with a fence, a secret and a short time to activate (rule 6)."""
        secret = self._new_secret()
        lease = replace(
            waiting,
            state=LeaseState.GRANTED,
            charge=charge,
            fence=self._number(),
            secret_digest=digest_of(secret),
            granted_wall=now.wall,
        )
        deadline = now.monotonic + self._policy.activate_by_s
        entry = Entry(lease, deadline, secret=secret, stream=stream, last_use_wall=now.wall)
        self._entries[lease.lease_id] = entry
        self._charge(entry)
        self._write(entry)
        self._tell(EventKind.GRANTED, now, entry.lease)
        self._schedule(entry)
        return entry

    def _renew_secret(self, entry: Entry) -> None:
        """A new secret; the old one is void.

        Only its digest is stored: a copy of the database gives nobody authority. What that costs: after a restart a
        retry by the same process gets a new secret instead of the same one, which is what AttachLease does anyway.
        """
        entry.secret = self._new_secret()
        entry.lease = replace(
            entry.lease, secret_digest=digest_of(entry.secret), previous_digest=entry.lease.secret_digest
        )

    def _holds(self, entry: Entry, secret: str) -> bool:
        return hmac.compare_digest(digest_of(secret), entry.lease.secret_digest)

    def _vacate(self, entry: Entry, now: Moment) -> None:
        """ACTIVE → VACATING, one way (rule 21): charged as before, and counted as coming back until its deadline."""
        entry.lease = replace(entry.lease, state=LeaseState.VACATING)
        entry.vacate_deadline = now.monotonic + self._policy.vacate_s
        self._pending.add(entry.lease.charge)
        self._unsettled = True
        self._write(entry)
        self._tell(EventKind.VACATING, now, entry.lease)
        self._schedule(entry)

    def _free(self, entry: Entry, cause: ReleaseCause, now: Moment) -> Lease:
        """GRANTED, ACTIVE, VACATING → RELEASED: the bytes are free."""
        lease = entry.lease
        self._uncharge(entry)
        del self._entries[lease.lease_id]
        self._set_overrun(entry, {})
        self._writes.append(DropLease(lease.lease_id))
        if lease.state is LeaseState.GRANTED:
            # It had its turn: it keeps its place for a retry, and waits anew.
            self._keep_place(Ticket(lease.request_id, lease.claim, lease.sequence, now.wall, 0), now.monotonic, now)
        else:
            self._remember_ended(lease, now)
        return self._end(lease, cause, now)

    def _end(self, lease: Lease, cause: ReleaseCause, now: Moment) -> Lease:
        if self._by_request.get(lease.request_id) == lease.lease_id:
            del self._by_request[lease.request_id]
        ended = replace(lease, state=LeaseState.RELEASED, suspect=False)
        self._released.append(Released(ended, cause, now.wall))
        self._tell(EventKind.RELEASED, now, ended, cause)
        return ended

    def _unqueue(self, waiter: Waiter, cause: ReleaseCause, now: Moment) -> Lease:
        """QUEUED → RELEASED: nothing was charged; the place is kept for a retry (rule 14)."""
        self._queue.remove(waiter.sequence)
        del self._queued[waiter.lease.lease_id]
        self._unsettled = True
        self._keep_place(self._place_of(waiter), waiter.since, now)
        return self._end(waiter.lease, cause, now)

    def _waiter(self, lease_id: str) -> Waiter | None:
        sequence = self._queued.get(lease_id)
        return None if sequence is None else self._queue.get(sequence)

    def _write(self, entry: Entry) -> None:
        self._writes.append(PutLease(entry.lease))

    # -- what outlives a lease -------------------------------------------------------------------------------------

    def _keep_place(self, ticket: Ticket, since: float, now: Moment) -> None:
        if not ticket.request_id:
            return
        self._places[ticket.request_id] = Place(ticket, since, now.monotonic + self._policy.ticket_s)
        self._places.move_to_end(ticket.request_id)
        self._writes.append(PutTicket(ticket))
        if len(self._places) > self._policy.tickets_kept:
            self._give_place_up(next(iter(self._places)))

    def _give_place_up(self, request_id: str) -> None:
        del self._places[request_id]
        self._writes.append(DropTicket(request_id))

    def _remember_ended(self, lease: Lease, now: Moment) -> None:
        ended = Ended(lease.lease_id, lease.request_id, lease.secret_digest, now.wall)
        self._remember(ended, now)
        self._writes.append(PutEnded(ended))
        if len(self._ended) > self._policy.ended_kept:
            self._forget_ended(next(iter(self._ended)))

    def _remember(self, ended: Ended, now: Moment) -> None:
        self._ended[ended.lease_id] = Remembered(ended, now.monotonic + self._policy.ended_s)
        if ended.request_id:
            self._ended_requests[ended.request_id] = ended.lease_id

    def _forget_ended(self, lease_id: str) -> None:
        ended = self._ended.pop(lease_id).ended
        if self._ended_requests.get(ended.request_id) == lease_id:
            del self._ended_requests[ended.request_id]
        self._writes.append(DropEnded(lease_id))

    # -- granting those who wait -----------------------------------------------------------------------------------

    def _settle(self, now: Moment) -> None:
        """Grant whoever can be granted, after anything that may have made room."""
        while self._unsettled:
            if not len(self._queue):
                self._unsettled = False
                return
            head = self._queue.head(self._policy.look_ahead)
            grant = passing.next_grant(head, self._machine(), now.monotonic, self._policy)
            if grant is None:
                self._unsettled = False
                return
            self._count_passes(grant.passed)
            waiter = self._queue.remove(grant.waiter.sequence)
            del self._queued[waiter.lease.lease_id]
            if waiter.lease.request_id:
                self._writes.append(DropTicket(waiter.lease.request_id))
            self._grant(waiter.lease, grant.charge, waiter.stream, now)

    def _count_passes(self, passed: tuple[Waiter, ...]) -> None:
        for waiter in passed:
            waiter.passes += 1
            if waiter.lease.request_id:
                self._writes.append(PutTicket(self._place_of(waiter)))

    def _place_of(self, waiter: Waiter) -> Ticket:
        """The place of a waiter as a restart would find it; a restart gives it its minute from then on."""
        lease = waiter.lease
        return Ticket(lease.request_id, lease.claim, lease.sequence, waiter.first_wall, waiter.passes)

    # -- time ------------------------------------------------------------------------------------------------------

    def _schedule(self, entry: Entry) -> None:
        """Look at `entry` when it is next due. A deadline that moved away needs nothing: the old look finds out."""
        due = self._due(entry)
        if due is not None and (entry.timer is None or due < entry.timer):
            entry.timer = due
            self._look_at(entry.lease.lease_id, due)

    def _look_at(self, lease_id: str, when: float) -> None:
        heappush(self._timers, (when, next(self._timer_numbers), lease_id))
        if len(self._timers) > 2 * (len(self._entries) + len(self._queue)) + STALE_TIMERS:
            # A deadline may lie minutes ahead, and claims come and go in milliseconds: what ended must not pile up.
            self._timers = [timer for timer in self._timers if self._timer_of(timer[2]) == timer[0]]
            heapify(self._timers)

    def _timer_of(self, lease_id: str) -> float | None:
        entry = self._entries.get(lease_id)
        if entry is not None:
            return entry.timer
        waiter = self._waiter(lease_id)
        return None if waiter is None else waiter.timer

    def _due(self, entry: Entry) -> float | None:
        overdue = entry.vacate_deadline if entry.vacate_deadline is not None and not entry.overdue else None
        if not entry.lease.suspect:
            silent: float | None = entry.deadline
        else:
            silent = entry.deadline + self._policy.grace_s if entry.lease.foreign else None
        return min((due for due in (overdue, silent) if due is not None), default=None)

    def _advance(self, now: Moment) -> None:
        """Let time act, before anything else does. At the deadline itself the term is over (rule 10)."""
        gap = now.monotonic - self._looked_at
        self._looked_at = max(self._looked_at, now.monotonic)
        if gap > self._policy.standstill_s:
            self._extend_after(gap, now)
        while self._timers and self._timers[0][0] <= now.monotonic:
            when, _, lease_id = heappop(self._timers)
            if self._timer_of(lease_id) != when:
                continue
            if (entry := self._entries.get(lease_id)) is not None:
                entry.timer = None
                self._act_on_time(entry, now)
            elif (waiter := self._waiter(lease_id)) is not None:
                waiter.timer = None
                self._act_on_waiter(waiter, now)
        while self._places and (oldest := next(iter(self._places.values()))).expires <= now.monotonic:
            self._give_place_up(oldest.ticket.request_id)
        while self._ended and next(iter(self._ended.values())).expires <= now.monotonic:
            self._forget_ended(next(iter(self._ended)))
        self._settle(now)

    def _act_on_time(self, entry: Entry, now: Moment) -> None:
        lease = entry.lease
        if entry.vacate_deadline is not None and not entry.overdue and entry.vacate_deadline <= now.monotonic:
            # Overdue bytes are no longer hoped for: counting them, a 3-of-4 claim waited 1,087 s instead of 206 (P).
            self._pending.remove(lease.charge)
            entry.overdue = True
            self._tell(EventKind.OVERDUE, now, lease)
        if lease.state is LeaseState.GRANTED:
            if entry.deadline <= now.monotonic:
                self._free(entry, ReleaseCause.NOT_ACTIVATED, now)
                return
        elif not lease.suspect and entry.deadline <= now.monotonic:
            # Freed on expiry, a silent but living holder's bytes would be used twice (S): it is only marked.
            entry.lease = replace(lease, suspect=True)
            self._write(entry)
            self._tell(EventKind.SUSPECTED, now, entry.lease)
        elif lease.suspect and lease.foreign and entry.deadline + self._policy.grace_s <= now.monotonic:
            self._free(entry, ReleaseCause.FENCED, now)
            return
        self._schedule(entry)

    def _act_on_waiter(self, waiter: Waiter, now: Moment) -> None:
        if waiter.deadline <= now.monotonic:
            self._unqueue(waiter, ReleaseCause.WAITED_TOO_LONG, now)
        else:
            self._schedule_waiter(waiter)

    def _schedule_waiter(self, waiter: Waiter) -> None:
        if waiter.timer is None or waiter.deadline < waiter.timer:
            waiter.timer = waiter.deadline
            self._look_at(waiter.lease.lease_id, waiter.deadline)

    def _extend_after(self, gap: float, now: Moment) -> None:
        """Nobody could renew while the ledger stood still: every term that may have suffered starts anew (rule 14)."""
        for entry in self._entries.values():
            usual = self._policy.activate_by_s if entry.lease.state is LeaseState.GRANTED else entry.lease.term_s
            if gap > usual / 2:
                self._extend(entry, now)
        for waiter in self._queue:
            waiter.deadline += gap

    def _extend(self, entry: Entry, now: Moment) -> None:
        if entry.lease.state is LeaseState.GRANTED:
            entry.deadline = now.monotonic + self._policy.activate_by_s
        else:
            entry.deadline = now.monotonic + entry.lease.term_s * (1 + self._spread())
        if entry.vacate_deadline is not None and not entry.overdue:
            entry.vacate_deadline = now.monotonic + self._policy.vacate_s

"""The state of the book and its primitive transitions. Layers above add who is asked to vacate (`reclaiming`), who is
granted (`settling`), what time does (`timing`), and the verbs; nothing else changes a charge."""

import hashlib
import hmac
import math
from collections import deque
from collections.abc import Callable, Mapping
from heapq import heapify, heappush
from itertools import count
from types import MappingProxyType

from weighbridge_common.immutable import immutable

from weighbridge_ledger.book.charging import Usage, devices_of, required_of
from weighbridge_ledger.book.entries import Entry, Released, Shrink
from weighbridge_ledger.book.events import Event, EventKind, ReleaseCause
from weighbridge_ledger.book.memories import Memories
from weighbridge_ledger.book.outside import Overruns
from weighbridge_ledger.book.passing import Machine
from weighbridge_ledger.book.policy import Policy
from weighbridge_ledger.book.queue import Waiter, WaitQueue
from weighbridge_ledger.book.records import DropLease, PutCounter, PutLease, Ticket, Write
from weighbridge_ledger.book.residents import Resident, Residents, Stage
from weighbridge_ledger.book.shrinking import Shrinkable
from weighbridge_ledger.book.states import (
    NO_EXTERNAL,
    Ceilings,
    Charge,
    Claim,
    External,
    Hold,
    Home,
    Lease,
    LeaseState,
    Moment,
    Observed,
    changed,
)
from weighbridge_ledger.book.witnesses import Witnesses

NUMBERS_AHEAD = 1024
"""Fences and sequences are reserved on disk so many at a time: one row less in the commit of almost every grant. A
restart skips what is left of them."""


STALE_TIMERS = 256
"""Timers of what is over that may lie about before they are thrown out."""


@immutable
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
        self._witnesses = Witnesses(home)
        self._new_id = new_id
        self._new_secret = new_secret
        self._spread = spread
        self._measured = NO_EXTERNAL
        self._external = NO_EXTERNAL
        self._steady = NO_EXTERNAL
        """What was held from outside for several samples: nobody is asked to vacate for more (rule 3)."""
        self._samples: deque[External] = deque(maxlen=policy.steady_samples)
        self._holds: Mapping[str, Hold] = MappingProxyType({})
        self._entries: dict[str, Entry] = {}
        self._queue = WaitQueue()
        self._queued: dict[str, int] = {}
        self._by_request: dict[str, str] = {}
        self._by_pool: dict[str, dict[str, None]] = {}
        self._writes: list[Write] = []
        self._events: list[Event] = []
        self._memories = Memories(policy, self._writes)
        self._released: deque[Released] = deque(maxlen=policy.released_kept)
        self._overruns = Overruns()
        self._usage = Usage()
        self._pending = Usage()
        self._stuck = Usage()
        """The part of usage that nobody can be asked for: pinned, suspect, overdue."""
        self._hopes = 0
        """Counts changes of that, of what is outside and of the ceilings: what can make an aim hopeless (rule 17)."""
        self._overdue: dict[str, None] = {}
        """Leases that did not vacate in time."""
        self._residents = Residents()
        self._shrinkable = Shrinkable()
        self._loading: dict[str, None] = {}
        self._loading_on_gpu: dict[str, None] = {}
        """Those of them that do not run on the processor alone."""
        self._careful: dict[int, None] = {}
        """Sequences of waiters that keep a lease busy (rule 25)."""
        self._counter = 0
        self._counter_reserved = 0
        self._streams = count(1)
        self._timers: list[tuple[float, int, str]] = []
        self._timer_numbers = count()
        self._looked_at = now.monotonic
        self._unsettled = False
        """Somebody who waits might be granted now: room, order or what keeps others from room has changed."""
        self._unasked = False
        """Somebody might be asked now: who may be asked has changed, or who waits."""

    # -- what is left behind ---------------------------------------------------------------------------------------

    def drain(self) -> Drained:
        """Everything that happened since the last drain. To be called after every verb, also after one that refused:
        time may have moved other leases."""
        if self._counter > self._counter_reserved:
            self._counter_reserved = self._counter + NUMBERS_AHEAD
            self._writes.append(PutCounter(self._counter_reserved))
        drained = Drained(tuple(self._writes), tuple(self._events))
        self._writes.clear()
        self._events.clear()
        return drained

    def _tell(
        self,
        kind: EventKind,
        now: Moment,
        lease: Lease | None = None,
        cause: ReleaseCause | None = None,
        asked: tuple[str, ...] = (),
        observed: Observed | None = None,
    ) -> None:
        self._events.append(Event(kind, now.wall, lease, cause, asked=asked, observed=observed))

    def _number(self) -> int:
        """The next number of the store-wide counter that gives fences and sequences."""
        self._counter += 1
        return self._counter

    def _write(self, entry: Entry) -> None:
        self._witnesses.put(entry.lease)
        self._writes.append(PutLease(entry.lease))

    # -- charges ---------------------------------------------------------------------------------------------------

    def _machine(self) -> Machine:
        return Machine(self._ceilings, self._external, self._usage, self._pending, self._replaced, self._holds)

    def _replaced(self, waiter: Waiter) -> Charge | None:
        entry = self._entries.get(waiter.replaces) if waiter.replaces else None
        # Asked already, its bytes are pending, or overdue and no longer hoped for.
        return None if entry is None or entry.vacate_deadline is not None else self._not_pending_of(entry)

    @staticmethod
    def _not_pending_of(entry: Entry) -> Charge:
        """The charge of a lease that was not asked to vacate, without what of it counts as pending already: optional
        bytes that were asked back are not to be counted twice."""
        return entry.lease.charge if entry.shrink is None else required_of(entry.lease.charge)

    def _charge(self, entry: Entry) -> None:
        """Start charging an entry's grant."""
        self._unsettled = True
        self._usage.add(entry.lease.charge)
        for pool in entry.lease.charge.pools.union(entry.lease.charge.occupies):
            self._by_pool.setdefault(pool, {})[entry.lease.lease_id] = None

    def _recharge(self, entry: Entry, charge: Charge, now: Moment) -> None:
        """Replace an entry's charge by another one."""
        vacating = entry.vacate_deadline is not None and not entry.overdue
        self._uncharge(entry)
        entry.lease = changed(entry.lease, charge=charge)
        self._charge(entry)
        if vacating:
            self._pending.add(charge)
        entry.shrink_asked = False
        self._review(entry, now)

    def _uncharge(self, entry: Entry) -> None:
        charge = entry.lease.charge
        self._forget_shrink(entry)
        self._set_stuck(entry, False)
        self._usage.remove(charge)
        for pool in charge.pools.union(charge.occupies):
            self._by_pool[pool].pop(entry.lease.lease_id, None)
        if entry.vacate_deadline is not None and not entry.overdue:
            self._pending.remove(charge)
        self._unsettled = True

    def _set_stuck(self, entry: Entry, stuck: bool) -> None:
        if stuck is not entry.stuck:
            self._stuck.add(entry.lease.charge, 1 if stuck else -1)
            entry.stuck = stuck
            self._hopes += 1
            self._unsettled = True

    def _forget_shrink(self, entry: Entry) -> None:
        """What was asked back of an entry is no longer hoped for."""
        if entry.shrink is not None:
            self._pending.add_optional(entry.lease.charge, -1)
            entry.shrink = None
            self._unsettled = True

    def _set_overrun(self, entry: Entry, overrun: dict[str, int]) -> None:
        """Bytes above the grant that could not be granted."""
        if self._overruns.set(entry.lease.lease_id, overrun):
            self._refresh_external()

    def _refresh_external(self) -> None:
        self._external = self._overruns.on_top_of(self._measured)
        self._hopes += 1
        self._unsettled = True

    # -- who may be asked, who loads -------------------------------------------------------------------------------

    def _review(self, entry: Entry, now: Moment) -> None:
        """Whether an entry may be asked to vacate or to shrink, after anything that may have changed that (rule 19)."""
        lease = entry.lease
        listens = lease.state is LeaseState.ACTIVE and not lease.suspect
        pinned = lease.pinned and not entry.replaced_by and lease.state is not LeaseState.VACATING
        self._set_stuck(entry, pinned or lease.suspect or entry.overdue)
        if listens and lease.charge.optional_bytes and not entry.shrink_asked:
            self._shrinkable.put(lease.lease_id, entry.idle_since, lease.charge)
        else:
            self._shrinkable.drop(lease.lease_id)
        if not listens or pinned:
            self._residents.drop(lease.lease_id)
        else:
            stage = self._stage(entry, now)
            idle_since = math.inf if stage is Stage.BUSY else entry.idle_since
            self._residents.put(
                Resident(lease.lease_id, lease.charge, lease.priority, idle_since, entry.resident_until, stage)
            )
        self._unasked = True
        self._schedule(entry)

    def _stage(self, entry: Entry, now: Moment) -> Stage:
        """How soon it may be asked to vacate."""
        if entry.uses or entry.loading_since is not None or not entry.heard:
            return Stage.BUSY
        if entry.resident_until > now.monotonic:
            return Stage.YOUNG
        return Stage.RIPE if entry.idle_since + self._policy.idle_s <= now.monotonic else Stage.SETTLED

    def _loaded(self, entry: Entry, now: Moment) -> None:
        """Its engine has finished loading: its minimum residency begins, and the next load may start (rule 22)."""
        if entry.loading_since is None:
            return
        load_s = max(0.0, now.monotonic - entry.loading_since)
        entry.loading_since = None
        self._end_loading(entry.lease.lease_id)
        entry.lease = changed(entry.lease, loaded_wall=now.wall, load_s=load_s)
        entry.idle_since = now.monotonic
        entry.resident_until = now.monotonic + self._residency_s(load_s)
        self._write(entry)
        self._tell(EventKind.LOADED, now, entry.lease)
        self._review(entry, now)

    def _residency_s(self, load_s: float) -> float:
        return min(max(2 * load_s, self._policy.min_residency_s), self._policy.max_residency_s)

    def _begin_loading(self, entry: Entry, since: float) -> None:
        entry.loading_since = since
        self._loading[entry.lease.lease_id] = None
        if not entry.lease.claim.cpu_only:
            self._loading_on_gpu[entry.lease.lease_id] = None

    def _end_loading(self, lease_id: str) -> None:
        self._loading.pop(lease_id, None)
        self._loading_on_gpu.pop(lease_id, None)
        self._unsettled = self._unsettled or self._ceilings.one_start_at_a_time

    def _anything_held(self) -> bool:
        """Whether somebody may not be loaded somewhere just now."""
        return bool(self._holds) or (self._ceilings.one_start_at_a_time and bool(self._loading_on_gpu))

    def _held(self, claim: Claim, target: Claim) -> Hold | None:
        """Why nothing may be loaded on the cards of a target just now."""
        if self._holds and (devices := devices_of(target, self._ceilings)):
            for device in ("", *devices):
                if device in self._holds:
                    return self._holds[device]
        if self._ceilings.one_start_at_a_time and self._loading_on_gpu and not claim.cpu_only:
            loading = self._entries[next(reversed(self._loading_on_gpu))].lease
            name = loading.purpose.model_name or loading.holder_name or "Another model"
            text = f"{name} is being loaded, and this machine loads one model at a time."
            return Hold("LOADS_ONE_AT_A_TIME", text, lasts=False)
        return None

    # -- transitions -----------------------------------------------------------------------------------------------

    def _grant(self, waiting: Lease, charge: Charge, stream: int, now: Moment) -> Entry:
        """QUEUED → GRANTED: charged, with a fence, a secret and a short time to activate (rule 6). What never waited
        gets its id here."""
        lease_id = waiting.lease_id or self._new_id()
        secret = self._new_secret()
        lease = changed(
            waiting,
            lease_id=lease_id,
            state=LeaseState.GRANTED,
            charge=charge,
            fence=self._number(),
            secret_digest=digest_of(secret),
            granted_wall=now.wall,
        )
        deadline = now.monotonic + self._policy.activate_by_s
        entry = Entry(lease, deadline, secret=secret, stream=stream, last_use_wall=now.wall, idle_since=now.monotonic)
        self._entries[lease_id] = entry
        if lease.request_id:
            self._by_request[lease.request_id] = lease_id
        self._charge(entry)
        self._begin_loading(entry, now.monotonic)
        self._write(entry)
        self._tell(EventKind.GRANTED, now, entry.lease)
        # All of a review that concerns it: nobody is asked before it is active.
        self._set_stuck(entry, lease.pinned)
        self._unasked = True
        self._schedule(entry)
        return entry

    def _renew_secret(self, entry: Entry) -> None:
        """A new secret; the old one is void.

        Only its digest is stored: a copy of the database gives nobody authority. What that costs: after a restart a
        retry by the same process gets a new secret instead of the same one, which is what AttachLease does anyway.
        """
        entry.secret = self._new_secret()
        entry.lease = changed(
            entry.lease, secret_digest=digest_of(entry.secret), previous_digest=entry.lease.secret_digest
        )

    @staticmethod
    def _is_secret_of(digest: bytes, secret: str) -> bool:
        return hmac.compare_digest(digest_of(secret), digest)

    def _holds_secret(self, entry: Entry, secret: str) -> bool:
        return hmac.compare_digest(digest_of(secret), entry.lease.secret_digest)

    def _vacate(self, entry: Entry, now: Moment, asked_by: str = "") -> None:
        """ACTIVE → VACATING, one way (rule 21): charged as before, and counted as coming back until its deadline."""
        self._forget_shrink(entry)
        entry.lease = changed(entry.lease, state=LeaseState.VACATING)
        entry.vacate_deadline = now.monotonic + self._policy.vacate_s
        entry.asked_by = asked_by
        self._pending.add(entry.lease.charge)
        self._unsettled = True
        self._write(entry)
        self._tell(EventKind.VACATING, now, entry.lease)
        self._review(entry, now)

    def _ask_to_shrink(self, entry: Entry, now: Moment) -> None:
        """The optional bytes of a lease are asked back: counted as coming back for a while, and not insisted on."""
        entry.shrink = Shrink(entry.lease.charge.optional_bytes, now.monotonic + self._policy.shrink_s)
        entry.shrink_asked = True
        self._pending.add_optional(entry.lease.charge)
        self._unsettled = True
        self._tell(EventKind.SHRINK_ASKED, now, entry.lease)
        self._review(entry, now)

    def _free(self, entry: Entry, cause: ReleaseCause, now: Moment) -> Lease:
        """GRANTED, ACTIVE, VACATING → RELEASED: the bytes are free."""
        lease = entry.lease
        self._uncharge(entry)
        del self._entries[lease.lease_id]
        self._witnesses.drop(lease.lease_id)
        self._residents.drop(lease.lease_id)
        self._overdue.pop(lease.lease_id, None)
        self._shrinkable.drop(lease.lease_id)
        self._end_loading(lease.lease_id)
        self._set_overrun(entry, {})
        self._writes.append(DropLease(lease.lease_id))
        if lease.state is LeaseState.GRANTED:
            # It had its turn: it keeps its place for a retry, and waits anew.
            ticket = Ticket(lease.request_id, lease.claim, lease.sequence, now.wall, 0)
            self._memories.keep_place(ticket, now.monotonic, now)
        else:
            self._memories.remember_ended(lease, now)
        if (waiter := self._waiter(entry.replaced_by)) is not None:
            waiter.replaces = ""
        return self._end(lease, cause, now, entry.observed)

    def _end(self, lease: Lease, cause: ReleaseCause, now: Moment, observed: Observed | None = None) -> Lease:
        if self._by_request.get(lease.request_id) == lease.lease_id:
            del self._by_request[lease.request_id]
        ended = changed(lease, state=LeaseState.RELEASED, suspect=False)
        self._released.append(Released(ended, cause, now.wall))
        self._tell(EventKind.RELEASED, now, ended, cause, observed=observed)
        return ended

    def _leave_queue(self, waiter: Waiter, now: Moment) -> None:
        """It waits no longer, for whatever reason."""
        self._queue.remove(waiter.sequence)
        del self._queued[waiter.lease.lease_id]
        self._careful.pop(waiter.sequence, None)
        self._unsettled = True
        if (replaced := self._entries.get(waiter.replaces)) is not None:
            replaced.replaced_by = ""
            self._review(replaced, now)

    def _unqueue(self, waiter: Waiter, cause: ReleaseCause, now: Moment) -> Lease:
        """QUEUED → RELEASED: nothing was charged; the place is kept for a retry (rule 14)."""
        self._leave_queue(waiter, now)
        self._memories.keep_place(_ticket_of(waiter), waiter.since, now)
        return self._end(waiter.lease, cause, now)

    def _waiter(self, lease_id: str) -> Waiter | None:
        sequence = self._queued.get(lease_id)
        return None if sequence is None else self._queue.get(sequence)

    # -- timers ----------------------------------------------------------------------------------------------------

    def _schedule(self, entry: Entry) -> None:
        """Look at `entry` when it is next due. A deadline that moved away needs nothing: the old look finds out."""
        due = self._due(entry)
        if due is not None and (entry.timer is None or due < entry.timer):
            entry.timer = due
            self._look_at(entry.lease.lease_id, due)

    def _look_at_waiter(self, waiter: Waiter, due: float) -> None:
        if waiter.timer is None or due < waiter.timer:
            waiter.timer = due
            self._look_at(waiter.lease.lease_id, due)

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
        lease = entry.lease
        if not lease.suspect:
            dues = [entry.deadline]
        else:
            dues = [entry.deadline + self._policy.grace_s] if lease.foreign else []
        if entry.vacate_deadline is not None and not entry.overdue:
            dues.append(entry.vacate_deadline)
        if entry.shrink is not None:
            dues.append(entry.shrink.deadline)
        if entry.loading_since is not None and lease.state is not LeaseState.GRANTED:
            # Also of one that was released before it had loaded, and whose engine hangs.
            dues.append(entry.loading_since + self._policy.longest_load_s)
        if lease.state is LeaseState.ACTIVE:
            resident = self._residents.get(lease.lease_id)
            if resident is not None and resident.stage is Stage.YOUNG:
                dues.append(entry.resident_until)
            elif resident is not None and resident.stage is Stage.SETTLED:
                dues.append(entry.idle_since + self._policy.idle_s)
        return min(dues, default=None)


def _ticket_of(waiter: Waiter) -> Ticket:
    """The place of a waiter as a restart would find it; a restart gives it its minute from then on."""
    lease = waiter.lease
    return Ticket(lease.request_id, lease.claim, lease.sequence, waiter.first_wall, waiter.passes)

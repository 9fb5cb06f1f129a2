"""The verbs of those who ask: admit, preview, and the end of an Admit stream (rules 2, 5, 8, 9, 15, 16, 24, 25)."""

from dataclasses import replace
from typing import NoReturn

from weighbridge_common.immutable import immutable
from weighbridge_common.sizes import format_gib

from weighbridge_ledger.book import passing
from weighbridge_ledger.book.charging import HOLDER, NOTHING_USED, pools_wanted, price
from weighbridge_ledger.book.core import _ticket_of
from weighbridge_ledger.book.entries import Entry, Place
from weighbridge_ledger.book.events import EventKind, ReleaseCause
from weighbridge_ledger.book.placing import aim, on_cards
from weighbridge_ledger.book.queue import Waiter
from weighbridge_ledger.book.records import DropTicket, PutTicket
from weighbridge_ledger.book.refusals import Reason, Refused
from weighbridge_ledger.book.states import (
    HOST,
    NO_EXTERNAL,
    Ask,
    Charge,
    Claim,
    Credential,
    Lease,
    LeaseState,
    Moment,
    Shortage,
    changed,
)
from weighbridge_ledger.book.texts import exceeds_text
from weighbridge_ledger.book.timing import TimedCore
from weighbridge_ledger.book.waiting import WaitReason, WaitVerbs


@immutable
class Admission:
    """The answer to Admit. `stream` is to be given back when the call ends."""

    lease: Lease
    stream: int


@immutable
class Preview:
    """How a claim would fare now: a charge (at once, or after `evict` have vacated), reasons (must wait) or a refusal
    (never)."""

    charge: Charge | None = None
    evict: tuple[str, ...] = ()
    reasons: tuple[WaitReason, ...] = ()
    refusal: Refused | None = None


class AdmissionVerbs(WaitVerbs, TimedCore):
    """Check and reserve in one step; wait in order when it does not fit."""

    def admit(self, ask: Ask, now: Moment) -> Admission:
        """Grants at once, queues, or finds what the same request got before.

        Raises:
            Refused: CLAIM_EMPTY, DEVICE_UNKNOWN, CLAIM_EXCEEDS_CAPACITY, QUEUE_FULL, REQUEST_ID_REUSED,
                REQUEST_IN_USE, REQUEST_ENDED, WAIT_WHILE_HOLDING; LEASE_SUSPECT, and for the leases that the claim
                names LEASE_NOT_FOUND, LEASE_SECRET_MISMATCH, LEASE_STATE. Nothing is charged or queued then.
        """
        self._advance(now)
        earlier = self._earlier(ask, now) if ask.request_id else None
        if earlier is not None:
            return earlier
        self._check_names(ask.claim)
        place = self._memories.place(ask.request_id)
        if place is not None:
            _check_same_claim(ask, place.ticket.claim)
        waiter = self._candidate(ask, place, now)
        grant = self._decide(waiter, now)
        if grant is None:
            # What fits now fits the empty machine too.
            self._check_possible(ask)
        if grant is None and len(self._queue) >= self._policy.queue_bound:
            raise Refused(
                Reason.QUEUE_FULL,
                f"{len(self._queue)} claims are waiting already. Try again in a while.",
                metadata={"waiting": str(len(self._queue))},
                retry_after_s=self._policy.queue_retry_s,
            )
        if grant is None and waiter.while_holding and not self._may_go_on_waiting(waiter, now):
            raise Refused(
                Reason.WAIT_WHILE_HOLDING,
                "It would wait for memory that is in use, while its caller keeps a lease busy: the two might wait for "
                "each other. End the use first, or ask without keeping it.",
            )
        return self._enter(waiter, grant, place, now)

    def preview(self, ask: Ask, now: Moment) -> Preview:
        """How `ask` would fare as a new claim at this moment. Changes nothing (beyond what time has moved).

        Raises:
            Refused: as `admit`, but for CLAIM_EXCEEDS_CAPACITY, which is in the answer.
        """
        self._advance(now)
        try:
            self._check_static(ask)
        except Refused as refusal:
            if refusal.reason is not Reason.CLAIM_EXCEEDS_CAPACITY:
                raise
            return Preview(refusal=refusal)
        waiter = self._candidate(replace(ask, request_id=""), None, now)
        # The caller's own lease counts as gone: it is the caller who decides when.
        replaced = self._replaced(waiter)
        waiter.while_holding |= {waiter.replaces}
        waiter.replaces = ""
        if replaced is not None:
            self._usage.remove(replaced)
        try:
            grant = self._decide(waiter, now)
            if grant is not None:
                return Preview(charge=self._with_optional(grant.charge, grant.target, waiter.lease))
            return self._preview_eviction(waiter, now) or Preview(reasons=self._reasons(waiter))
        finally:
            if replaced is not None:
                self._usage.add(replaced)

    def stream_ended(self, lease_id: str, stream: int, now: Moment) -> None:
        """An Admit call is over, for whatever reason: a claim that waits is cancelled, a grant that nobody activated is
        freed, anything later is left alone. Only the newest call of a claim does this (rule 9)."""
        self._advance(now)
        waiter = self._waiter(lease_id)
        if waiter is not None and waiter.stream == stream:
            self._unqueue(waiter, ReleaseCause.CANCELLED, now)
        entry = self._entries.get(lease_id)
        if entry is not None and entry.stream == stream and entry.lease.state is LeaseState.GRANTED:
            self._free(entry, ReleaseCause.CANCELLED, now)
        self._settle(now)

    def withdraw(self, lease_id: str, now: Moment) -> None:
        """A grant could not be committed, so it was never told: take it back."""
        entry = self._entries.get(lease_id)
        if entry is not None and entry.lease.state is LeaseState.GRANTED:
            self._free(entry, ReleaseCause.NOT_STORED, now)
        self._settle(now)

    # -- the same request again ------------------------------------------------------------------------------------

    def _earlier(self, ask: Ask, now: Moment) -> Admission | None:
        if self._memories.has_ended(ask.request_id):
            # Without this a late Admit makes a grant for which nobody is left (S).
            raise Refused(
                Reason.REQUEST_ENDED,
                "This request was granted, activated and has ended. Ask anew, with another request id.",
            )
        lease_id = self._by_request.get(ask.request_id)
        if lease_id is None:
            return None
        waiter = self._waiter(lease_id)
        if waiter is not None:
            _check_same_claim(ask, waiter.lease.claim)
            return self._take_over_waiting(waiter, ask, now)
        entry = self._entries[lease_id]
        _check_same_claim(ask, entry.lease.claim)
        return self._take_over_charged(entry, ask, now)

    def _take_over_waiting(self, waiter: Waiter, ask: Ask, now: Moment) -> Admission:
        """The retry waits in the old one's place; the old call no longer cancels anything."""
        if ask.memory_limit_bytes != waiter.lease.memory_limit_bytes:
            self._check_static(ask)
        waiter.stream = next(self._streams)
        waiter.lease = self._with_holder(waiter.lease, ask)
        self._set_target(waiter, waiter.claim)  # its holder's own limit counts, and may be another one
        waiter.deadline = now.monotonic + self._wait_s(ask)
        self._schedule_waiter(waiter, now)
        return Admission(waiter.lease, waiter.stream)

    def _take_over_charged(self, entry: Entry, ask: Ask, now: Moment) -> Admission:
        same_process = entry.lease.holder == ask.holder
        if entry.lease.suspect:
            raise Refused(
                Reason.LEASE_SUSPECT,
                "The lease of this request was silent for too long. Attach to it again.",
                metadata={"lease_id": entry.lease.lease_id},
            )
        if entry.lease.state is LeaseState.GRANTED:
            if not same_process:
                if 0 < ask.memory_limit_bytes < entry.lease.charge.host_bytes:
                    raise _exceeds_holder(entry.lease.charge.host_bytes, ask.memory_limit_bytes)
                # The same secret for both: the late Release of the first would free what the second holds (S).
                entry.lease = self._with_holder(entry.lease, ask)
                self._renew_secret(entry)
                self._write(entry)
            elif entry.secret is None:
                self._renew_secret(entry)
                self._write(entry)
            entry.deadline = now.monotonic + self._policy.activate_by_s
        elif not same_process:
            # Handing an ACTIVE lease over: orphan engine and new engine on one charge (S).
            raise Refused(
                Reason.REQUEST_IN_USE,
                "Another process holds the lease of this request. It ends when that process is proven gone.",
                metadata={"lease_id": entry.lease.lease_id},
            )
        elif entry.secret is None:
            self._renew_secret(entry)
            self._write(entry)
        entry.stream = next(self._streams)
        return Admission(entry.lease, entry.stream)

    def _with_holder(self, lease: Lease, ask: Ask) -> Lease:
        return changed(
            lease,
            holder=ask.holder,
            holder_name=ask.holder_name,
            memory_limit_bytes=ask.memory_limit_bytes,
            foreign=not self._home.sees(ask.holder),
        )

    # -- deciding --------------------------------------------------------------------------------------------------

    def _candidate(self, ask: Ask, place: Place | None, now: Moment) -> Waiter:
        """What would wait if it were not granted: nothing of it is in the book yet.

        Raises:
            Refused: for the leases that the claim names.
        """
        replaces = self._replaced_id(ask)
        for credential in ask.while_holding:
            self._own_entry(credential, ask)
        if ask.claim.floating:
            target = aim(ask.claim, self._ceilings, self._external, self._usage.less(self._pending))
        else:
            target = on_cards(ask.claim, self._ceilings, self._external, self._usage)
        assert target is not None  # _check_names refused it otherwise
        lease = Lease(
            lease_id="",
            request_id=ask.request_id,
            fence=0,
            sequence=self._counter + 1 if place is None else place.ticket.sequence,
            state=LeaseState.QUEUED,
            claim=ask.claim,
            holder=ask.holder,
            foreign=not self._home.sees(ask.holder),
            term_s=self._policy.term(ask.term_s),
            holder_name=ask.holder_name,
            memory_limit_bytes=ask.memory_limit_bytes,
            purpose=ask.purpose,
            priority=ask.priority,
            pinned=ask.pinned,
            exclusive=ask.exclusive,
            requested_wall=now.wall,
        )
        since = now.monotonic if place is None else place.since
        return Waiter(
            lease,
            target,
            pools_wanted(target, self._ceilings),
            stream=0,
            first_wall=now.wall if place is None else place.ticket.first_wall,
            since=since,
            deadline=now.monotonic + self._wait_s(ask),
            level=self._level(ask.priority, since, now),
            passes=0 if place is None else place.ticket.passes,
            replaces=replaces,
            while_holding=frozenset(one.lease_id for one in ask.while_holding),
        )

    def _replaced_id(self, ask: Ask) -> str:
        """The lease that a claim replaces; empty if none does, or it has ended already: then nothing is in the way."""
        credential = ask.replaces
        if credential is None:
            return ""
        ended = self._memories.ended(credential.lease_id)
        if ended is not None and self._is_secret_of(ended.secret_digest, credential.secret):
            return ""
        entry = self._own_entry(credential, ask)
        if entry.replaced_by and entry.replaced_by != self._by_request.get(ask.request_id):
            raise Refused(Reason.LEASE_STATE, "Another claim waits to take the place of that lease already.")
        return credential.lease_id

    def _own_entry(self, credential: Credential, ask: Ask) -> Entry:
        entry = self._entries.get(credential.lease_id)
        if entry is None:
            raise Refused(
                Reason.LEASE_NOT_FOUND,
                "There is no such lease as the one that the claim names.",
                metadata={"lease_id": credential.lease_id},
            )
        if not self._holds_secret(entry, credential.secret) or entry.lease.holder != ask.holder:
            raise Refused(
                Reason.LEASE_SECRET_MISMATCH, "The lease that the claim names is not its caller's. Nothing was changed."
            )
        if entry.lease.suspect:
            raise Refused(
                Reason.LEASE_SUSPECT, "The lease that the claim names was silent for too long. Attach to it first."
            )
        if entry.lease.state is LeaseState.GRANTED:
            raise Refused(Reason.LEASE_STATE, "The lease that the claim names is not active yet. Activate it first.")
        return entry

    def _decide(self, waiter: Waiter, now: Moment) -> passing.Grant | None:
        """Whether a claim fits now and may pass those who wait: the check of check-and-reserve. None: it must wait."""
        if waiter.replaces:
            return None
        machine = self._machine()
        ahead: list[Waiter] | None = None
        for target, charge in passing.fitting(waiter, machine):
            if self._held(waiter.lease.claim, target) is not None:
                continue
            if not len(self._queue):
                return passing.Grant(waiter, target, charge, ())
            if not self._queue.in_view(charge.pools, waiter.key, self._policy.look_ahead):
                continue
            if ahead is None:
                ahead = self._ahead_of(waiter)
            passed = passing.may_pass(ahead, charge, machine, now.monotonic, self._policy)
            if passed is not None:
                return passing.Grant(waiter, target, charge, passed)
        return None

    def _enter(self, waiter: Waiter, grant: passing.Grant | None, place: Place | None, now: Moment) -> Admission:
        """Grant or queue what was decided."""
        if place is None:
            self._number()
        else:
            self._memories.take_place(waiter.lease.request_id)
        stream = waiter.stream = next(self._streams)
        if grant is not None:
            self._count_passes(grant.passed)
            if place is not None:
                self._writes.append(DropTicket(waiter.lease.request_id))
            charge = self._with_optional(grant.charge, grant.target, waiter.lease)
            granted = self._grant(waiter.lease, charge, stream, now)
            self._settle(now)
            return Admission(granted.lease, stream)
        lease = waiter.lease = changed(waiter.lease, lease_id=self._new_id())
        if lease.request_id:
            self._by_request[lease.request_id] = lease.lease_id
        waiter.required = passing.required_alone(
            waiter.claim, self._ceilings, exclusive=lease.exclusive, limit_bytes=lease.memory_limit_bytes
        )
        self._queue.add(waiter)
        self._queued[lease.lease_id] = waiter.sequence
        if waiter.while_holding:
            self._careful[waiter.sequence] = None
        if (replaced := self._entries.get(waiter.replaces)) is not None:
            replaced.replaced_by = lease.lease_id
            self._review(replaced, now)
        self._schedule_waiter(waiter, now)
        if lease.request_id:
            self._writes.append(PutTicket(_ticket_of(waiter)))
        self._tell(EventKind.QUEUED, now, lease)
        self._unasked = True
        self._settle(now)
        entered = self._entries.get(lease.lease_id)
        return Admission(lease if entered is None else entered.lease, stream)

    def _preview_eviction(self, waiter: Waiter, now: Moment) -> Preview | None:
        """Whom it would ask, if it were the first who waits and no earlier claim is in its way."""
        machine = self._machine()
        base = machine.settled_for(waiter)
        claim = waiter.lease.claim
        targets = passing.bindings(waiter, machine, base) if waiter.floating else (waiter.claim,)
        for target in targets:
            if self._held(claim, target) is not None or self._would_fit(waiter, target, base, self._steady_external()):
                continue
            plan = self._plan(replace(self._demand_of(waiter, target, base, now), patient=True), now)
            if plan is None or not plan.vacate:
                # Optional bytes alone are given back or not, as their holder likes: nothing can be promised on them.
                continue
            after = base.copy()
            for lease_id in plan.vacate:
                after.remove(self._not_pending_of(self._entries[lease_id]))
            for lease_id in plan.shrink:
                after.add_optional(self._entries[lease_id].lease.charge, -1)
            charge = passing.price_of(waiter, target, self._ceilings, self._external, after)
            if not isinstance(charge, Charge) or not self._queue.in_view(
                charge.pools, waiter.key, self._policy.look_ahead
            ):
                continue
            ahead = self._ahead_of(waiter)
            if passing.may_pass(ahead, charge, machine, now.monotonic, self._policy) is None:
                continue
            if not ahead or not passing.harmed(ahead, charge, machine):
                return Preview(charge=charge, evict=plan.vacate)
        return None

    def _check_static(self, ask: Ask) -> None:
        """The refusals that depend on the claim and the empty machine alone (rule 2)."""
        self._check_names(ask.claim)
        self._check_possible(ask)

    def _check_names(self, claim: Claim) -> None:
        """Refuses what asks for nothing, or for cards that are not there."""
        if claim.total_bytes <= 0:
            raise Refused(Reason.CLAIM_EMPTY, "The claim asks for nothing. Give the bytes it needs.")
        for want in claim.devices:
            if want.device_id and want.device_id not in self._ceilings.devices:
                raise Refused(
                    Reason.DEVICE_UNKNOWN,
                    "The claim names a card that this machine does not have.",
                    metadata={"device_id": want.device_id},
                )
        if claim.devices and on_cards(claim, self._ceilings, NO_EXTERNAL, NOTHING_USED) is None:
            raise Refused(Reason.DEVICE_UNKNOWN, "The claim wants more cards than this machine has.")

    def _check_possible(self, ask: Ask) -> None:
        """Refuses what would never fit."""
        claim, limit = ask.claim, ask.memory_limit_bytes
        empty = on_cards(claim, self._ceilings, NO_EXTERNAL, NOTHING_USED)
        assert empty is not None  # _check_names refused it otherwise
        alone = price(empty, self._ceilings, NO_EXTERNAL, NOTHING_USED)
        host_bytes = alone.host_bytes if isinstance(alone, Charge) else claim.host_bytes
        if 0 < limit < host_bytes:
            raise _exceeds_holder(host_bytes, limit)
        if isinstance(alone, Shortage):
            self._exceeds(empty, alone)

    def _exceeds(self, claim: Claim, shortage: Shortage) -> NoReturn:
        ceilings = self._ceilings
        if shortage.cause == "LIMIT":
            need, allowed = claim.total_bytes, ceilings.total_bytes
        else:
            allowed = ceilings.host_bytes if shortage.pool == HOST else ceilings.pool_bytes(shortage.pool)
            need = allowed + shortage.missing_bytes
        raise Refused(
            Reason.CLAIM_EXCEEDS_CAPACITY,
            exceeds_text(claim, shortage, ceilings),
            metadata=_figures(need, allowed) | {"pool": shortage.pool},
            missing=((shortage.pool, f"{format_gib(shortage.missing_bytes)} missing"),),
        )

    def _wait_s(self, ask: Ask) -> float:
        longest = self._policy.max_wait_s
        return longest if ask.max_wait_s is None else min(max(0.0, ask.max_wait_s), longest)


def _check_same_claim(ask: Ask, before: Claim) -> None:
    if before != ask.claim:
        raise Refused(
            Reason.REQUEST_ID_REUSED,
            "This request id belongs to a claim for other bytes. Give each claim an id of its own.",
            metadata={"request_id": ask.request_id},
        )


def _exceeds_holder(host_bytes: int, limit: int) -> Refused:
    return Refused(
        Reason.CLAIM_EXCEEDS_CAPACITY,
        f"It needs {format_gib(host_bytes)} of host memory, and the holder's own limit is {format_gib(limit)}.",
        metadata=_figures(host_bytes, limit),
        missing=((HOLDER, f"{format_gib(host_bytes - limit)} missing"),),
    )


def _figures(need: int, allowed: int) -> dict[str, str]:
    return {"required_bytes": str(need), "ceiling_bytes": str(allowed), "missing_bytes": str(need - allowed)}

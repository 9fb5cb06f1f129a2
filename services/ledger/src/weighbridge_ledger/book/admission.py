"""The verbs of those who ask: admit, preview, and the end of an Admit stream (rules 2, 5, 8, 9, 15, 16)."""

import enum
from dataclasses import dataclass, replace

from weighbridge_common.sizes import format_gib

from weighbridge_ledger.book import passing
from weighbridge_ledger.book.charging import NOTHING_USED, on_cards, pools_wanted, price, static_shortage
from weighbridge_ledger.book.core import BookCore
from weighbridge_ledger.book.entries import Entry
from weighbridge_ledger.book.events import EventKind, ReleaseCause
from weighbridge_ledger.book.queue import Waiter
from weighbridge_ledger.book.records import DropTicket, PutTicket
from weighbridge_ledger.book.refusals import Reason, Refused
from weighbridge_ledger.book.states import HOST, NO_EXTERNAL, Ask, Charge, Claim, Lease, LeaseState, Moment, Shortage

HOLDERS_NAMED = 8
"""At most so many holders are named to a waiter: enough to act on, bounded for a machine full of small leases."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to Admit. `stream` is to be given back when the call ends."""

    lease: Lease
    stream: int


class WaitCode(enum.StrEnum):
    """Why a claim waits."""

    BYTES_HELD = "BYTES_HELD"
    EXTERNAL_USE = "EXTERNAL_USE"
    EARLIER_CLAIM = "EARLIER_CLAIM"


@dataclass(frozen=True, slots=True)
class WaitReason:
    """One thing a claim waits for."""

    code: WaitCode
    message: str
    lease_ids: tuple[str, ...] = ()
    missing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Preview:
    """How a claim would fare now: a charge (at once), reasons (must wait) or a refusal (never)."""

    charge: Charge | None = None
    reasons: tuple[WaitReason, ...] = ()
    refusal: Refused | None = None


class AdmissionVerbs(BookCore):
    """Check and reserve in one step; wait in order when it does not fit."""

    def admit(self, ask: Ask, now: Moment) -> Admission:
        """Grants at once, queues, or finds what the same request got before.

        Raises:
            Refused: CLAIM_EMPTY, DEVICE_UNKNOWN, CLAIM_EXCEEDS_CAPACITY, QUEUE_FULL, REQUEST_ID_REUSED,
                REQUEST_IN_USE, REQUEST_ENDED, LEASE_SUSPECT. Nothing is charged or queued then.
        """
        self._advance(now)
        earlier = self._earlier(ask, now) if ask.request_id else None
        if earlier is not None:
            return earlier
        self._check_static(ask)
        target = self._target(ask.claim)
        place = self._places.get(ask.request_id) if ask.request_id else None
        if place is not None:
            _check_same_claim(ask, place.ticket.claim)
        pools = pools_wanted(target, self._ceilings)
        sequence = self._counter + 1 if place is None else place.ticket.sequence
        decision = self._decide(target, pools, sequence, now)
        if decision is None and len(self._queue) >= self._policy.queue_bound:
            raise Refused(
                Reason.QUEUE_FULL,
                f"{len(self._queue)} claims are waiting already. Try again in a while.",
                metadata={"waiting": str(len(self._queue))},
                retry_after_s=self._policy.queue_retry_s,
            )
        if place is None:
            sequence = self._number()
        else:
            del self._places[ask.request_id]
        stream = next(self._streams)
        lease = Lease(
            lease_id=self._new_id(),
            request_id=ask.request_id,
            fence=0,
            sequence=sequence,
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
            requested_wall=now.wall,
        )
        if ask.request_id:
            self._by_request[ask.request_id] = lease.lease_id
        if decision is not None:
            charge, passed = decision
            self._count_passes(passed)
            if place is not None:
                self._writes.append(DropTicket(ask.request_id))
            return Admission(self._grant(lease, charge, stream, now).lease, stream)
        waiter = Waiter(
            lease,
            target,
            pools,
            stream,
            first_wall=now.wall if place is None else place.ticket.first_wall,
            since=now.monotonic if place is None else place.since,
            deadline=now.monotonic + self._wait_s(ask),
            passes=0 if place is None else place.ticket.passes,
        )
        self._queue.add(waiter)
        self._queued[lease.lease_id] = sequence
        self._schedule_waiter(waiter)
        if ask.request_id:
            self._writes.append(PutTicket(self._place_of(waiter)))
        self._tell(EventKind.QUEUED, now, lease)
        return Admission(lease, stream)

    def preview(self, ask: Ask, now: Moment) -> Preview:
        """How `ask` would fare as a new claim at this moment. Changes nothing (beyond what time has moved)."""
        self._advance(now)
        try:
            self._check_static(ask)
        except Refused as refusal:
            if refusal.reason is not Reason.CLAIM_EXCEEDS_CAPACITY:
                raise
            return Preview(refusal=refusal)
        target = self._target(ask.claim)
        decision = self._decide(target, pools_wanted(target, self._ceilings), self._counter + 1, now)
        if decision is not None:
            return Preview(charge=decision[0])
        return Preview(reasons=self._reasons(target, self._counter + 1))

    def waiting_for(self, lease_id: str) -> tuple[int, float, tuple[WaitReason, ...]] | None:
        """(position from 1, moment on the monotonic clock since when, reasons) of a queued claim; None if it is not."""
        waiter = self._waiter(lease_id)
        if waiter is None:
            return None
        return self._queue.position(waiter.sequence), waiter.since, self._reasons(waiter.claim, waiter.sequence)

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
        if ask.request_id in self._ended_requests:
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
        waiter.stream = next(self._streams)
        waiter.lease = self._with_holder(waiter.lease, ask)
        waiter.deadline = now.monotonic + self._wait_s(ask)
        self._schedule_waiter(waiter)
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
        return replace(lease, holder=ask.holder, holder_name=ask.holder_name, foreign=not self._home.sees(ask.holder))

    # -- deciding --------------------------------------------------------------------------------------------------

    def _decide(
        self, target: Claim, pools: frozenset[str], sequence: int, now: Moment
    ) -> tuple[Charge, tuple[Waiter, ...]] | None:
        """Whether a claim fits now and may pass those who wait: the check of check-and-reserve. None: it must wait."""
        priced = price(target, self._ceilings, self._external, self._usage)
        if isinstance(priced, Shortage):
            return None
        if not len(self._queue):
            return priced, ()
        blockers = self._queue.blockers(pools, sequence, self._policy.look_ahead)
        if blockers is None:
            return None
        passed = passing.may_pass(blockers, priced, self._machine(), now.monotonic, self._policy)
        return None if passed is None else (priced, passed)

    def _check_static(self, ask: Ask) -> None:
        """The refusals that depend on the claim and the empty machine alone, before anything else moves (rule 2)."""
        claim = ask.claim
        if claim.total_bytes <= 0:
            raise Refused(Reason.CLAIM_EMPTY, "The claim asks for nothing. Give the bytes it needs.")
        for want in claim.devices:
            if want.device_id and want.device_id not in self._ceilings.devices:
                raise Refused(
                    Reason.DEVICE_UNKNOWN,
                    "The claim names a card that this machine does not have.",
                    metadata={"device_id": want.device_id},
                )
        empty = on_cards(claim, self._ceilings, NO_EXTERNAL, NOTHING_USED)
        if empty is None:
            raise Refused(Reason.DEVICE_UNKNOWN, "The claim wants more cards than this machine has.")
        if 0 < ask.memory_limit_bytes < claim.host_bytes:
            raise Refused(
                Reason.CLAIM_EXCEEDS_CAPACITY,
                f"It needs {format_gib(claim.host_bytes)} of host memory, and the holder's own limit is "
                f"{format_gib(ask.memory_limit_bytes)}.",
                metadata=_figures(claim.host_bytes, ask.memory_limit_bytes),
                missing=(("holder", f"{format_gib(claim.host_bytes - ask.memory_limit_bytes)} missing"),),
            )
        shortage = static_shortage(empty, self._ceilings)
        if shortage is not None:
            raise self._exceeds(empty, shortage)

    def _exceeds(self, claim: Claim, shortage: Shortage) -> Refused:
        ceilings = self._ceilings
        if shortage.cause == "LIMIT":
            need, allowed, where = claim.total_bytes, ceilings.total_bytes, "in all under the limit that was set"
            if ceilings.limit_bytes is None:
                where = "in all"
        elif shortage.pool == HOST:
            allowed = ceilings.host_bytes
            need, where = allowed + shortage.missing_bytes, "of host memory"
        else:
            allowed = ceilings.pool_bytes(shortage.pool)
            need, where = allowed + shortage.missing_bytes, "on that card"
        return Refused(
            Reason.CLAIM_EXCEEDS_CAPACITY,
            f"It needs {format_gib(need)}, and this machine allows {format_gib(allowed)} {where}, even with nothing "
            "else loaded. A smaller context or quantisation would help.",
            metadata=_figures(need, allowed) | {"pool": shortage.pool},
            missing=((shortage.pool, f"{format_gib(shortage.missing_bytes)} missing"),),
        )

    def _target(self, claim: Claim) -> Claim:
        target = on_cards(claim, self._ceilings, self._external, self._usage)
        assert target is not None  # _check_static refused it otherwise
        return target

    def _reasons(self, claim: Claim, sequence: int) -> tuple[WaitReason, ...]:
        """What a claim waits for just now."""
        priced = price(claim, self._ceilings, self._external, self._usage)
        if isinstance(priced, Charge):
            ahead = self._queue.position(sequence) - 1
            return (WaitReason(WaitCode.EARLIER_CLAIM, f"Waits for {ahead} earlier claim{'s' if ahead != 1 else ''}."),)
        where = "of host memory" if priced.pool == HOST else "on its card"
        if priced.cause == "EXTERNAL":
            text = f"Programs outside the ledger hold {format_gib(priced.missing_bytes)} {where} that it needs."
            return (WaitReason(WaitCode.EXTERNAL_USE, text, (), priced.missing_bytes),)
        holders = tuple(self._by_pool.get(priced.pool, {}))[:HOLDERS_NAMED] if priced.cause != "LIMIT" else ()
        text = f"{format_gib(priced.missing_bytes)} {where} must be given back by other models first."
        return (WaitReason(WaitCode.BYTES_HELD, text, holders, priced.missing_bytes),)

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


def _figures(need: int, allowed: int) -> dict[str, str]:
    return {"required_bytes": str(need), "ceiling_bytes": str(allowed), "missing_bytes": str(need - allowed)}

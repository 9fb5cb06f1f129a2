"""The verbs of those who hold: activate, attach, renew, begin and end use, resize, release (rules 6-13, 21, 23)."""

import hmac
from collections.abc import Callable
from dataclasses import replace

from weighbridge_common.immutable import immutable
from weighbridge_common.processes import ProcessIdentity
from weighbridge_common.sizes import format_gib

from weighbridge_ledger.book import passing
from weighbridge_ledger.book.core import digest_of
from weighbridge_ledger.book.entries import Entry
from weighbridge_ledger.book.events import EventKind, ReleaseCause
from weighbridge_ledger.book.refusals import Reason, Refused
from weighbridge_ledger.book.resizing import growth, resize
from weighbridge_ledger.book.states import (
    HOST,
    NOBODY,
    Charge,
    Claim,
    DeviceWant,
    Lease,
    LeaseState,
    Moment,
    Observed,
    Shortage,
    changed,
)
from weighbridge_ledger.book.timing import TimedCore

IsAlive = Callable[[ProcessIdentity], bool | None]
"""Whether a process is alive; None: cannot be known from here."""


@immutable
class Renewal:
    """The answer to one renewal."""

    lease: Lease
    deadline: float
    """When it turns SUSPECT unless renewed, on the monotonic clock."""
    vacate_deadline: float | None
    """Set: the holder has been asked to vacate by then."""
    out_of_grant: Refused | None
    """Set: more is in use than was granted, and it cannot be granted. The holder stops its engine."""
    shrink: tuple[int, float] | None = None
    """Set: (bytes, moment on the monotonic clock until when they are hoped for): optional bytes were asked back."""


class HolderVerbs(TimedCore):
    """Every verb checks lease and secret, and a miss changes nothing."""

    def activate(
        self,
        lease_id: str,
        secret: str,
        process: ProcessIdentity,
        engines: tuple[ProcessIdentity, ...],
        now: Moment,
    ) -> Lease:
        """GRANTED → ACTIVE; on an ACTIVE lease, records further engine processes.

        Nothing is allocated before this is accepted: with allocation at the grant, a deadline frees bytes in use, and
        without a deadline a restart leaves grants charged for ever (rule 6).

        Raises:
            Refused: LEASE_NOT_FOUND, LEASE_SECRET_MISMATCH, LEASE_SUSPECT, LEASE_VACATING, TOO_MANY_PROCESSES.
        """
        entry = self._authorised(lease_id, secret, now)
        if process != entry.lease.holder:
            raise _mismatch()
        _refuse_suspect_or_vacating(entry)
        recorded = tuple(dict.fromkeys((*entry.lease.engines, *engines)))
        if len(recorded) > self._policy.engines_per_lease:
            raise Refused(
                Reason.TOO_MANY_PROCESSES,
                f"A lease records at most {self._policy.engines_per_lease} engine processes.",
            )
        if entry.lease.state is LeaseState.GRANTED:
            entry.lease = changed(entry.lease, state=LeaseState.ACTIVE, engines=recorded, activated_wall=now.wall)
            entry.idle_since = now.monotonic
            self._begin_loading(entry, now.monotonic)
            self._renew_term(entry, now)
            self._write(entry)
            self._tell(EventKind.ACTIVATED, now, entry.lease)
            self._review(entry, now)
        elif recorded != entry.lease.engines:
            entry.lease = changed(entry.lease, engines=recorded)
            self._write(entry)
            self._tell(EventKind.ACTIVATED, now, entry.lease)
        self._settle(now)
        return entry.lease

    def attach(self, lease_id: str, process: ProcessIdentity, secret: str, now: Moment) -> tuple[Lease, str]:
        """The holder's own process comes back: same bytes, a new secret and term, no longer SUSPECT (rule 11).

        `secret` may be empty (it was lost), the current one or the one before it (the last answer was lost). A
        KeepAlive that revived a dead secret instead would charge the holder twice (S).

        Raises:
            Refused: LEASE_NOT_FOUND (the bytes were given away: end the engine at once), LEASE_SECRET_MISMATCH,
                LEASE_STATE (granted but never activated: repeat Admit instead).
        """
        self._advance(now)
        entry = self._entry(lease_id)
        known = not secret or self._holds_secret(entry, secret)
        if not known:
            known = hmac.compare_digest(digest_of(secret), entry.lease.previous_digest)
        if process != entry.lease.holder or not known:
            raise _mismatch()
        if entry.lease.state is LeaseState.GRANTED:
            raise Refused(
                Reason.LEASE_STATE, "The lease was never activated. Repeat Admit with its request id instead."
            )
        entry.lease = changed(entry.lease, suspect=False)
        self._renew_secret(entry)
        self._renew_term(entry, now)
        self._write(entry)
        self._tell(EventKind.ATTACHED, now, entry.lease)
        self._hear(entry, now)
        self._review(entry, now)  # no longer suspect: it may be asked to vacate, and hoped for
        self._settle(now)
        assert entry.secret is not None
        return entry.lease, entry.secret

    def renew(
        self, lease_id: str, secret: str, observed: Observed | None, now: Moment, load_complete: bool = False
    ) -> Renewal:
        """A beat of KeepAlive: a new term, what is in use, and whether the engine has finished loading. Not committed,
        but for the end of loading (rules 5, 10, 22, 23).

        Raises:
            Refused: LEASE_NOT_FOUND, LEASE_SECRET_MISMATCH, LEASE_SUSPECT (attach), LEASE_STATE (not activated).
        """
        entry = self._authorised(lease_id, secret, now)
        _refuse_suspect(entry)
        if entry.lease.state is LeaseState.GRANTED:
            raise Refused(Reason.LEASE_STATE, "The lease is not active yet. Activate it first.")
        self._renew_term(entry, now)
        self._hear(entry, now)
        if load_complete:
            self._loaded(entry, now)
        out_of_grant = None
        if observed is not None:
            entry.observed = observed
            out_of_grant = self._account_observation(entry, observed, now)
        self._settle(now)
        shrink = None if entry.shrink is None else (entry.shrink.optional_bytes, entry.shrink.deadline)
        return Renewal(entry.lease, entry.deadline, entry.vacate_deadline, out_of_grant, shrink)

    def connected(self, lease_id: str, change: int) -> None:
        """A KeepAlive stream began (+1) or ended (−1) carrying this lease. Shown; decides nothing (rule 10)."""
        entry = self._entries.get(lease_id)
        if entry is not None:
            entry.keep_alives = max(0, entry.keep_alives + change)

    def begin_use(self, lease_id: str, secret: str, use_id: str, now: Moment) -> str:
        """Busy is granted, not announced: refused on a lease that is VACATING or SUSPECT (rule 21).

        Raises:
            Refused: LEASE_NOT_FOUND, LEASE_SECRET_MISMATCH, LEASE_SUSPECT, LEASE_VACATING, LEASE_STATE, TOO_MANY_USES,
                DEVICE_UNHEALTHY (try again in a while).
        """
        entry = self._authorised(lease_id, secret, now)
        _refuse_suspect_or_vacating(entry)
        if entry.lease.state is LeaseState.GRANTED:
            raise Refused(Reason.LEASE_STATE, "The lease is not active yet. Activate it first.")
        if len(entry.uses) >= self._policy.uses_per_lease and use_id not in entry.uses:
            raise Refused(
                Reason.TOO_MANY_USES, f"{len(entry.uses)} uses of this lease are open. End those that are over."
            )
        if use_id not in entry.uses:
            self._refuse_unwell(entry)
        use = use_id or self._new_id()
        entry.uses[use] = None
        entry.last_use_wall = now.wall
        self._hear(entry, now)
        self._loaded(entry, now)  # what is used is loaded, whether or not its holder said so
        self._review(entry, now)
        self._settle(now)
        return use

    def end_use(self, lease_id: str, secret: str, use_id: str, now: Moment) -> int:
        """Ends a use and returns how many are open. An unknown use is ignored, so that a retry is harmless.

        Raises:
            Refused: LEASE_NOT_FOUND, LEASE_SECRET_MISMATCH.
        """
        entry = self._authorised(lease_id, secret, now)
        if use_id in entry.uses:
            del entry.uses[use_id]
            entry.last_use_wall = now.wall
            if not entry.uses:
                entry.idle_since = now.monotonic
            self._review(entry, now)
            self._settle(now)
        return len(entry.uses)

    def resize(self, lease_id: str, secret: str, claim: Claim, now: Moment, exclusive: bool | None = None) -> Lease:
        """Down always, after freeing; up answered at once, never waiting (rule 23).

        If growth waited, two that hold 2 of 4 and want 3 would wait for each other. If it ignored the queue, holders
        growing and shrinking in turn would starve a waiter. So it counts as a pass over everyone it harms.

        Args:
            lease_id: the lease.
            secret: its secret.
            claim: what it shall be charged instead. Optional bytes are kept up to what it wants of them.
            now: the moment.
            exclusive: whether nobody else may be on its devices (rule 26): dropped at will, raised only when alone;
                None: as it is.

        Raises:
            Refused: LEASE_NOT_FOUND, LEASE_SECRET_MISMATCH, LEASE_SUSPECT, LEASE_VACATING (growth only), LEASE_STATE,
                DEVICE_UNKNOWN, CANNOT_GROW. The lease is as it was then.
        """
        entry = self._authorised(lease_id, secret, now)
        _refuse_suspect(entry)
        if entry.lease.state is LeaseState.GRANTED:
            raise Refused(Reason.LEASE_STATE, "The lease is not active yet. Activate it first.")
        known = self._ceilings.devices.keys() | _cards(entry)
        if any(want.device_id not in known for want in claim.devices):
            raise Refused(Reason.DEVICE_UNKNOWN, "The claim names a card that this machine does not have.")
        changed = self._resized(entry, claim, now, exclusive)
        if isinstance(changed, Refused):
            raise changed
        self._apply_resize(entry, changed, now, entry.lease.exclusive if exclusive is None else exclusive)
        if entry.observed is not None:
            self._set_overrun(entry, _overrun(changed, entry.observed))
        self._settle(now)
        return entry.lease

    def release(self, lease_id: str, secret: str, is_alive: IsAlive, now: Moment) -> Lease:
        """Ends a lease. While an engine process of it lives, it is VACATING and charged until that is gone (rule 13).

        The engines decide, not the holder: the host outlives the engines it stops. A lease without recorded engines is
        freed on its holder's word, for nothing can have been let through a gate under it. Engines of another pid
        namespace cannot be seen from here; their holder, who fences them, is the only witness, and is believed.
        Releasing a lease that has ended is answered like the first time.

        Raises:
            Refused: LEASE_NOT_FOUND, LEASE_SECRET_MISMATCH.
        """
        self._advance(now)
        ended = self._memories.ended(lease_id)
        if ended is not None:
            if not self._is_secret_of(ended.secret_digest, secret):
                raise _mismatch()
            return self._ended_lease(lease_id, ended.request_id)
        entry = self._authorised(lease_id, secret, now)
        return self._release(entry, is_alive, ReleaseCause.HOLDER, now)

    def release_by_operator(self, lease_id: str, is_alive: IsAlive, now: Moment) -> Lease:
        """An operator's word that the processes of a lease are gone (rule 12).

        Raises:
            Refused: LEASE_NOT_FOUND, PROCESS_ALIVE while one of them is seen alive.
        """
        self._advance(now)
        entry = self._entry(lease_id)
        for process in entry.lease.processes:
            if is_alive(process) is True:
                raise Refused(Reason.PROCESS_ALIVE, f"Process {process.pid} of this lease is alive. End it first.")
        lease = self._free(entry, ReleaseCause.OPERATOR, now)
        self._settle(now)
        return lease

    # -- steps -----------------------------------------------------------------------------------------------------

    def _entry(self, lease_id: str) -> Entry:
        entry = self._entries.get(lease_id)
        if entry is None:
            raise Refused(
                Reason.LEASE_NOT_FOUND,
                "There is no such lease: it was never granted here, or it has ended and its bytes were given away.",
                metadata={"lease_id": lease_id},
            )
        return entry

    def _authorised(self, lease_id: str, secret: str, now: Moment) -> Entry:
        self._advance(now)
        entry = self._entry(lease_id)
        if not self._holds_secret(entry, secret):
            raise _mismatch()
        return entry

    def _renew_term(self, entry: Entry, now: Moment) -> None:
        entry.deadline = now.monotonic + entry.lease.term_s
        self._schedule(entry)

    def _hear(self, entry: Entry, now: Moment) -> None:
        """Its holder is there: after a restart it has said by now, or says in a moment, what it uses."""
        if not entry.heard:
            entry.heard = True
            entry.idle_since = now.monotonic
            self._review(entry, now)

    def _refuse_unwell(self, entry: Entry) -> None:
        for device in entry.lease.charge.occupies:
            hold = self._holds.get(device)
            if hold is not None and hold.refuses_use:
                raise Refused(Reason.DEVICE_UNHEALTHY, hold.message, retry_after_s=hold.retry_after_s)

    def _release(self, entry: Entry, is_alive: IsAlive, cause: ReleaseCause, now: Moment) -> Lease:
        living = any(self._may_live(engine, is_alive) for engine in entry.lease.engines)
        if living and entry.lease.state is LeaseState.VACATING:
            return entry.lease
        if living:
            self._vacate(entry, now)
            lease = entry.lease
        else:
            lease = self._free(entry, cause, now)
        self._settle(now)
        return lease

    def _may_live(self, process: ProcessIdentity, is_alive: IsAlive) -> bool:
        """One that should be seen from here and just now cannot be (no file descriptor left) is not dead."""
        alive = is_alive(process)
        return self._home.sees(process) if alive is None else alive

    def _ended_lease(self, lease_id: str, request_id: str) -> Lease:
        for released in reversed(self._released):
            if released.lease.lease_id == lease_id:
                return released.lease
        return Lease(lease_id, request_id, 0, 0, LeaseState.RELEASED, Claim(0), NOBODY)

    def _resized(
        self,
        entry: Entry,
        claim: Claim,
        now: Moment,
        exclusive: bool | None = None,
        observed: Observed | None = None,
    ) -> Charge | Refused:
        """The charge that an entry would have; counted as a pass then. With `observed` it covers all of that."""
        before = entry.lease.charge
        outside = self._overruns.seen_from(entry.lease.lease_id, self._external)
        changed = resize(before, claim, self._ceilings, outside, self._usage, exclusive=exclusive)
        if isinstance(changed, Shortage):
            if changed.cause == "EXCLUSIVE":
                return Refused(Reason.CANNOT_GROW, "Somebody else is on its device. The lease is as it was.")
            return Refused(
                Reason.CANNOT_GROW,
                f"{format_gib(changed.missing_bytes)} are missing to grow. The lease is as it was.",
                metadata={"missing_bytes": str(changed.missing_bytes), "pool": changed.pool},
                missing=((changed.pool, f"{format_gib(changed.missing_bytes)} missing"),),
            )
        limit = entry.lease.memory_limit_bytes
        if observed is None and limit and changed.host_bytes > max(before.host_bytes, limit):
            # Also by what spills; what is in use is in use, and the holder's own system sees to its limit.
            return Refused(
                Reason.CANNOT_GROW,
                f"It would need {format_gib(changed.host_bytes)} of host memory, and the holder's own limit is "
                f"{format_gib(limit)}. The lease is as it was.",
                metadata={"missing_bytes": str(changed.host_bytes - limit), "pool": "holder"},
                missing=(("holder", f"{format_gib(changed.host_bytes - limit)} missing"),),
            )
        if observed is not None and _overrun(changed, observed):
            # Other bytes than those in use: optional ones given up for them, or room on the host for what is on a card.
            return Refused(Reason.CANNOT_GROW, "More is in use than can be granted.")
        added = growth(before, changed)
        if added.total_bytes == 0 and not added.exclusive:
            return changed
        if entry.lease.state is LeaseState.VACATING:
            return Refused(Reason.LEASE_VACATING, "The lease has been asked to vacate and cannot grow.")
        # What it uses is charged then, and must not be in somebody's way twice.
        in_use = entry.observed if observed is None else observed
        left = {} if in_use is None else _overrun(changed, in_use)
        outside = self._overruns.seen_from(entry.lease.lease_id, self._external, left)
        machine = replace(self._machine(), external=outside)
        passed = passing.may_pass(list(self._contenders()), added, machine, now.monotonic, self._policy)
        if passed is None:
            return Refused(Reason.CANNOT_GROW, "An earlier claim has waited too long to be overtaken once more.")
        self._count_passes(passed)
        return changed

    def _apply_resize(self, entry: Entry, charge: Charge, now: Moment, exclusive: bool) -> None:
        before = entry.lease
        # The wish is kept even where it changes no charge, because exclusive use is not heeded there.
        entry.lease = changed(before, exclusive=exclusive)
        if charge != before.charge:
            self._recharge(entry, charge, now)
        if entry.lease != before:
            self._write(entry)
            self._tell(EventKind.RESIZED, now, entry.lease)

    def _account_observation(self, entry: Entry, observed: Observed, now: Moment) -> Refused | None:
        """More in use than granted is an upward resize. If refused, the excess is charged to nobody but given to nobody
        either, until the holder has stopped its engine."""
        charge = entry.lease.charge
        overrun = _overrun(charge, observed)
        if not overrun:
            self._set_overrun(entry, {})
            return None
        optional, spilled = dict(charge.optional_devices), dict(charge.spilled)
        wanted = Claim(
            charge.host_bytes - charge.optional_host_bytes - charge.spilled_bytes + overrun.get(HOST, 0),
            tuple(
                DeviceWant(
                    device,
                    charge.on(device) - optional.get(device, 0) + spilled.get(device, 0) + overrun.get(device, 0),
                    optional.get(device, 0),
                )
                for device in sorted({device for device, _ in charge.devices} | (overrun.keys() - {HOST}))
            ),
            charge.optional_host_bytes,
        )
        changed = self._resized(entry, wanted, now, observed=observed)
        if not isinstance(changed, Refused):
            self._apply_resize(entry, changed, now, entry.lease.exclusive)
            self._set_overrun(entry, {})
            return None
        self._set_overrun(entry, overrun)
        used = observed.host_bytes + sum(size for _, size in observed.devices)
        return Refused(
            Reason.OUT_OF_GRANT,
            f"{format_gib(used)} are in use under a grant of {format_gib(charge.total_bytes)}, and no more can be "
            "granted. The engine must be stopped.",
            metadata={"granted_bytes": str(charge.total_bytes), "observed_bytes": str(used)},
        )


def _cards(entry: Entry) -> frozenset[str]:
    return frozenset(device for device, _ in entry.lease.charge.devices)


def _overrun(charge: Charge, observed: Observed) -> dict[str, int]:
    excess = {HOST: observed.host_bytes - charge.host_bytes}
    excess |= {device: size - charge.on(device) for device, size in observed.devices}
    return {pool: size for pool, size in excess.items() if size > 0}


def _mismatch() -> Refused:
    return Refused(
        Reason.LEASE_SECRET_MISMATCH,
        "The secret or the process does not belong to this lease. Nothing was changed. If the lease was attached to or "
        "granted anew, use the secret told last.",
    )


def _refuse_suspect(entry: Entry) -> None:
    if entry.lease.suspect:
        raise Refused(
            Reason.LEASE_SUSPECT,
            "The lease was silent for longer than its term. Attach to it again from its own process.",
        )


def _refuse_suspect_or_vacating(entry: Entry) -> None:
    _refuse_suspect(entry)
    if entry.lease.state is LeaseState.VACATING:
        raise Refused(Reason.LEASE_VACATING, "The lease has been asked to vacate: finish, stop the engine and release.")

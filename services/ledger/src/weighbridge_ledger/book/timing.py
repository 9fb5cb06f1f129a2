"""What time does to the book: terms, deadlines, ageing, the ledger's own standing still (rules 6, 10, 12, 14, 15)."""

from heapq import heappop
from math import floor

from weighbridge_ledger.book.entries import Entry, Shrink
from weighbridge_ledger.book.events import EventKind, ReleaseCause
from weighbridge_ledger.book.queue import Waiter
from weighbridge_ledger.book.settling import SettlingCore
from weighbridge_ledger.book.states import LeaseState, Moment, changed


class TimedCore(SettlingCore):
    """Time acts before anything else does, in every verb."""

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
        self._memories.forget_what_is_old(now)
        self._settle(now)

    def _act_on_time(self, entry: Entry, now: Moment) -> None:
        lease = entry.lease
        if entry.vacate_deadline is not None and not entry.overdue and entry.vacate_deadline <= now.monotonic:
            # Overdue bytes are no longer hoped for: counting them, a 3-of-4 claim waited 1,087 s instead of 206 (P).
            self._pending.remove(lease.charge)
            self._unsettled = True
            entry.overdue = True
            self._overdue[lease.lease_id] = None
            self._tell(EventKind.OVERDUE, now, lease)
        if entry.shrink is not None and entry.shrink.deadline <= now.monotonic:
            self._forget_shrink(entry)
        since = None if lease.state is LeaseState.GRANTED else entry.loading_since
        if since is not None and since + self._policy.longest_load_s <= now.monotonic:
            self._loaded(entry, now)
            lease = entry.lease
        if lease.state is LeaseState.GRANTED:
            if entry.deadline <= now.monotonic:
                self._free(entry, ReleaseCause.NOT_ACTIVATED, now)
                return
        elif not lease.suspect and entry.deadline <= now.monotonic:
            self._suspect(entry, now)
        elif lease.suspect and lease.foreign and entry.deadline + self._policy.grace_s <= now.monotonic:
            self._free(entry, ReleaseCause.FENCED, now)
            return
        self._review(entry, now)

    def _act_on_waiter(self, waiter: Waiter, now: Moment) -> None:
        if waiter.deadline <= now.monotonic:
            self._unqueue(waiter, ReleaseCause.WAITED_TOO_LONG, now)
            return
        level = self._level(waiter.lease.priority, waiter.since, now)
        if level != waiter.level:
            self._queue.remove(waiter.sequence)
            waiter.level = level
            self._queue.add(waiter)
        self._unsettled = True
        self._schedule_waiter(waiter, now)

    def _level(self, priority: int, since: float, now: Moment) -> int:
        """Without ageing two interactive claims that alternate keep a background one waiting for ever (rule 15)."""
        return max(priority, min(self._policy.top_level, priority + self._ages(since, now)))

    def _ages(self, since: float, now: Moment) -> int:
        """How many ages it has waited. A moment at which the next one is due counts as reached when it is: of one in
        12,500 the difference to `since` is rounded to less, and the look at it would be repeated for ever."""
        ages = max(0, floor((now.monotonic - since) / self._policy.age_s))
        return ages + 1 if self._aged_at(since, ages + 1) <= now.monotonic else ages

    def _aged_at(self, since: float, ages: int) -> float:
        return since + ages * self._policy.age_s

    def _schedule_waiter(self, waiter: Waiter, now: Moment) -> None:
        dues = [waiter.deadline]
        if waiter.level < self._policy.top_level:
            dues.append(self._aged_at(waiter.since, self._ages(waiter.since, now) + 1))
        protected_at = waiter.since + self._policy.protect_after_s
        if protected_at > now.monotonic:
            dues.append(protected_at)
        if waiter.asked_until > now.monotonic:
            dues.append(waiter.asked_until)
        self._look_at_waiter(waiter, min(dues))

    def _extend_after(self, gap: float, now: Moment) -> None:
        """Nobody could renew while the ledger stood still: every term that may have suffered starts anew (rule 14)."""
        for entry in self._entries.values():
            usual = self._policy.activate_by_s if entry.lease.state is LeaseState.GRANTED else entry.lease.term_s
            if gap > usual / 2:
                self._extend(entry, now)
            elif entry.vacate_deadline is not None and not entry.overdue:
                entry.vacate_deadline += gap  # nobody could hear that it was asked, or that it had gone
            if entry.shrink is not None:
                entry.shrink = Shrink(entry.shrink.optional_bytes, entry.shrink.deadline + gap)
        for waiter in self._queue:
            waiter.deadline += gap
            # Its reclaim is in flight for as long as those who were asked now have.
            asked = (self._entries[one] for one in waiter.asked if one in self._entries)
            deadlines = [entry.vacate_deadline for entry in asked if entry.vacate_deadline and not entry.overdue]
            waiter.asked_until = max((waiter.asked_until, *deadlines))

    def _extend(self, entry: Entry, now: Moment) -> None:
        if entry.lease.state is LeaseState.GRANTED:
            entry.deadline = now.monotonic + self._policy.activate_by_s
        else:
            entry.deadline = now.monotonic + entry.lease.term_s * (1 + self._spread())
        if entry.vacate_deadline is not None and not entry.overdue:
            entry.vacate_deadline = now.monotonic + self._policy.vacate_s

    def _suspect(self, entry: Entry, now: Moment) -> None:
        """Freed on expiry, a silent but living holder's bytes would be used twice (S): it is only marked."""
        entry.lease = changed(entry.lease, suspect=True)
        self._write(entry)
        self._tell(EventKind.SUSPECTED, now, entry.lease)

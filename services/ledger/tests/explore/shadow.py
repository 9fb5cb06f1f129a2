"""What an attentive bystander makes of everything that a book tells: each change is held against the rules as it is
told, and afterwards the book must stand exactly where its own telling has led."""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, replace

from weighbridge_common.processes import ProcessIdentity
from weighbridge_ledger.book import (
    HOST,
    Ask,
    Book,
    Ceilings,
    Charge,
    Claim,
    Event,
    EventKind,
    External,
    Hold,
    Lease,
    LeaseState,
    Observed,
    Policy,
    ReleaseCause,
)

from services.ledger.tests.explore.oracle import Beside, Holder, Scene, Waiting, required_of
from services.ledger.tests.explore.reclaim import Reclaim, may_ask_first
from services.ledger.tests.explore.standing import freed_rightly, nobody_waits_in_vain

RANK = {state: rank for rank, state in enumerate(LeaseState)}


@dataclass(frozen=True)
class Kept:
    """A place in the order that a claim keeps for a minute after its call has ended (rule 14)."""

    sequence: int
    since: float
    passes: int
    until: float


class Shadow:
    """Follows one book. `told` counts what was told, by kind, and by cause for ends.

    Time may pass only by `follow`, with `scene.now` set before: then nothing is told late, inside the next verb.
    """

    def __init__(self, ceilings: Ceilings, policy: Policy, dead: set[ProcessIdentity]) -> None:
        self.dead = dead
        """Processes that have ended, kept up to date by whoever ends them."""
        self.scene = Scene(ceilings, policy)
        self.told: Counter[str] = Counter()
        self._fence = 0
        self._rank: dict[str, int] = {}
        self._places: dict[str, Kept] = {}
        self._samples: deque[External] = deque(maxlen=policy.steady_samples)
        self._observed: dict[str, Observed] = {}
        self._aims: dict[str, Claim] = {}
        """Of those who were protected for good after the last verb."""
        self._passes_at_most: dict[str, int] = {}
        """A waiter for any card may have changed its aim within one verb: at most so often it may have been harmed."""

    # -- what only the caller knows --------------------------------------------------------------------------------

    def heard(self, lease_id: str) -> None:
        """The holder has renewed its lease."""
        holder = self.scene.holders[lease_id]
        holder.until = self.scene.now + holder.lease.term_s
        self._known(holder)

    def _known(self, holder: Holder) -> None:
        """After a restart, its holder has said by now whether it is in use."""
        if not holder.known:
            holder.known, holder.idle_since = True, self.scene.now

    def observed(self, lease_id: str, observed: Observed) -> None:
        """What the holder says that it uses."""
        self._observed[lease_id] = observed

    def began(self, lease_id: str, use: str) -> None:
        """A use was granted (rule 21)."""
        holder = self.scene.holders[lease_id]
        assert holder.lease.state is LeaseState.ACTIVE, "a use was granted on a lease that is not active"
        assert not holder.lease.suspect, "a use was granted on a suspect lease"
        held = [self.scene.holds[device] for device in holder.lease.charge.occupies if device in self.scene.holds]
        assert use in holder.uses or not any(hold.refuses_use for hold in held), "a use was granted on an unwell device"
        holder.uses.add(use)
        self._known(holder)

    def ended(self, lease_id: str, use: str) -> None:
        """A use was ended."""
        holder = self.scene.holders[lease_id]
        if use in holder.uses:
            holder.uses.remove(use)
            if not holder.uses:
                holder.idle_since = self.scene.now

    def asked_again(self, lease: Lease) -> None:
        """A claim was retried: perhaps by another process, or with its secret forgotten by a restart (rule 8)."""
        holder = self.scene.holders.get(lease.lease_id)
        if holder is None:
            return
        before = holder.lease
        assert lease.holder == before.holder or lease.state is LeaseState.GRANTED, "an active lease changed hands"
        if before.state is LeaseState.GRANTED:
            holder.until = self.scene.now + self.scene.policy.activate_by_s
        holder.lease = replace(
            before,
            holder=lease.holder,
            foreign=lease.foreign,
            secret_digest=lease.secret_digest,
            previous_digest=lease.previous_digest,
        )

    def measured(self, external: External) -> None:
        """Other programs were measured. A rise counts for asking after three samples with nothing loading (rule 3)."""
        pools = [HOST, *self.scene.ceilings.devices]
        if any(holder.loading_since is not None for holder in self.scene.holders.values()):
            self._samples.clear()
        else:
            self._samples.append(external)
        enough = len(self._samples) == self.scene.policy.steady_samples
        before = {pool: self.scene.steady.get(pool, 0) for pool in pools}
        self.scene.measured = {pool: external.on(pool) for pool in pools}
        self.scene.steady = {
            pool: min(sample.on(pool) for sample in self._samples) if enough else min(before[pool], external.on(pool))
            for pool in pools
        }

    def held(self, holds: dict[str, Hold]) -> None:
        """Devices are not well, or well again."""
        self.scene.holds = dict(holds)

    def restarted(self) -> None:
        """The ledger was killed and started: what was not committed is lost (rule 14)."""
        now, scene = self.scene.now, self.scene
        for waiter in scene.waiting.values():
            waited_s = min(now - waiter.since, scene.policy.max_wait_s)
            self._keep_place(waiter.lease, now - waited_s, waiter.passes)
        self._places = {
            request: replace(
                kept,
                since=now - min(now - kept.since, scene.policy.max_wait_s),
                until=now + scene.policy.ticket_s,
            )
            for request, kept in self._places.items()
            if now < kept.until
        }
        scene.waiting, scene.overruns, scene.measured, scene.steady, scene.holds = {}, {}, {}, {}, {}
        self._samples.clear()
        self._observed.clear()
        self._aims.clear()
        for holder in scene.holders.values():
            holder.until = now + self._extended(holder.lease)
            holder.uses, holder.known = set(), False
            holder.shrink_by, holder.was_asked_to_shrink = None, False
            if holder.vacate_by is not None:
                holder.overdue = False
                holder.vacate_by = now + scene.policy.vacate_s
                holder.loading_since = None
            elif holder.loading_since is not None:
                holder.loading_since = now

    def stood_still(self, gap_s: float) -> None:
        """The ledger did not look for so long: who may have suffered from that gets as much time again (rule 14)."""
        scene = self.scene
        if gap_s > scene.policy.standstill_s:
            for holder in scene.holders.values():
                if gap_s > scene.term_of(holder.lease) / 2:
                    holder.until = scene.now + self._extended(holder.lease)
                    if holder.vacate_by is not None and not holder.overdue:
                        holder.vacate_by = scene.now + scene.policy.vacate_s
                elif holder.vacate_by is not None and not holder.overdue:
                    holder.vacate_by += gap_s
                if holder.shrink_by is not None:
                    holder.shrink_by += gap_s
            for waiter in scene.waiting.values():
                asked = (scene.holders[one] for one in waiter.asked if one in scene.holders)
                waiter.asked_until = max(
                    [waiter.asked_until, *(holder.vacate_by for holder in asked if holder.vacate_by is not None)]
                )

    def _extended(self, lease: Lease) -> float:
        """A term once more and up to doubled, so that not all end at once; worlds of tests spread by a half."""
        return self.scene.term_of(lease) * (1 if lease.state is LeaseState.GRANTED else 1.5)

    # -- what was told ---------------------------------------------------------------------------------------------

    def follow(self, events: list[Event], *, ask: Ask | None = None, given_back: Collection[str] = ()) -> None:
        """Take up the changes of one verb, in the order in which they were told.

        Args:
            events: the changes.
            ask: what was asked for, if that was the verb.
            given_back: leases whose holders asked for their end themselves.
        """
        self._passes_at_most = {one: waiter.passes for one, waiter in self.scene.waiting.items()}
        resized = {event.lease.lease_id for event in events if event.lease and event.kind is EventKind.RESIZED}
        for lease_id in self._observed.keys() - resized:
            self._set_overrun(lease_id, self.scene.holders[lease_id].lease.charge)
        judged: set[str] = set()
        for at, event in enumerate(events):
            self.told[event.kind] += 1
            if event.ceilings is not None:
                self.scene.ceilings = event.ceilings
            if (lease := event.lease) is None:
                continue
            assert RANK[lease.state] >= self._rank.get(lease.lease_id, 0), f"walked back: {event}"
            self._rank[lease.lease_id] = RANK[lease.state]
            match event.kind:
                case EventKind.QUEUED:
                    self._queued(lease, ask)
                case EventKind.GRANTED:
                    self._granted(lease, ask)
                case EventKind.VACATING if lease.lease_id not in given_back and lease.lease_id not in judged:
                    judged |= self._judge_reclaim(lease.lease_id, events[at:])
                    self._vacating(lease)
                case EventKind.VACATING:
                    self._vacating(lease)
                case EventKind.SHRINK_ASKED:
                    self._shrink_asked(lease)
                case EventKind.RESIZED:
                    self._resized(lease)
                case EventKind.RELEASED:
                    self.told[f"RELEASED {event.cause}"] += 1
                    self._released(lease, event.cause, lease.lease_id in given_back)
                case EventKind.RECLAIMING | EventKind.CEILINGS_CHANGED:
                    assert set(event.asked) <= judged, "somebody was asked and did not vacate"
                case _:
                    self._changed(event.kind, lease)

    def _queued(self, lease: Lease, ask: Ask | None) -> None:
        waiter = self._newcomer(lease, ask)
        waiter.target = next(self.scene.bindings(lease.claim))
        self.scene.waiting[lease.lease_id] = waiter
        self._passes_at_most[lease.lease_id] = waiter.passes

    def _newcomer(self, lease: Lease, ask: Ask | None) -> Waiting:
        """A claim as it comes in, with the place that it kept."""
        assert ask is not None, f"a claim that nobody made: {lease}"
        kept = self._places.pop(lease.request_id, None)
        if kept is not None and self.scene.now < kept.until:
            assert lease.sequence == kept.sequence, "a retry lost its place"
            since, passes = kept.since, kept.passes
        else:
            since, passes = self.scene.now, 0
        old = "" if ask.replaces is None else ask.replaces.lease_id
        return Waiting(
            lease,
            since,
            passes,
            replaces=old if old in self.scene.holders else "",
            while_holding=frozenset(one.lease_id for one in ask.while_holding),
        )

    def _granted(self, lease: Lease, ask: Ask | None) -> None:
        scene = self.scene
        waiter = scene.waiting.get(lease.lease_id) or self._newcomer(lease, ask)
        required = required_of(lease.charge)
        assert lease.fence > self._fence, "fences rise"
        self._fence = lease.fence
        assert any(_same(required, charge) for charge in scene.grants(waiter)), f"not to be granted: {lease}"
        ahead = scene.ahead_of(waiter)
        for other in ahead:
            assert not scene.grants(other, surely=True), f"{other} comes first, and could be granted"
        self._count_passes(ahead, required)
        scene.waiting.pop(lease.lease_id, None)
        self._check_optional(lease, required)
        scene.holders[lease.lease_id] = Holder(
            lease, scene.now + scene.term_of(lease), idle_since=scene.now, loading_since=scene.now
        )

    def _count_passes(self, harmable: list[Waiting], charge: Charge) -> None:
        """Whoever is harmed has lost a turn, and was not protected (rule 16)."""
        for other in harmable:
            if self.scene.surely_harmed(other, charge):
                assert not self.scene.protected(other), f"{charge} harms {other}, who is protected"
                other.passes += 1
            if self.scene.perhaps_harmed(other, charge):
                self._passes_at_most[other.lease.lease_id] += 1

    def _check_optional(self, lease: Lease, required: Charge) -> None:
        """Optional bytes are what is left after the required bytes of all who wait, and never spill (rule 4)."""
        scene, charge = self.scene, lease.charge
        extra = {HOST: charge.optional_host_bytes} | dict(charge.optional_devices)
        wanted: Counter[str] = Counter({HOST: lease.claim.optional_host_bytes})
        for want in lease.claim.devices:
            wanted[want.device_id] += want.optional_bytes
        empty = Scene(scene.ceilings, scene.policy)
        awaited = [empty.place(other.lease, other.target, Beside(())) for other in scene.waiting.values()]
        after = scene.beside(joined=[charge, *(one for one in awaited if one is not None)])
        for pool, size in extra.items():
            if not size:
                continue
            most = wanted[pool] if lease.claim.floating is False or pool == HOST else sum(wanted.values())
            assert size <= most, "more optional bytes than were wanted"
            assert size % scene.policy.optional_step_bytes == 0 or size == most, "not in steps"
            assert pool not in dict(charge.spilled), "optional bytes on a card from which required ones spill"
            if not any(other.lease.claim.floating for other in scene.waiting.values()):
                assert after.used[pool] <= scene.most(pool), f"{size} bytes on {pool} are somebody's required ones"
                assert after.total <= scene.ceilings.total_bytes, "somebody's required bytes under the limit"
        for other in scene.waiting.values():
            delayed = scene.surely_harmed(other, charge) and not scene.perhaps_harmed(other, required)
            assert not delayed, f"optional bytes delay {other}"

    def _judge_reclaim(self, victim: str, events: list[Event]) -> set[str]:
        """Whether those who are asked may be, and have to be: looked at before the first of them vacates."""
        reclaim = next((one for one in events if one.kind is EventKind.RECLAIMING and victim in one.asked), None)
        assert reclaim is not None, f"{victim} was asked to vacate for nobody"
        assert reclaim.lease is not None
        scene, waiter = self.scene, self.scene.waiting[reclaim.lease.lease_id]
        aims = scene.aims(waiter)
        assert all(scene.hold_on(aim) for aim in aims) is False, "nobody is asked for who may not be loaded anyway"
        assert may_ask_first(scene, waiter), f"another claim comes first, wherever it aims: {waiter}"
        if reclaim.asked == (waiter.replaces,):
            without = scene.beside([waiter.replaces])
            assert any(scene.place(waiter.lease, aim, without) for aim in aims), "something else is missing too"
        else:
            # How often it was overtaken depends on where it aimed, and whether it is protected on that.
            perhaps = replace(waiter, passes=self._passes_at_most[waiter.lease.lease_id])
            readings = [waiter] if perhaps.passes == waiter.passes else [waiter, perhaps]
            faults = [Reclaim(scene, one, aim).fault_in(reclaim.asked) for one in readings for aim in aims]
            assert None in faults, f"{reclaim.asked} were asked for {waiter}: {faults}"
        waiter.asked |= set(reclaim.asked)
        waiter.asked_until = scene.now + scene.policy.vacate_s
        return set(reclaim.asked)

    def _vacating(self, lease: Lease) -> None:
        holder = self.scene.holders[lease.lease_id]
        holder.lease, holder.shrink_by = lease, None
        holder.vacate_by = self.scene.now + self.scene.policy.vacate_s

    def _shrink_asked(self, lease: Lease) -> None:
        assert lease.lease_id in self.scene.shrinkable(), f"asked for optional bytes in vain: {lease}"
        holder = self.scene.holders[lease.lease_id]
        holder.shrink_by = self.scene.now + self.scene.policy.shrink_s
        holder.was_asked_to_shrink = True

    def _resized(self, lease: Lease) -> None:
        """Growth is a pass over every waiter that it harms, and refused where one is protected (rule 23)."""
        holder = self.scene.holders[lease.lease_id]
        before, after = holder.lease.charge, lease.charge
        raised = after.exclusive and not before.exclusive
        cards = tuple((card, max(0, size - before.on(card))) for card, size in after.devices)
        growth = Charge(
            max(0, after.host_bytes - before.host_bytes),
            tuple((card, size) for card, size in cards if size or raised),
            on_gpu=after.on_gpu and raised,
            exclusive=raised,
        )
        self._set_overrun(lease.lease_id, after)  # what it uses already is charged now, and not used twice
        if growth.total_bytes or raised:
            assert holder.lease.state is LeaseState.ACTIVE, "who vacates does not grow"
            self._count_passes(list(self.scene.waiting.values()), growth)
        holder.lease = lease
        if after != before:
            # A wish that is not heeded can change alone: that is no answer to what it was asked.
            holder.shrink_by, holder.was_asked_to_shrink = None, False
        for pool in growth.pools:
            mine = self.scene.overruns.get(lease.lease_id, {}).get(pool, 0)
            most = self.scene.most(pool) + mine
            assert self.scene.beside().used[pool] <= most, f"grew above what {pool} has: {lease}"
        if after.total_bytes > before.total_bytes:
            assert self.scene.beside().total <= self.scene.ceilings.total_bytes, f"grew above the limit: {lease}"

    def _set_overrun(self, lease_id: str, charge: Charge) -> None:
        """What is in use above a charge is nobody's to give (rule 23)."""
        self.scene.overruns.pop(lease_id, None)
        observed = self._observed.get(lease_id)
        if observed is not None:
            over = {HOST: observed.host_bytes - charge.host_bytes}
            over |= {card: size - charge.on(card) for card, size in observed.devices}
            self.scene.overruns[lease_id] = {pool: size for pool, size in over.items() if size > 0}

    def _released(self, lease: Lease, cause: ReleaseCause | None, given_back: bool) -> None:
        holder = self.scene.holders.pop(lease.lease_id, None)
        self.scene.overruns.pop(lease.lease_id, None)
        self._observed.pop(lease.lease_id, None)
        if holder is None:
            waiter = self.scene.waiting.pop(lease.lease_id)
            if cause is ReleaseCause.EXCEEDS_CAPACITY:
                assert self.scene.never_fits(lease), "told that it never fits, though it could"
            self._keep_place(lease, waiter.since, waiter.passes)
        else:
            freed_rightly(self.scene, holder, cause, self.dead, given_back=given_back)
            if holder.lease.state is LeaseState.GRANTED:
                self._keep_place(lease, self.scene.now, 0)

    def _keep_place(self, lease: Lease, since: float, passes: int) -> None:
        if lease.request_id:
            self._places[lease.request_id] = Kept(
                lease.sequence, since, passes, self.scene.now + self.scene.policy.ticket_s
            )

    def _changed(self, kind: EventKind, lease: Lease) -> None:
        now, holder = self.scene.now, self.scene.holders[lease.lease_id]
        if kind is EventKind.ACTIVATED and holder.lease.state is LeaseState.GRANTED:
            holder.idle_since = holder.loading_since = now
            holder.until = now + lease.term_s
        elif kind is EventKind.ATTACHED:
            self.heard(lease.lease_id)
        elif kind is EventKind.LOADED:
            assert holder.loading_since is not None
            assert lease.load_s == now - holder.loading_since
            holder.loading_since, holder.loaded, holder.idle_since = None, now, now
        elif kind is EventKind.SUSPECTED:
            assert now >= holder.until, "marked before its term was over"
        elif kind is EventKind.OVERDUE:
            assert holder.vacate_by is not None
            assert holder.vacate_by <= now, "overdue before its deadline"
            holder.overdue = True
        holder.lease = lease

    # -- where that has led ----------------------------------------------------------------------------------------

    def compare(self, book: Book) -> None:
        """The book stands where its telling has led, and nobody waits who need not."""
        scene = self.scene
        assert {view.lease.lease_id: view.lease for view in book.charged()} == {
            one: holder.lease for one, holder in scene.holders.items()
        }
        for one, holder in scene.holders.items():
            assert holder.lease.suspect or scene.now < holder.until, f"silent for its term: {one}"
        queued = {waiter.lease.lease_id: waiter for waiter in book._queue}
        assert queued.keys() == scene.waiting.keys()
        for one, waiter in scene.waiting.items():
            theirs = queued[one]
            waiter.lease, waiter.target = theirs.lease, theirs.claim
            assert waiter.passes <= theirs.passes <= self._passes_at_most.get(one, waiter.passes), f"passes of {theirs}"
            waiter.passes = theirs.passes
            assert theirs.passes <= scene.policy.protect_passes, f"overtaken too often: {theirs}"
            assert theirs.since == waiter.since, f"waits since {waiter.since}, not {theirs.since}: {theirs}"
            assert theirs.level == scene.level(waiter), f"level of {theirs}"
        order = [waiter.lease.lease_id for waiter in scene.in_order()]
        assert [waiter.lease.lease_id for waiter in book._queue] == order
        nobody_waits_in_vain(scene, self._aims)
        self._aims = {one: waiter.target for one, waiter in scene.waiting.items() if scene.protected_for_good(waiter)}


def _same(one: Charge, other: Charge) -> bool:
    return (
        one.host_bytes == other.host_bytes
        and dict(one.devices) == dict(other.devices)
        and dict(one.spilled) == dict(other.spilled)
        and one.on_gpu == other.on_gpu
        and one.exclusive == other.exclusive
    )

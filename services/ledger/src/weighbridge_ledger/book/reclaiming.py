"""Who is asked to give bytes back for the claims that wait (rules 3, 4, 17 to 20, 22, 24)."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from weighbridge_common.immutable import immutable

from weighbridge_ledger.book import passing
from weighbridge_ledger.book.charging import Usage, devices_of, pools_wanted, price, required_of, room_on, short_pools
from weighbridge_ledger.book.core import BookCore
from weighbridge_ledger.book.events import EventKind
from weighbridge_ledger.book.placing import aim, aims_well, placements
from weighbridge_ledger.book.queue import Waiter
from weighbridge_ledger.book.residents import Resident
from weighbridge_ledger.book.states import Charge, Claim, External, Moment
from weighbridge_ledger.book.victims import Candidate, choose


@immutable
class Demand:
    """A claim that does not fit, and what it may count on."""

    target: Claim
    """With every card named."""
    exclusive: bool
    host_limit_bytes: int
    level: int
    base: Usage
    """What is charged once everything is back that comes back anyway."""
    spared: frozenset[str] = frozenset()
    """Leases that are not asked for it."""
    staged: bool = False
    """It is protected for good: it plans over busy and young holders too (rule 20)."""
    patient: bool = False
    """A what-if: idle holders count that may be asked only in a moment, because they are young."""


@immutable
class Plan:
    """Whom to ask, so that a claim fits."""

    vacate: tuple[str, ...] = ()
    """At once."""
    later: tuple[str, ...] = ()
    """As soon as they fall idle and are no longer young."""
    shrink: tuple[str, ...] = ()
    """For their optional bytes."""


class ReclaimCore(BookCore):
    """Asks only when it suffices, the fewest bytes that suffice, and those that are needed least."""

    def _reclaim(self, now: Moment) -> None:
        """Let the first blocked waiter of each pool ask, if what is being given back does not suffice (rule 18)."""
        served: set[str] = set()
        for waiter in self._queue.head(self._policy.look_ahead):
            hold = self._held(waiter.lease.claim, waiter.claim)
            if hold is not None and hold.lasts:
                # Who takes any card waits for no unwell one as long as there is another.
                if not self._ask_planned(waiter, self._plan_elsewhere(waiter, served, now), now):
                    continue
            elif hold is None and served.isdisjoint(waiter.places):
                self._reclaim_for(waiter, served, now)
            served |= waiter.places
            # The person's limit is like a pool that all share.
            if self._ceilings.limit_bytes is not None or self._queue.all_served(served):
                return

    def _reclaim_for(self, waiter: Waiter, served: Collection[str], now: Moment) -> None:
        base = self._machine().settled_for(waiter)
        if self._would_fit(waiter, waiter.claim, base, self._steady_external()):
            self._ask_replaced(waiter, now)
            return
        plan = self._plan(self._demand_of(waiter, waiter.claim, base, now), now)
        if plan is None:
            # Another card, where asking helps, is worth more than the one where least is missing.
            plan = self._plan_elsewhere(waiter, served, now)
        self._ask_planned(waiter, plan, now)

    def _plan_elsewhere(self, waiter: Waiter, served: Collection[str], now: Moment) -> Plan | None:
        """Lets a waiter for any card aim at one where asking helps, is of use, and is not for others to do first."""
        if not waiter.floating or passing.protected(waiter, now.monotonic, self._policy):
            return None
        claim = waiter.lease.claim
        machine = self._machine()
        base = machine.settled_for(waiter)
        for target in passing.bindings(waiter, machine, base):
            places = pools_wanted(target, self._ceilings).union(devices_of(target, self._ceilings))
            if self._held(claim, target) is not None or not places.isdisjoint(served):
                continue
            if self._would_fit(waiter, target, base, self._steady_external()):
                return None
            plan = self._plan(self._demand_of(waiter, target, base, now), now)
            if plan is not None:
                self._set_target(waiter, target)
                return plan
        return None

    def _ask_planned(self, waiter: Waiter, plan: Plan | None, now: Moment) -> bool:
        """Ask whom a plan asks now; False: there is none."""
        if plan is None:
            return False
        for lease_id in plan.shrink:
            self._ask_to_shrink(self._entries[lease_id], now)
        if plan.vacate:
            self._ask(waiter, plan.vacate, now)
        return True

    def _ask(self, waiter: Waiter, lease_ids: tuple[str, ...], now: Moment) -> None:
        for lease_id in lease_ids:
            self._vacate(self._entries[lease_id], now, asked_by=waiter.lease.lease_id)
            waiter.asked[lease_id] = None
        waiter.asked_until = now.monotonic + self._policy.vacate_s
        # From then on others may overtake it again: a moment to look at the queue, whatever else happens.
        self._look_at_waiter(waiter, waiter.asked_until)
        self._tell(EventKind.RECLAIMING, now, waiter.lease, asked=lease_ids)

    def _ask_replaced(self, waiter: Waiter, now: Moment) -> None:
        """The lease that a waiter replaces is its willing victim, and asked last: when nothing else is missing."""
        if self._replaced(waiter) is None:
            return
        without = self._usage.copy()
        # All of it, also optional bytes that it was asked for: with the lease they go.
        without.remove(self._entries[waiter.replaces].lease.charge)
        if self._would_fit(waiter, waiter.claim, without, self._external):
            self._ask(waiter, (waiter.replaces,), now)

    def _would_fit(self, waiter: Waiter, target: Claim, usage: Usage, external: External) -> bool:
        return isinstance(passing.price_of(waiter, target, self._ceilings, external, usage), Charge)

    def _demand_of(self, waiter: Waiter, target: Claim, base: Usage, now: Moment) -> Demand:
        return Demand(
            target,
            waiter.lease.exclusive,
            waiter.lease.memory_limit_bytes,
            waiter.level,
            base,
            own_leases(waiter),
            passing.overdue(waiter, now.monotonic, self._policy),
        )

    def _plan(self, demand: Demand, now: Moment) -> Plan | None:
        """Whom to ask so that a claim fits; None: asking helps nothing, and so nobody is asked (rule 20)."""
        steady = self._steady_external()

        def fits(usage: Usage, external: External = steady) -> bool:
            priced = price(
                demand.target,
                self._ceilings,
                external,
                usage,
                exclusive=demand.exclusive,
                host_limit_bytes=demand.host_limit_bytes,
            )
            return isinstance(priced, Charge)

        without_optional = self._shrinkable.without(demand.base, demand.spared)
        base = demand.base if without_optional is None else without_optional
        if without_optional is not None and fits(base):
            # Optional bytes are given back first, and that is enough (rule 4).
            pools = short_pools(demand.target, self._ceilings, steady, demand.base, exclusive=demand.exclusive)
            plan, after = Plan(shrink=self._shrink_until(fits, demand.base.copy(), pools, demand.spared)), base
        else:
            ripe_only = not (demand.staged or demand.patient)
            if not fits(self._residents.without(base, demand.level, demand.spared, ripe_only=ripe_only)):
                return None
            pools = short_pools(demand.target, self._ceilings, steady, base, exclusive=demand.exclusive)
            places = pools.union(devices_of(demand.target, self._ceilings))
            if demand.staged and not demand.patient and not self._residents.any_askable_now(places, demand.level):
                # All would be asked later. Which of them is seen when the first of them is idle, not at each event.
                return None
            chosen = choose(self._candidates(demand, places, now), base, fits, self._policy.exact_victims)
            if not chosen:
                return None
            vacate = tuple(one.lease_id for one in chosen if one.askable_now)
            later = tuple(one.lease_id for one in chosen if not one.askable_now)
            shrink: tuple[str, ...] = ()
            if not later:
                left = demand.base.copy()
                for lease_id in vacate:
                    left.remove(self._not_pending_of(self._entries[lease_id]))
                shrink = self._shrink_until(fits, left, pools, demand.spared.union(vacate))
            plan = Plan(vacate, later, shrink)
            after = base.copy()
            for one in chosen:
                after.remove(one.charge)
        if self._external != steady and not fits(after, self._external):
            return None  # it would not suffice as long as programs outside hold what they hold just now
        return plan

    def _candidates(self, demand: Demand, places: Iterable[str], now: Moment) -> Iterator[Candidate]:
        if demand.staged or demand.patient:
            residents = self._residents.staged(places, demand.level)
        else:
            residents = self._residents.ripe(places, demand.level)
        for resident in residents:
            if resident.lease_id in demand.spared or (demand.patient and resident.last_use == math.inf):
                continue
            yield Candidate(
                resident.lease_id,
                self._still_counted(resident),
                resident.last_use,
                resident.ripe or demand.patient or resident.may_be_asked(now.monotonic),
            )

    def _still_counted(self, resident: Resident) -> Charge:
        """What of a resident's charge is in the base of a plan: its optional bytes have been taken out there."""
        entry = self._entries[resident.lease_id]
        gone = entry.shrink is not None or resident.lease_id in self._shrinkable
        return required_of(resident.charge) if gone else resident.charge

    def _shrink_until(
        self, fits: passing.Fits, usage: Usage, pools: Iterable[str], spared: Collection[str]
    ) -> tuple[str, ...]:
        """Whose optional bytes have to be asked back so that a claim fits, longest idle first and none in vain; `usage`
        is changed."""
        asked: dict[str, Charge] = {}
        coming = self._shrinkable.in_order(pools)
        while not fits(usage) and (one := next(coming, None)) is not None:
            lease_id, charge = one
            if lease_id not in spared:
                usage.add_optional(charge, -1)
                asked[lease_id] = charge
        for lease_id, charge in list(asked.items()):
            usage.add_optional(charge)
            if fits(usage):
                del asked[lease_id]
            else:
                usage.add_optional(charge, -1)
        return tuple(asked)

    def _steady_external(self) -> External:
        return self._overruns.on_top_of(self._steady)

    # -- which card a waiter aims at -------------------------------------------------------------------------------

    def _aiming(self, now: Moment) -> Callable[[Waiter], None]:
        """Lets waiters aim, one after the other, at what there is at this moment."""
        settled = self._usage.less(self._pending)
        rooms = {device: room_on(device, self._ceilings, self._external, settled) for device in self._ceilings.devices}
        return lambda waiter: self._aim_anew(waiter, settled, rooms, now)

    def _aim_anew(self, waiter: Waiter, settled: Usage, rooms: Mapping[str, int], now: Moment) -> None:
        """Rule 17: a waiter for any card aims at the one where least is missing. The aim of a protected one is frozen,
        unless what is pinned, suspect or overdue makes it hopeless: cards of 2 and 2, one of them pinned, and w waits
        there while the other one is given to others again and again (exhaustive search)."""
        claim = waiter.lease.claim
        if not passing.protected(waiter, now.monotonic, self._policy):
            if aims_well(claim, waiter.claim, rooms):
                return
            target = aim(claim, self._ceilings, self._external, settled, waiter.claim)
        elif waiter.hopeful_at == self._hopes:
            return
        elif self._would_fit(waiter, waiter.claim, self._stuck, self._external):
            waiter.hopeful_at = self._hopes
            return
        else:
            hopeful = (
                target
                for target in placements(claim, self._ceilings, self._external, settled)
                if self._would_fit(waiter, target, self._stuck, self._external)
            )
            target = next(hopeful, None)
        if target is not None and target != waiter.claim:
            self._set_target(waiter, target)

    def _set_target(self, waiter: Waiter, target: Claim) -> None:
        self._queue.remove(waiter.sequence)
        waiter.claim = target
        waiter.hopeful_at = -1
        waiter.pools = pools_wanted(target, self._ceilings)
        waiter.required = passing.required_alone(
            target, self._ceilings, exclusive=waiter.lease.exclusive, limit_bytes=waiter.lease.memory_limit_bytes
        )
        self._queue.add(waiter)


def own_leases(waiter: Waiter) -> frozenset[str]:
    """The caller's own leases that a claim names: nobody is asked for them on its behalf."""
    return waiter.while_holding | {waiter.replaces}

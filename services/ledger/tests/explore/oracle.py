"""The rules of docs/ledger.md a second time: from their text, for shortness instead of speed, and without a line of the
book's own deciding. What both get wrong in the same way stays unseen; nothing else does.

Sizes are small whole numbers, times are seconds of the monotonic clock.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations

from weighbridge_ledger.book import GPU, HOST, Ceilings, Charge, Claim, DeviceWant, Hold, Lease, LeaseState, Policy

NOTHING = Claim(0)


@dataclass
class Holder:
    """One charged lease, as the rules look at it."""

    lease: Lease
    until: float
    """Until when it may be silent; granted: not activated."""
    known: bool = True
    """False: not heard of since the ledger was started anew, so nobody knows whether it is in use."""
    uses: set[str] = field(default_factory=set)
    idle_since: float = 0.0
    loading_since: float | None = None
    """Since when its engine may be loading: from the grant, or from the start of the ledger."""
    loaded: float = 0.0
    vacate_by: float | None = None
    overdue: bool = False
    shrink_by: float | None = None
    """Until when optional bytes that were asked back are hoped for."""
    was_asked_to_shrink: bool = False
    """And did not do so: it is not asked again before its size has changed."""


@dataclass
class Waiting:
    """One claim that waits, as the rules look at it."""

    lease: Lease
    since: float
    passes: int = 0
    target: Claim = NOTHING
    """Its claim on the cards at which it aims."""
    replaces: str = ""
    while_holding: frozenset[str] = frozenset()
    asked: set[str] = field(default_factory=set)
    """Who was asked to vacate for it."""
    asked_until: float = float("-inf")
    """And until when they are hoped for, unless the ledger stands still meanwhile."""


class Beside:
    """The sums of some charges, added up anew."""

    def __init__(self, charges: Iterable[Charge]) -> None:
        self.used: Counter[str] = Counter()
        self.company: Counter[str] = Counter()
        """Leases on each device."""
        self.alone: set[str] = set()
        """Devices that somebody has for itself."""
        self.spilled: set[str] = set()
        """Cards from which bytes of a lease were moved to the host."""
        for charge in charges:
            self.used[HOST] += charge.host_bytes
            for card, size in charge.devices:
                self.used[card] += size
            for device in charge.occupies:
                self.company[device] += 1
                if charge.exclusive:
                    self.alone.add(device)
            self.spilled |= {card for card, size in charge.spilled if size}

    @property
    def total(self) -> int:
        return sum(self.used.values())


def required_of(charge: Charge) -> Charge:
    """A charge without what was granted on top of the required bytes."""
    optional = dict(charge.optional_devices)
    return replace(
        charge,
        host_bytes=charge.host_bytes - charge.optional_host_bytes,
        devices=tuple((card, size - optional.get(card, 0)) for card, size in charge.devices),
        optional_host_bytes=0,
        optional_devices=(),
    )


@dataclass
class Scene:
    """Everything that a decision may look at."""

    ceilings: Ceilings
    policy: Policy
    now: float = 0.0
    holders: dict[str, Holder] = field(default_factory=dict)
    waiting: dict[str, Waiting] = field(default_factory=dict)
    measured: dict[str, int] = field(default_factory=dict)
    """By pool, what other programs hold."""
    steady: dict[str, int] = field(default_factory=dict)
    """What they have held for so many samples in a row that somebody may be asked to vacate for it."""
    overruns: dict[str, dict[str, int]] = field(default_factory=dict)
    """By lease and pool, what is in use above its grant."""
    holds: dict[str, Hold] = field(default_factory=dict)

    # -- rules 2 and 26: what fits where ---------------------------------------------------------------------------

    def outside(self, pool: str, *, steadily: bool = False) -> int:
        """Bytes in a pool that no lease is charged for."""
        others = (self.steady if steadily else self.measured).get(pool, 0)
        return others + sum(over.get(pool, 0) for over in self.overruns.values())

    def most(self, pool: str) -> int:
        """What leases may be charged in one pool: R − E on the host, min(C − E, L) on a card."""
        ceilings, limit = self.ceilings, self.ceilings.limit_bytes
        if pool == HOST:
            return ceilings.host_bytes - self.outside(HOST)
        own = ceilings.devices.get(pool, 0) - self.outside(pool)
        return own if limit is None else min(own, limit)

    def beside(self, gone: Collection[str] = (), shrunk: Collection[str] = (), joined: Iterable[Charge] = ()) -> Beside:
        """The sums without some leases, without the optional bytes of others, and with some more charges."""
        stay = [
            required_of(holder.lease.charge) if lease_id in shrunk else holder.lease.charge
            for lease_id, holder in self.holders.items()
            if lease_id not in gone
        ]
        return Beside([*stay, *joined])

    def place(self, lease: Lease, claim: Claim, beside: Beside, *, steadily: bool = False) -> Charge | None:
        """Where a lease's claim, on named cards, would be charged; None: it does not fit."""
        ceilings, limit = self.ceilings, self.ceilings.limit_bytes
        occupies = self.devices(claim)
        if ceilings.exclusive_heeded:
            if occupies & beside.alone:
                return None
            if lease.exclusive and any(beside.company[device] for device in occupies):
                return None
        host, cards, spilled = claim.host_bytes, [], []
        for want in claim.devices:
            card, size = want.device_id, want.required_bytes
            if card in beside.spilled and not ceilings.spill_allowed:
                return None
            free = ceilings.devices.get(card, 0) - self.outside(card, steadily=steadily)
            free = (free if limit is None else min(free, limit)) - beside.used[card]
            if size > free:
                if free <= 0 or not (ceilings.spill_allowed or beside.company[card] == 0):
                    return None
                spilled.append((card, size - free))
                host, size = host + size - free, free
            cards.append((card, size))
        if lease.memory_limit_bytes and host > lease.memory_limit_bytes:
            return None
        if host and beside.used[HOST] + host > ceilings.host_bytes - self.outside(HOST, steadily=steadily):
            return None
        charge = Charge(
            host,
            tuple(cards),
            tuple(spilled),
            on_gpu=GPU in occupies,
            exclusive=lease.exclusive and ceilings.exclusive_heeded and bool(occupies),
        )
        # Without a limit it is all pools together: less than what is charged, where a card was taken out.
        if beside.total + charge.total_bytes > ceilings.total_bytes:
            return None
        return charge

    def devices(self, claim: Claim) -> set[str]:
        """The devices that a claim on named cards would be on."""
        if claim.devices:
            return {want.device_id for want in claim.devices}
        return {GPU} if self.ceilings.has_shared_gpu and not claim.cpu_only else set()

    def pools(self, claim: Claim) -> set[str]:
        """The pools that a claim on named cards may be charged in."""
        spills = any(
            self.ceilings.spill_allowed or want.required_bytes > self.ceilings.pool_bytes(want.device_id)
            for want in claim.devices
        )
        cards = {want.device_id for want in claim.devices}
        return cards | {HOST} if claim.host_bytes or spills else cards

    def bindings(self, claim: Claim) -> Iterator[Claim]:
        """A claim with its unnamed cards decided, in every way; wishes for one card are one wish.

        The largest wish first, each takes a card that could hold it when it is empty, so that it does not spill because
        the large card is in use; one that is larger than all that are left takes a largest of them.
        """
        named = {want.device_id for want in claim.devices if want.device_id}
        loose = [want for want in claim.devices if not want.device_id]
        free = [card for card in self.ceilings.devices if card not in named]
        by_size = sorted(range(len(loose)), key=lambda index: -loose[index].required_bytes)
        for cards in permutations(free, len(loose)):
            left = set(free)
            for index in by_size:
                most = max(self.ceilings.pool_bytes(card) for card in left)
                if self.ceilings.pool_bytes(cards[index]) < min(loose[index].required_bytes, most):
                    break
                left.remove(cards[index])
            else:
                yield self._bound(claim, cards)

    @staticmethod
    def _bound(claim: Claim, cards: tuple[str, ...]) -> Claim:
        """A claim with its unnamed cards named."""
        wants: dict[str, DeviceWant] = {}
        chosen = iter(cards)
        for want in claim.devices:
            card = want.device_id or next(chosen)
            had = wants.get(card, DeviceWant(card, 0))
            wants[card] = DeviceWant(
                card, had.required_bytes + want.required_bytes, had.optional_bytes + want.optional_bytes
            )
        kept = tuple(wants[card] for card in sorted(wants) if wants[card].required_bytes > 0)
        return replace(claim, devices=kept)

    def missing(self, target: Claim) -> int:
        """Bytes that a claim on named cards misses there once everything is back that comes back (rule 17)."""
        settled = self.beside(self.pending(), self.shrinking())
        return sum(
            max(0, want.required_bytes - max(0, self.most(want.device_id) - settled.used[want.device_id]))
            for want in target.devices
        )

    def never_fits(self, lease: Lease) -> bool:
        """Whether the claim could not be granted even if nobody else were there."""
        empty = Scene(self.ceilings, self.policy)
        return not any(empty.place(lease, bound, Beside(())) for bound in empty.bindings(lease.claim))

    def term_of(self, lease: Lease) -> float:
        """How long its holder may be silent, or a grant not be activated (rules 6, 10)."""
        return self.policy.activate_by_s if lease.state is LeaseState.GRANTED else lease.term_s

    # -- what is there for the moment ------------------------------------------------------------------------------

    def pending(self) -> set[str]:
        """The leases whose bytes are coming back: VACATING before their deadline."""
        return {
            one for one, holder in self.holders.items() if holder.vacate_by is not None and self.now < holder.vacate_by
        }

    def shrinking(self) -> set[str]:
        """The leases whose optional bytes are coming back, as is hoped."""
        return {
            one for one, holder in self.holders.items() if holder.shrink_by is not None and self.now < holder.shrink_by
        }

    def shrinkable(self) -> set[str]:
        """The leases that could be asked for optional bytes."""
        return {
            one
            for one, holder in self.holders.items()
            if holder.lease.state is LeaseState.ACTIVE
            and not holder.lease.suspect
            and holder.lease.charge.optional_bytes
            and not holder.was_asked_to_shrink
        }

    def stuck(self) -> set[str]:
        """The leases whose bytes nobody can be asked for: pinned, suspect, overdue."""
        replaced = self.replaced()
        return {
            one
            for one, holder in self.holders.items()
            if holder.lease.suspect
            or (holder.vacate_by is not None and holder.vacate_by <= self.now)
            or (holder.lease.pinned and one not in replaced and holder.lease.state is not LeaseState.VACATING)
        }

    def replaced(self) -> set[str]:
        """The leases that a waiting claim replaces: they have lost their pin (rule 24)."""
        return {waiter.replaces for waiter in self.waiting.values()}

    def hold_on(self, claim: Claim) -> Hold | None:
        """Why nothing may be loaded where a claim on named cards would be."""
        devices = self.devices(claim)
        return next((self.holds[one] for one in ("", *devices) if one in self.holds), None) if devices else None

    def must_wait_its_turn(self, claim: Claim) -> bool:
        """Whether somebody else is loading, where loads come one after the other."""
        loading = (
            holder.loading_since is not None and not holder.lease.claim.cpu_only for holder in self.holders.values()
        )
        return self.ceilings.one_start_at_a_time and not claim.cpu_only and any(loading)

    # -- rules 15 and 16: order and passing ------------------------------------------------------------------------

    def level(self, waiter: Waiting) -> int:
        """Priority, raised by one for every 30 s of waiting."""
        aged = waiter.lease.priority + int((self.now - waiter.since) // self.policy.age_s)
        return max(waiter.lease.priority, min(self.policy.top_level, aged))

    def in_order(self) -> list[Waiting]:
        """Those who wait, first served first."""
        return sorted(self.waiting.values(), key=self._place_in_order)

    def ahead_of(self, waiter: Waiting) -> list[Waiting]:
        """Those who come before a waiter."""
        mine = self._place_in_order(waiter)
        return [other for other in self.in_order() if self._place_in_order(other) < mine]

    def _place_in_order(self, waiter: Waiting) -> tuple[int, int]:
        return -self.level(waiter), waiter.lease.sequence

    def protected_for_good(self, waiter: Waiting) -> bool:
        """Overtaken often enough, or waiting long enough."""
        return waiter.passes >= self.policy.protect_passes or self.now - waiter.since >= self.policy.protect_after_s

    def protected(self, waiter: Waiting) -> bool:
        """Whether nobody may overtake it harmfully: as above, or its reclaim is in flight."""
        return self.protected_for_good(waiter) or bool(waiter.asked & self.pending())

    def left_alone(self, waiter: Waiting) -> bool:
        """Whether somebody may be kept waiting for its sake: also for a while after those asked for it are gone."""
        return self.protected(waiter) or self.now < waiter.asked_until

    def counted_on(self, waiter: Waiting) -> set[str]:
        """The leases that will be gone without anything being done for it: pending ones, and the one it replaces."""
        replaced = self.holders.get(waiter.replaces)
        return self.pending() | ({waiter.replaces} if replaced is not None and replaced.vacate_by is None else set())

    def aims(self, waiter: Waiting) -> list[Claim]:
        """The cards at which it may aim within a verb. Afterwards it aims at `target`."""
        return list(self.bindings(waiter.lease.claim)) if waiter.lease.claim.floating else [waiter.target]

    def surely_harmed(self, waiter: Waiting, charge: Charge) -> bool:
        """Whether `charge` harms a waiter, wherever it aims; not if it waits for a device to get well."""
        return all(self.hold_on(aim) is None and self.harmed(waiter, charge, aim) for aim in self.aims(waiter))

    def perhaps_harmed(self, waiter: Waiting, charge: Charge) -> bool:
        """Whether `charge` harms a waiter if it aims at certain cards."""
        return any(self.hold_on(aim) is None and self.harmed(waiter, charge, aim) for aim in self.aims(waiter))

    def harmed(self, waiter: Waiting, charge: Charge, target: Claim) -> bool:
        """Whether it makes a difference to a waiter on `target`, once what it counts on is back, that `charge` is
        granted."""
        places = self.pools(target) | self.devices(target)
        if self.ceilings.limit_bytes is None and not places & (set(charge.pools) | set(charge.occupies)):
            return False
        settled = self.beside(self.counted_on(waiter), self.shrinking(), [charge])
        return self.place(waiter.lease, target, settled) is None

    def grants(self, waiter: Waiting, *, surely: bool = False) -> list[Charge]:
        """The charges at which a waiter may be granted now, without optional bytes; `surely`: must be."""
        keeps, harms = (self.left_alone, self.perhaps_harmed) if surely else (self.protected, self.surely_harmed)
        if waiter.replaces in self.holders or self.must_wait_its_turn(waiter.lease.claim):
            return []
        beside, ahead = self.beside(), None
        found = []
        for bound in self.bindings(waiter.lease.claim):
            charge = self.place(waiter.lease, bound, beside)
            if charge is None or self.hold_on(bound) is not None:
                continue
            ahead = self.ahead_of(waiter) if ahead is None else ahead
            if not any(keeps(other) and harms(other, charge) for other in ahead):
                found.append(charge)
        return found

"""Who is granted next, and who may overtake whom (rules 16, 17). Pure: it looks, the book acts."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence

from weighbridge_common.immutable import immutable

from weighbridge_ledger.book.charging import NOTHING_USED, Rooms, Usage, price
from weighbridge_ledger.book.placing import placements
from weighbridge_ledger.book.policy import Policy
from weighbridge_ledger.book.queue import Waiter, WaitQueue
from weighbridge_ledger.book.states import HOST, NO_EXTERNAL, Ceilings, Charge, Claim, External, Hold, Shortage

NOBODY_THERE = Charge()

Fits = Callable[[Usage], bool]
"""Whether a claim fits beside a usage."""

Kind = tuple[str, bool, bool]
"""(the one pool it is in; empty: any card; whether it is on the processor alone; whether it is exclusive)."""


@immutable
class Machine:
    """What a decision looks at besides the waiters."""

    ceilings: Ceilings
    external: External
    usage: Usage
    pending: Usage
    """The part of usage that is being given back: VACATING before its deadline, and optional bytes asked back."""
    replaced: Callable[[Waiter], Charge | None]
    """What the lease that a waiter replaces is charged, unless it has ended or is pending already (rule 24)."""
    unwell: Collection[str] = ()
    """The devices on which nothing may be loaded just now."""

    def settled_for(self, waiter: Waiter, joining: Charge = NOBODY_THERE, leaving: Charge = NOBODY_THERE) -> Usage:
        """What is charged once everything that `waiter` can count on is back."""
        settled = self.usage.less(self.pending)
        replaced = self.replaced(waiter)
        if replaced is not None:
            settled.remove(replaced)
        if leaving is not NOBODY_THERE:
            settled.remove(leaving)
        if joining is not NOBODY_THERE:
            settled.add(joining)
        return settled


@immutable
class Grant:
    """A decision: this waiter, on these cards, at this charge, at the cost of one pass for each of those."""

    waiter: Waiter
    target: Claim
    charge: Charge
    passed: tuple[Waiter, ...]


def protected(waiter: Waiter, now: float, policy: Policy) -> bool:
    """Whether `waiter` may no longer be overtaken harmfully.

    Unlimited overtaking starves: C=2, two claims of 1 alternate and a claim of 2 is never granted (exhaustive search).
    While holders vacate for it, nobody else may take what they leave.
    """
    return overdue(waiter, now, policy) or now < waiter.asked_until


def overdue(waiter: Waiter, now: float, policy: Policy) -> bool:
    """Whether `waiter` was overtaken so often, or waits so long, that it is protected for good."""
    # The sum, not the difference, which may be rounded to less at the very moment for which a look was set.
    return waiter.passes >= policy.protect_passes or now >= waiter.since + policy.protect_after_s


def price_of(waiter: Waiter, target: Claim, ceilings: Ceilings, external: External, usage: Usage) -> Charge | Shortage:
    """What a waiter would be charged on these cards."""
    lease = waiter.lease
    return price(
        target, ceilings, external, usage, exclusive=lease.exclusive, host_limit_bytes=lease.memory_limit_bytes
    )


def harmed(
    blocked: Sequence[Waiter], joining: Charge, machine: Machine, leaving: Charge = NOBODY_THERE
) -> tuple[Waiter, ...]:
    """Those of `blocked` for whom it makes a difference that `joining` is charged now, in the place of `leaving`.

    It makes none for a waiter that shares no pool with it, or that would fit beside it once all pending bytes are back.
    The person's limit lies over everything: under one, all share. Exclusive use is of devices, not of bytes.
    """
    return tuple(_each_harmed(blocked, joining, machine, leaving))


def _each_harmed(blocked: Sequence[Waiter], joining: Charge, machine: Machine, leaving: Charge) -> Iterator[Waiter]:
    touched = joining.pools.union(joining.occupies)
    shared_limit = machine.ceilings.limit_bytes is not None
    settled, rooms = None, None
    for waiter in blocked:
        if not shared_limit and touched.isdisjoint(waiter.places):
            continue
        if waiter.replaces:
            left = machine.settled_for(waiter, joining, leaving)
        else:
            if settled is None or rooms is None:
                settled = machine.settled_for(waiter, joining, leaving)
                rooms = Rooms(machine.ceilings, machine.external, settled)
            if not rooms.may_hold(waiter.claim, waiter.total_bytes):
                yield waiter
                continue
            left = settled
        priced = price_of(waiter, waiter.claim, machine.ceilings, machine.external, left)
        if isinstance(priced, Shortage):
            yield waiter


def may_pass(
    blocked: Sequence[Waiter],
    joining: Charge,
    machine: Machine,
    now: float,
    policy: Policy,
    leaving: Charge = NOBODY_THERE,
) -> tuple[Waiter, ...] | None:
    """The waiters that lose a turn if `joining` is charged before `blocked` are; None if one of them is protected."""
    losers = []
    for waiter in _each_harmed(blocked, joining, machine, leaving):
        if protected(waiter, now, policy):
            return None
        losers.append(waiter)
    return tuple(losers)


def next_grant(
    queue: WaitQueue,
    machine: Machine,
    aim: Callable[[Waiter], None] | None,
    held: Callable[[Waiter, Claim], Hold | None] | None,
    now: float,
    policy: Policy,
) -> Grant | None:
    """The first waiter in order that fits on some card and harms no protected waiter before it.

    Args:
        queue: who waits.
        machine: what is there.
        aim: lets a waiter for any card aim anew; called for each in order, so that those before whoever is granted aim
            at what they would get instead. None: there is nothing to choose.
        held: why nothing may be loaded on a waiter's cards just now, or None; None: everything may be loaded anywhere.
        now: a moment of the monotonic clock.
        policy: the numbers.
    """
    while True:
        head = queue.head(policy.look_ahead)
        grant = _first_grant(head, queue, machine, aim, held, now, policy)
        # Those who aim elsewhere than before may have let others into view.
        if grant is not None or queue.head(policy.look_ahead) is head:
            return grant


def _first_grant(
    head: list[Waiter],
    queue: WaitQueue,
    machine: Machine,
    aim: Callable[[Waiter], None] | None,
    held: Callable[[Waiter, Claim], Hold | None] | None,
    now: float,
    policy: Policy,
) -> Grant | None:
    blocked: list[Waiter] = []
    rooms = Rooms(machine.ceilings, machine.external, machine.usage)
    refused: dict[Kind, int] = {}
    for waiter in head:
        if aim is not None and waiter.floating:
            aim(waiter)
        hold = None if held is None else held(waiter, waiter.claim)
        wanted = waiter.lease.claim if waiter.floating else waiter.claim
        if (
            rooms.may_hold(wanted, waiter.total_bytes)
            and not waiter.replaces
            and (hold is None or waiter.floating)
            and ((kind := _kind(waiter, wanted)) is None or waiter.total_bytes < refused.get(kind, math.inf))
        ):
            in_the_way = False
            for target, charge in fitting(waiter, machine):
                if held is not None and held(waiter, target) is not None:
                    continue
                if not queue.in_view(charge.pools, waiter.key, policy.look_ahead):
                    continue
                passed = may_pass(blocked, charge, machine, now, policy)
                if passed is not None:
                    return Grant(waiter, target, charge, passed)
                in_the_way = True
            if in_the_way and kind is not None:
                refused[kind] = waiter.total_bytes
        # Who waits for a device to get well does not keep memory from others meanwhile, whether or not there is room.
        if hold is None or not hold.lasts:
            blocked.append(waiter)
    return None


def _kind(waiter: Waiter, wanted: Claim) -> Kind | None:
    """Claims of which the larger one harms whoever the smaller one harms: for bytes of the same one pool, or for one
    card, whichever. None: it is of no such kind."""
    lease = waiter.lease
    if not wanted.devices:
        return HOST, wanted.cpu_only, lease.exclusive
    if len(wanted.devices) == 1 and not wanted.host_bytes:
        return wanted.devices[0].device_id, False, lease.exclusive
    return None


def fitting(waiter: Waiter, machine: Machine) -> Iterator[tuple[Claim, Charge]]:
    """The ways in which a waiter fits now, best first: on any card if it names none, else on its target (rule 17)."""
    targets = bindings(waiter, machine, machine.usage, every=True) if waiter.floating else (waiter.claim,)
    priced = (
        (target, price_of(waiter, target, machine.ceilings, machine.external, machine.usage)) for target in targets
    )
    return ((target, charge) for target, charge in priced if isinstance(charge, Charge))


def bindings(waiter: Waiter, machine: Machine, usage: Usage, *, every: bool = False) -> Iterator[Claim]:
    """The cards on which a waiter for any card is to be tried beside `usage`, in that order (see `placements`)."""
    lease = waiter.lease
    return placements(
        lease.claim,
        machine.ceilings,
        machine.external,
        usage,
        exclusive=lease.exclusive,
        unwell=machine.unwell,
        every=every,
    )


def required_alone(target: Claim, ceilings: Ceilings, *, exclusive: bool, limit_bytes: int) -> Charge:
    """What a claim that was found to fit the empty machine is charged there."""
    charge = price(target, ceilings, NO_EXTERNAL, NOTHING_USED, exclusive=exclusive, host_limit_bytes=limit_bytes)
    return charge if isinstance(charge, Charge) else Charge(target.total_bytes)

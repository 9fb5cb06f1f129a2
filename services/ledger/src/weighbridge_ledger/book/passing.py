"""Who is granted next, and who may overtake whom (rule 16). Pure: it looks, the book acts."""

from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge_ledger.book.charging import Usage, price
from weighbridge_ledger.book.policy import Policy
from weighbridge_ledger.book.queue import Waiter
from weighbridge_ledger.book.states import Ceilings, Charge, External, Shortage


@dataclass(frozen=True, slots=True)
class Machine:
    """What a decision looks at besides the waiters."""

    ceilings: Ceilings
    external: External
    usage: Usage
    pending: Usage
    """The part of usage that is being given back: VACATING before its deadline."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A decision: this waiter, at this charge, at the cost of one pass for each of those."""

    waiter: Waiter
    charge: Charge
    passed: tuple[Waiter, ...]


def protected(waiter: Waiter, now: float, policy: Policy) -> bool:
    """Whether `waiter` may no longer be overtaken harmfully.

    Unlimited overtaking starves: C=2, two claims of 1 alternate and a claim of 2 is never granted (exhaustive search).
    """
    return waiter.passes >= policy.protect_passes or now - waiter.since >= policy.protect_after_s


def harmed(blocked: Sequence[Waiter], charge: Charge, machine: Machine) -> tuple[Waiter, ...]:
    """Those of `blocked` for whom it makes a difference that `charge` is granted now.

    It makes none for a waiter that shares no pool with it, or that would fit beside it once all pending bytes are back.
    The person's limit lies over everything: under one, all share.
    """
    if not blocked:
        return ()
    settled = machine.usage.after(machine.pending, charge)
    touched = charge.pools
    shared_limit = machine.ceilings.limit_bytes is not None
    return tuple(
        waiter
        for waiter in blocked
        if (shared_limit or touched & waiter.pools)
        and isinstance(price(waiter.claim, machine.ceilings, machine.external, settled), Shortage)
    )


def may_pass(
    blocked: Sequence[Waiter], charge: Charge, machine: Machine, now: float, policy: Policy
) -> tuple[Waiter, ...] | None:
    """The waiters that lose a turn if `charge` is granted before `blocked`; None if one of them is protected."""
    losers = harmed(blocked, charge, machine)
    return None if any(protected(waiter, now, policy) for waiter in losers) else losers


def next_grant(head: Sequence[tuple[Waiter, bool]], machine: Machine, now: float, policy: Policy) -> Grant | None:
    """The first waiter in order that fits and harms no protected waiter before it."""
    blocked: list[Waiter] = []
    for waiter, grantable in head:
        if grantable:
            priced = price(waiter.claim, machine.ceilings, machine.external, machine.usage)
            if isinstance(priced, Charge):
                passed = may_pass(blocked, priced, machine, now, policy)
                if passed is not None:
                    return Grant(waiter, priced, passed)
        blocked.append(waiter)
    return None

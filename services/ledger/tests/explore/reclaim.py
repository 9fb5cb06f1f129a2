"""Rules 18 to 22, 24 and 25 from their text: who may be asked to vacate, for whom, and who has to be."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import inf

from weighbridge_ledger.book import Claim, LeaseState

from services.ledger.tests.explore.oracle import Beside, Holder, Scene, Waiting, required_of

Cost = tuple[int, int, float]
"""(bytes that may not be asked for now, bytes, the most recent use)."""


@dataclass(frozen=True)
class Reclaim:
    """What could be done for one waiter on one target."""

    scene: Scene
    waiter: Waiting
    target: Claim

    @property
    def staged(self) -> bool:
        """Who is protected for good plans over busy and young holders too, and asks those it may (rule 20)."""
        return self.scene.protected_for_good(self.waiter)

    # -- who -------------------------------------------------------------------------------------------------------

    def may_plan_over(self, holder: Holder) -> bool:
        """Whether a lease could ever be asked for this waiter, busy or young as it may be."""
        lease = holder.lease
        return (
            lease.state is LeaseState.ACTIVE
            and not lease.suspect
            and (not lease.pinned or lease.lease_id in self.scene.replaced())
            and lease.priority <= self.scene.level(self.waiter)
            and lease.lease_id != self.waiter.replaces
            and lease.lease_id not in self.waiter.while_holding
        )

    def may_ask(self, holder: Holder) -> bool:
        """Whether a lease may be asked for this waiter now (rule 19)."""
        scene, policy = self.scene, self.scene.policy
        if not self.may_plan_over(holder) or holder.uses or holder.loading_since is not None or not holder.known:
            return False
        stay_s = min(max(2 * holder.lease.load_s, policy.min_residency_s), policy.max_residency_s)
        idle_s = 0.0 if self.staged else policy.idle_s
        return scene.now - holder.idle_since >= idle_s and scene.now - holder.loaded >= stay_s

    def candidates(self) -> dict[str, Holder]:
        """The leases that a plan may be made of."""
        may = self.may_plan_over if self.staged else self.may_ask
        return {one: holder for one, holder in self.scene.holders.items() if may(holder)}

    def idle(self) -> set[str]:
        """The leases that may be asked now."""
        return {one for one, holder in self.scene.holders.items() if self.may_ask(holder)}

    # -- how much --------------------------------------------------------------------------------------------------

    def fits(self, gone: Iterable[str] = (), *, shrunk: bool = False, steadily: bool = True) -> bool:
        """Whether the waiter fits once what it counts on and `gone` are gone, and with `shrunk` also all optional bytes
        that can be asked for."""
        scene = self.scene
        less = scene.shrinking() | (self._shrinkable() if shrunk else set())
        beside: Beside = scene.beside(scene.counted_on(self.waiter) | set(gone), less)
        return scene.place(self.waiter.lease, self.target, beside, steadily=steadily) is not None

    def _shrinkable(self) -> set[str]:
        return self.scene.shrinkable() - self.waiter.while_holding - {self.waiter.replaces}

    def suffices(self, asked: Collection[str]) -> bool:
        """Whether the waiter fits once `asked` are gone, also beside what other programs hold just now."""
        return self.fits(asked, shrunk=True) and self.fits(asked, shrunk=True, steadily=False)

    def in_vain(self, asked: Collection[str]) -> set[str]:
        """Those of `asked` without whom the others would suffice too."""
        return {one for one in asked if self.fits((other for other in asked if other != one), shrunk=True)}

    def plans(self) -> Iterator[tuple[Cost, frozenset[str]]]:
        """Every set that would suffice and of which nobody is in vain, with what it costs."""
        candidates = sorted(self.candidates())
        for count in range(len(candidates) + 1):
            for chosen in combinations(candidates, count):
                if self.fits(chosen, shrunk=True) and not self.in_vain(chosen):
                    yield self._cost(chosen), frozenset(chosen)

    def _cost(self, chosen: Iterable[str]) -> Cost:
        later = total = 0
        recent = -inf
        for holder in (self.scene.holders[one] for one in chosen):
            in_use = holder.uses or holder.loading_since is not None or not holder.known
            back_anyway = holder.lease.lease_id in self.scene.shrinking() | self._shrinkable()
            size = (required_of(holder.lease.charge) if back_anyway else holder.lease.charge).total_bytes
            total += size
            later += 0 if self.may_ask(holder) else size
            recent = max(recent, inf if in_use else holder.idle_since)
        return later, total, recent

    def fault_in(self, asked: Collection[str]) -> str | None:
        """What is wrong with asking exactly these; None: they are a best plan's part that may be asked now."""
        if self.fits():
            return "what is coming back anyway suffices"
        if self.fits(shrunk=True):
            return "optional bytes are given back first, and suffice"
        if not all(self.may_ask(self.scene.holders[one]) for one in asked):
            return "somebody was asked who may not be"
        plans = list(self.plans())
        least = min((cost for cost, _ in plans), default=None)
        for cost, plan in plans:
            if cost == least and {one for one in plan if self.may_ask(self.scene.holders[one])} == set(asked):
                return None if self.suffices(plan) else "it does not suffice beside other programs"
        return f"the best plans are {[sorted(plan) for cost, plan in plans if cost == least]}"

    def undone(self) -> str | None:
        """What has to be asked for and was not."""
        if self.fits():
            return None
        if self.fits(shrunk=True):
            return (
                None if not self.fits(shrunk=True, steadily=False) else "optional bytes suffice, and nobody was asked"
            )
        if not self.fits(self.candidates(), shrunk=True):
            return None
        plans = list(self.plans())
        least = min(cost for cost, _ in plans)
        best = [plan for cost, plan in plans if cost == least]
        if not all(self.suffices(plan) for plan in best):
            return None
        to_ask = [one for one in best[0] if self.may_ask(self.scene.holders[one])]
        return f"{sorted(to_ask)} could be asked, and were not" if to_ask else None


def may_ask_first(scene: Scene, waiter: Waiting) -> bool:
    """Whether a waiter may ask on some cards, while others who take any card may still aim elsewhere (rule 18)."""
    served: set[str] = set()
    for other in scene.ahead_of(waiter):
        if not other.lease.claim.floating and scene.hold_on(other.target) is None:
            served |= _places(scene, other.target)
    return any(served.isdisjoint(_places(scene, aim)) for aim in scene.aims(waiter))


def _places(scene: Scene, target: Claim) -> set[str]:
    """Where a claim on named cards competes with others."""
    limited = {"everywhere"} if scene.ceilings.limit_bytes is not None else set()
    return scene.pools(target) | scene.devices(target) | limited


def asks_first(scene: Scene) -> Iterator[Waiting]:
    """The waiters that may ask: the first in each of their pools, of those whose devices are well (rule 18)."""
    served: set[str] = set()
    for waiter in scene.in_order():
        if scene.hold_on(waiter.target) is not None:
            continue
        places = _places(scene, waiter.target)
        if served.isdisjoint(places) and not scene.must_wait_its_turn(waiter.lease.claim):
            yield waiter
        served |= places

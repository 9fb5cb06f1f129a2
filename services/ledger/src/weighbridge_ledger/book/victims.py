"""Who is asked to vacate for a waiting claim (rules 18 to 20). Pure: it chooses, the book asks."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from weighbridge_common.immutable import immutable

from weighbridge_ledger.book.charging import Usage
from weighbridge_ledger.book.states import Charge

Fits = Callable[[Usage], bool]
"""Whether the claim would be granted beside this usage. Whatever fits beside some leases fits beside fewer of them.

The usage belongs to the search, which goes on changing it: it is not to be kept or written to.
"""


@immutable
class Candidate:
    """One lease that could make room."""

    lease_id: str
    charge: Charge
    last_use: float
    """Seconds of the monotonic clock; infinity while it is in use."""
    askable_now: bool
    """False: busy or young. Only the plan of a protected claim may count on it (rule 20)."""

    @property
    def cost(self) -> tuple[int, int]:
        """(bytes that cannot be asked for now, bytes)."""
        size = self.charge.total_bytes
        return (0 if self.askable_now else size, size)


def choose(candidates: Iterable[Candidate], base: Usage, fits: Fits, exact: int) -> tuple[Candidate, ...] | None:
    """The candidates that have to go so that the claim fits, none of them in vain.

    Up to `exact` candidates it is the best set of all: the least by (bytes not askable now, bytes, most recent use in
    the set, ids). Of more, they are taken in the order in which they come until the claim fits, and those that turn out
    not to be needed are left out; of an iterator no more is consumed than that takes.

    Args:
        candidates: askable ones first, each part least recently used first.
        base: usage once everything that is already coming back is back; still contains the candidates.
        fits: whether the claim fits beside a usage.
        exact: how many candidates are worth a search among all their sets, which doubles with each.

    Returns:
        In the order of `candidates`; empty if the claim fits already; None if not even all of them suffice.
    """
    if fits(base):
        return ()
    coming = iter(candidates)
    first = list(islice(coming, exact + 1))
    if len(first) <= exact:
        return _Search(first, base, fits).best()
    return _first_that_suffice(chain(first, coming), base, fits)


def _first_that_suffice(candidates: Iterator[Candidate], base: Usage, fits: Fits) -> tuple[Candidate, ...] | None:
    usage = base.copy()
    taken: list[Candidate] = []
    for candidate in candidates:
        taken.append(candidate)
        usage.remove(candidate.charge)
        if fits(usage):
            break
    else:
        return None
    in_vain: set[str] = set()
    for candidate in sorted(taken, key=_worst_first):
        usage.add(candidate.charge)
        if fits(usage):
            in_vain.add(candidate.lease_id)
        else:
            usage.remove(candidate.charge)
    return tuple(candidate for candidate in taken if candidate.lease_id not in in_vain)


class _Search:
    """Branch and bound over all sets of a few candidates.

    Each candidate is first left out and then taken, the worst first: so the first set that is found leaves out the
    worst it can, and bounds all others. A branch ends where all that is still open would not suffice, where what is
    taken suffices, or where it can no longer be better than the best.
    """

    def __init__(self, candidates: list[Candidate], base: Usage, fits: Fits) -> None:
        self._given = candidates
        self._order = sorted(candidates, key=_worst_first)
        self._fits = fits
        self._without_taken = base.copy()
        """Usage once those that were taken are gone."""
        self._without_open = base.copy()
        """Usage once those that were taken or are still undecided are gone."""
        self._taken: list[Candidate] = []
        # Leases of equal charge are equal to `fits`: a set is known by how many of each charge are gone, as the digits
        # of one number. A machine full of equal leases is judged once for each count, not once for each set.
        digits: dict[Charge, int] = {}
        for candidate in candidates:
            digits.setdefault(candidate.charge, (len(candidates) + 1) ** len(digits))
        self._digits = digits
        self._known: dict[int, bool] = {}
        self._best: tuple[tuple[int, int], float, list[str]] | None = None
        self._best_set: frozenset[str] = frozenset()

    def best(self) -> tuple[Candidate, ...] | None:
        """The least sufficient set; None if there is none."""
        everything = 0
        for candidate in self._order:
            self._without_open.remove(candidate.charge)
            everything += self._digits[candidate.charge]
        if not self._suffices(everything, self._without_open):
            return None
        self._decide(0, 0, everything, (0, 0), float("-inf"))
        return tuple(candidate for candidate in self._given if candidate.lease_id in self._best_set)

    def _decide(self, index: int, taken: int, still_open: int, cost: tuple[int, int], recency: float) -> None:
        """Leave candidate `index` out, then take it. What is taken so far does not suffice, with all open ones it does.

        Args:
            index: into the order, worst first.
            taken: the number of the set of those that were taken.
            still_open: the number of the set of those that were taken or are still undecided.
            cost: of those that were taken.
            recency: the most recent use among those that were taken.
        """
        candidate = self._order[index]
        digit = self._digits[candidate.charge]
        if self._may_be_best(_sum(cost, self._order[-1].cost), recency):
            self._without_open.add(candidate.charge)
            if self._suffices(still_open - digit, self._without_open):
                self._decide(index + 1, taken, still_open - digit, cost, recency)
            self._without_open.remove(candidate.charge)
        cost = _sum(cost, candidate.cost)
        recency = max(recency, candidate.last_use)
        if not self._may_be_best(cost, recency):
            return
        self._taken.append(candidate)
        self._without_taken.remove(candidate.charge)
        if self._suffices(taken + digit, self._without_taken):
            self._offer(taken + digit, cost, recency)
        else:
            self._decide(index + 1, taken + digit, still_open, cost, recency)
        self._without_taken.add(candidate.charge)
        self._taken.pop()

    def _may_be_best(self, cost: tuple[int, int], recency: float) -> bool:
        """Whether a set that costs at least so much can be as good as the best."""
        return self._best is None or (cost, recency) <= self._best[:2]

    def _offer(self, taken: int, cost: tuple[int, int], recency: float) -> None:
        """Those that were taken suffice: keep them if they are better than the best, and none of them is in vain.

        Whoever is in vain makes a set cost more than one without it, except a lease that costs nothing.
        """
        found = (cost, recency, sorted(candidate.lease_id for candidate in self._taken))
        if self._best is not None and found >= self._best:
            return
        for candidate in self._taken:
            self._without_taken.add(candidate.charge)
            in_vain = self._suffices(taken - self._digits[candidate.charge], self._without_taken)
            self._without_taken.remove(candidate.charge)
            if in_vain:
                return
        self._best = found
        self._best_set = frozenset(found[2])

    def _suffices(self, gone: int, usage: Usage) -> bool:
        known = self._known.get(gone)
        if known is None:
            known = self._known[gone] = self._fits(usage)
        return known


def _worst_first(candidate: Candidate) -> tuple[int, int, float]:
    not_now, size = candidate.cost
    return (-not_now, -size, -candidate.last_use)


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return (one[0] + other[0], one[1] + other[1])

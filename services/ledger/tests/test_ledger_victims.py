"""Rules 18 to 20: which leases have to go for a claim. Judged by a look at every set, with the real price."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from weighbridge_ledger.book import HOST, Ceilings, Charge, Claim, DeviceWant, External
from weighbridge_ledger.book.charging import Usage, price
from weighbridge_ledger.book.states import NO_EXTERNAL
from weighbridge_ledger.book.victims import Candidate, Fits, choose

EXACT = 12


@dataclass(frozen=True)
class Scene:
    """A claim that waits on a machine, and the leases that could make room for it."""

    claim: Claim
    ceilings: Ceilings
    external: External
    candidates: tuple[Candidate, ...]
    others: tuple[Charge, ...] = ()
    """Leases that nobody may ask."""

    @property
    def usage(self) -> Usage:
        return used(*self.others, *(candidate.charge for candidate in self.candidates))

    def fits(self, usage: Usage) -> bool:
        return isinstance(price(self.claim, self.ceilings, self.external, usage), Charge)

    def fits_without(self, gone: Sequence[Candidate]) -> bool:
        stay = (candidate.charge for candidate in self.candidates if candidate not in gone)
        return self.fits(used(*self.others, *stay))

    def irredundant(self, gone: Sequence[Candidate]) -> bool:
        return not any(self.fits_without([other for other in gone if other is not one]) for one in gone)

    def chosen(self, exact: int = EXACT) -> tuple[Candidate, ...] | None:
        return choose(self.candidates, self.usage, self.fits, exact)


def used(*charges: Charge) -> Usage:
    usage = Usage()
    for charge in charges:
        usage.add(charge)
    return usage


def holds(lease_id: str, size: int, last_use: float = 0.0, askable_now: bool = True) -> Candidate:
    return Candidate(lease_id, Charge(size), last_use, askable_now)


def scene(want: int, ceiling: int, *candidates: Candidate) -> Scene:
    """A claim of host memory on a machine that has only that."""
    return Scene(Claim(want), Ceilings(ceiling), NO_EXTERNAL, candidates)


def ids(chosen: Sequence[Candidate] | None) -> list[str] | None:
    return None if chosen is None else [candidate.lease_id for candidate in chosen]


def rank(gone: Sequence[Candidate]) -> tuple[int, int, float, list[str]]:
    """The order of rule 20."""
    return (
        sum(one.charge.total_bytes for one in gone if not one.askable_now),
        sum(one.charge.total_bytes for one in gone),
        max((one.last_use for one in gone), default=-math.inf),
        sorted(one.lease_id for one in gone),
    )


def best_of_all_sets(scene: Scene) -> tuple[Candidate, ...] | None:
    sets = (gone for count in range(len(scene.candidates) + 1) for gone in combinations(scene.candidates, count))
    sound = [gone for gone in sets if scene.fits_without(gone) and scene.irredundant(gone)]
    return min(sound, key=rank, default=None)


def claims(most_on_host: int, most_on_a: int, most_on_b: int) -> st.SearchStrategy[Claim]:
    def build(host: int, a: int, b: int) -> Claim:
        return Claim(host, tuple(DeviceWant(card, size) for card, size in (("a", a), ("b", b)) if size))

    return st.builds(build, st.integers(0, most_on_host), st.integers(0, most_on_a), st.integers(0, most_on_b))


@st.composite
def scenes(draw: st.DrawFn, at_most: int = 7) -> Scene:
    """Two cards, leases on them as the real price put them there, and a claim that would fit the empty machine."""
    ceilings = Ceilings(
        draw(st.integers(4, 8)),
        {"a": draw(st.integers(4, 8)), "b": draw(st.integers(4, 8))},
        limit_bytes=draw(st.none() | st.integers(6, 12)),
        spill_allowed=draw(st.booleans()),
    )
    usage = Usage()
    candidates: list[Candidate] = []
    others: list[Charge] = []
    for number in range(draw(st.integers(1, at_most))):
        charge = price(draw(claims(2, 3, 3)), ceilings, NO_EXTERNAL, usage)
        if isinstance(charge, Charge):
            usage.add(charge)
            if draw(st.integers(0, 9)) == 0:
                others.append(charge)
                continue
            askable = draw(st.booleans())
            last_use = draw(st.sampled_from([0.0, 1.0, 2.0] if askable else [0.0, 1.0, math.inf]))
            candidates.append(Candidate(f"lease-{number}", charge, last_use, askable))
    claim = draw(claims(*(ceilings.pool_bytes(pool) for pool in (HOST, "a", "b"))))
    external = External(draw(st.integers(0, 1)), {"a": draw(st.integers(0, 1))})
    candidates.sort(key=lambda candidate: (not candidate.askable_now, candidate.last_use))
    return Scene(claim, ceilings, external, tuple(candidates), tuple(others))


@given(scenes())
def test_a_few_candidates_are_chosen_as_the_best_of_all_sets(scene: Scene) -> None:
    assert scene.chosen() == best_of_all_sets(scene)


@given(scenes(at_most=12), st.integers(0, 3))
def test_of_many_candidates_those_chosen_suffice_and_none_of_them_goes_in_vain(scene: Scene, exact: int) -> None:
    chosen = scene.chosen(exact)
    if chosen is None:
        assert not scene.fits_without(scene.candidates)
    else:
        assert scene.fits_without(chosen)
        assert scene.irredundant(chosen)


def test_the_smallest_lease_that_suffices_goes_and_not_the_oldest() -> None:
    assert ids(scene(3, 10, holds("old", 5, 1.0), holds("small", 3, 8.0), holds("tiny", 2, 9.0)).chosen()) == ["small"]


def test_two_small_leases_go_before_one_that_is_larger_than_both() -> None:
    assert ids(scene(4, 10, holds("one", 2, 3.0), holds("two", 2, 4.0), holds("big", 6, 1.0)).chosen()) == [
        "one",
        "two",
    ]


def test_among_equal_bytes_the_set_whose_most_recent_use_is_longest_ago_goes() -> None:
    # A pair of which one was used just now, or a single one used a little earlier: the single one.
    assert ids(scene(4, 8, holds("a", 2, 1.0), holds("b", 4, 8.0), holds("c", 2, 9.0)).chosen()) == ["b"]


def test_among_equals_the_id_decides() -> None:
    assert ids(scene(2, 4, holds("b", 2, 1.0), holds("a", 2, 1.0)).chosen()) == ["a"]


def test_a_claim_that_fits_asks_nobody() -> None:
    assert scene(3, 10, holds("a", 5)).chosen() == ()


def test_nobody_is_asked_when_not_even_all_together_suffice() -> None:
    # 2 of the 10 are held by somebody who may not be asked.
    short = Scene(Claim(9), Ceilings(10), NO_EXTERNAL, (holds("a", 4), holds("b", 4)), (Charge(2),))
    assert short.chosen() is None
    assert short.chosen(exact=1) is None


def test_a_lease_that_charges_nothing_does_not_go_for_nothing() -> None:
    # ("a", "b") comes before ("b",): by ids alone the empty lease would go as well.
    assert ids(scene(2, 4, holds("a", 0), holds("b", 4)).chosen()) == ["b"]


def test_a_staged_plan_counts_on_larger_leases_rather_than_on_busy_ones() -> None:
    plan = scene(3, 10, holds("idle", 7, 5.0), holds("busy", 3, math.inf, askable_now=False)).chosen()
    assert ids(plan) == ["idle"]


def test_a_staged_plan_counts_on_the_least_busy_bytes_that_suffice() -> None:
    # All 7 are taken. The idle lease alone is not enough; of the other two the smaller one is waited for.
    plan = scene(
        4,
        7,
        holds("idle", 2, 1.0),
        holds("young", 3, 2.0, askable_now=False),
        holds("busy", 2, math.inf, askable_now=False),
    ).chosen()
    assert ids(plan) == ["idle", "busy"]


def test_only_leases_on_the_wanted_card_go() -> None:
    on_a = Candidate("on-a", Charge(0, (("a", 4),)), 9.0, True)
    on_b = Candidate("on-b", Charge(0, (("b", 4),)), 1.0, True)
    machine = Scene(Claim(0, (DeviceWant("a", 4),)), Ceilings(8, {"a": 4, "b": 4}), NO_EXTERNAL, (on_b, on_a))
    assert ids(machine.chosen()) == ["on-a"]
    assert ids(machine.chosen(exact=1)) == ["on-a"]


def test_whoever_is_in_the_way_of_an_exclusive_claim_goes_although_no_byte_is_missing() -> None:
    """`fits` may say no for another reason than bytes: somebody is on the device."""
    leases = (holds("a", 1, 1.0), holds("b", 1, 2.0), holds("c", 1, 3.0))

    def alone(usage: Usage) -> bool:
        return usage.host_bytes == 1  # the one that nobody may ask, on the processor

    base = used(Charge(1), *(lease.charge for lease in leases))
    assert ids(choose(leases, base, alone, EXACT)) == ["a", "b", "c"]
    assert ids(choose(leases, base, alone, 1)) == ["a", "b", "c"]


def test_many_candidates_go_in_the_order_in_which_they_come() -> None:
    leases = [holds(f"lease-{number:02}", 1, float(number)) for number in range(20)]
    assert ids(scene(3, 20, *leases).chosen()) == ["lease-00", "lease-01", "lease-02"]


def test_of_many_candidates_those_that_a_later_one_makes_needless_stay() -> None:
    leases = [holds("small", 1, 1.0), holds("large", 5, 2.0), *(holds(f"{number}", 1, 3.0) for number in range(20))]
    assert ids(scene(5, 26, *leases).chosen()) == ["large"]


def test_of_many_candidates_no_more_are_looked_at_than_it_takes() -> None:
    taken: list[str] = []

    def coming() -> Iterator[Candidate]:
        for number in range(10_000):
            taken.append(f"{number}")
            yield holds(f"{number}", 1, float(number))

    base = used(Charge(10_000))
    assert ids(choose(coming(), base, lambda usage: usage.total_bytes <= 9_980, EXACT)) == taken[:20]
    assert len(taken) == 20


def counted(fits: Fits) -> tuple[Fits, Callable[[], int]]:
    """`fits`, and how often it was asked."""
    asked = 0

    def counting(usage: Usage) -> bool:
        nonlocal asked
        asked += 1
        return fits(usage)

    return counting, lambda: asked


def test_a_cheapest_lease_that_suffices_is_found_without_looking_at_many_sets() -> None:
    leases = [holds(f"{size:02}", size, float(-size)) for size in range(3, 3 + EXACT)]
    judge, times = counted(scene(3, sum(range(3, 3 + EXACT)), *leases).fits)
    assert ids(choose(leases, used(*(lease.charge for lease in leases)), judge, EXACT)) == ["03"]
    assert times() <= 2 * EXACT + 2


def test_equal_leases_are_judged_once_for_each_count() -> None:
    # Half of twelve: there are 924 such sets.
    leases = [holds(f"{number:02}", 2, float(number)) for number in range(EXACT)]
    judge, times = counted(scene(EXACT, 2 * EXACT, *leases).fits)
    assert ids(choose(leases, used(*(lease.charge for lease in leases)), judge, EXACT)) == [
        f"{number:02}" for number in range(EXACT // 2)
    ]
    assert times() <= EXACT + 2


def test_a_claim_for_everything_is_found_without_looking_at_many_sets() -> None:
    leases = [holds(f"{size:02}", size) for size in range(1, 1 + EXACT)]
    judge, times = counted(scene(sum(range(1, 1 + EXACT)), sum(range(1, 1 + EXACT)), *leases).fits)
    assert len(choose(leases, used(*(lease.charge for lease in leases)), judge, EXACT) or ()) == EXACT
    assert times() <= 3 * EXACT + 2

"""Will it run? A requirement against the static ceilings of an empty machine.

The ceilings are the ones the ledger refuses at, so WONT_RUN means: refused here whatever else is running.
"""

from dataclasses import dataclass
from enum import Enum

from weighbridge_common.sizes import format_gib

from weighbridge_fit.capacity import Capacity, Ceiling
from weighbridge_fit.lines import Range, Requirement

SMALLEST_REQUANTISATION = 0.1
"""From 16 bits to the fewest that any format of today stores (under 2) is about a tenth: below that only another model
helps."""


class Verdict(Enum):
    """The answer. UNKNOWN blocks nothing."""

    RUNS = "RUNS"
    TIGHT = "TIGHT"
    WONT_RUN = "WONT_RUN"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Assessment:
    """The verdict, its stable reason, a sentence for people, and what would help."""

    verdict: Verdict
    reason_code: str
    reason: str
    help: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Test:
    need: Range
    ceiling: Ceiling
    where: str


def judge(requirement: Requirement, capacity: Capacity) -> Assessment:
    """Compares a requirement with a machine.

    WONT_RUN needs the low bound above a ceiling; a ceiling between the low and the high bound is TIGHT. On a card a
    model is charged for what it holds there while loaded, and that may spill into host memory, as the ledger lets the
    only model of a card: too small a card alone is TIGHT, and so is a buffer beyond what its driver gives out.
    """
    tests = _tests(requirement, capacity)
    beyond = [test for test in tests if test.need.low > test.ceiling.effective]
    if beyond:
        worst = max(beyond, key=lambda test: test.need.low - test.ceiling.effective)
        code = "EXCEEDS_LIMIT" if _only_the_limit(worst) else "EXCEEDS_CAPACITY"
        reason = (
            f"Needs at least {format_gib(worst.need.low)} of {worst.where}, "
            f"{_allows(worst.ceiling)} {format_gib(worst.ceiling.effective)}."
        )
        return Assessment(Verdict.WONT_RUN, code, reason)
    stopped = _beyond_allocation(requirement, capacity) or _beyond_own_budget(requirement, capacity)
    if stopped is not None:
        return stopped
    tests += _card_tests(requirement, capacity)
    tight = [test for test in tests if test.need.high > test.ceiling.effective]
    if tight:
        worst = max(tight, key=lambda test: test.need.high - test.ceiling.effective)
        reason = (
            f"Needs {format_gib(worst.need.expected)} of {worst.where}, at worst {format_gib(worst.need.high)}; "
            f"{_allows(worst.ceiling)} {format_gib(worst.ceiling.effective)}."
        )
        return Assessment(Verdict.TIGHT, "BETWEEN_BOUNDS", reason)
    nearest = min(tests, key=lambda test: test.ceiling.effective - test.need.high)
    reason = (
        f"Needs {format_gib(nearest.need.expected)} of {nearest.where}, at most {format_gib(nearest.need.high)}; "
        f"{_allows(nearest.ceiling)} {format_gib(nearest.ceiling.effective)}."
    )
    return Assessment(Verdict.RUNS, "FITS", reason)


def help_for(
    requirement: Requirement,
    capacity: Capacity,
    weight_bytes: int,
    smaller_context: int,
    *,
    saved_bytes: int = 0,
    missing_bytes: int = 0,
) -> tuple[str, ...]:
    """What would turn a TIGHT or WONT_RUN into RUNS, and by how much.

    Args:
        requirement: what was judged.
        capacity: the machine.
        weight_bytes: the weights alone.
        smaller_context: the largest context that runs, 0 for none.
        saved_bytes: what that context saves at worst. 0: not known, or nothing.
        missing_bytes: what the smallest context still needs beyond the machine. 0: not known.
    """
    ceiling = capacity.largest_card.ceiling if uses_card(requirement, capacity) else capacity.host_ceiling
    advice = []
    if smaller_context:
        saves = f" and saves {format_gib(saved_bytes)}" if saved_bytes > 0 else ""
        advice.append(f"A context of {smaller_context:,} tokens runs here{saves}.")
    elif weight_bytes > ceiling.effective:
        share = ceiling.effective / weight_bytes
        choose = "choose a smaller model."
        if share >= SMALLEST_REQUANTISATION:
            choose = f"choose a quantisation of at most {share:.0%} of their size, or a smaller model."
        advice.append(f"The weights alone are {format_gib(weight_bytes)}: {choose}")
    elif missing_bytes > 0:
        advice.append(
            f"No context is small enough, the smallest needs {format_gib(missing_bytes)} more than there is: choose a "
            "quantisation or a model that is smaller by as much."
        )
    else:
        advice.append("No context is small enough: choose a smaller quantisation or a smaller model.")
    limit = limit_help(requirement, capacity)
    return (*advice, limit) if limit else tuple(advice)


def limit_help(requirement: Requirement, capacity: Capacity) -> str:
    """What the person's limit would have to be where it alone stands in the way, "" where it does not."""
    ceiling = capacity.total if uses_card(requirement, capacity) else capacity.host_ceiling
    if not ceiling.limited or requirement.total.low > ceiling.automatic:
        return ""
    said = f"Your limit is {format_gib(ceiling.effective)}; the machine allows {format_gib(ceiling.automatic)}."
    if requirement.total.high > ceiling.automatic:
        return said
    return f"{said} With a limit of {format_gib(requirement.total.high)} or more it runs."


def shortfall(requirement: Requirement, capacity: Capacity) -> int:
    """Bytes by which the machine is too small for a requirement to be RUNS, 0 where it is not."""
    tests = _tests(requirement, capacity) + _card_tests(requirement, capacity)
    return max(0, *(test.need.high - test.ceiling.effective for test in tests))


def _tests(requirement: Requirement, capacity: Capacity) -> list[_Test]:
    """What the ledger refuses at: host memory with what spills into it, and everything together."""
    if not uses_card(requirement, capacity):
        return [_Test(requirement.total, capacity.host_ceiling, "memory")]
    host, spilled = requirement.host, spilled_bytes(requirement, capacity)
    where = "the host's memory, what the card cannot hold included" if spilled.high else "the host's memory"
    return [
        _Test(host + spilled, capacity.host_ceiling, where),
        _Test(requirement.total, capacity.total, "memory, host and cards together"),
    ]


def _card_tests(requirement: Requirement, capacity: Capacity) -> list[_Test]:
    """Whether a card holds all that would run on it; if not, the model still runs, slower or with parts elsewhere."""
    if not uses_card(requirement, capacity):
        return []
    needed, budget = requirement.device.cover(requirement.device_peak), requirement.own_budget
    if budget is not None and budget.need.high <= budget.bytes:
        # What one line takes more another gets less: an engine within its own budget holds no more than that.
        needed = Range(needed.low, needed.expected, max(needed.expected, min(needed.high, budget.bytes)))
    return [_Test(needed, capacity.largest_card.ceiling, "the card's memory")]


def _beyond_own_budget(requirement: Requirement, capacity: Capacity) -> Assessment | None:
    """An engine that was told to take less of the card than it needs does not start, however much is free. The ledger
    knows nothing of it, so that this is no WONT_RUN."""
    budget = requirement.own_budget
    if budget is None or budget.need.high <= budget.bytes or not uses_card(requirement, capacity):
        return None
    reason = (
        f"Needs {format_gib(budget.need.expected)} of the card's memory, at worst {format_gib(budget.need.high)}; the "
        f"{budget.what} are {format_gib(budget.bytes)}."
    )
    code = "EXCEEDS_OWN_BUDGET" if budget.need.low > budget.bytes else "BETWEEN_BOUNDS"
    return Assessment(Verdict.TIGHT, code, reason)


def _beyond_allocation(requirement: Requirement, capacity: Capacity) -> Assessment | None:
    """A single buffer that the card's driver will not give out in one piece, however much is free."""
    if not uses_card(requirement, capacity):
        return None
    limit = capacity.largest_card.allocation_limit
    largest = max(
        (line for line in requirement.lines if line.on_device), key=lambda line: line.buffer.expected, default=None
    )
    if not limit or largest is None or largest.buffer.expected <= limit:
        return None
    reason = (
        f"One buffer of {format_gib(largest.buffer.expected)} ({largest.component}, {largest.phase.value}) is larger "
        f"than the {format_gib(limit)} that this card gives out in one piece."
    )
    return Assessment(Verdict.TIGHT, "EXCEEDS_ALLOCATION", reason)


def uses_card(requirement: Requirement, capacity: Capacity) -> bool:
    """Whether a plan puts anything on a card that this machine has."""
    return bool(capacity.devices) and requirement.device_peak.high > 0


def spilled_bytes(requirement: Requirement, capacity: Capacity) -> Range:
    """What does not fit on the largest card and goes to host memory: at least of what is held, at most of the peak."""
    card = capacity.largest_card.ceiling.effective
    held, peak = requirement.device, requirement.device_peak
    low, expected = max(0, held.low - card), max(0, peak.expected - card)
    return Range(low, max(low, expected), max(low, expected, peak.high - card))


def _only_the_limit(test: _Test) -> bool:
    return test.ceiling.limited and test.need.low <= test.ceiling.automatic


def _allows(ceiling: Ceiling) -> str:
    return "your limit allows" if ceiling.limited else "this machine allows"

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

    WONT_RUN needs the low bound above a ceiling; a ceiling between the low and the high bound is TIGHT.
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


def help_for(requirement: Requirement, capacity: Capacity, weight_bytes: int, smaller_context: int) -> tuple[str, ...]:
    """What would turn a TIGHT or WONT_RUN into RUNS. `smaller_context` is the largest context that runs, 0 for none."""
    ceiling = capacity.host_ceiling
    advice = []
    if smaller_context:
        advice.append(f"A context of {smaller_context:,} tokens runs here.")
    elif weight_bytes > ceiling.effective:
        share = ceiling.effective / weight_bytes
        choose = "choose a smaller model."
        if share >= SMALLEST_REQUANTISATION:
            choose = f"choose a quantisation of at most {share:.0%} of their size, or a smaller model."
        advice.append(f"The weights alone are {format_gib(weight_bytes)}: {choose}")
    else:
        advice.append("No context is small enough: choose a smaller quantisation or a smaller model.")
    if ceiling.limited and requirement.total.low <= ceiling.automatic:
        advice.append(
            f"Your limit is {format_gib(ceiling.effective)}; the machine allows {format_gib(ceiling.automatic)}."
        )
    return tuple(advice)


def _tests(requirement: Requirement, capacity: Capacity) -> list[_Test]:
    total = requirement.total
    tests = [_Test(_host_part(requirement), capacity.host_ceiling, "memory")]
    if requirement.device_peak.high and capacity.devices:
        card = max(capacity.devices, key=lambda device: device.ceiling.effective)
        tests.append(_Test(requirement.device, card.ceiling, "the card's memory"))
        tests.append(_Test(total, capacity.total, "memory"))
    return tests


def _host_part(requirement: Requirement) -> Range:
    """What is not on a card; everything, on machines with one memory."""
    total, device = requirement.total, requirement.device_peak
    low, expected = max(0, total.low - device.low), max(0, total.expected - device.expected)
    return Range(low, max(low, expected), max(low, expected, total.high - device.high))


def _only_the_limit(test: _Test) -> bool:
    return test.ceiling.limited and test.need.low <= test.ceiling.automatic


def _allows(ceiling: Ceiling) -> str:
    return "your limit allows" if ceiling.limited else "this machine allows"

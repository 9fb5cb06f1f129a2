"""What was measured before sharpens the next plan of the same model, build and shape."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from weighbridge_fit.lines import Range, Requirement

# From this many launches on, what was seen outweighs what was computed.
ENOUGH = 3
# Above the 95th percentile, so that one launch in twenty does not exceed its claim by a little.
MARGIN = 1.03


@dataclass(frozen=True, slots=True)
class Observed:
    """Earlier launches: how many, and the 95th percentile of their peaks in bytes."""

    count: int
    p95_peak_bytes: int


def summarise(peaks: Sequence[int]) -> Observed | None:
    """The summary of measured peaks, None of none. The percentile is the nearest rank."""
    if not peaks:
        return None
    ranked = sorted(peaks)
    return Observed(len(ranked), ranked[ceil(0.95 * len(ranked)) - 1])


def sharpen(requirement: Requirement, observed: Observed | None, weight_bytes: int) -> Requirement:
    """Expected becomes p95 x 1.03 after enough launches, never below the weights; low and high stay.

    Where a measurement lies outside low and high, the bound gives way: a range must hold what it is a range of.
    """
    if observed is None or observed.count < ENOUGH:
        return requirement
    expected = max(weight_bytes, round(observed.p95_peak_bytes * MARGIN))
    total = requirement.total
    sharpened = Range(min(total.low, expected), expected, max(total.high, expected))
    return replace(requirement, total=sharpened)

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


def sharpen(requirement: Requirement, observed: Observed | None) -> Requirement:
    """Expected becomes p95 x 1.03 after enough launches, never below the low bound; low and high stay.

    The low bound (weights, a full cache) is the floor because launches that used little of their context prove nothing
    about the next one: an engine that claimed less than its plan surely needs would be ended in mid-answer. Where
    a measurement lies above the high bound, that bound gives way: a range must hold what it is a range of.
    """
    if observed is None or observed.count < ENOUGH:
        return requirement
    total = requirement.total
    expected = max(total.low, round(observed.p95_peak_bytes * MARGIN))
    sharpened = Range(total.low, expected, max(total.high, expected))
    host, on_card = requirement.host, requirement.device_peak.expected
    # What was measured is host and cards together; what a card holds is planned, so the rest is the host's.
    at_host = max(host.low, expected - on_card)
    return replace(requirement, total=sharpened, host=Range(host.low, at_host, max(host.high, at_host)))

"""A model that no law here prices: a guess from its size that says so, and never stands in anybody's way."""

from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.lines import Line, Phase, Range, Requirement, Source, requirement

GIB = 1 << 30

# Weights, a tenth for what an engine adds to them and 1 GiB for its process and a context. Other admitters use factors
# from 1.05 to 1.25 and up to 2 GiB; none of them is measured.
PERCENT_OF_FILES = 110
ON_TOP_BYTES = GIB


def guess(facts: WeightFacts) -> Requirement:
    """One assumed line: 1.1 x the files + 1 GiB at most, and for all that is known nothing at least."""
    files = max(facts.file_bytes, facts.tensor_bytes)
    size = files * PERCENT_OF_FILES // 100 + ON_TOP_BYTES
    basis = "1.1 x the size of the files + 1 GiB: no law of this version prices this model"
    return requirement((Line("model", Phase.RESIDENT, Range(0, size, size), Source.ASSUMED, basis),))

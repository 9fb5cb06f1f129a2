"""What one admission costs in the book itself (admit, activate, release; no store, no wire), with 10, 1,000 and 10,000
leases and as many waiters, for crowds that each lean on another of its indexes."""

import gc
import time
from collections.abc import Iterator

from benchmarks.crowd import SCENARIOS, Crowd
from benchmarks.measure import Comparison

SIZES = (10, 1_000, 10_000)
ROUNDS = 15
ADMISSIONS = 20
"""In one measurement: what is done only now and then has its part in most of them."""


def _us_per_admission(crowd: Crowd) -> float:
    """Processor time: the book waits for nothing, and what else runs is not its cost."""
    start = time.process_time()
    for _ in range(ADMISSIONS):
        crowd.admit_one()
    return (time.process_time() - start) / ADMISSIONS * 1e6


def run() -> Iterator[Comparison]:
    """Every crowd at every size, sizes in turn, against the smallest."""
    for scenario in SCENARIOS:
        crowds = [Crowd(scenario, size) for size in SIZES]
        gc.collect()
        times: list[list[float]] = [[] for _ in SIZES]
        for number in range(-1, ROUNDS):
            for crowd, into in zip(crowds, times, strict=True):
                measured = _us_per_admission(crowd)
                if number >= 0:
                    into.append(measured)
        few, *more = times
        for size, many in zip(SIZES[1:], more, strict=True):
            yield Comparison(
                f"one admission with {size:,} leases and waiters: {scenario.name}", "µs", many,
                f"one with {SIZES[0]} of each", few, "at most 2", lambda ratio: ratio <= 2,
            )  # fmt: skip

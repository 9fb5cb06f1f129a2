"""Alternated measurements and how they are printed."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MEDIAN = 0.5


@dataclass(frozen=True)
class Comparison:
    """One figure of ours beside a baseline, measured in turn: A B A B ..."""

    name: str
    unit: str
    ours: Sequence[float]
    baseline_name: str
    baseline: Sequence[float]
    goal: str
    """What the ratio shall be, in words; empty where there is no goal."""
    holds: Callable[[float], bool] | None = None
    inverse: bool = False
    """Print baseline / ours ("times faster") instead of ours / baseline."""
    at: float = MEDIAN
    """Which quantile of both is compared: the median unless the tail is the figure, for outliers are the machine's."""

    @property
    def ratio(self) -> float:
        """That quantile of ours over the same of the baseline (or the inverse)."""
        ours, baseline = quantile(self.ours, self.at), quantile(self.baseline, self.at)
        return baseline / ours if self.inverse else ours / baseline

    @property
    def met(self) -> bool | None:
        """Whether the goal holds; None where there is none."""
        return self.holds(self.ratio) if self.holds else None


def quantile(values: Sequence[float], at: float) -> float:
    """The least value that at least the share `at` of all values does not exceed; the usual median for one half."""
    if at == MEDIAN:
        return statistics.median(values)
    return sorted(values)[max(0, math.ceil(at * len(values)) - 1)]


def render(comparison: Comparison) -> str:
    """One figure as a line: the ratio first, then both quantiles with their spread."""
    word = "x faster" if comparison.inverse else "x"
    verdict = {None: "", True: "  [holds]", False: "  [MISSED]"}[comparison.met]
    goal = f"  goal: {comparison.goal}{verdict}" if comparison.goal else ""
    return (
        f"{comparison.name}\n    {comparison.ratio:8.2f} {word} against {comparison.baseline_name}{goal}\n"
        f"    ours {_spread(comparison.ours, comparison.unit, comparison.at)};"
        f" baseline {_spread(comparison.baseline, comparison.unit, comparison.at)}"
    )


def _spread(values: Sequence[float], unit: str, at: float) -> str:
    return f"{quantile(values, at):.4g} {unit} ({min(values):.4g}..{max(values):.4g}, n={len(values)})"


def alternate(
    ours: Callable[[], object], baseline: Callable[[], object], *, rounds: int, warmup: int = 1
) -> tuple[list[float], list[float]]:
    """Time two callables in turn and return their durations in milliseconds.

    Args:
        ours: ours, called first in every round.
        baseline: what it is compared with.
        rounds: counted rounds.
        warmup: rounds before these that fill caches and import modules.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(warmup + rounds):
        for work, into in zip((ours, baseline), times, strict=True):
            start = time.perf_counter()
            work()
            elapsed_ms = (time.perf_counter() - start) * 1e3
            if number >= warmup:
                into.append(elapsed_ms)
    return times

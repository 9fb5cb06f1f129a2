"""The arithmetic of the benchmarks; what they measure is printed and not asserted."""

import importlib

import pytest

from benchmarks.__main__ import SUITES
from benchmarks.ds4 import paced
from benchmarks.measure import Comparison, quantile, render


@pytest.mark.parametrize(
    ("values", "at", "expected"),
    [
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([4.0, 1.0, 2.0, 3.0], 0.5, 2.5),
        ([float(number) for number in range(1, 101)], 0.99, 99.0),
        ([float(number) for number in range(1, 201)], 0.99, 198.0),
        ([5.0, 7.0], 0.99, 7.0),
        ([5.0], 0.0, 5.0),
    ],
)
def test_a_quantile_is_the_least_value_that_so_many_do_not_exceed(values, at, expected) -> None:
    assert quantile(values, at) == expected


def test_the_tail_is_compared_with_the_tail() -> None:
    ours, baseline = [1.0] * 98 + [9.0, 9.0], [1.0] * 98 + [3.0, 3.0]
    assert Comparison("x", "ms", ours, "y", baseline, "").ratio == 1
    assert Comparison("x", "ms", ours, "y", baseline, "", at=0.99).ratio == 3


def test_a_goal_is_told_with_what_became_of_it() -> None:
    missed = Comparison("x", "per s", [2.0], "y", [5.0], "at least 0.5", lambda ratio: ratio >= 0.5)
    assert missed.met is False
    assert "0.40 x against y  goal: at least 0.5  [MISSED]" in render(missed)


@pytest.mark.parametrize(("rates", "met"), [([29.9, 30.0, 30.2], True), ([29.0, 29.1, 30.0], False)])
def test_a_stand_in_that_does_not_pace_as_told_is_no_sound_baseline(rates, met) -> None:
    assert paced(30, rates).met is met


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_can_be_run(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.{name}").run)

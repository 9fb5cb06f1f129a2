"""The largest workload that still RUNS, found with the same plan and verdict that answer PlanModel."""

from typing import Any

from weighbridge_fit.capacity import Capacity
from weighbridge_fit.families.family import ChatFamily, ImageFamily
from weighbridge_fit.lines import Requirement
from weighbridge_fit.model import Model
from weighbridge_fit.plans.plan import Plan
from weighbridge_fit.solve import largest_context, largest_picture, picture_sizes
from weighbridge_fit.verdict import Verdict, help_for, judge, shortfall

SMALLEST_CONTEXT = 1


def solve_context(family: ChatFamily, model: Model, request: Any, capacity: Capacity, below: int = 0) -> int:
    """The largest context that RUNS with everything else as asked, 0 if none does; `below` a context if that is given.

    Raises PlanError for options that cannot be.
    """
    longest = family.longest_context(model)
    if below:
        longest = min(below - 1, longest)

    def runs(context: int) -> bool:
        made = family.plan(model, family.with_context(request, context), capacity)
        return judge(made.requirement, capacity).verdict is Verdict.RUNS

    return largest_context(runs, longest)


def context_help(
    family: ChatFamily, model: Model, request: Any, capacity: Capacity, made: Plan, requirement: Requirement
) -> tuple[int, tuple[str, ...]]:
    """The largest smaller context that RUNS (0 if none does), and what to say about it: how much it saves, or how much
    is missing at the smallest. `requirement` is the plan's, sharpened by what was measured.

    Raises PlanError for options that cannot be.
    """
    smaller = solve_context(family, model, request, capacity, below=family.context_of(made))
    least = family.plan(model, family.with_context(request, smaller or SMALLEST_CONTEXT), capacity).requirement
    said = help_for(
        requirement,
        capacity,
        made.weight_bytes,
        smaller,
        saved_bytes=made.requirement.total.high - least.total.high,
        missing_bytes=shortfall(least, capacity),
    )
    return smaller, said


def solve_size(
    family: ImageFamily, model: Model, request: Any, capacity: Capacity, aspect: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Width and height of the largest picture that RUNS at an aspect with everything else as asked, (0, 0) if none.

    In multiples of what the engine rounds up to, inside what the model renders; the next larger one does not run.
    Raises PlanError for options that cannot be.
    """
    sizes = _sizes(family, model, aspect)

    def runs(width: int, height: int) -> bool:
        made = family.plan(model, family.with_size(request, width, height), capacity)
        return judge(made.requirement, capacity).verdict is Verdict.RUNS

    return largest_picture(runs, sizes)


def smallest_picture(family: ImageFamily, model: Model, aspect: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """Width and height of the smallest picture at an aspect; the smallest square where there is none at that aspect."""
    side = family.side_range(model)[0]
    return next(iter(_sizes(family, model, aspect)), (side, side))


def _sizes(family: ImageFamily, model: Model, aspect: tuple[int, int]) -> list[tuple[int, int]]:
    return picture_sizes(aspect, family.side_step(model), family.side_range(model))

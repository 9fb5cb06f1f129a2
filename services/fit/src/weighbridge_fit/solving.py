"""The largest workload that still RUNS, by bisection over the same plan and verdict that answer PlanModel."""

from typing import Any

from weighbridge_fit.capacity import Capacity
from weighbridge_fit.families.family import ChatFamily
from weighbridge_fit.model import Model
from weighbridge_fit.solve import largest_context
from weighbridge_fit.verdict import Verdict, judge


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

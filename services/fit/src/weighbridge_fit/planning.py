"""From facts and a machine to everything that is said about a launch. Pure: capacity and observations are passed in."""

from dataclasses import dataclass, replace

from weighbridge_common.sizes import format_gib

from weighbridge_fit.calibration import ComputeDevice
from weighbridge_fit.capacity import Capacity, Pool
from weighbridge_fit.claim import Claim, claim_for
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.lines import Requirement, Source
from weighbridge_fit.observed import ENOUGH, Observed, sharpen
from weighbridge_fit.plans import unpriced
from weighbridge_fit.plans.mlx_options import LONGEST_CONTEXT, MlxRequest
from weighbridge_fit.plans.mlx_qwen import MlxPlan, Note, plan
from weighbridge_fit.solve import largest_context
from weighbridge_fit.verdict import Assessment, Verdict, help_for, judge


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan on a machine: what it needs, whether it runs, and what it would claim."""

    plan: MlxPlan
    requirement: Requirement
    assessment: Assessment
    claim: Claim
    claim_source: Source


@dataclass(frozen=True, slots=True)
class Guess:
    """What is said about a model that cannot be priced: it never says no."""

    requirement: Requirement
    assessment: Assessment
    claim: Claim
    note: Note


def compute_device(capacity: Capacity) -> ComputeDevice:
    """What MLX computes on: Metal where memory is unified, else the CPU (cards are not used by this engine)."""
    return ComputeDevice.METAL if capacity.pool is Pool.UNIFIED else ComputeDevice.CPU


def answer(facts: WeightFacts, request: MlxRequest, capacity: Capacity, observed: Observed | None = None) -> Answer:
    """Plans, judges and claims. Raises PlanError."""
    made = plan(facts, request, compute_device(capacity))
    needed = sharpen(made.requirement, observed)
    assessment = judge(needed, capacity)
    if assessment.verdict in (Verdict.TIGHT, Verdict.WONT_RUN):
        smaller = solve_context(facts, request, capacity, below=made.shape.context_tokens)
        advice = help_for(needed, capacity, made.weight_bytes, smaller)
        assessment = replace(assessment, help=advice)
    measured = observed is not None and observed.count >= ENOUGH
    source = Source.MEASURED if measured else Source.DERIVED
    return Answer(made, needed, assessment, claim_for(needed, capacity, assessment.verdict), source)


def guess(facts: WeightFacts, capacity: Capacity, why: str, reason_code: str = "NOT_PRICED") -> Guess:
    """Verdict UNKNOWN and a claim that the empty machine grants. `why` is a sentence: what stood against a price."""
    needed = unpriced.guess(facts)
    reason = f"Its price is not known: {format_gib(needed.total.expected)} is a guess from the size of its files."
    assessment = Assessment(Verdict.UNKNOWN, reason_code, reason)
    note = Note("NOT_PRICED", f"{why} It can be looked at, not run.")
    return Guess(needed, assessment, claim_for(needed, capacity, Verdict.UNKNOWN), note)


def solve_context(facts: WeightFacts, request: MlxRequest, capacity: Capacity, below: int = 0) -> int:
    """The largest context that RUNS with everything else as asked, 0 if none does; `below` a context if that is given.

    Raises PlanError for options that cannot be.
    """
    device = compute_device(capacity)
    made_for = facts.geometry.max_context_tokens if facts.geometry else 0
    longest = min(below - 1 if below else LONGEST_CONTEXT, made_for or LONGEST_CONTEXT)

    def runs(context: int) -> bool:
        made = plan(facts, replace(request, context_tokens=context), device)
        return judge(made.requirement, capacity).verdict is Verdict.RUNS

    return largest_context(runs, longest)

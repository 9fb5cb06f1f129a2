"""From a model and a machine to everything that is said about a launch. Pure: capacity and observations are passed
in."""

from dataclasses import dataclass, replace
from typing import Any

from weighbridge_common.sizes import format_gib

from weighbridge_fit.capacity import Capacity
from weighbridge_fit.claim import Claim, claim_for
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.families.family import Family
from weighbridge_fit.lines import Requirement, Source
from weighbridge_fit.model import Model
from weighbridge_fit.observed import ENOUGH, Observed, sharpen
from weighbridge_fit.plans import unpriced
from weighbridge_fit.plans.plan import Note, Plan
from weighbridge_fit.verdict import Assessment, Verdict, judge


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan on a machine: what it needs, whether it runs, and what it would claim."""

    plan: Plan
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


def answer(family: Family, model: Model, request: Any, capacity: Capacity, observed: Observed | None = None) -> Answer:
    """Plans, judges and claims. Raises PlanError."""
    made = family.plan(model, request, capacity)
    needed = sharpen(made.requirement, observed)
    assessment = judge(needed, capacity)
    if assessment.verdict in (Verdict.TIGHT, Verdict.WONT_RUN):
        assessment = replace(assessment, help=family.advise(model, request, capacity, made, needed))
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

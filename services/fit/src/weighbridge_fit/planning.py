"""From a model and a machine to everything that is said about a launch. Pure: capacity and observations are passed
in."""

from dataclasses import dataclass, replace
from typing import Any

from weighbridge_common.sizes import format_gib

from weighbridge_fit.capacity import Capacity
from weighbridge_fit.catalog import ranged
from weighbridge_fit.catalog.entry import CatalogEntry
from weighbridge_fit.claim import Claim, claim_for
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.families.family import Family
from weighbridge_fit.lines import Line, Phase, Range, Requirement, Source, requirement
from weighbridge_fit.model import Model
from weighbridge_fit.observed import ENOUGH, Observed, sharpen
from weighbridge_fit.plans import unpriced
from weighbridge_fit.plans.errors import REFUSED_BY_MACHINE, PlanError
from weighbridge_fit.plans.plan import Note, Plan
from weighbridge_fit.solve import largest_context
from weighbridge_fit.verdict import Assessment, Verdict, help_for, judge, shortfall


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


PRICED_BY_RANGE = "PRICED_BY_RANGE"


def answer(
    family: Family,
    model: Model,
    request: Any,
    capacity: Capacity,
    observed: Observed | None = None,
    *,
    plan: Plan | None = None,
    advise: bool = True,
) -> Answer:
    """Plans, judges and claims. Raises PlanError. `plan` is the plan where it is made already. Advice takes a dozen
    plans more: lists do without."""
    made = family.plan(model, request, capacity) if plan is None else plan
    needed = sharpen(made.requirement, observed)
    assessment = judge(needed, capacity)
    if advise and assessment.verdict in (Verdict.TIGHT, Verdict.WONT_RUN):
        assessment = replace(assessment, help=family.advise(model, request, capacity, made, needed))
    measured = observed is not None and observed.count >= ENOUGH
    source = Source.MEASURED if measured else _source(needed)
    claim = replace(claim_for(needed, capacity, assessment.verdict), cpu_only=made.cpu_only)
    return Answer(made, needed, assessment, claim, source)


def _source(needed: Requirement) -> Source:
    """How most of what is held was come by: a range of sizes is assumed, however exact a small line beside it is."""
    held = [line for line in needed.lines if line.phase is Phase.RESIDENT]
    assumed = sum(line.bytes.expected for line in held if line.source is Source.ASSUMED)
    return Source.ASSUMED if 2 * assumed > sum(line.bytes.expected for line in held) else Source.DERIVED


def guess(facts: WeightFacts, capacity: Capacity, why: str, reason_code: str = "NOT_PRICED") -> Guess:
    """Verdict UNKNOWN and a claim that the empty machine grants. `why` is a sentence: what stood against a price."""
    needed = unpriced.guess(facts)
    reason = f"Its price is not known: {format_gib(needed.total.expected)} is a guess from the size of its files."
    assessment = Assessment(Verdict.UNKNOWN, reason_code, reason)
    note = Note("NOT_PRICED", f"{why} It can be looked at, not run.")
    return Guess(needed, assessment, claim_for(needed, capacity, Verdict.UNKNOWN), note)


def too_small(facts: WeightFacts, capacity: Capacity, error: PlanError) -> Guess | None:
    """WONT_RUN for a model that its family refuses on this machine (`REFUSED_BY_MACHINE`), with the family's sentence.

    Shown and claimed is the least that it starts with, else the whole model: whichever the ledger refuses here too.
    None where the machine would hold even that: then it is no matter of its size.
    """
    if error.reason not in REFUSED_BY_MACHINE:
        return None
    least = Note("LEAST_SHOWN", "The figures are those of the least that this model starts with.")
    whole = Note("WHOLE_MODEL_SHOWN", "The figures are those of the whole model: no smaller part of it is held here.")
    for needed, note in ((error.least, least), (_whole_model(facts), whole)):
        if needed is not None and judge(needed, capacity).verdict is Verdict.WONT_RUN:
            assessment = Assessment(Verdict.WONT_RUN, error.reason, error.message)
            return Guess(needed, assessment, claim_for(needed, capacity, Verdict.WONT_RUN), note)
    return None


def _whole_model(facts: WeightFacts) -> Requirement:
    size = Range.exactly(max(facts.file_bytes, facts.tensor_bytes))
    basis = "the size of its files: this machine cannot hold less of it safely"
    return requirement((Line("weights", Phase.RESIDENT, size, Source.ASSUMED, basis),))


def by_range(entry: CatalogEntry, capacity: Capacity, context_tokens: int = 0, slots: int = 0) -> Guess:
    """The verdict on a catalogue model of which only the sizes of its files are known (`ranged.can_be_ranged`). Zero:
    the defaults of a chat.

    Its low bound is one that no such model stays under, so it can be refused; all else is a range that says so.
    """
    context, slots = context_tokens or ranged.DEFAULT_CONTEXT, slots or 1
    needed = ranged.plausible(entry, context, slots)
    assessment = judge(needed, capacity)
    if assessment.verdict is not Verdict.RUNS:
        assessment = replace(assessment, help=_help_by_range(entry, capacity, needed, context, slots))
    message = (
        f"Only the sizes of its files are known until {entry.catalog_id} is on this machine: this is the range that "
        f"such models need, {format_gib(needed.total.low)} to {format_gib(needed.total.high)}."
    )
    return Guess(needed, assessment, claim_for(needed, capacity, assessment.verdict), Note(PRICED_BY_RANGE, message))


def _help_by_range(
    entry: CatalogEntry, capacity: Capacity, needed: Requirement, context: int, slots: int
) -> tuple[str, ...]:
    def at(tokens: int) -> Requirement:
        return ranged.plausible(entry, tokens, slots)

    smaller = largest_context(lambda tokens: judge(at(tokens), capacity).verdict is Verdict.RUNS, context - 1)
    least = at(smaller or 1)
    return help_for(
        needed,
        capacity,
        entry.weight_bytes,
        smaller,
        saved_bytes=needed.total.high - least.total.high,
        missing_bytes=shortfall(least, capacity),
    )

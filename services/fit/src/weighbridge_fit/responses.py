"""What is said about a plan, as it travels."""

from weighbridge_proto.errors import RequestError, failed_precondition, invalid_argument
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge_fit.catalog import ranged
from weighbridge_fit.catalog.entry import CatalogEntry
from weighbridge_fit.catalog.resolve import disagreement, has_facts
from weighbridge_fit.families.family import Family
from weighbridge_fit.lines import Source
from weighbridge_fit.listing import default_chat
from weighbridge_fit.model import Model
from weighbridge_fit.observed import summarise
from weighbridge_fit.planning import Answer, Guess, by_range, guess
from weighbridge_fit.plans.plan import Engine, Note
from weighbridge_fit.requests import INVALID_OPTION
from weighbridge_fit.verdict import Assessment
from weighbridge_fit.wire.answer import assessment_message, claim_message, note_messages, requirement_message
from weighbridge_fit.wire.catalog import ENGINE_KINDS
from weighbridge_fit.wire.machine import capacity_from

MODEL_WONT_RUN = "MODEL_WONT_RUN"
CONTEXT_TOO_LONG = "CONTEXT_TOO_LONG"


def planned(
    family: Family,
    model: Model,
    made: Answer,
    capacity: machine_pb2.Capacity,
    seen: list[lease_pb2.Observation],
) -> pb.PlanModelResponse:
    """A plan with its price, verdict, claim and launch."""
    response = pb.PlanModelResponse(
        requirement=requirement_message(made.requirement),
        assessment=assessment_message(made.assessment),
        claim=claim_message(made.claim, made.claim_source),
        launch=family.launch(made.plan),
        notes=note_messages((*made.plan.notes, *_catalogue_notes(model))),
        model_digest=model.facts.model_digest,
        model_name=name_of(model),
        engine_kind=ENGINE_KINDS[family.engine],
        workload=family.workload(made.plan),
        options=family.options(made.plan),
        shape=made.plan.shape.text(),
        capacity=capacity,
        resolved_path=model.path,
    )
    summary = summarise([item.peak_bytes for item in seen])
    if summary is not None:
        latest = max((item.observe_time for item in seen), key=lambda time: (time.seconds, time.nanos))
        response.observations.CopyFrom(
            plan_pb2.ObservationSummary(count=summary.count, p95_peak_bytes=summary.p95_peak_bytes, latest_time=latest)
        )
    return response


def guessed(
    model: Model,
    made: Guess,
    capacity: machine_pb2.Capacity,
    engine: Engine = Engine.GENERIC,
    workload: plan_pb2.Workload | None = None,
) -> pb.PlanModelResponse:
    """The answer without a plan: no launch, no shape. `workload` is what a range was made for."""
    return pb.PlanModelResponse(
        requirement=requirement_message(made.requirement),
        assessment=assessment_message(made.assessment),
        claim=claim_message(made.claim, Source.ASSUMED),
        notes=note_messages((made.note, *_catalogue_notes(model))),
        model_digest=model.facts.model_digest,
        model_name=name_of(model),
        engine_kind=ENGINE_KINDS[engine],
        workload=workload,
        capacity=capacity,
        resolved_path=model.path,
    )


def name_of(model: Model) -> str:
    """The model's name for people: the catalogue's id where it has one."""
    return model.facts.name if model.entry is None else model.entry.catalog_id


def _catalogue_notes(model: Model) -> list[Note]:
    if model.entry is None:
        return []
    notes = []
    if not model.path:
        named = model.entry.catalog_id
        message = f"Its files are not on this machine: weighbridge pull {named} gets them before it can be loaded."
        notes.append(Note("CATALOG_MODEL_NOT_ON_DISK", message))
    differing = disagreement(model)
    return [*notes, differing] if differing else notes


def ranged_or_guessed(
    request: pb.PlanModelRequest, model: Model, capacity: machine_pb2.Capacity, why: str
) -> pb.PlanModelResponse:
    """The answer without a law: by the range of such models where the catalogue knows the files, else a guess."""
    entry, ceilings = model.entry, capacity_from(capacity)
    if entry is None or has_facts(model) or not ranged.can_be_ranged(entry):
        return guessed(model, guess(model.facts, ceilings, why), capacity)
    workload = default_chat()
    workload.chat.MergeFrom(request.workload.chat)
    context, slots = workload.chat.context_tokens, workload.chat.slots
    if not (0 < context <= ranged.MOST_TOKENS and 0 < slots <= ranged.MOST_SLOTS):
        raise invalid_argument("workload.chat", "is no chat that a model could hold", INVALID_OPTION)
    if entry.max_context_tokens and context > entry.max_context_tokens:
        described = f"is more than the {entry.max_context_tokens:,} tokens that this model was made for"
        raise invalid_argument("workload.chat.context_tokens", described, CONTEXT_TOO_LONG)
    made = by_range(entry, ceilings, context, slots)
    return guessed(model, made, capacity, entry.engine, workload)


def nothing_runs(what: str, assessment: Assessment) -> RequestError:
    """Even the smallest of something does not run: the verdict's sentence on it, and what would help."""
    sentences = [f"No {what} of this model runs on this machine.", assessment.reason, *assessment.help]
    return failed_precondition(MODEL_WONT_RUN, " ".join(sentences), {"verdict_reason": assessment.reason_code})


def too_large(entry: CatalogEntry, plan: pb.PlanModelResponse) -> RequestError:
    """A download that would bring what cannot run here: the verdict's sentence, what would help, and the figures."""
    needed = plan.requirement
    sentences = [f"{entry.display_name} would not run here.", plan.assessment.reason, *plan.assessment.help]
    figures: dict[str, object] = {
        "catalog_id": entry.catalog_id,
        "verdict_reason": plan.assessment.reason_code,
        "low_bytes": needed.total.low_bytes,
        "expected_bytes": needed.total.expected_bytes,
        "high_bytes": needed.total.high_bytes,
        "ceiling_bytes": plan.capacity.total.effective_bytes,
        "file_bytes": entry.file_bytes,
    }
    return failed_precondition(MODEL_WONT_RUN, " ".join(sentences), figures)

"""The fit service: messages in, core calls, messages out."""

# ruff: noqa: N802 - methods are named after the contract's rpcs

from typing import Any

import grpc
import structlog
from weighbridge_common.handlers import AnyContext
from weighbridge_proto.errors import RequestError, failed_precondition, invalid_argument
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import fit_service_pb2_grpc, plan_pb2
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge_fit.asking import HEADER_TOO_LARGE, ModelDesk
from weighbridge_fit.families.family import Family
from weighbridge_fit.families.registry import FAMILIES, recognise
from weighbridge_fit.ledger_client import LedgerClient
from weighbridge_fit.lines import Source
from weighbridge_fit.model import Model
from weighbridge_fit.observed import summarise
from weighbridge_fit.planning import Answer, answer, guess
from weighbridge_fit.plans.errors import UNSUPPORTED_ARCHITECTURE, PlanError
from weighbridge_fit.plans.plan import Engine
from weighbridge_fit.solving import solve_context
from weighbridge_fit.wire.answer import assessment_message, claim_message, note_messages, requirement_message
from weighbridge_fit.wire.facts import facts_message
from weighbridge_fit.wire.machine import capacity_from

NOT_YET_IMPLEMENTED = "NOT_YET_IMPLEMENTED"

ENGINE_KINDS = {engine: plan_pb2.EngineKind.Value(f"ENGINE_KIND_{engine.name}") for engine in Engine}
_ENGINES: dict[int, Engine] = {number: engine for engine, number in ENGINE_KINDS.items()}
_AVAILABILITY = {
    lease_pb2.OUTCOME_NOW: pb.AVAILABILITY_NOW,
    lease_pb2.OUTCOME_AFTER_EVICTION: pb.AVAILABILITY_AFTER_EVICTION,
    lease_pb2.OUTCOME_MUST_WAIT: pb.AVAILABILITY_MUST_WAIT,
    lease_pb2.OUTCOME_NEVER: pb.AVAILABILITY_NEVER,
}

_log = structlog.get_logger(__name__)


class FitServicer(fit_service_pb2_grpc.FitServiceServicer):
    """See the contract. Holds no state between calls."""

    def __init__(self, desk: ModelDesk, ledger: LedgerClient) -> None:
        self._desk = desk
        self._ledger = ledger

    async def DescribeWeights(
        self, request: pb.DescribeWeightsRequest, context: AnyContext
    ) -> pb.DescribeWeightsResponse:
        """See the contract."""
        model = await self._desk.model(request.model)
        facts = facts_message(model.facts, include_tensors=request.include_tensors)
        return pb.DescribeWeightsResponse(facts=facts)

    async def PlanModel(self, request: pb.PlanModelRequest, context: AnyContext) -> pb.PlanModelResponse:
        """See the contract."""
        # Whoever names an engine wants to launch it and must be refused; whoever asks in general gets a guess.
        named = _named_family(request.engine_kind, request.workload, request.options)
        what_if = request.machine if request.HasField("machine") else None
        try:
            model = await self._desk.model(request.model)
        except RequestError as error:
            if named is not None or error.failure.reason != HEADER_TOO_LARGE:
                raise
            unread = await self._desk.size_alone(request.model.path)
            capacity = await self._ledger.capacity(what_if)
            response = _guessed(unread, capacity, error.failure.message, HEADER_TOO_LARGE)
        else:
            response = await self._planned_or_guessed(request, model, named, what_if)
        if request.check_current_leases and what_if is None:
            await self._add_availability(response, request.engine_build)
        return response

    async def _planned_or_guessed(
        self,
        request: pb.PlanModelRequest,
        model: Model,
        named: Family | None,
        what_if: machine_pb2.Machine | None,
    ) -> pb.PlanModelResponse:
        capacity = await self._ledger.capacity(what_if)
        family = named or recognise(model)
        if family is None:
            return _guessed(model, capacity, _unrecognised(model))
        try:
            model = await self._desk.with_companions(model, family.companions(request.options))
            asked = family.request(request.workload, request.options)
            return await self._planned(
                family, model, asked, capacity, request.engine_build, own_machine=what_if is None
            )
        except PlanError as error:
            if named is not None or error.reason != UNSUPPORTED_ARCHITECTURE:
                raise _plan_refused(error) from error
            return _guessed(model, capacity, error.message)

    async def SolveContext(self, request: pb.SolveContextRequest, context: AnyContext) -> pb.SolveContextResponse:
        """See the contract."""
        workload = plan_pb2.Workload(chat=plan_pb2.ChatWorkload(slots=request.slots))
        named = _named_family(plan_pb2.ENGINE_KIND_UNSPECIFIED, workload, request.options)
        what_if = request.machine if request.HasField("machine") else None
        model = await self._desk.model(request.model)
        capacity = await self._ledger.capacity(what_if)
        family: Any = named or recognise(model)
        if family is None or family.workload_name != "chat":
            raise _plan_refused(PlanError(UNSUPPORTED_ARCHITECTURE, "model", _unrecognised(model)))
        try:
            model = await self._desk.with_companions(model, family.companions(request.options))
            asked = family.request(workload, request.options)
            largest = solve_context(family, model, asked, capacity_from(capacity))
            if not largest:
                raise failed_precondition("MODEL_WONT_RUN", "No context of this model runs on this machine.")
            asked = family.with_context(asked, largest)
            plan = await self._planned(family, model, asked, capacity, "", own_machine=what_if is None)
        except PlanError as error:
            raise _plan_refused(error) from error
        return pb.SolveContextResponse(context_tokens=largest, plan=plan)

    async def SolveSize(self, request: pb.SolveSizeRequest, context: AnyContext) -> pb.SolveSizeResponse:
        """Not yet."""
        raise _not_yet("Prices of images")

    async def ListFits(self, request: pb.ListFitsRequest, context: AnyContext) -> pb.ListFitsResponse:
        """Not yet."""
        raise _not_yet("The catalogue")

    async def CheckPull(self, request: pb.CheckPullRequest, context: AnyContext) -> pb.CheckPullResponse:
        """Not yet."""
        raise _not_yet("The catalogue")

    async def ListModels(self, request: pb.ListModelsRequest, context: AnyContext) -> pb.ListModelsResponse:
        """Not yet."""
        raise _not_yet("The catalogue")

    async def GetModel(self, request: pb.GetModelRequest, context: AnyContext) -> pb.GetModelResponse:
        """Not yet."""
        raise _not_yet("The catalogue")

    async def _planned(
        self,
        family: Family,
        model: Model,
        asked: Any,
        capacity: machine_pb2.Capacity,
        build: str,
        *,
        own_machine: bool,
    ) -> pb.PlanModelResponse:
        """Raises PlanError."""
        ceilings = capacity_from(capacity)
        made = answer(family, model, asked, ceilings)
        seen: list[lease_pb2.Observation] = []
        # A what-if machine is not the one that was measured.
        if own_machine and model.facts.model_digest:
            seen = await self._observations(model.facts.model_digest, build, made.plan.shape.text())
            if seen:
                made = answer(family, model, asked, ceilings, summarise([item.peak_bytes for item in seen]))
        return _response(family, model, made, capacity, seen)

    async def _add_availability(self, response: pb.PlanModelResponse, build: str) -> None:
        """How the response's claim would fare now. Raises RequestError."""
        kind = plan_pb2.EngineKind.Name(response.engine_kind)
        purpose = lease_pb2.Purpose(
            engine_kind=kind.removeprefix("ENGINE_KIND_").lower(),
            model_name=response.model_name,
            model_digest=response.model_digest,
            engine_build=build,
            shape=response.shape,
            planned_peak_bytes=response.requirement.total.expected_bytes,
        )
        preview = await self._ledger.preview(response.claim, purpose)
        response.availability = _AVAILABILITY.get(preview.outcome, pb.AVAILABILITY_UNSPECIFIED)
        response.would_evict_lease_ids.extend(preview.would_evict_lease_ids)

    async def _observations(self, digest: str, build: str, shape: str) -> list[lease_pb2.Observation]:
        """Measured peaks; none if the ledger does not tell: a plan without them is still a plan."""
        try:
            return await self._ledger.observations(digest, build, shape)
        except RequestError as error:
            _log.warning("observations_unavailable", reason=error.failure.reason)
            return []


def _response(
    family: Family,
    model: Model,
    made: Answer,
    capacity: machine_pb2.Capacity,
    seen: list[lease_pb2.Observation],
) -> pb.PlanModelResponse:
    response = pb.PlanModelResponse(
        requirement=requirement_message(made.requirement),
        assessment=assessment_message(made.assessment),
        claim=claim_message(made.claim, made.claim_source),
        launch=family.launch(made.plan),
        notes=note_messages(made.plan.notes),
        model_digest=model.facts.model_digest,
        model_name=model.facts.name,
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


def _guessed(
    model: Model, capacity: machine_pb2.Capacity, why: str, reason_code: str = "NOT_PRICED"
) -> pb.PlanModelResponse:
    """The answer for a model that no law prices: no launch, no shape, and a verdict that blocks nothing."""
    made = guess(model.facts, capacity_from(capacity), why, reason_code)
    return pb.PlanModelResponse(
        requirement=requirement_message(made.requirement),
        assessment=assessment_message(made.assessment),
        claim=claim_message(made.claim, Source.ASSUMED),
        notes=note_messages([made.note]),
        model_digest=model.facts.model_digest,
        model_name=model.facts.name,
        engine_kind=plan_pb2.ENGINE_KIND_GENERIC,
        capacity=capacity,
        resolved_path=model.path,
    )


def _named_family(kind: int, workload: plan_pb2.Workload, options: plan_pb2.EngineOptions) -> Family | None:
    """The family that the caller means by engine or options, None if by neither. Raises RequestError."""
    member = options.WhichOneof("engine")
    engine = _ENGINES.get(kind) if kind else None if member is None else Engine(member)
    if engine is None:
        if kind:
            raise invalid_argument("engine_kind", "is no engine that fit knows", "INVALID_OPTION")
        return None
    family = FAMILIES.get(engine)
    if family is None:
        raise _not_yet("Plans for this engine")
    if member is not None and member != family.options_name:
        raise invalid_argument("options", f"are for {member}, the plan is for {family.options_name}", "INVALID_OPTION")
    asked = workload.WhichOneof("kind")
    if asked is not None and asked != family.workload_name:
        described = f"is for {asked}, and {family.options_name} does {family.workload_name}"
        raise invalid_argument("workload", described, "INVALID_OPTION")
    return family


def _unrecognised(model: Model) -> str:
    named = f"of type {model.facts.architecture!r}" if model.facts.architecture else "whose type is not known"
    return f"No engine's law prices a model {named}."


def _plan_refused(error: PlanError) -> RequestError:
    return RequestError(
        grpc.StatusCode.INVALID_ARGUMENT,
        error.reason,
        error.message,
        field_violations=[(error.field, error.message)],
    )


def _not_yet(what: str) -> RequestError:
    return RequestError(
        grpc.StatusCode.UNIMPLEMENTED, NOT_YET_IMPLEMENTED, f"{what}: in the contract, not in this version."
    )

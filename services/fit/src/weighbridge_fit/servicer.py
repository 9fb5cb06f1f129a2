"""The fit service: messages in, core calls, messages out."""

# ruff: noqa: N802 - methods are named after the contract's rpcs

import grpc
import structlog
from weighbridge_common.handlers import AnyContext
from weighbridge_proto.errors import RequestError, failed_precondition, invalid_argument, not_found
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import fit_service_pb2_grpc, plan_pb2, weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge_fit import messages
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.ledger_client import LedgerClient
from weighbridge_fit.lines import Source
from weighbridge_fit.models_root import ModelNotFoundError
from weighbridge_fit.observed import summarise
from weighbridge_fit.planning import Answer, answer, guess, solve_context
from weighbridge_fit.plans.errors import UNSUPPORTED_ARCHITECTURE, PlanError
from weighbridge_fit.plans.mlx_options import MlxRequest
from weighbridge_fit.reading import HeaderReader

NOT_YET_IMPLEMENTED = "NOT_YET_IMPLEMENTED"
HEADER_TOO_LARGE = WeightReason.HEADER_TOO_LARGE.value

# Choices that the contract has and that no plan of this version honours: refused, so that nobody is priced without
# them.
_UNPLANNED_OPTIONS = frozenset({"adapters", "draft_model", "prompt_cache_bytes", "split_lane"})

_REASONS = {
    WeightReason.HEADER_TOO_LARGE: HEADER_TOO_LARGE,
    WeightReason.CONFIG_INVALID: "MALFORMED_CONFIG",
    WeightReason.UNKNOWN_FORMAT: "UNSUPPORTED_FORMAT",
    WeightReason.UNSUPPORTED_VERSION: "UNSUPPORTED_FORMAT",
    WeightReason.NO_WEIGHTS: "UNSUPPORTED_FORMAT",
}
_AVAILABILITY = {
    lease_pb2.OUTCOME_NOW: pb.AVAILABILITY_NOW,
    lease_pb2.OUTCOME_AFTER_EVICTION: pb.AVAILABILITY_AFTER_EVICTION,
    lease_pb2.OUTCOME_MUST_WAIT: pb.AVAILABILITY_MUST_WAIT,
    lease_pb2.OUTCOME_NEVER: pb.AVAILABILITY_NEVER,
}

_log = structlog.get_logger(__name__)


class FitServicer(fit_service_pb2_grpc.FitServiceServicer):
    """See the contract. Holds no state between calls."""

    def __init__(self, reader: HeaderReader, ledger: LedgerClient) -> None:
        self._reader = reader
        self._ledger = ledger

    async def DescribeWeights(
        self, request: pb.DescribeWeightsRequest, context: AnyContext
    ) -> pb.DescribeWeightsResponse:
        """See the contract."""
        facts, _ = await self._facts(request.model)
        return pb.DescribeWeightsResponse(facts=messages.facts_message(facts))

    async def PlanModel(self, request: pb.PlanModelRequest, context: AnyContext) -> pb.PlanModelResponse:
        """See the contract."""
        _check_engine(request.engine_kind, request.workload, request.options)
        # Whoever names MLX wants to launch it and must be refused; whoever asks in general gets a guess.
        mlx_meant = request.engine_kind == plan_pb2.ENGINE_KIND_MLX or request.options.HasField("mlx")
        what_if = _what_if(request)
        try:
            facts, path = await self._facts(request.model)
        except RequestError as error:
            if mlx_meant or error.failure.reason != HEADER_TOO_LARGE:
                raise
            response = await self._guessed_by_size(request.model.path, what_if, error.failure.message)
        else:
            response = await self._planned_or_guessed(request, facts, path, what_if, mlx_meant)
        if request.check_current_leases and what_if is None:
            await self._add_availability(response, request.engine_build)
        return response

    async def _planned_or_guessed(
        self,
        request: pb.PlanModelRequest,
        facts: WeightFacts,
        path: str,
        what_if: machine_pb2.Machine | None,
        mlx_meant: bool,
    ) -> pb.PlanModelResponse:
        capacity = await self._ledger.capacity(what_if)
        asked = messages.mlx_request_from(request.workload, request.options)
        try:
            return await self._planned(facts, path, asked, capacity, request.engine_build, own_machine=what_if is None)
        except PlanError as error:
            if mlx_meant or error.reason != UNSUPPORTED_ARCHITECTURE:
                raise _plan_refused(error) from error
            return _guessed(facts, path, capacity, error.message)

    async def _guessed_by_size(
        self, reference: str, what_if: machine_pb2.Machine | None, why: str
    ) -> pb.PlanModelResponse:
        """For headers beyond what is read: unknown is an answer, and blocks nothing."""
        path = await self._reader.resolve(reference)
        try:
            facts = await self._reader.size(path)
        except WeightError as error:
            raise _malformed(error) from error
        return _guessed(facts, str(path), await self._ledger.capacity(what_if), why, HEADER_TOO_LARGE)

    async def SolveContext(self, request: pb.SolveContextRequest, context: AnyContext) -> pb.SolveContextResponse:
        """See the contract."""
        workload = plan_pb2.Workload(chat=plan_pb2.ChatWorkload(slots=request.slots))
        _check_engine(plan_pb2.ENGINE_KIND_UNSPECIFIED, workload, request.options)
        facts, path = await self._facts(request.model)
        what_if = _what_if(request)
        capacity = await self._ledger.capacity(what_if)
        asked = messages.mlx_request_from(workload, request.options)
        try:
            largest = solve_context(facts, asked, messages.capacity_from(capacity))
        except PlanError as error:
            raise _plan_refused(error) from error
        if not largest:
            raise failed_precondition("MODEL_WONT_RUN", "No context of this model runs on this machine.")
        asked = messages.mlx_request_from(
            plan_pb2.Workload(chat=plan_pb2.ChatWorkload(context_tokens=largest, slots=request.slots)), request.options
        )
        plan = await self._planned(facts, path, asked, capacity, "", own_machine=what_if is None)
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

    async def _facts(self, model: weights_pb2.ModelRef) -> tuple[WeightFacts, str]:
        """The facts of a model, and the path that an engine would open ("" for inline facts)."""
        kind = model.WhichOneof("model")
        if kind is None:
            raise invalid_argument("model", "names no model: give a path, a catalogue id or facts", "MODEL_MISSING")
        if kind == "facts":
            try:
                return messages.facts_from(model.facts), ""
            except messages.UnpriceableFactsError as error:
                raise invalid_argument(error.field, error.message, "INVALID_FACTS") from error
        if kind == "catalog_id":
            raise _model_not_found(model.catalog_id)
        try:
            path = await self._reader.resolve(model.path)
        except ModelNotFoundError as error:
            raise _model_not_found(model.path) from error
        try:
            return await self._reader.read(path), str(path)
        except WeightError as error:
            raise _malformed(error) from error

    async def _planned(
        self,
        facts: WeightFacts,
        path: str,
        asked: MlxRequest,
        capacity: machine_pb2.Capacity,
        build: str,
        *,
        own_machine: bool,
    ) -> pb.PlanModelResponse:
        """Raises PlanError."""
        ceilings = messages.capacity_from(capacity)
        made = answer(facts, asked, ceilings)
        seen: list[lease_pb2.Observation] = []
        # A what-if machine is not the one that was measured.
        if own_machine and facts.model_digest:
            seen = await self._observations(facts.model_digest, build, made.plan.shape.text())
            if seen:
                made = answer(facts, asked, ceilings, summarise([item.peak_bytes for item in seen]))
        return _response(facts, path, made, capacity, seen)

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
    facts: WeightFacts,
    path: str,
    made: Answer,
    capacity: machine_pb2.Capacity,
    seen: list[lease_pb2.Observation],
) -> pb.PlanModelResponse:
    shape = made.plan.shape
    response = pb.PlanModelResponse(
        requirement=messages.requirement_message(made.requirement),
        assessment=messages.assessment_message(made.assessment),
        claim=messages.claim_message(made.claim, made.claim_source),
        launch=messages.launch_message(made.plan),
        notes=[plan_pb2.PlanNote(code=note.code, message=note.message) for note in made.plan.notes],
        model_digest=facts.model_digest,
        model_name=facts.name,
        engine_kind=plan_pb2.ENGINE_KIND_MLX,
        workload=messages.workload_message(shape),
        options=messages.options_message(shape),
        shape=shape.text(),
        capacity=capacity,
        resolved_path=path,
    )
    summary = summarise([item.peak_bytes for item in seen])
    if summary is not None:
        latest = max((item.observe_time for item in seen), key=lambda time: (time.seconds, time.nanos))
        response.observations.CopyFrom(
            plan_pb2.ObservationSummary(count=summary.count, p95_peak_bytes=summary.p95_peak_bytes, latest_time=latest)
        )
    return response


def _guessed(
    facts: WeightFacts, path: str, capacity: machine_pb2.Capacity, why: str, reason_code: str = "NOT_PRICED"
) -> pb.PlanModelResponse:
    """The answer for a model that no law prices: no launch, no shape, and a verdict that blocks nothing."""
    made = guess(facts, messages.capacity_from(capacity), why, reason_code)
    return pb.PlanModelResponse(
        requirement=messages.requirement_message(made.requirement),
        assessment=messages.assessment_message(made.assessment),
        claim=messages.claim_message(made.claim, Source.ASSUMED),
        notes=[plan_pb2.PlanNote(code=made.note.code, message=made.note.message)],
        model_digest=facts.model_digest,
        model_name=facts.name,
        engine_kind=plan_pb2.ENGINE_KIND_GENERIC,
        capacity=capacity,
        resolved_path=path,
    )


def _check_engine(kind: int, workload: plan_pb2.Workload, options: plan_pb2.EngineOptions) -> None:
    """Refuses engines and options that this version does not plan, rather than pricing something else."""
    if kind not in (plan_pb2.ENGINE_KIND_UNSPECIFIED, plan_pb2.ENGINE_KIND_MLX):
        raise _not_yet("Plans for this engine")
    if workload.WhichOneof("kind") == "image":
        raise _not_yet("Prices of images")
    engine = options.WhichOneof("engine")
    if engine not in (None, "mlx"):
        if kind == plan_pb2.ENGINE_KIND_MLX:
            raise invalid_argument("options", f"are for {engine}, the plan is for MLX", "INVALID_OPTION")
        raise _not_yet("Plans for this engine")
    unplanned = sorted(_UNPLANNED_OPTIONS & messages.set_options(options).keys())
    if unplanned:
        raise _not_yet(f"The option {unplanned[0]}")


def _plan_refused(error: PlanError) -> RequestError:
    return RequestError(
        grpc.StatusCode.INVALID_ARGUMENT,
        error.reason,
        error.message,
        field_violations=[(error.field, error.message)],
    )


def _malformed(error: WeightError) -> RequestError:
    metadata = {"file": error.file, "cause": error.reason.value}
    if error.offset is not None:
        metadata["offset"] = str(error.offset)
    sentence = error.sentence()
    return RequestError(
        grpc.StatusCode.INVALID_ARGUMENT,
        _REASONS.get(error.reason, "MALFORMED_WEIGHTS"),
        f"The model cannot be read: {sentence}.",
        metadata=metadata,
        field_violations=[("model", sentence)],
    )


def _model_not_found(reference: str) -> RequestError:
    # One sentence for absent and forbidden: the difference would tell what exists outside the models root.
    message = f"There is no model {reference[:200]!r} under the models root."
    return not_found("MODEL_NOT_FOUND", message)


def _not_yet(what: str) -> RequestError:
    return RequestError(
        grpc.StatusCode.UNIMPLEMENTED, NOT_YET_IMPLEMENTED, f"{what}: in the contract, not in this version."
    )


def _what_if(request: pb.PlanModelRequest | pb.SolveContextRequest) -> machine_pb2.Machine | None:
    return request.machine if request.HasField("machine") else None

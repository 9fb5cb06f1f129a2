"""The fit service: messages in, core calls, messages out."""

# ruff: noqa: N802 - methods are named after the contract's rpcs

from collections.abc import Sequence
from functools import partial
from typing import Any

import structlog
from weighbridge_common.handlers import AnyContext
from weighbridge_proto.errors import RequestError, failed_precondition, invalid_argument
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import fit_service_pb2_grpc, plan_pb2, weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

from weighbridge_fit import responses
from weighbridge_fit.asking import HEADER_TOO_LARGE, ModelDesk, all_facts, entry_of, not_on_disk
from weighbridge_fit.catalog.entry import CatalogEntry
from weighbridge_fit.catalog.installed import Installed
from weighbridge_fit.catalog.resolve import has_facts
from weighbridge_fit.catalog.shelf import Shelf
from weighbridge_fit.catalog.store import Snapshot
from weighbridge_fit.families.family import Family
from weighbridge_fit.families.registry import ALL, Families, family_of, recognise
from weighbridge_fit.ledger_client import LedgerClient
from weighbridge_fit.listing import fit_on
from weighbridge_fit.model import Model
from weighbridge_fit.observed import summarise
from weighbridge_fit.off_loop import Threads
from weighbridge_fit.paging import list_name, page_of
from weighbridge_fit.planning import answer, guess, too_small
from weighbridge_fit.plans.errors import REFUSED_BY_MACHINE, UNSUPPORTED_ARCHITECTURE, PlanError
from weighbridge_fit.plans.plan import Engine
from weighbridge_fit.requests import (
    INVALID_OPTION,
    OF_ANOTHER_KIND,
    check_workload,
    named_engine,
    plan_refused,
    unrecognised,
    what_if,
    with_way_out,
    workload_kind,
)
from weighbridge_fit.responses import MODEL_WONT_RUN
from weighbridge_fit.solve import CONTEXT_STEP
from weighbridge_fit.solving import smallest_picture, solve_context, solve_size
from weighbridge_fit.wire.catalog import USES_BACK, entry_message
from weighbridge_fit.wire.facts import facts_message
from weighbridge_fit.wire.machine import capacity_from

_AVAILABILITY = {
    lease_pb2.OUTCOME_NOW: pb.AVAILABILITY_NOW,
    lease_pb2.OUTCOME_AFTER_EVICTION: pb.AVAILABILITY_AFTER_EVICTION,
    lease_pb2.OUTCOME_MUST_WAIT: pb.AVAILABILITY_MUST_WAIT,
    lease_pb2.OUTCOME_NEVER: pb.AVAILABILITY_NEVER,
}

# Plans are Python's own work, so that more at once make none of them faster; several, so that a long one does not keep
# the short ones waiting.
MOST_PRICINGS = 4

_log = structlog.get_logger(__name__)


class FitServicer(fit_service_pb2_grpc.FitServiceServicer):
    """See the contract. Holds no state between calls."""

    def __init__(self, desk: ModelDesk, shelf: Shelf, ledger: LedgerClient, families: Families = ALL) -> None:
        self._desk = desk
        self._families = families
        self._shelf = shelf
        self._ledger = ledger
        self._pricing = Threads(MOST_PRICINGS)

    async def DescribeWeights(
        self, request: pb.DescribeWeightsRequest, context: AnyContext
    ) -> pb.DescribeWeightsResponse:
        """See the contract."""
        model = await self._desk.model(request.model)
        if model.entry is not None and not has_facts(model):
            raise not_on_disk(model.entry)

        def told() -> weights_pb2.WeightFacts:
            return facts_message(all_facts(model), include_tensors=request.include_tensors)

        return pb.DescribeWeightsResponse(facts=await self._pricing.run(told))

    async def PlanModel(self, request: pb.PlanModelRequest, context: AnyContext) -> pb.PlanModelResponse:
        """See the contract."""
        # Whoever names an engine wants to launch it and must be refused; whoever asks in general gets a guess.
        engine = named_engine(request.engine_kind, request.options)
        machine = what_if(request)
        try:
            model = await self._desk.model(request.model)
        except RequestError as error:
            if engine is not None or error.failure.reason != HEADER_TOO_LARGE:
                raise
            unread = await self._desk.size_alone(request.model)
            capacity = await self._ledger.capacity(machine)
            made = guess(unread.facts, capacity_from(capacity), error.failure.message, HEADER_TOO_LARGE)
            response = responses.guessed(unread, made, capacity)
        else:
            response = await self._planned_or_guessed(request, model, engine, machine)
        if request.check_current_leases and machine is None:
            await self._add_availability(response, request.engine_build)
        return response

    async def _planned_or_guessed(
        self,
        request: pb.PlanModelRequest,
        model: Model,
        engine: Engine | None,
        machine: machine_pb2.Machine | None,
    ) -> pb.PlanModelResponse:
        capacity = await self._ledger.capacity(machine)
        kind = workload_kind(request.workload, request.options)
        family = await self._pricing.run(partial(_family, engine, model, kind, self._families))
        why = unrecognised(model)
        if family is None and engine is not None:
            raise plan_refused(PlanError(UNSUPPORTED_ARCHITECTURE, "engine_kind", why))
        if family is not None:
            check_workload(family, request.workload)
            try:
                model = await self._desk.with_companions(model, family.companions(request.options))
                asked = family.request(request.workload, request.options)
                return await self._planned(
                    family, model, asked, capacity, request.engine_build, own_machine=machine is None
                )
            except PlanError as error:
                refused = too_small(model.facts, capacity_from(capacity), error)
                if refused is not None:
                    return responses.guessed(model, refused, capacity, family.engine)
                known = model.entry is not None and not has_facts(model) and engine in (None, model.entry.engine)
                if error.reason != UNSUPPORTED_ARCHITECTURE or not (engine is None or known):
                    told = await self._pricing.run(partial(with_way_out, error, model, engine, self._families))
                    raise plan_refused(told) from error
                why = error.message
        return responses.ranged_or_guessed(request, model, capacity, why)

    async def SolveContext(self, request: pb.SolveContextRequest, context: AnyContext) -> pb.SolveContextResponse:
        """See the contract."""
        workload = plan_pb2.Workload(chat=plan_pb2.ChatWorkload(slots=request.slots))
        model, family, capacity = await self._to_solve(request, workload)
        chat: Any = family
        try:
            asked = chat.request(workload, request.options)
            largest = await self._pricing.run(partial(solve_context, chat, model, asked, capacity_from(capacity)))
            if not largest:
                smallest = chat.with_context(asked, min(CONTEXT_STEP, chat.longest_context(model)))
                raise await self._nothing_runs("context", chat, model, smallest, capacity)
            asked = chat.with_context(asked, largest)
            plan = await self._planned(chat, model, asked, capacity, "", own_machine=what_if(request) is None)
        except PlanError as error:
            raise _unsolved(error, model) from error
        return pb.SolveContextResponse(context_tokens=largest, plan=plan)

    async def SolveSize(self, request: pb.SolveSizeRequest, context: AnyContext) -> pb.SolveSizeResponse:
        """See the contract."""
        aspect = (request.aspect_width or 1, request.aspect_height or 1)
        if min(aspect) < 0 or bool(request.aspect_width) != bool(request.aspect_height):
            raise invalid_argument("aspect_width", "and aspect_height go together, both above zero", INVALID_OPTION)
        workload = plan_pb2.Workload(image=plan_pb2.ImageWorkload(frames=request.frames))
        model, family, capacity = await self._to_solve(request, workload)
        images: Any = family
        try:
            asked = images.request(workload, request.options)
            solve = partial(solve_size, images, model, asked, capacity_from(capacity), aspect)
            width, height = await self._pricing.run(solve)
            if not width:
                smallest = images.with_size(asked, *smallest_picture(images, model, aspect))
                raise await self._nothing_runs("size of picture", images, model, smallest, capacity)
            asked = images.with_size(asked, width, height)
            plan = await self._planned(images, model, asked, capacity, "", own_machine=what_if(request) is None)
        except PlanError as error:
            raise _unsolved(error, model) from error
        return pb.SolveSizeResponse(width_px=width, height_px=height, plan=plan)

    async def _to_solve(
        self, request: pb.SolveContextRequest | pb.SolveSizeRequest, workload: plan_pb2.Workload
    ) -> tuple[Model, Family, machine_pb2.Capacity]:
        """The model with its companions, who plans it, and the machine. Raises RequestError."""
        engine = named_engine(plan_pb2.ENGINE_KIND_UNSPECIFIED, request.options)
        model = await self._desk.model(request.model)
        capacity = await self._ledger.capacity(what_if(request))
        kind = workload_kind(workload, request.options)
        family = await self._pricing.run(partial(_family, engine, model, kind, self._families))
        if family is not None and family.workload_name != kind:
            raise plan_refused(PlanError(UNSUPPORTED_ARCHITECTURE, "model", OF_ANOTHER_KIND[kind]))
        if family is None:
            raise _unsolved(PlanError(UNSUPPORTED_ARCHITECTURE, "model", unrecognised(model)), model)
        try:
            return await self._desk.with_companions(model, family.companions(request.options)), family, capacity
        except PlanError as error:
            raise plan_refused(error) from error

    async def ListModels(self, request: pb.ListModelsRequest, context: AnyContext) -> pb.ListModelsResponse:
        """See the contract."""
        snapshot = await self._shelf.snapshot()
        ids = _of_use(snapshot, request.use, list(snapshot.entries))
        page, token = page_of(ids, list_name("models", request.use), request.page_size, request.page_token)
        entries = [snapshot.entries[catalog_id] for catalog_id in page]
        installed = await self._shelf.look(entries)
        return pb.ListModelsResponse(
            models=[self._entry(entry, installed.get(entry.catalog_id)) for entry in entries],
            next_page_token=token,
            notes=snapshot.problems,
        )

    async def GetModel(self, request: pb.GetModelRequest, context: AnyContext) -> pb.GetModelResponse:
        """See the contract."""
        entry = entry_of(await self._shelf.snapshot(), request.catalog_id)
        installed = (await self._shelf.look([entry])).get(entry.catalog_id)
        return pb.GetModelResponse(model=self._entry(entry, installed))

    async def ListFits(self, request: pb.ListFitsRequest, context: AnyContext) -> pb.ListFitsResponse:
        """See the contract."""
        snapshot = await self._shelf.snapshot()
        asked = sorted({entry_of(snapshot, catalog_id).catalog_id for catalog_id in request.catalog_ids})
        ids = _of_use(snapshot, request.use, asked or list(snapshot.entries))
        page, token = page_of(ids, list_name("fits", request.use, asked), request.page_size, request.page_token)
        capacity = await self._ledger.capacity(what_if(request))
        ceilings = capacity_from(capacity)
        entries = [snapshot.entries[catalog_id] for catalog_id in page]
        installed = await self._shelf.look(entries)
        response = pb.ListFitsResponse(capacity=capacity, next_page_token=token, notes=snapshot.problems)
        for entry in entries:
            response.fits.append(
                await fit_on(
                    self._shelf, entry, installed, request.quality, ceilings, self._pricing.run, self._families
                )
            )
        return response

    async def CheckPull(self, request: pb.CheckPullRequest, context: AnyContext) -> pb.CheckPullResponse:
        """See the contract."""
        entry = entry_of(await self._shelf.snapshot(), request.catalog_id)
        installed = (await self._shelf.look([entry])).get(entry.catalog_id)
        response = pb.CheckPullResponse(model=self._entry(entry, installed))
        asked = pb.PlanModelRequest(model=weights_pb2.ModelRef(catalog_id=entry.catalog_id))
        if request.HasField("machine"):
            asked.machine.CopyFrom(request.machine)
        try:
            plan = await self.PlanModel(asked, context)
        except RequestError as error:
            # Whoever launches it is asked again: what cannot be told now must not stand in the way of a download.
            reason, message = error.failure.reason, error.failure.message
        except Exception:
            _log.exception("pull_not_assessed", catalog_id=entry.catalog_id)
            reason, message = "PRICING_FAILED", "Pricing it failed: see the log of fit."
        else:
            if plan.assessment.verdict == requirement_pb2.VERDICT_WONT_RUN:
                raise responses.too_large(entry, plan)
            response.assessment.CopyFrom(plan.assessment)
            response.assessed = plan.assessment.verdict != requirement_pb2.VERDICT_UNKNOWN
            return response
        response.assessment.CopyFrom(
            requirement_pb2.Assessment(
                verdict=requirement_pb2.VERDICT_UNKNOWN,
                reason_code=reason,
                reason=f"Whether it runs here could not be told: {message}",
            )
        )
        return response

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
        plan = await self._pricing.run(partial(family.plan, model, asked, ceilings))
        seen: list[lease_pb2.Observation] = []
        # A what-if machine is not the one that was measured.
        if own_machine and model.facts.model_digest:
            seen = await self._observations(model.facts.model_digest, build, plan.shape.text())
        observed = summarise([item.peak_bytes for item in seen])
        made = await self._pricing.run(partial(answer, family, model, asked, ceilings, observed, plan=plan))
        return responses.planned(family, model, made, capacity, seen)

    async def _nothing_runs(
        self, what: str, family: Family, model: Model, smallest: Any, capacity: machine_pb2.Capacity
    ) -> RequestError:
        """That a solver found nothing, with what stands against the smallest and what would help. Raises PlanError."""
        made = await self._pricing.run(partial(answer, family, model, smallest, capacity_from(capacity)))
        return responses.nothing_runs(what, made.assessment)

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

    def _entry(self, entry: CatalogEntry, installed: Installed | None) -> pb.CatalogModel:
        on_disk = installed is not None and installed.whole
        return entry_message(entry, str(self._shelf.folder_of(entry)), on_disk)


def _family(engine: Engine | None, model: Model, kind: str, among: Families) -> Family | None:
    """Who plans a model. Raises RequestError for an engine that the catalogue says does not load it."""
    if engine is None:
        return recognise(model, among)
    if model.entry is not None and engine not in (model.entry.engine, Engine.GENERIC):
        named = f"{model.entry.catalog_id} is loaded by {model.entry.engine.value}, not by {engine.value}"
        error = PlanError(UNSUPPORTED_ARCHITECTURE, "engine_kind", f"{named}.")
        raise plan_refused(with_way_out(error, model, engine, among))
    return family_of(engine, model, kind, among)


def _unsolved(error: PlanError, model: Model) -> RequestError:
    """A solver needs a law; of a catalogue model that is not here only a range may be known."""
    if error.reason in REFUSED_BY_MACHINE:
        return failed_precondition(MODEL_WONT_RUN, error.message, {"verdict_reason": error.reason})
    if error.reason == UNSUPPORTED_ARCHITECTURE and model.entry is not None and not has_facts(model):
        return not_on_disk(model.entry)
    return plan_refused(error)


def _of_use(snapshot: Snapshot, use: int, ids: Sequence[str]) -> Sequence[str]:
    """The ids of models for a use. Raises RequestError."""
    if not use:
        return ids
    if use not in USES_BACK:
        raise invalid_argument("use", "is no use that a model has")
    return [catalog_id for catalog_id in ids if snapshot.entries[catalog_id].use is USES_BACK[use]]

"""One catalogue model's fit, for lists: never an error, and cheap enough for the whole catalogue at once."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import structlog
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge_fit.asking import malformed
from weighbridge_fit.capacity import Capacity
from weighbridge_fit.catalog import ranged
from weighbridge_fit.catalog.entry import CatalogEntry, Use
from weighbridge_fit.catalog.installed import Installed
from weighbridge_fit.catalog.resolve import has_facts, known_by_sizes
from weighbridge_fit.catalog.shelf import Shelf
from weighbridge_fit.errors import WeightError
from weighbridge_fit.families.registry import ALL, Families, recognise
from weighbridge_fit.lines import Source
from weighbridge_fit.model import Model
from weighbridge_fit.off_loop import AbandonedError
from weighbridge_fit.planning import Guess, answer, by_range, guess, too_small
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.requests import unrecognised
from weighbridge_fit.verdict import Verdict
from weighbridge_fit.wire.answer import assessment_message, claim_message, range_message
from weighbridge_fit.wire.catalog import ENGINE_KINDS

_log = structlog.get_logger(__name__)

Tier: TypeAlias = "plan_pb2.QualityTier.ValueType"

NO_OPTIONS = plan_pb2.EngineOptions()


async def fit_on(
    shelf: Shelf,
    entry: CatalogEntry,
    installed: Mapping[str, Installed],
    quality: Tier,
    capacity: Capacity,
    run: Callable[[Callable[[], pb.ModelFit]], Awaitable[pb.ModelFit]],
    among: Families = ALL,
) -> pb.ModelFit:
    """The fit of an entry at its default workload, images at a quality tier. What cannot be priced is UNKNOWN. `run`
    does the pricing where the event loop need not wait for it."""
    here = installed.get(entry.catalog_id)
    try:
        model = await shelf.model(entry, here)
    except WeightError as error:
        failed = malformed(error).failure
        made = guess(known_by_sizes(entry).facts, capacity, failed.message, failed.reason)
        return _message(entry, made, plan_pb2.Workload(), here)
    return await run(partial(fit_of, entry, model, quality, capacity, here, among))


def fit_of(
    entry: CatalogEntry,
    model: Model,
    quality: Tier,
    capacity: Capacity,
    here: Installed | None = None,
    among: Families = ALL,
) -> pb.ModelFit:
    """The fit of a model that was read. Raises nothing but AbandonedError."""
    try:
        return _fit_of(entry, model, quality, capacity, here, among)
    except AbandonedError:
        raise
    except Exception:
        # One model that nobody can price must not take the list with it, whatever is wrong with it.
        _log.exception("fit_failed", catalog_id=entry.catalog_id)
        made = guess(model.facts, capacity, "Pricing it failed: see the log of fit.", "PRICING_FAILED")
        return _message(entry, made, plan_pb2.Workload(), here)


def _fit_of(
    entry: CatalogEntry,
    model: Model,
    quality: Tier,
    capacity: Capacity,
    here: Installed | None,
    among: Families,
) -> pb.ModelFit:
    family = recognise(model, among)
    why = unrecognised(model)
    if family is not None:
        tier = quality if entry.use is Use.IMAGE else plan_pb2.QUALITY_TIER_UNSPECIFIED
        tiered = plan_pb2.ImageWorkload(quality=tier)
        workload = plan_pb2.Workload(image=tiered) if family.workload_name == "image" else plan_pb2.Workload()
        try:
            made = answer(family, model, family.request(workload, NO_OPTIONS), capacity, advise=False)
        except PlanError as error:
            refused = too_small(model.facts, capacity, error)
            if refused is not None:
                return _message(entry, refused, plan_pb2.Workload(), here)
            why = error.message
        else:
            return pb.ModelFit(
                catalog_id=entry.catalog_id,
                assessment=assessment_message(made.assessment),
                total=range_message(made.requirement.total),
                engine_kind=ENGINE_KINDS[family.engine],
                workload=family.workload(made.plan),
                claim=claim_message(made.claim, made.claim_source),
                priced_by_facts=has_facts(model),
                on_disk=here is not None and here.whole,
            )
    if not has_facts(model) and ranged.can_be_ranged(entry):
        return _message(entry, by_range(entry, capacity), default_chat(), here)
    return _message(entry, guess(model.facts, capacity, why), plan_pb2.Workload(), here)


def default_chat() -> plan_pb2.Workload:
    """What a range is made for when nobody says."""
    return plan_pb2.Workload(chat=plan_pb2.ChatWorkload(context_tokens=ranged.DEFAULT_CONTEXT, slots=1))


def _message(entry: CatalogEntry, made: Guess, workload: plan_pb2.Workload, here: Installed | None) -> pb.ModelFit:
    assessment = made.assessment
    if assessment.verdict is Verdict.UNKNOWN:
        # A list has no notes: what stood against a price is said with the verdict.
        assessment = replace(assessment, reason=f"{made.note.message} {assessment.reason}")
    return pb.ModelFit(
        catalog_id=entry.catalog_id,
        assessment=assessment_message(assessment),
        total=range_message(made.requirement.total),
        engine_kind=ENGINE_KINDS[entry.engine],
        workload=workload,
        claim=claim_message(made.claim, Source.ASSUMED),
        on_disk=here is not None and here.whole,
    )

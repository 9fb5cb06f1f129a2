"""One launch decided: what is streamed, how large the expert cache is, whether it drafts and sees.

Residency on the weights alone, then companions; the policy decides on its author's figures, and what it decides is
held against what the engine would refuse at its start.
"""

from dataclasses import dataclass, replace

from weighbridge_common.sizes import format_gib

from weighbridge_fit.calibration.ds4 import Compute, Ds4Calibration, Layout
from weighbridge_fit.model import Model
from weighbridge_fit.plans.ds4.companions import DRAFTER, VISION, Companion, companion_of, drafter_kind
from weighbridge_fit.plans.ds4.drafting import Drafter, Drafting, DraftReason, decide
from weighbridge_fit.plans.ds4.machine import Ds4Machine
from weighbridge_fit.plans.ds4.options import MAX_CACHE_GIB, Basics, Ds4Request
from weighbridge_fit.plans.ds4.policy import (
    GIB,
    SYSTEM_HEADROOM_BYTES,
    AuthorFigures,
    CachePlan,
    full_residency_allowed,
    launch_context,
    plan_cache,
)
from weighbridge_fit.plans.ds4.shape import Ds4Weights, Family
from weighbridge_fit.plans.ds4.standing import Frame, standing_lines
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.plan import Note

# Models whose own draft block ds4 uses: GLM (--glm-mtp), and since September 2026 Qwen (--mtp without a file). A block
# in a DeepSeek file is not read: those draft with a file beside the model.
_DRAFTS_WITH_ITS_BLOCK = (Family.GLM, Family.OTHER)


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Too little memory for a safe expert cache: the least physical memory that the policy starts this launch on, and
    a sentence for people."""

    needed_ram_bytes: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Decisions:
    """What a launch does. `cache_gib` 0: nothing is streamed. `drafter` NONE: it does not draft. `shortfall`: it must
    not be made here; `cache_gib` is then the smallest that the engine starts with."""

    streams: bool
    cache_gib: int
    drafting: Drafting
    drafter: Drafter
    drafter_file: Companion | None
    vision_file: Companion | None
    notes: tuple[Note, ...]
    shortfall: Shortfall | None = None


@dataclass(frozen=True, slots=True)
class _Desk:
    """Everything that decisions are made from."""

    model: Model
    weights: Ds4Weights
    machine: Ds4Machine
    figures: AuthorFigures
    basics: Basics
    request: Ds4Request
    calibration: Ds4Calibration


def figures_of(model: Model) -> AuthorFigures:
    """The figures that the catalogue's author gives for this model."""
    given = model.entry.figures if model.entry else {}
    return AuthorFigures(**{name: given.get(name, 0) for name in AuthorFigures.__slots__})


def decide_launch(
    model: Model,
    weights: Ds4Weights,
    machine: Ds4Machine,
    figures: AuthorFigures,
    basics: Basics,
    request: Ds4Request,
    calibration: Ds4Calibration,
) -> Decisions:
    """Decides everything. Raises PlanError INVALID_OPTION."""
    desk = _Desk(model, weights, machine, figures, basics, request, calibration)
    streams, notes = _residency(desk)
    vision, vision_notes = _vision(desk)
    drafter = companion_of(model, DRAFTER)
    kind = drafter_kind(model, drafter, draft_block=weights.draft_block and weights.family in _DRAFTS_WITH_ITS_BLOCK)
    drafter_bytes = _drafter_bytes(desk, drafter)
    vision_bytes = vision.file_bytes if vision else 0
    drafting = decide(
        basics.policy,
        kind,
        compute=machine.compute,
        streams=streams,
        streamed_drafting=weights.family is Family.V41 and kind is not Drafter.EMBEDDED,
        fits=_companion_fits(desk, streams, drafter_bytes, vision_bytes),
        refusal=_drafter_refused(desk, kind),
    )
    notes += vision_notes + _drafting_notes(drafting, kind)
    cache, shortfall = 0, None
    if streams:
        extra_bytes = vision_bytes + (drafter_bytes if drafting.enabled else 0)
        _check_configured(desk)
        shortfall = _shortfall(desk, extra_bytes)
        cache, cache_notes = (_smallest_cache_gib(desk), []) if shortfall else _cache(desk, extra_bytes)
        notes += cache_notes
    return Decisions(
        streams=streams,
        cache_gib=cache,
        drafting=drafting,
        drafter=kind if drafting.enabled else Drafter.NONE,
        drafter_file=drafter if drafting.enabled else None,
        vision_file=vision,
        notes=tuple(notes),
        shortfall=shortfall,
    )


def _residency(desk: _Desk) -> tuple[bool, list[Note]]:
    """Streaming unless somebody turned it off and the weights leave the system its memory."""
    asked, entry = desk.request.stream_experts, desk.model.entry
    unable = ""
    if entry is not None and entry.ssd_streaming is False:
        unable = "this model does not support streaming; all that loads stays in memory"
    elif desk.machine.compute is Compute.CPU:
        unable = "ds4 does not stream on the processor; the file is mapped whole"
    elif desk.basics.layout is Layout.MAY:
        unable = "builds before June 2026 do not stream; all weights stay in memory"
    if unable:
        return False, [Note("STREAMING_IGNORED", f"stream_experts is ignored: {unable}.")] if asked else []
    if asked is not False:
        return True, []
    size, ram = desk.weights.mapped_bytes, desk.machine.ram_bytes
    if full_residency_allowed(ram_bytes=ram, arm=desk.machine.arm, weight_bytes=size):
        return False, []
    needed = size + SYSTEM_HEADROOM_BYTES
    why = (
        f"weights of {format_gib(size)} and {format_gib(SYSTEM_HEADROOM_BYTES)} for the system need "
        f"{format_gib(needed)} of memory, this machine has {format_gib(ram)}"
        if desk.machine.arm
        else "only on arm64 Macs and Linux machines are whole models kept in memory"
    )
    metadata = {"weight_bytes": str(size), "needed_ram_bytes": str(needed), "ram_bytes": str(ram)}
    return True, [Note("RESIDENCY_REFUSED", f"Experts are streamed although stream_experts is off: {why}.", metadata)]


def _vision(desk: _Desk) -> tuple[Companion | None, list[Note]]:
    """The vision companion loads where there is one, unless somebody does not want it."""
    wanted = desk.request.vision
    if wanted is False:
        return None, []
    found = companion_of(desk.model, VISION)
    if desk.basics.layout is Layout.MAY and found:
        message = "Builds of May 2026 see no pictures: the vision companion is not loaded."
        return None, [Note("VISION_UNMET", message, {"reason": "BUILD_TOO_OLD"})]
    if found is None and wanted:
        message = "There is no vision companion; name one with vision_file."
        return None, [Note("VISION_UNMET", message, {"reason": "NO_COMPANION"})]
    return found, []


def _drafter_bytes(desk: _Desk, drafter: Companion | None) -> int:
    if drafter is None:
        return 0
    runtime = desk.calibration["v41_drafter_runtime_bytes"].expected if desk.weights.family is Family.V41 else 0
    return drafter.file_bytes + int(runtime)


def _companion_fits(desk: _Desk, streams: bool, drafter_bytes: int, vision_bytes: int) -> bool:
    if streams:
        return _shortfall(desk, drafter_bytes + vision_bytes) is None
    return full_residency_allowed(
        ram_bytes=desk.machine.ram_bytes,
        arm=desk.machine.arm,
        weight_bytes=desk.weights.mapped_bytes,
        companion_bytes=drafter_bytes + vision_bytes,
    )


def _drafter_refused(desk: _Desk, kind: Drafter) -> DraftReason | None:
    """What the build or the model cannot do whatever else is decided."""
    if desk.machine.compute is Compute.CPU:
        return DraftReason.PROCESSOR
    if desk.basics.layout is Layout.MAY and kind is not Drafter.LEGACY_HEAD:
        return DraftReason.BUILD_TOO_OLD
    if desk.basics.sessions > 1:
        return DraftReason.SESSIONS
    external = kind in (Drafter.DSPARK, Drafter.LEGACY_HEAD)
    if external and (desk.weights.family is Family.GLM or desk.weights.pro):
        return DraftReason.MODEL_REFUSES
    return None


def _drafting_notes(drafting: Drafting, kind: Drafter) -> list[Note]:
    metadata = {"reason": drafting.reason.value}
    if drafting.unmet:
        return [Note("DRAFT_UNMET", drafting.sentence, metadata)]
    if drafting.sentence and kind is not Drafter.NONE:
        return [Note("DRAFT_NOT_USED", drafting.sentence, metadata)]
    return []


def _reference_bytes(desk: _Desk) -> int:
    """What the engine holds beside the cache at the usual context with one session. Caches are sized against this and
    not against the context that was asked for: a larger context must never look cheaper."""
    usual = launch_context(
        ram_bytes=desk.machine.ram_bytes,
        author_cap=desk.figures.max_launch_context_tokens,
        model_longest=desk.weights.longest_context,
    )
    basics = replace(desk.basics, context_tokens=usual, sessions=1)
    frame = Frame(desk.weights, basics, desk.machine.compute, streams=True, on_card=desk.machine.discrete)
    lines = standing_lines(frame, desk.calibration)
    return sum(line.bytes.expected for line in lines if line.on_device or not desk.machine.discrete)


def _fixed_bytes(desk: _Desk) -> int:
    """What the policy takes to stay beside the cache: the author's figure, else what the engine holds."""
    return desk.figures.fixed_bytes if desk.figures.resident_bytes else _reference_bytes(desk)


def _smallest_cache_gib(desk: _Desk) -> int:
    """The smallest cache that the policy gives and the engine starts with."""
    return desk.weights.experts.smallest_cache_gib if desk.weights.experts else 1


def _policy_cache(desk: _Desk, extra_bytes: int) -> CachePlan:
    """The policy's cache. `extra_bytes` are companions that stay resident; they count also where the author says
    nothing."""
    return plan_cache(
        ram_bytes=desk.machine.ram_bytes,
        fixed_bytes=_fixed_bytes(desk) + extra_bytes,
        configured_gib=desk.request.expert_cache_gib,
        author_cache_bytes=desk.figures.expert_cache_bytes,
    )


def _check_configured(desk: _Desk) -> None:
    configured, smallest, experts = desk.request.expert_cache_gib, _smallest_cache_gib(desk), desk.weights.experts
    if configured is not None and not smallest <= configured <= MAX_CACHE_GIB:
        message = (
            f"ds4 starts this model with an expert cache of {smallest} GiB or more: prompts are read through "
            f"{format_gib(experts.headroom_bytes if experts else 0)} of it. {configured} GiB were asked for."
        )
        raise PlanError("INVALID_OPTION", "options.ds4.expert_cache_gib", message)


def _shortfall(desk: _Desk, extra_bytes: int) -> Shortfall | None:
    """What is missing where no cache that the engine starts with leaves the system its memory."""
    smallest, fixed, ram = _smallest_cache_gib(desk), _fixed_bytes(desk) + extra_bytes, desk.machine.ram_bytes
    needed = smallest * GIB + fixed + SYSTEM_HEADROOM_BYTES
    if needed <= ram:
        return None
    allowed = full_residency_allowed(ram_bytes=ram, arm=desk.machine.arm, weight_bytes=desk.weights.mapped_bytes)
    other = "set stream_experts=false, the whole model fits" if allowed else "choose a smaller model or quantisation"
    sentence = (
        f"No expert cache is safe here: at least {smallest} GiB of it, {format_gib(fixed)} beside it and "
        f"{format_gib(SYSTEM_HEADROOM_BYTES)} for the system need {format_gib(needed)} of memory, this machine has "
        f"{format_gib(ram)}. It lacks {format_gib(needed - ram)}; {other}."
    )
    return Shortfall(needed, sentence)


def _cache(desk: _Desk, extra_bytes: int) -> tuple[int, list[Note]]:
    """The cache in GiB: the policy's, within what is admitted here and above what the engine starts with."""
    plan, smallest = _policy_cache(desk, extra_bytes), _smallest_cache_gib(desk)
    metadata = {"safe_gib": str(plan.safe_gib), "smallest_gib": str(smallest)}
    notes = []
    if plan.clamped:
        message = (
            f"The expert cache is {plan.cache_gib} GiB instead of {plan.requested_gib:g} GiB: the system keeps "
            f"{format_gib(SYSTEM_HEADROOM_BYTES)}."
        )
        notes.append(Note("EXPERT_CACHE_CLAMPED", message, {**metadata, "cache_gib": str(plan.cache_gib)}))
    if desk.request.expert_cache_gib is not None:
        return plan.cache_gib, notes
    room = (desk.machine.pool_ceiling_bytes - _reference_bytes(desk) - extra_bytes) // GIB
    admitted = max(smallest, min(plan.cache_gib, room))
    if admitted < plan.cache_gib:
        where = "the card has room for" if desk.machine.discrete else "is admitted here"
        message = f"The expert cache is {admitted} GiB instead of {plan.cache_gib} GiB: that is what {where}."
        notes.append(Note("EXPERT_CACHE_LOWERED", message, {**metadata, "cache_gib": str(admitted)}))
    return admitted, notes

"""What should be known about a ds4 launch: the policy's figure beside the engine's, what ds4 itself will print, and
where it may refuse or hold more than it says."""

from math import ceil

from weighbridge_common.sizes import format_gib

from weighbridge_fit.calibration.ds4 import Compute, Ds4Calibration, Layout
from weighbridge_fit.laws.ds4_experts import GIB, largest_cache_gib
from weighbridge_fit.laws.ds4_v41 import metal_budget_bytes, needed_bytes
from weighbridge_fit.lines import Requirement, Source
from weighbridge_fit.model import Model
from weighbridge_fit.plans.ds4.decisions import Decisions
from weighbridge_fit.plans.ds4.machine import Ds4Machine
from weighbridge_fit.plans.ds4.policy import DISK_KV_SPACE_MIB, RESIDENT_RESERVATION_BYTES, AuthorFigures, reservation
from weighbridge_fit.plans.ds4.shape import Family
from weighbridge_fit.plans.ds4.standing import Frame, context_buffers
from weighbridge_fit.plans.plan import Note

# KV of this size goes to memory that CUDA pages between host and card.
MANAGED_KV_BYTES = 8 * GIB


def launch_notes(
    model: Model,
    frame: Frame,
    machine: Ds4Machine,
    figures: AuthorFigures,
    decisions: Decisions,
    needed: Requirement,
    printed_bytes: int,
    calibration: Ds4Calibration,
) -> tuple[Note, ...]:
    """Every note of one launch, the decisions' own first. `printed_bytes`: see `printed_plan_bytes`."""
    notes = [Note("WEIGHTS", text) for text in model.facts.notes]
    notes += decisions.notes
    notes.append(_policy_note(frame, figures, decisions, needed))
    if printed_bytes:
        message = (
            f"ds4 will print a plan of {format_gib(printed_bytes)}. It leaves out the prefill workspace, compressor "
            f"states{', most weights that stay' if decisions.streams else ''} and the driver."
        )
        notes.append(Note("ENGINE_PRINTS", message, {"planned_bytes": str(printed_bytes)}))
    notes += _source_notes(model, frame, machine, figures)
    notes += _metal_notes(frame, machine, decisions, needed, calibration)
    notes += _streaming_notes(frame, machine, decisions, calibration)
    notes += _session_notes(frame)
    return tuple(notes)


def printed_plan_bytes(frame: Frame, decisions: Decisions) -> int:
    """The total of ds4's start line "ds4: memory: ... planned" (V4, builds since July 2026); 0 where it is not
    known. When streaming it counts of all resident weights the token embedding alone."""
    buffers, weights = context_buffers(frame), frame.weights
    if buffers is None or frame.basics.layout is Layout.MAY or frame.basics.sessions > 1:
        return 0
    if frame.compute is Compute.CPU:
        return 0
    if not decisions.streams:
        return weights.mapped_bytes + buffers.total_bytes
    if weights.experts is None:
        return 0
    cached = weights.experts.slots(decisions.cache_gib) * weights.experts.expert_bytes
    return buffers.total_bytes + weights.embedding_bytes + cached + weights.experts.headroom_bytes


def _policy_note(frame: Frame, figures: AuthorFigures, decisions: Decisions, needed: Requirement) -> Note:
    """Both lines side by side: what the policy that decided would reserve, and what the engine holds."""
    context, streams = frame.basics.context_tokens, decisions.streams
    policy = reservation(figures, context, frame.weights.mapped_bytes, streams=streams)
    engine = needed.total.expected
    projected = figures.resident_at(context) is not None
    if not streams:
        origin = f"never less than {format_gib(RESIDENT_RESERVATION_BYTES)} where all weights stay in memory"
    elif projected:
        origin = f"from the catalogue, for {context:,} tokens and its own choice of expert cache"
    elif figures.resident_bytes:
        origin = "from the catalogue, for any context"
    else:
        origin = "a guess from the file's size"
    metadata = {
        "policy_bytes": str(policy),
        "engine_bytes": str(engine),
        "difference_bytes": str(engine - policy),
        "author_expert_cache_bytes": str(figures.expert_cache_bytes),
        "author_fixed_bytes": str(figures.fixed_bytes),
        "expert_cache_bytes": str(decisions.cache_gib * GIB),
    }
    message = (
        f"At least {format_gib(engine)} of memory is claimed for this launch: what ds4 is expected to hold. The rules "
        f"that chose its settings count on {format_gib(policy)} ({origin}). That figure is not claimed; "
        "there is nothing to do."
    )
    return Note("POLICY_RESIDENT", message, metadata)


def _source_notes(model: Model, frame: Frame, machine: Ds4Machine, figures: AuthorFigures) -> list[Note]:
    notes = []
    if frame.weights.source is Source.ASSUMED:
        message = "Nothing is known of this model's tensors: it is priced by the plausible range of its file's size."
        notes.append(Note("PRICED_BY_RANGE", message))
    elif not model.facts.tensor_count:
        message = f"Priced without facts about its tensors: {frame.weights.basis}."
        notes.append(Note("PRICED_BY_SIZE", message))
    cap, context = figures.max_launch_context_tokens, frame.basics.context_tokens
    if cap and context > cap:
        message = f"The catalogue's author launches this model with at most {cap:,} tokens; {context:,} were asked for."
        notes.append(Note("ABOVE_LAUNCH_CONTEXT", message, {"max_launch_context_tokens": str(cap)}))
    if machine.platform_assumed:
        message = "No platform is named: unified memory is taken for a Mac with Apple silicon."
        notes.append(Note("PLATFORM_ASSUMED", message))
    if machine.compute is Compute.CPU:
        message = "ds4 on a processor is for diagnosis: far below one token a second."
        notes.append(Note("PROCESSOR_ONLY", message))
    return notes


def _metal_notes(
    frame: Frame, machine: Ds4Machine, decisions: Decisions, needed: Requirement, calibration: Ds4Calibration
) -> list[Note]:
    """macOS lets the GPU wire a part of memory only; beyond it the machine pages, and V4.1 is not admitted by ds4."""
    if frame.compute is not Compute.METAL:
        return []
    working_set = int(machine.ram_bytes * calibration["working_set_share"].expected)
    wired, code = needed.total.expected, "GPU_WIRED_LIMIT"
    if frame.weights.family is Family.V41:
        weights, experts = frame.weights, frame.weights.experts
        session = calibration.v41_session.session_bytes(frame.basics.context_tokens).expected
        wired = needed_bytes(
            weights.non_routed.expected if decisions.streams else weights.mapped_bytes,
            session,
            frame.basics.sessions,
            int(calibration["v41_reserve_bytes"].expected),
            experts.headroom_bytes if experts and decisions.streams else 0,
        )
        working_set, code = metal_budget_bytes(machine.ram_bytes, working_set), "ENGINE_MAY_REFUSE"
    if wired <= working_set:
        return []
    mib = ceil(wired / 2**20)
    what = "ds4 asks for" if code == "ENGINE_MAY_REFUSE" else "The GPU would wire"
    message = (
        f"{what} {format_gib(wired)}; by default macOS grants about {format_gib(working_set)} here. "
        f"`sudo sysctl iogpu.wired_limit_mb={mib}` grants it until the next start."
    )
    return [Note(code, message, {"needed_mib": str(mib), "granted_bytes": str(working_set)})]


def _streaming_notes(
    frame: Frame, machine: Ds4Machine, decisions: Decisions, calibration: Ds4Calibration
) -> list[Note]:
    if not decisions.streams:
        return []
    notes, experts = [], frame.weights.experts
    if experts is not None and experts.slots(decisions.cache_gib) < experts.warned_below_slots:
        message = (
            f"The cache holds {experts.slots(decisions.cache_gib):,} experts; with fewer than "
            f"{experts.warned_below_slots:,} ds4 warns that it reads most of them again for every token."
        )
        notes.append(Note("EXPERT_CACHE_SMALL", message))
    buffers = context_buffers(frame)
    if frame.compute is Compute.METAL and buffers is not None:
        working_set = int(machine.ram_bytes * calibration["working_set_share"].expected)
        most = largest_cache_gib(working_set, buffers.total_bytes * frame.basics.sessions)
        if most < decisions.cache_gib:
            message = f"ds4 itself lowers this expert cache to {most} GiB: 7/8 of what macOS grants, less the context."
            notes.append(Note("ENGINE_LOWERS_CACHE", message, {"cache_gib": str(most)}))
        message = (
            "Builds of July and August 2026 were seen to exceed the expert cache, up to twice, when a prompt changes "
            "the experts in use (ds4 issue 802)."
        )
        notes.append(Note("CACHE_MAY_OVERSHOOT", message))
    return notes


def _session_notes(frame: Frame) -> list[Note]:
    notes = []
    buffers = context_buffers(frame)
    if frame.compute is Compute.CUDA and buffers is not None and buffers.cache_bytes >= MANAGED_KV_BYTES:
        message = f"A cache of {format_gib(buffers.cache_bytes)} is put in memory that CUDA pages as it is used."
        notes.append(Note("KV_MANAGED", message))
    if frame.basics.disk_kv:
        message = (
            f"Conversations are kept on disk, up to {DISK_KV_SPACE_MIB // 1024} GiB, with their text readable; "
            "disk_kv=false keeps none."
        )
        notes.append(Note("DISK_KV", message, {"space_mib": str(DISK_KV_SPACE_MIB)}))
    return notes

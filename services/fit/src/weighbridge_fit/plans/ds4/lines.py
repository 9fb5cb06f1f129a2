"""The lines of a ds4 launch: what stands anyway, the expert cache, companions, and checkpoints on their way to disk."""

from dataclasses import replace

from weighbridge_fit.calibration.ds4 import Ds4Calibration
from weighbridge_fit.laws.ds4_context import checkpoint_bytes
from weighbridge_fit.laws.ds4_experts import GIB
from weighbridge_fit.lines import Line, Phase, Range, Source
from weighbridge_fit.plans.ds4.decisions import Decisions
from weighbridge_fit.plans.ds4.drafting import Drafter
from weighbridge_fit.plans.ds4.shape import Ds4Weights, Family
from weighbridge_fit.plans.ds4.standing import Frame, standing_lines


def launch_lines(frame: Frame, decisions: Decisions, calibration: Ds4Calibration) -> tuple[Line, ...]:
    """Every line of one launch."""
    added = [
        *_cache_lines(frame.weights, decisions),
        *_drafter_lines(frame, decisions, calibration),
        *_vision_lines(decisions),
    ]
    if frame.on_card:
        added = [replace(line, on_device=True) for line in added]
    lines = [*standing_lines(frame, calibration), *added]
    if frame.basics.disk_kv:
        lines.append(_checkpoint_line(frame, calibration))
    return tuple(lines)


def _cache_lines(weights: Ds4Weights, decisions: Decisions) -> list[Line]:
    if not decisions.streams:
        return []
    budget, experts = decisions.cache_gib * GIB, weights.experts
    if experts is None:
        basis = f"--ssd-streaming-cache-experts {decisions.cache_gib}GB; the size of one expert is not known"
        return [Line("expert_cache", Phase.RESIDENT, Range.exactly(budget), Source.ASSUMED, basis)]
    slots = experts.slots(decisions.cache_gib)
    mib = experts.expert_bytes / 2**20
    lines = [
        Line(
            "expert_cache",
            Phase.RESIDENT,
            Range.exactly(slots * experts.expert_bytes),
            Source.DERIVED,
            f"{slots:,} of {experts.layers * experts.experts:,} experts of {mib:.2f} MiB: whole slots of "
            f"{decisions.cache_gib} GiB beside the reserve",
        ),
        Line(
            "prefill_reserve",
            Phase.RESIDENT,
            Range.exactly(experts.headroom_bytes),
            Source.DERIVED,
            f"two routed layers of {experts.experts} experts of {mib:.2f} MiB, through which prompts are read; part of "
            "the cache's budget",
        ),
    ]
    if experts.bypass_bytes:
        basis = (
            "experts of another size go past the cache through mapped pages: none need stay, and Metal was seen to "
            "keep all that it used (ds4 issue 638)"
        )
        held = Range(0, 0, experts.bypass_bytes)
        lines.append(Line("mapped_experts", Phase.RESIDENT, held, Source.ASSUMED, basis))
    return lines


def _drafter_lines(frame: Frame, decisions: Decisions, calibration: Ds4Calibration) -> list[Line]:
    if decisions.drafter is Drafter.EMBEDDED:
        figure = calibration["drafter_runtime_bytes"]
        basis = f"the model's own draft block, whose weights are in its file; {figure.basis}"
        return [Line("drafter", Phase.RESIDENT, figure.range, Source.ASSUMED, basis)]
    if decisions.drafter_file is None:
        return []
    v41 = frame.weights.family is Family.V41
    figure = calibration["v41_drafter_runtime_bytes" if v41 else "drafter_runtime_bytes"]
    size = Range.exactly(decisions.drafter_file.file_bytes) + figure.range
    basis = f"the drafter's whole file, resident also while experts are streamed; {figure.basis}"
    return [Line("drafter", Phase.RESIDENT, size, figure.source, basis)]


def _vision_lines(decisions: Decisions) -> list[Line]:
    if decisions.vision_file is None:
        return []
    size = Range.exactly(decisions.vision_file.file_bytes)
    return [Line("vision", Phase.RESIDENT, size, Source.DERIVED, "the vision companion's whole file")]


def _checkpoint_line(frame: Frame, calibration: Ds4Calibration) -> Line:
    """Host memory of a checkpoint on its way to or from disk; the disk's own space is no memory."""
    layers, context = frame.weights.context, frame.basics.context_tokens
    if layers is not None:
        size = checkpoint_bytes(layers, context, frame.weights.vocab_size)
    elif frame.weights.family is Family.V41:
        size = int(calibration["v41_checkpoint_bytes_per_token"].expected * context)
    else:
        figure = "glm_kv_bytes_per_token" if frame.weights.family is Family.GLM else "other_kv_bytes_per_token"
        # Always float32 on disk, whatever the cache is.
        size = int(2 * calibration[figure].expected * context)
    basis = "written and read row by row as far as is known; at worst one full conversation is held on the way"
    return Line("disk_kv", Phase.PREFILL, Range(0, 0, size), Source.ASSUMED, basis)

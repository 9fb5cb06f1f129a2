"""The plan of an MLX language model: what the runtime's process will hold, line by line.

All memory is host memory: MLX allocates from the one memory of a unified machine, or from the host's on a CPU.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from weighbridge_fit.calibration import BOUNDS, Calibration, ComputeDevice, mlx
from weighbridge_fit.components import HALF_PRECISIONS, Component, activation_bytes
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.geometry import ModelGeometry
from weighbridge_fit.laws import mlx_trellis
from weighbridge_fit.lines import MAX_BYTES, NOTHING, Line, Phase, Range, Source, requirement
from weighbridge_fit.plans.errors import UNSUPPORTED_ARCHITECTURE, PlanError
from weighbridge_fit.plans.mlx import drafting
from weighbridge_fit.plans.mlx.adapters import adapter_lines
from weighbridge_fit.plans.mlx.architectures import architecture_of
from weighbridge_fit.plans.mlx.notes import not_launched, notes
from weighbridge_fit.plans.mlx.options import MlxRequest, MlxShape, settle
from weighbridge_fit.plans.mlx.residency import lane_lines, prompt_cache_lines, slab, slab_line
from weighbridge_fit.plans.mlx.support import loaded_bytes, loaded_tensors, supported
from weighbridge_fit.plans.mlx.working import ALLOCATOR_CACHE, Loaded, cache_lines, caches_of, phase_lines
from weighbridge_fit.plans.plan import Engine, Plan

_PER_LAYER_INPUTS = ".per_layer_model_projection.weight"
_NO_COMPANIONS: Mapping[str, WeightFacts] = MappingProxyType({})


def memory_limit_bytes(plan: Plan) -> int:
    """What MLX's allocator may hold in all: the planned bytes less the process's own."""
    return plan.requirement.total.expected - plan.process_bytes


def plan(
    facts: WeightFacts,
    request: MlxRequest,
    device: ComputeDevice,
    companions: Mapping[str, WeightFacts] = _NO_COMPANIONS,
) -> Plan:
    """Plans one model, with its adapters and drafter as `companions` by role.

    Raises PlanError: UNSUPPORTED_ARCHITECTURE, CONTEXT_TOO_LONG, INVALID_OPTION, ADAPTER_MISMATCH, DRAFTER_MISMATCH,
    DRAFT_HEAD_MISSING, EXPERT_SLAB_TOO_SMALL.
    """
    model = _loaded(facts)
    geometry, calibration = model.geometry, mlx(device)
    longest_drafted = drafting.longest_drafted(geometry, companions)
    shape = settle(request, geometry, loaded_bytes(facts, geometry), device, calibration, longest_drafted)
    weights, shape = _weight_lines(facts, model, request, shape)
    caches = cache_lines(geometry, shape)
    phases = phase_lines(model, shape, calibration)
    if shape.draft_model:
        drafter_weights, drafter_caches, phases = _with_drafter(geometry, companions, shape, calibration, phases)
        weights, caches = [*weights, *drafter_weights], [*caches, *drafter_caches]
    adapters = adapter_lines(facts, companions, shape, calibration)
    beside = [*adapters, *prompt_cache_lines(shape), *lane_lines(facts, geometry, shape)]
    if shape.draft_head:
        caches += _draft_head_caches(geometry, shape)
    process = _process_lines(geometry, calibration)
    working = requirement((*caches, *(line for line in phases if line.component != ALLOCATOR_CACHE))).total
    loaded = sum(line.bytes.expected for line in weights)
    slack = _slack_line(loaded, working, calibration)
    needed = requirement((*weights, *caches, *beside, *process, slack, *phases))
    if needed.total.high > MAX_BYTES:
        message = "The model's sizes multiply to more memory than can be counted: its configuration is wrong."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", message)
    found = architecture_of(geometry)
    launched_type = found is not None and found.launched
    return Plan(
        engine=Engine.MLX,
        shape=replace(shape, launched=not not_launched(model, shape, launched_type)),
        requirement=needed,
        weight_bytes=loaded,
        process_bytes=sum(line.bytes.expected for line in process),
        notes=notes(facts, model, shape, launched_type),
    )


def _loaded(facts: WeightFacts) -> Loaded:
    """What the laws need to know of a model. Raises PlanError UNSUPPORTED_ARCHITECTURE."""
    geometry = supported(facts)
    tensors = loaded_tensors(facts, geometry)
    trellis = tuple(mlx_trellis.matrices(tensors, geometry.hidden_size))
    unknown = [matrix.path for matrix in trellis if not matrix.bits]
    if unknown:
        message = f"The codes of {unknown[0]} are of a trellis format that is not known (2, 3 or 4 bits are)."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", message)
    # The scales of trellis codes are used in the product and do not decide what it is computed in.
    scales = {f"{matrix.path}.scales" for matrix in trellis}
    width = activation_bytes(tensor for tensor in tensors if tensor.name not in scales)
    geometry = replace(geometry, activation_bytes=width or geometry.activation_bytes)
    inputs = (tensor.shape[0] for tensor in tensors if tensor.shape and tensor.name.endswith(_PER_LAYER_INPUTS))
    return Loaded(geometry, _half_elements(facts), next(inputs, 0), trellis)


def _half_elements(facts: WeightFacts) -> int:
    """Elements that the loaded weights store in half precision; as many as could be where the facts do not say."""
    loaded = [total for total in facts.components if total.component == Component.MODEL]
    if not any(total.precisions for total in loaded):
        return facts.component_bytes(Component.MODEL) // 2
    precisions = (precision for total in loaded for precision in total.precisions)
    return sum(precision.elements for precision in precisions if precision.dtype in HALF_PRECISIONS)


def _weight_lines(
    facts: WeightFacts, model: Loaded, request: MlxRequest, shape: MlxShape
) -> tuple[list[Line], MlxShape]:
    """The model's own weights, its draft head's, and the slabs that stand for the experts of either. The shape gets the
    bytes that whole slots take."""
    geometry = model.geometry
    parts = {Component.MODEL: "model"}
    if shape.draft_head:
        drafting.check_draft_head(facts)
        parts[Component.DRAFT] = "draft_head"
    lines, held = [], 0
    for component, name in parts.items():
        draft = component is Component.DRAFT
        size = facts.component_bytes(component) if draft else loaded_bytes(facts, geometry)
        if request.expert_slab_bytes is not None:
            rows = shape.draft_tokens if draft else shape.slots * shape.verify_rows
            found, slots = slab(facts, geometry, request.expert_slab_bytes, rows, component)
            if found.bytes:
                lines.append(slab_line(f"{name}_expert_slab", found, slots, geometry.experts))
                size, held = size - found.bytes, held + slots * found.slot_bytes
        lines.append(_weight_line(facts, name, size))
    return lines, replace(shape, expert_slab_bytes=held)


def _weight_line(facts: WeightFacts, name: str, size: int) -> Line:
    basis = "tensor bytes of the headers, exactly"
    if name == "model" and facts.tensor_bytes > size:
        basis += "; without what is not loaded with it: draft head, vision tower, streamed experts, unused tensors"
    return Line(name, Phase.RESIDENT, Range.exactly(size), Source.DERIVED, basis, _largest(facts, size))


def _largest(facts: WeightFacts, size: int) -> Range:
    return Range.exactly(min(facts.largest_tensor_bytes, size))


def _with_drafter(
    target: ModelGeometry,
    companions: Mapping[str, WeightFacts],
    shape: MlxShape,
    calibration: Calibration,
    phases: list[Line],
) -> tuple[list[Line], list[Line], list[Line]]:
    """A drafter's weights and caches, and the phases with its reading of the prompt, which goes before the model's.
    Raises PlanError DRAFTER_MISMATCH."""
    facts = drafting.drafter_of(companions, target)
    try:
        model = _loaded(facts)
    except PlanError as error:
        raise drafting.refused(f"mlx-lm cannot draft with this model. {error.message}") from error
    size = loaded_bytes(facts, model.geometry)
    basis = "tensor bytes of the drafter's headers, exactly"
    weights = [Line("drafter", Phase.RESIDENT, Range.exactly(size), Source.DERIVED, basis, _largest(facts, size))]
    drafting.check_drafter(model.geometry, shape)
    caches = cache_lines(model.geometry, shape, "drafter_")
    return weights, caches, [*phases, *_drafter_prefill(phases, phase_lines(model, shape, calibration))]


def _drafter_prefill(phases: list[Line], drafters: list[Line]) -> list[Line]:
    """What a drafter's reading of the prompt takes above the model's own: the larger of the two counts, not their sum.
    At least nothing, so that no bound falls where one outgrows the other."""
    own, other, buffer = NOTHING, NOTHING, NOTHING
    for line in (line for line in phases if line.phase is Phase.PREFILL):
        own = own + line.bytes
    for line in (line for line in drafters if line.phase is Phase.PREFILL):
        other, buffer = other + line.bytes, buffer.cover(line.buffer)
    expected = max(0, other.expected - own.expected)
    above = Range(0, expected, max(expected, other.high - own.high))
    if not above.high:
        return []
    basis = "the drafter reads the prompt before the model does: what that takes above the model's own reading"
    return [Line("drafter_prefill", Phase.PREFILL, above, Source.DERIVED, basis, buffer)]


def _draft_head_caches(geometry: ModelGeometry, shape: MlxShape) -> list[Line]:
    state = caches_of(geometry, shape).state_bytes
    return [*drafting.draft_head_lines(geometry, shape), *drafting.rollback_lines(state, shape)]


def _process_lines(geometry: ModelGeometry, calibration: Calibration) -> list[Line]:
    base, tokenizer = calibration["process_base_bytes"], calibration["tokenizer_bytes_per_entry"]
    basis = f"{geometry.vocab_size:,} vocabulary entries; {tokenizer.basis}"
    entries = Range(*(int(tokenizer.at(bound) * geometry.vocab_size) for bound in BOUNDS))
    return [
        Line("process", Phase.RESIDENT, base.range, base.source, base.basis),
        Line("tokenizer", Phase.RESIDENT, entries, tokenizer.source, basis),
    ]


def _slack_line(weights: int, working: Range, calibration: Calibration) -> Line:
    """Resident pages beyond what the allocator says it holds."""
    on_weights, on_heap = calibration["weight_slack_fraction"], calibration["heap_slack_fraction"]
    amounts = {"low": working.low, "expected": working.expected, "high": working.high}
    slack = Range(*(int(weights * on_weights.at(bound) + amounts[bound] * on_heap.at(bound)) for bound in BOUNDS))
    basis = f"pages kept beside live allocations; {on_heap.basis}; {on_weights.basis}"
    return Line("allocator_slack", Phase.RESIDENT, slack, on_heap.source, basis)

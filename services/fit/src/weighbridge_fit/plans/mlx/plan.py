"""The plan of an MLX Qwen model: what the runtime's process will hold, line by line.

All memory is host memory: MLX allocates from the one memory of a unified machine, or from the host's on a CPU.
"""

from collections.abc import Callable

from weighbridge_fit.calibration import Calibration, ComputeDevice, WorkspaceFactors, mlx
from weighbridge_fit.components import HALF_PRECISIONS, Component
from weighbridge_fit.facts import WeightFacts, WeightFormat
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws import cache_growth, gated_delta, kv, workspace
from weighbridge_fit.lines import Line, Phase, Range, Source, requirement
from weighbridge_fit.model_config import QWEN_TYPES
from weighbridge_fit.plans.errors import UNSUPPORTED_ARCHITECTURE, PlanError
from weighbridge_fit.plans.mlx.options import MlxRequest, MlxShape, settle
from weighbridge_fit.plans.plan import Engine, Note, Plan

# What the contract's signed 64 bits hold.
MAX_BYTES = 2**63 - 1
_BOUNDS = ("low", "expected", "high")
_ALLOCATOR_CACHE = "allocator_cache"


def memory_limit_bytes(plan: Plan) -> int:
    """What MLX's allocator may hold in all: the planned bytes less the process's own."""
    return plan.requirement.total.expected - plan.process_bytes


def plan(facts: WeightFacts, request: MlxRequest, device: ComputeDevice) -> Plan:
    """Plans one model. Raises PlanError: UNSUPPORTED_ARCHITECTURE, CONTEXT_TOO_LONG, INVALID_OPTION."""
    geometry = _supported(facts)
    calibration = mlx(device)
    weights = facts.component_bytes(Component.MODEL)
    shape = settle(request, geometry, weights, device, calibration)
    caches = _cache_lines(geometry, shape)
    phases = _phase_lines(geometry, shape, calibration, _half_elements(facts))
    process = _process_lines(geometry, calibration)
    working = requirement((*caches, *(line for line in phases if line.component != _ALLOCATOR_CACHE))).total
    lines = (_weight_line(facts, weights), *caches, *process, _slack_line(weights, working, calibration), *phases)
    needed = requirement(lines)
    if needed.total.high > MAX_BYTES:
        message = "The model's sizes multiply to more memory than can be counted: its configuration is wrong."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", message)
    return Plan(
        engine=Engine.MLX,
        shape=shape,
        requirement=needed,
        weight_bytes=weights,
        process_bytes=sum(line.bytes.expected for line in process),
        notes=_notes(facts, geometry, device),
    )


def _supported(facts: WeightFacts) -> ModelGeometry:
    geometry = facts.geometry
    if facts.format is not WeightFormat.SAFETENSORS:
        message = "The MLX engine loads folders of safetensors; this model is stored in another format."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", message)
    if geometry is None or geometry.model_type not in QWEN_TYPES:
        named = f"of type {facts.architecture!r}" if facts.architecture else "without a config that names its type"
        message = f"The MLX engine plans Qwen models ({', '.join(sorted(QWEN_TYPES))}); this is a model {named}."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", message)
    needed = {
        "hidden_size": geometry.hidden_size,
        "vocab_size": geometry.vocab_size,
        "attention_heads": geometry.attention_heads,
        "kv_heads": geometry.kv_heads,
        "head_size": geometry.head_size,
        "layers": len(geometry.layers),
        "activation_bytes": geometry.activation_bytes,
    }
    if LayerKind.GATED_DELTA in geometry.layers:
        needed |= {
            "delta_key_heads": geometry.delta_key_heads,
            "delta_value_heads": geometry.delta_value_heads,
            "delta_key_size": geometry.delta_key_size,
            "delta_value_size": geometry.delta_value_size,
            "delta_conv_width": geometry.delta_conv_width,
        }
    missing = [name for name, value in needed.items() if not value]
    if missing:
        message = f"The model's geometry does not say its {', '.join(missing)}."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model.facts.geometry", message)
    return geometry


def _weight_line(facts: WeightFacts, weights: int) -> Line:
    left_out = facts.tensor_bytes - weights
    basis = "tensor bytes of the headers, exactly"
    if left_out:
        basis += "; draft head, vision tower and unused tensors are not loaded"
    buffer = Range.exactly(min(facts.largest_tensor_bytes, weights))
    return Line("model", Phase.RESIDENT, Range.exactly(weights), Source.DERIVED, basis, buffer)


def _cache_lines(geometry: ModelGeometry, shape: MlxShape) -> list[Line]:
    lines = []
    per_token = kv.bytes_per_token(geometry, shape.kv_bits, shape.kv_group_size)
    if per_token:
        slots = _slots(shape)
        growing = per_token * shape.slots
        row = kv.row_bytes(geometry, shape.kv_bits, shape.kv_group_size) * shape.slots
        stored = f"{shape.kv_bits} bit in groups of {shape.kv_group_size}" if shape.kv_bits else "unquantised"
        basis = (
            f"2 x {per_token // (2 * kv.row_bytes(geometry, shape.kv_bits, shape.kv_group_size))} attention layers x "
            f"{geometry.kv_heads} heads x {geometry.head_size}, {stored}: {per_token:,} bytes per token, for "
            f"{shape.slots} x {shape.context_tokens:,} tokens in slabs of {cache_growth.GROWTH_STEP}"
        )
        lines.append(
            Line("kv_cache", Phase.RESIDENT, _scaled(slots, growing), Source.DERIVED, basis, _scaled(slots, row))
        )
    state = gated_delta.state_bytes(geometry)
    if state:
        layers = geometry.count(LayerKind.GATED_DELTA)
        basis = f"constant state of {layers} gated-delta layers for {shape.slots} sequence(s)"
        lines.append(Line("recurrent_state", Phase.RESIDENT, Range.exactly(state * shape.slots), Source.DERIVED, basis))
    return lines


def _slots(shape: MlxShape) -> Range:
    """Slots of one full sequence. How many exactly depends on the chunks that filled it, within one slab."""
    most = cache_growth.most_slots_for(shape.context_tokens)
    filled = cache_growth.slots_for(shape.context_tokens, shape.prefill_step_tokens)
    return Range(shape.context_tokens, min(filled, most), most)


def _process_lines(geometry: ModelGeometry, calibration: Calibration) -> list[Line]:
    base, tokenizer = calibration["process_base_bytes"], calibration["tokenizer_bytes_per_entry"]
    basis = f"{geometry.vocab_size:,} vocabulary entries; {tokenizer.basis}"
    entries = Range(*(int(tokenizer.at(bound) * geometry.vocab_size) for bound in _BOUNDS))
    return [
        Line("process", Phase.RESIDENT, base.range, base.source, base.basis),
        Line("tokenizer", Phase.RESIDENT, entries, tokenizer.source, basis),
    ]


def _slack_line(weights: int, working: Range, calibration: Calibration) -> Line:
    """Resident pages beyond what the allocator says it holds."""
    on_weights, on_heap = calibration["weight_slack_fraction"], calibration["heap_slack_fraction"]
    amounts = {"low": working.low, "expected": working.expected, "high": working.high}
    slack = Range(*(int(weights * on_weights.at(bound) + amounts[bound] * on_heap.at(bound)) for bound in _BOUNDS))
    basis = f"pages kept beside live allocations; {on_heap.basis}; {on_weights.basis}"
    return Line("allocator_slack", Phase.RESIDENT, slack, on_heap.source, basis)


def _half_elements(facts: WeightFacts) -> int:
    """Elements that the loaded weights store in half precision; as many as could be where the facts do not say."""
    loaded = [total for total in facts.components if total.component == Component.MODEL]
    if not any(total.precisions for total in loaded):
        return facts.component_bytes(Component.MODEL) // 2
    precisions = (precision for total in loaded for precision in total.precisions)
    return sum(precision.elements for precision in precisions if precision.dtype in HALF_PRECISIONS)


def _phase_lines(geometry: ModelGeometry, shape: MlxShape, calibration: Calibration, half_elements: int) -> list[Line]:
    chunk = min(shape.prefill_step_tokens, shape.context_tokens)
    row = kv.row_bytes(geometry, shape.kv_bits, shape.kv_group_size) * shape.slots
    context = shape.context_tokens

    def line(component: str, phase: Phase, law: Callable[[WorkspaceFactors], float], figure: str, basis: str) -> Line:
        sized = Range(*(int(law(calibration.factors(bound))) for bound in _BOUNDS))
        source = calibration[figure].source
        return Line(component, phase, sized, source, f"{basis}; {calibration[figure].basis}")

    # One prompt is read at a time, whatever the number of slots.
    lines = [
        line(
            "activations",
            Phase.PREFILL,
            lambda factors: workspace.activation_bytes(geometry, chunk, factors),
            "hidden_elements",
            f"one layer's activations for a chunk of {chunk:,} tokens",
        ),
        line(
            "attention_scores",
            Phase.PREFILL,
            lambda factors: workspace.score_bytes(geometry, chunk, context, factors),
            "score_copies",
            f"{geometry.attention_heads} heads x {chunk:,} x {context:,} keys, no fused kernel for head size "
            f"{geometry.head_size}",
        ),
        line(
            "kv_growth",
            Phase.PREFILL,
            lambda factors: workspace.growth_bytes(row, context, factors),
            "growth_copies",
            "old and new slab of one layer while the cache grows",
        ),
        line(
            "gated_delta",
            Phase.PREFILL,
            lambda factors: workspace.delta_bytes(geometry, chunk, factors),
            "delta_states_per_token",
            f"states of a chunk of {chunk:,} tokens where no kernel exists",
        ),
        line(
            "logits",
            Phase.DECODE,
            lambda factors: workspace.output_bytes(geometry, shape.slots, factors),
            "logit_copies",
            f"{shape.slots} row(s) of {geometry.vocab_size:,} in float32",
        ),
    ]
    widened = workspace.widened_bytes(geometry, half_elements)
    if widened:
        basis = "weights stored narrower than the float32 activations are widened for one product"
        lines.append(
            Line("widened_weights", Phase.DECODE, Range.exactly(widened), Source.DERIVED, basis, Range.exactly(widened))
        )
    # generate_step empties the cache after each prefill chunk, so what it keeps are buffers of the size decoding frees.
    decode = sum(entry.bytes.expected for entry in lines if entry.phase is Phase.DECODE)
    kept = Range(0, min(shape.allocator_cache_bytes, decode), shape.allocator_cache_bytes)
    basis = f"freed decode buffers, at most the limit; {calibration['allocator_cache_floor_bytes'].basis}"
    lines.append(Line(_ALLOCATOR_CACHE, Phase.DECODE, kept, Source.DERIVED, basis))
    return [_with_buffer(entry) for entry in lines if entry.bytes.high]


def _with_buffer(line: Line) -> Line:
    """Scores and logits are single allocations; activations and freed buffers are many."""
    if line.component != "attention_scores":
        return line
    return Line(line.component, line.phase, line.bytes, line.source, line.basis, line.bytes)


def _scaled(slots: Range, size: int) -> Range:
    return Range(slots.low * size, slots.expected * size, slots.high * size)


def _notes(facts: WeightFacts, geometry: ModelGeometry, device: ComputeDevice) -> tuple[Note, ...]:
    notes = [Note("WEIGHTS", text) for text in facts.notes]
    for component, what in ((Component.DRAFT, "draft head"), (Component.VISION, "vision tower")):
        if facts.component_bytes(component):
            notes.append(Note("NOT_LOADED", f"The {what} in these files is not loaded by the MLX engine."))
    if LayerKind.SLIDING_ATTENTION in geometry.layers:
        notes.append(Note("WINDOW_NOT_USED", "mlx-lm keeps the whole context in sliding layers of Qwen models."))
    half = geometry.activation_bytes < workspace.FLOAT32_BYTES
    if device is ComputeDevice.CPU and geometry.experts and half and not geometry.quantization_bits:
        message = "MLX 0.32 multiplies experts in float32 only on the CPU: this model loads here and cannot answer."
        notes.append(Note("EXPERTS_NEED_FLOAT32", message))
    if not half:
        message = "The weights make every activation float32, so keys and values take twice the usual bytes."
        notes.append(Note("FLOAT32_ACTIVATIONS", message))
    return tuple(notes)

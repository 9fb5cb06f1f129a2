"""Lines of an MLX model's caches and of what it needs for a moment: while a prompt is read, while an answer is made."""

from collections.abc import Callable
from dataclasses import dataclass

from weighbridge_fit.calibration import BOUNDS, Calibration, WorkspaceFactors
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws import cache_growth, mlx_caches, mlx_trellis, workspace
from weighbridge_fit.laws.mlx_caches import Caches
from weighbridge_fit.laws.mlx_trellis import TrellisMatrix
from weighbridge_fit.lines import Line, Phase, Range, Source
from weighbridge_fit.plans.mlx.architectures import attends_fused
from weighbridge_fit.plans.mlx.options import MlxShape

ALLOCATOR_CACHE = "allocator_cache"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the laws need to know of a model's tensors beside its geometry.

    `half_elements` are stored in half precision, `per_layer_inputs` is the width of the embeddings that every layer
    gets a share of (Gemma 3n and 4; 0: none), `trellis` its trellis-coded projections.
    """

    geometry: ModelGeometry
    half_elements: int
    per_layer_inputs: int = 0
    trellis: tuple[TrellisMatrix, ...] = ()


def caches_of(geometry: ModelGeometry, shape: MlxShape) -> Caches:
    """One sequence's caches at the planned quantisation."""
    return mlx_caches.caches(geometry, shape.kv_bits, shape.kv_group_size)


def cache_lines(geometry: ModelGeometry, shape: MlxShape, prefix: str = "") -> list[Line]:
    """What all conversations' caches hold once their contexts are full."""
    held = caches_of(geometry, shape)
    lines = []
    if held.slot_bytes:
        slots = _slots(shape)
        stored = f"{shape.kv_bits} bit in groups of {shape.kv_group_size}" if shape.kv_bits else "unquantised"
        basis = (
            f"{held.growing_layers} layers that hold the whole context{_heads(geometry)}, {stored}: "
            f"{held.slot_bytes:,} bytes per token, for {shape.slots} x {shape.context_tokens:,} tokens in slabs of "
            f"{cache_growth.GROWTH_STEP}"
        )
        size, row = _scaled(slots, held.slot_bytes * shape.slots), held.largest_row_bytes * shape.slots
        lines.append(Line(f"{prefix}kv_cache", Phase.RESIDENT, size, Source.DERIVED, basis, _scaled(slots, row)))
    if held.windows:
        tokens = shape.context_tokens
        least = sum(min(tokens, window.tokens) * window.slot_bytes for window in held.windows)
        most = held.window_bytes(tokens)
        spans = ", ".join(f"{window.layers} layers of {window.tokens:,} tokens" for window in held.windows)
        basis = f"sliding windows, for {shape.slots} sequence(s): {spans}"
        size = Range(least * shape.slots, most * shape.slots, most * shape.slots)
        lines.append(Line(f"{prefix}kv_window", Phase.RESIDENT, size, Source.DERIVED, basis))
    if held.state_bytes:
        what = "gated-delta" if LayerKind.GATED_DELTA in geometry.layers else "recurrent"
        basis = f"constant state of {held.state_layers} {what} layers for {shape.slots} sequence(s)"
        size = Range.exactly(held.state_bytes * shape.slots)
        lines.append(Line(f"{prefix}recurrent_state", Phase.RESIDENT, size, Source.DERIVED, basis))
    return lines


def _heads(geometry: ModelGeometry) -> str:
    """The heads behind a size, where all layers have the same."""
    if geometry.measures or not geometry.kv_heads or LayerKind.LATENT_ATTENTION in geometry.layers:
        return ""
    return f", key and value of {geometry.kv_heads} heads x {geometry.head_size}"


def _slots(shape: MlxShape) -> Range:
    """Slots of one sequence that fills its context. How many exactly depends on the chunks that filled it, within one
    slab; drafted tokens that are not accepted take slots for a moment."""
    context = shape.context_tokens
    most = cache_growth.most_slots_for(context + shape.draft_tokens)
    return Range(context, cache_growth.slots_up_to(context, shape.prefill_step_tokens), most)


def phase_lines(model: Loaded, shape: MlxShape, calibration: Calibration) -> list[Line]:
    """What is held while a prompt is read and while answers are made. One prompt is read at a time, whatever the number
    of conversations."""
    lines = [*_prefill_lines(model, shape, calibration), *_decode_lines(model, shape, calibration)]
    # generate_step empties the cache after each prefill chunk, so what it keeps are buffers of the size decoding frees.
    decode = sum(entry.bytes.expected for entry in lines if entry.phase is Phase.DECODE)
    kept = Range(0, min(shape.allocator_cache_bytes, decode), shape.allocator_cache_bytes)
    basis = f"freed decode buffers, at most the limit; {calibration['allocator_cache_floor_bytes'].basis}"
    lines.append(Line(ALLOCATOR_CACHE, Phase.DECODE, kept, Source.DERIVED, basis))
    return [entry for entry in lines if entry.bytes.high]


def _prefill_lines(model: Loaded, shape: MlxShape, calibration: Calibration) -> list[Line]:
    geometry, context = model.geometry, shape.context_tokens
    chunk = min(shape.prefill_step_tokens, context)
    held = caches_of(geometry, shape)
    unfused = bool(shape.kv_bits) or not attends_fused(geometry)
    attended = mlx_caches.attended(geometry, context, chunk)

    def line(component: str, law: Callable[[WorkspaceFactors], float], figure: str, basis: str) -> Line:
        return _line(calibration, component, Phase.PREFILL, law, figure, basis)

    def scores(factors: WorkspaceFactors) -> float:
        return max(
            (workspace.score_bytes(geometry, chunk, keys, factors, head, unfused=unfused) for head, keys in attended),
            default=0.0,
        )

    why = "keys and values are quantised" if shape.kv_bits else "no fused kernel for this head size or model"
    heads = " and ".join(str(head) for head in sorted({head for head, _ in attended})) or "-"
    lines = [
        line(
            "activations",
            lambda factors: (
                workspace.activation_bytes(geometry, chunk, factors)
                + workspace.per_layer_input_bytes(geometry, chunk, model.per_layer_inputs, factors)
            ),
            "hidden_elements",
            f"one layer's activations for a chunk of {chunk:,} tokens",
        ),
        _with_buffer(
            line(
                "attention_scores",
                scores,
                "score_copies",
                f"{geometry.attention_heads} heads x {chunk:,} x {context:,} keys of head size {heads}, {why}",
            )
        ),
        line(
            "latent_attention",
            lambda factors: workspace.latent_bytes(geometry, chunk, context, factors),
            "latent_score_copies",
            f"keys and values of {geometry.attention_heads} heads unpacked for {context:,} tokens, and rotary scores",
        ),
        line(
            "kv_growth",
            lambda factors: workspace.growth_bytes(held.growth_rows(context, chunk), shape.slots, factors),
            "growth_copies",
            "old and new slab of one layer while the cache grows",
        ),
        line(
            "gated_delta",
            lambda factors: workspace.delta_bytes(geometry, chunk, factors),
            "delta_states_per_token",
            f"states of a chunk of {chunk:,} tokens where no kernel exists",
        ),
        line(
            "state_space",
            lambda factors: workspace.state_space_bytes(geometry, chunk, factors),
            "state_space_copies",
            f"squares of pieces of {workspace.STATE_SPACE_PIECE} tokens of a chunk of {chunk:,}",
        ),
    ]
    spare = held.window_spare_bytes(context, chunk)
    basis = f"window caches hold a chunk of {chunk:,} tokens beside the window until the prompt is read"
    lines.append(Line("window_spare", Phase.PREFILL, Range.exactly(spare), Source.DERIVED, basis))
    if model.trellis:
        largest = max(matrix.elements for matrix in model.trellis) * geometry.activation_bytes
        basis = "the largest trellis-coded matrix expanded for one product"
        size = Range.exactly(largest)
        lines.append(Line("trellis_expand", Phase.PREFILL, size, Source.DERIVED, basis, size))
    return lines


def _decode_lines(model: Loaded, shape: MlxShape, calibration: Calibration) -> list[Line]:
    geometry = model.geometry
    # A drafting conversation computes its verified rows alone, the others wait.
    rows = max(shape.slots, shape.verify_rows)
    lines = [
        _line(
            calibration,
            "logits",
            Phase.DECODE,
            lambda factors: workspace.output_bytes(geometry, rows, factors),
            "logit_copies",
            f"{rows} row(s) of {geometry.vocab_size:,} in float32",
        )
    ]
    widened = workspace.widened_bytes(geometry, model.half_elements)
    if widened:
        basis = "weights stored narrower than the float32 activations are widened for one product"
        size = Range.exactly(widened)
        lines.append(Line("widened_weights", Phase.DECODE, size, Source.DERIVED, basis, size))
    if model.trellis:
        parts = mlx_trellis.scatter_bytes(rows, geometry.hidden_size)
        basis = f"partial sums of {mlx_trellis.SCATTER_PARTS} parts of the input in float32"
        lines.append(Line("trellis_scatter", Phase.DECODE, Range(0, parts, parts), Source.DERIVED, basis))
    return lines


def _line(
    calibration: Calibration,
    component: str,
    phase: Phase,
    law: Callable[[WorkspaceFactors], float],
    figure: str,
    basis: str,
) -> Line:
    sized = Range(*(int(law(calibration.factors(bound))) for bound in BOUNDS))
    return Line(component, phase, sized, calibration[figure].source, f"{basis}; {calibration[figure].basis}")


def _with_buffer(line: Line) -> Line:
    """Scores are a single allocation; activations and freed buffers are many."""
    return Line(line.component, line.phase, line.bytes, line.source, line.basis, line.bytes)


def _scaled(slots: Range, size: int) -> Range:
    return Range(slots.low * size, slots.expected * size, slots.high * size)

"""A model as mlx-lm would hold it, for architectures whose plan the MLX family does not make: by the cache law and the
prefill law, with wide bounds on the rest."""

from weighbridge_fit.calibration import BOUNDS, ComputeDevice, mlx
from weighbridge_fit.calibration.generic import generic
from weighbridge_fit.components import Component
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws import kv_mlx, prefill, workspace
from weighbridge_fit.laws.kv_layers import ATTENTION
from weighbridge_fit.lines import Line, Phase, Range, Source
from weighbridge_fit.plans.generic.caches import cache_lines
from weighbridge_fit.plans.generic.options import GenericShape


def lines(facts: WeightFacts, geometry: ModelGeometry, shape: GenericShape, device: ComputeDevice) -> list[Line]:
    """All lines: MLX allocates from the one memory there is."""
    figures = generic().figures["mlx"]
    loaded = facts.component_bytes(Component.MODEL)
    largest = Range.exactly(min(facts.largest_tensor_bytes, loaded))
    process = figures["process_bytes"]
    return [
        Line("model", Phase.RESIDENT, Range.exactly(loaded), Source.DERIVED, "tensor bytes of the headers", largest),
        *cache_lines(geometry, shape),
        Line("process", Phase.RESIDENT, process.range, process.source, process.basis),
        *_prefill_lines(geometry, shape, device),
    ]


def _prefill_lines(geometry: ModelGeometry, shape: GenericShape, device: ComputeDevice) -> list[Line]:
    calibration, share = mlx(device), generic().figures["mlx"]["activation_share"]
    chunk, context = min(shape.micro_batch_tokens, shape.context_tokens), shape.context_tokens
    made = []
    growth = kv_mlx.window_growth_bytes(geometry, context, shape.micro_batch_tokens, shape.kv_type)
    if growth:
        basis = f"windows while a prompt is read: each chunk of {chunk:,} tokens is appended whole"
        made.append(Line("window_growth", Phase.PREFILL, Range.exactly(growth), Source.DERIVED, basis))
    embeddings = Range.exactly(prefill.mlx_embedding_bytes(geometry, context))
    basis = f"embeddings of {context:,} prompt tokens"
    made.append(Line("prompt_embeddings", Phase.PREFILL, embeddings, Source.DERIVED, basis, embeddings))
    attending = ATTENTION | {LayerKind.LATENT_ATTENTION}
    if attending & set(geometry.layers):
        scores = prefill.mlx_score_bytes(geometry, chunk, context)
        fused = geometry.head_size in calibration.fused_head_sizes
        sized = Range(0, 0, 0) if fused else Range(scores, scores, int(scores * 1.2))
        basis = f"{geometry.attention_heads} heads x {chunk:,} x {context:,} keys, no fused kernel for this head size"
        if not fused:
            made.append(Line("attention_scores", Phase.PREFILL, sized, Source.DERIVED, basis, sized))
    activations = [
        workspace.activation_bytes(geometry, chunk, calibration.factors(bound)) * share.at(bound) for bound in BOUNDS
    ]
    low, expected, high = sorted(int(size) for size in activations)
    basis = f"one layer's activations for {chunk:,} tokens; {share.basis}"
    made.append(Line("activations", Phase.PREFILL, Range(low, expected, high), share.source, basis))
    logits = [workspace.output_bytes(geometry, shape.slots, calibration.factors(bound)) for bound in BOUNDS]
    low, expected, high = sorted(int(size) for size in logits)
    basis = f"{shape.slots} row(s) of {geometry.vocab_size:,} in float32"
    made.append(Line("logits", Phase.DECODE, Range(low, expected, high), Source.DERIVED, basis))
    return made

"""The cache lines that all laws have: one for each kind of memory."""

from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws import kv, kv_llama_cpp, kv_mlx, kv_vllm
from weighbridge_fit.laws.kv import KvLaw
from weighbridge_fit.laws.kv_layers import LayerRow, layer_rows
from weighbridge_fit.laws.kv_sum import CacheBytes
from weighbridge_fit.lines import NOTHING, Line, Phase, Range, Source
from weighbridge_fit.plans.generic.options import GenericShape

_STATE_KINDS = frozenset(
    {
        LayerKind.GATED_DELTA,
        LayerKind.STATE_SPACE,
        LayerKind.SHORT_CONVOLUTION,
        LayerKind.LINEAR_ATTENTION,
        LayerKind.CROSS_ATTENTION,
    }
)


def cache_of(geometry: ModelGeometry, shape: GenericShape) -> CacheBytes:
    """All caches by kind."""
    return kv.cache_bytes(
        geometry, shape.law, shape.context_tokens, shape.slots, shape.kv_type, shape.micro_batch_tokens
    )


def bytes_per_token(geometry: ModelGeometry, shape: GenericShape) -> int:
    """One more token of one conversation over all layers, windows and all."""
    return sum(kv.layer_bytes_per_token(geometry, index, shape.kv_type) for index in range(len(geometry.layers)))


def cache_lines(geometry: ModelGeometry, shape: GenericShape) -> list[Line]:
    """One line for each kind of memory that the model has."""
    held, most = cache_of(geometry, shape), _most(geometry, shape)
    rows = layer_rows(geometry)
    tokens = f"{shape.slots} x {shape.context_tokens:,} tokens, {shape.kv_type_name}"
    attending = sum(1 for row in rows if row.key and not row.window_tokens)
    windows = [row for row in rows if row.window_tokens]
    latents = sum(1 for row in rows if row.latent)
    states = sum(1 for kind in geometry.layers if kind in _STATE_KINDS) or len(rows)
    lines = [
        _line("kv_cache", held.growing, most.growing, shape, f"{attending} full layers; {tokens}; {_law(shape)}"),
        _line("kv_window", held.windowed, most.windowed, shape, _window_basis(windows, shape, tokens)),
        _line(
            "kv_latent", held.latent, most.latent, shape, f"{latents} layers of latent rows; {tokens}; {_law(shape)}"
        ),
        _line(
            "recurrent_state",
            held.state,
            most.state,
            shape,
            f"{states} layers of constant state, {shape.slots} time(s); {_law(shape)}",
        ),
    ]
    return [line for line in lines if line.bytes.high]


def _most(geometry: ModelGeometry, shape: GenericShape) -> CacheBytes:
    """What another setting or another way of filling them would make of the same caches."""
    if shape.law is KvLaw.MLX:
        return kv_mlx.cache_bytes(geometry, shape.context_tokens, shape.slots, shape.kv_type, None)
    if shape.law is KvLaw.VLLM:
        # --mamba-ssm-cache-dtype float32, which some models are served with.
        return kv_vllm.cache_bytes(geometry, shape.context_tokens, shape.slots, shape.kv_type, kv_vllm.FLOAT32_BYTES)
    # Without --kv-unified each conversation has a window and a physical batch of its own.
    alone = kv_llama_cpp.cache_bytes(
        layer_rows(geometry), shape.context_tokens, 1, shape.kv_type, shape.micro_batch_tokens
    )
    return alone.times(shape.slots)


def _line(component: str, held: int, most: int, shape: GenericShape, basis: str) -> Line:
    low = min(held, most)
    sized = Range(low, held, max(held, most))
    return Line(component, Phase.RESIDENT, sized, Source.DERIVED, basis, NOTHING, shape.on_card)


def _law(shape: GenericShape) -> str:
    return {
        KvLaw.LLAMA_CPP: "llama.cpp allocates all cells at load, in steps of 256",
        KvLaw.VLLM: "vLLM takes them from its pool in blocks of 16 tokens",
        KvLaw.MLX: "mlx-lm grows them in slabs of 256 tokens",
    }[shape.law]


def _window_basis(rows: list[LayerRow], shape: GenericShape, tokens: str) -> str:
    window = max((row.window_tokens for row in rows), default=0)
    layers = f"{len(rows)} layers with a window of {window:,} tokens"
    if shape.law is KvLaw.VLLM:
        return f"{layers}, charged for the whole context as vLLM's pool is; {tokens}"
    if shape.law is KvLaw.LLAMA_CPP:
        return f"{layers} and a physical batch of {shape.micro_batch_tokens:,}, in steps of 256 cells; {tokens}"
    return f"{layers}, rotating; {tokens}"

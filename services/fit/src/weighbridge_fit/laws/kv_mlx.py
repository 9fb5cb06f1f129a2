"""mlx-lm's caches: keys and values grow in slabs of 256 tokens, windows rotate, states have a constant size.

Source: mlx-lm 0.32.2, `KVCache`, `RotatingKVCache`, `ArraysCache` and each model's `make_cache`; equal to the real
objects' `nbytes`. Rows of a batch share one buffer as wide as the longest, so sequences multiply.
"""

from dataclasses import replace

from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws.cache_growth import (
    GROWTH_STEP,
    most_slots_for,
    most_window_slots_in_prefill,
    window_slots_for,
)
from weighbridge_fit.laws.kv_layers import LayerRow, layer_rows
from weighbridge_fit.laws.kv_sum import CacheBytes
from weighbridge_fit.laws.kv_types import KvType

# Recurrent states are float32 whatever the model computes in; convolution inputs are in the activation type.
STATE_BYTES = 4
# Models whose states are in the activation type too.
NARROW_STATES = frozenset({"falcon_mamba", "jamba", "mamba", "recurrent_gemma", "rwkv7"})

# Models whose `make_cache` gives sliding layers a rotating cache. All others keep the whole context in them.
ROTATING = frozenset(
    (
        *("afmoe", "cohere2", "exaone4", "exaone_moe", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4"),
        *("gemma4_text", "gpt_oss", "laguna", "llama", "llama4", "llama4_text", "mimo_v2_flash", "ministral3"),
        *("mistral", "olmo3", "recurrent_gemma", "step3p5"),
    )
)
# Models that keep unpacked keys and values instead of latent rows.
UNPACKED_LATENT = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})


def held_rows(geometry: ModelGeometry) -> tuple[LayerRow, ...]:
    """What mlx-lm keeps of each layer."""
    rows = layer_rows(geometry)
    if geometry.model_type in UNPACKED_LATENT:
        heads = geometry.attention_heads
        unpacked = LayerRow(key=heads * geometry.head_size, value=heads * geometry.value_head_size)
        kinds = zip(rows, geometry.layers, strict=True)
        rows = tuple(unpacked if kind is LayerKind.LATENT_ATTENTION else row for row, kind in kinds)
    # Where every layer slides, the window came from a config without layer types: read as full attention throughout.
    whole = geometry.count(LayerKind.SLIDING_ATTENTION) == len(geometry.layers)
    if whole or geometry.model_type not in ROTATING:
        rows = tuple(replace(row, window_tokens=0) for row in rows)
    return rows


def growing_slots(context_tokens: int, prefill_step: int) -> int:
    """Slots of a full cache: the context in whole slabs where every prefill step is whole slabs, else the most that
    any chunks can leave."""
    if prefill_step % GROWTH_STEP:
        return most_slots_for(context_tokens)
    return -(-context_tokens // GROWTH_STEP) * GROWTH_STEP


def cache_bytes(
    geometry: ModelGeometry, context_tokens: int, sequences: int, kv_type: KvType, prefill_step: int
) -> CacheBytes:
    """All layers' caches with `context_tokens` in each sequence, while it is answered."""
    total = CacheBytes()
    slots = growing_slots(context_tokens, prefill_step)
    width = geometry.activation_bytes or 2
    state_width = width if geometry.model_type in NARROW_STATES else STATE_BYTES
    for row in held_rows(geometry):
        pair = _pair(row, kv_type)
        # The indexer's cache keeps zeros for values.
        latent = kv_type.row_bytes(row.latent) + 2 * kv_type.row_bytes(row.indexer)
        total = total + CacheBytes(
            growing=0 if row.window_tokens else slots * pair,
            windowed=window_slots_for(context_tokens, row.window_tokens) * pair if row.window_tokens else 0,
            latent=slots * latent,
            state=row.state * state_width + row.convolution * width,
        )
    return total.times(sequences)


def window_growth_bytes(geometry: ModelGeometry, context_tokens: int, prefill_step: int, kv_type: KvType) -> int:
    """What one sequence's windows hold beyond their size while its prompt is read: each chunk is appended whole."""
    more = 0
    for row in held_rows(geometry):
        if row.window_tokens:
            most = most_window_slots_in_prefill(context_tokens, prefill_step, row.window_tokens)
            more += max(0, most - window_slots_for(context_tokens, row.window_tokens)) * _pair(row, kv_type)
    return more


def _pair(row: LayerRow, kv_type: KvType) -> int:
    return kv_type.row_bytes(row.key) + kv_type.row_bytes(row.value)

"""mlx-lm's caches: keys and values grow in slabs of 256 tokens, windows rotate, states have a constant size.

Source: mlx-lm 0.32.2, `KVCache`, `RotatingKVCache`, `ArraysCache` and each model's `make_cache`; equal to the real
objects' `nbytes`. Rows of a batch share one buffer as wide as the longest, so sequences multiply.
"""

from dataclasses import replace

from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws.cache_growth import (
    most_slots_for,
    most_window_slots_in_prefill,
    slots_up_to,
    window_slots_for,
)
from weighbridge_fit.laws.kv_layers import ATTENTION, LayerRow, layer_rows
from weighbridge_fit.laws.kv_sum import CacheBytes
from weighbridge_fit.laws.kv_types import KvType

# Recurrent states are float32 whatever the model computes in; convolution inputs are in the activation type.
STATE_BYTES = 4
# Models whose states are in the activation type too.
NARROW_STATES = frozenset({"falcon_mamba", "jamba", "mamba", "recurrent_gemma", "rwkv7"})

# Models whose `make_cache` gives sliding layers a rotating cache. All others keep the whole context in them, Mistral 3
# too: its wrapper has no make_cache of its own.
ROTATING = frozenset(
    (
        *("afmoe", "cohere2", "exaone4", "exaone_moe", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4"),
        *("gemma4_text", "gemma4_unified", "gpt_oss", "laguna", "llama", "llama4", "llama4_text", "mimo_v2_flash"),
        *("ministral3", "mistral", "olmo3", "recurrent_gemma", "step3p5"),
    )
)
# Models that keep unpacked keys and values instead of latent rows.
UNPACKED_LATENT = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})


def keeps_windows(geometry: ModelGeometry) -> bool:
    """Whether sliding layers get caches of their window; else they hold the whole context.

    Where every layer slides, the window came from a config without layer types, which mlx-lm reads as full attention
    throughout (its Llama cannot even be made without one full layer).
    """
    whole = geometry.count(LayerKind.SLIDING_ATTENTION) == len(geometry.layers)
    return geometry.model_type in ROTATING and not whole


def held_rows(geometry: ModelGeometry) -> tuple[LayerRow, ...]:
    """What mlx-lm's cache classes store of each layer, in elements.

    Keys that are the values too (Gemma 4) are stored twice, because only keys are rotated. An indexer's cache keeps
    zeros for values. Latent attention stores the compressed row as key and the rotary key as value.
    """
    windows, unpacks = keeps_windows(geometry), geometry.model_type in UNPACKED_LATENT
    heads, rows = geometry.attention_heads, []
    for kind, row in zip(geometry.layers, layer_rows(geometry), strict=True):
        if unpacks and kind is LayerKind.LATENT_ATTENTION:
            rows.append(LayerRow(key=heads * geometry.head_size, value=heads * geometry.value_head_size))
            continue
        value = row.key if kind in ATTENTION and not row.value else row.value
        window = row.window_tokens if windows else 0
        rows.append(replace(row, value=value, indexer=2 * row.indexer, window_tokens=window))
    return tuple(rows)


def state_bytes(row: LayerRow, geometry: ModelGeometry) -> int:
    """What one layer remembers of one sequence however long it is."""
    width = geometry.activation_bytes or 2
    return row.state * (width if geometry.model_type in NARROW_STATES else STATE_BYTES) + row.convolution * width


def cache_bytes(
    geometry: ModelGeometry, context_tokens: int, sequences: int, kv_type: KvType, prefill_step: int | None
) -> CacheBytes:
    """All layers' caches with `context_tokens` in each sequence, while it is answered. `prefill_step` None: the most
    that any way of filling them leaves."""
    total = CacheBytes()
    slots = most_slots_for(context_tokens) if prefill_step is None else slots_up_to(context_tokens, prefill_step)
    for row in held_rows(geometry):
        pair = _pair(row, kv_type)
        total = total + CacheBytes(
            growing=0 if row.window_tokens else slots * pair,
            windowed=window_slots_for(context_tokens, row.window_tokens) * pair if row.window_tokens else 0,
            latent=slots * (kv_type.row_bytes(row.latent) + kv_type.row_bytes(row.indexer)),
            state=state_bytes(row, geometry),
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

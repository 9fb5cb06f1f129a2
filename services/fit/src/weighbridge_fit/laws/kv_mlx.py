"""mlx-lm's caches: keys and values grow in slabs of 256 tokens, windows rotate, states have a constant size.

Source: mlx-lm 0.32.2, `KVCache`, `RotatingKVCache`, `ArraysCache` and each model's `make_cache`; equal to the real
objects' `nbytes`. Rows of a batch share one buffer as wide as the longest, so sequences multiply.
"""

from collections.abc import Sequence

from weighbridge_fit.laws.cache_growth import GROWTH_STEP, most_slots_for
from weighbridge_fit.laws.kv_layers import LayerRow
from weighbridge_fit.laws.kv_sum import CacheBytes
from weighbridge_fit.laws.kv_types import KvType

# Recurrent states are float32 whatever the model computes in; convolution inputs are in the activation type.
STATE_BYTES = 4


def growing_slots(context_tokens: int, prefill_step: int) -> int:
    """Slots of a full cache: the context in whole slabs where every prefill step is whole slabs, else the most that
    any chunks can leave."""
    if prefill_step % GROWTH_STEP:
        return most_slots_for(context_tokens)
    return -(-context_tokens // GROWTH_STEP) * GROWTH_STEP


def window_slots(window_tokens: int, context_tokens: int) -> int:
    """Slots of a rotating cache while it answers: slabs up to the window, and never more."""
    return min(window_tokens, -(-context_tokens // GROWTH_STEP) * GROWTH_STEP)


def window_prefill_slots(window_tokens: int, context_tokens: int, prefill_step: int) -> int:
    """Slots of a rotating cache at the end of a prefill chunk: it is appended whole to the window less one, and cut
    when the first token is made."""
    if context_tokens <= prefill_step:
        return context_tokens
    return min(context_tokens, window_tokens - 1 + prefill_step)


def cache_bytes(
    rows: Sequence[LayerRow],
    context_tokens: int,
    sequences: int,
    kv_type: KvType,
    activation_bytes: int,
    prefill_step: int,
) -> CacheBytes:
    """All layers' caches with `context_tokens` in each sequence."""
    total = CacheBytes()
    slots = growing_slots(context_tokens, prefill_step)
    for row in rows:
        constant = row.state * STATE_BYTES + row.convolution * activation_bytes
        pair = kv_type.row_bytes(row.key) + kv_type.row_bytes(row.value)
        # The indexer's cache keeps keys and no values (a width of zero).
        latent = kv_type.row_bytes(row.latent) + kv_type.row_bytes(row.indexer)
        windowed = window_slots(row.window_tokens, context_tokens) * pair if row.window_tokens else 0
        growing = 0 if row.window_tokens else slots * pair
        total = total + CacheBytes(growing, windowed, slots * latent, constant)
    return total.times(sequences)

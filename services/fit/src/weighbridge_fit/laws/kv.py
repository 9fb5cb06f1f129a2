"""Bytes of keys and values, by layer type.

Per slot and attention layer: two rows (key, value) of kv heads x head size elements. Quantised in b bits with groups
of g, an element costs b/8 bytes and every group two more activation elements (scale and zero point). Source: mlx-lm
0.32.2, `KVCache` and `QuantizedKVCache`; equal to the real objects' `nbytes`.
"""

from weighbridge_fit.geometry import LayerKind, ModelGeometry


def row_bytes(geometry: ModelGeometry, kv_bits: int = 0, kv_group_size: int = 0) -> int:
    """Bytes of one key (or one value) over all kv heads of one layer. `kv_bits` 0: not quantised."""
    elements = geometry.kv_heads * geometry.head_size
    if not kv_bits:
        return elements * geometry.activation_bytes
    return elements * kv_bits // 8 + 2 * geometry.activation_bytes * (elements // kv_group_size)


def bytes_per_token(geometry: ModelGeometry, kv_bits: int = 0, kv_group_size: int = 0) -> int:
    """Bytes that one more slot of one sequence costs over all layers that grow."""
    growing = geometry.count(LayerKind.FULL_ATTENTION) + geometry.count(LayerKind.SLIDING_ATTENTION)
    return 2 * growing * row_bytes(geometry, kv_bits, kv_group_size)


def cache_bytes(geometry: ModelGeometry, slots: int, kv_bits: int = 0, kv_group_size: int = 0) -> int:
    """Bytes of one sequence's keys and values with `slots` slots in every attention layer.

    mlx-lm's Qwen models keep the whole context in sliding layers too (they make a plain KVCache for each), so a window
    bounds nothing here.
    """
    return slots * bytes_per_token(geometry, kv_bits, kv_group_size)

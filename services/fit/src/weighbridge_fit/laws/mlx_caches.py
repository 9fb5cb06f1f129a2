"""Which caches mlx-lm makes for a model's layers, and what they hold.

`kv_layers` says what a layer remembers, this says how mlx-lm stores it.

Three things differ from what the architecture needs. Most models make a `KVCache` of the whole context for sliding
layers too; those that make a `RotatingKVCache` keep the window. Layers whose keys are their values (Gemma 4) store
both, because keys are rotated and values are not. Latent attention stores the compressed row as key and the rotary key
as value. Source: `make_cache` of each model and `cache.py` of mlx-lm 0.32.2; equal to the real objects' `nbytes`.
"""

from dataclasses import dataclass

from weighbridge_fit.geometry import LayerKind, LayerMeasure, ModelGeometry
from weighbridge_fit.laws import cache_growth
from weighbridge_fit.laws.kv_layers import ATTENTION, LayerRow, layer_rows
from weighbridge_fit.laws.kv_mlx import STATE_BYTES
from weighbridge_fit.laws.kv_types import KvType, mlx_quantised, plain


@dataclass(frozen=True, slots=True)
class Window:
    """The layers that share one window length: bytes of one slot over all of them, and of the largest row."""

    tokens: int
    layers: int
    slot_bytes: int
    largest_row_bytes: int


@dataclass(frozen=True, slots=True)
class Caches:
    """What one sequence's caches are made of, in bytes.

    `slot_bytes` is one more token over all `growing_layers`, `largest_row_bytes` the larger of a key and a value of one
    of them, `state_bytes` what the `state_layers` remember however long the sequence is.
    """

    growing_layers: int
    slot_bytes: int
    largest_row_bytes: int
    windows: tuple[Window, ...]
    state_layers: int
    state_bytes: int

    def window_bytes(self, tokens: int) -> int:
        """Window caches of a sequence whose `tokens` were read as a prompt."""
        return sum(cache_growth.window_slots_for(tokens, window.tokens) * window.slot_bytes for window in self.windows)

    def window_spare_bytes(self, tokens: int, prefill_step: int) -> int:
        """What window caches hold beyond that while the prompt is read."""
        spare = 0
        for window in self.windows:
            reading = cache_growth.most_window_slots_in_prefill(tokens, prefill_step, window.tokens)
            spare += max(0, reading - cache_growth.window_slots_for(tokens, window.tokens)) * window.slot_bytes
        return spare

    def growth_rows(self, tokens: int, prefill_step: int) -> int:
        """Bytes of the largest tensor that is copied when one layer's cache grows."""
        largest = self.largest_row_bytes * tokens
        for window in self.windows:
            slots = cache_growth.most_window_slots_in_prefill(tokens, prefill_step, window.tokens)
            largest = max(largest, window.largest_row_bytes * slots)
        return largest


def stored_rows(geometry: ModelGeometry, keeps_windows: bool) -> tuple[LayerRow, ...]:
    """Every layer's memory in elements, as mlx-lm's cache classes store it. `keeps_windows`: the model makes rotating
    caches for its sliding layers."""
    rows = []
    for kind, row in zip(geometry.layers, layer_rows(geometry), strict=True):
        value = row.key if kind in ATTENTION and not row.value else row.value
        rows.append(
            LayerRow(
                row.key, value, row.latent, row.indexer, row.window_tokens if keeps_windows else 0, row.state,
                row.convolution,
            )
        )  # fmt: skip
    return tuple(rows)


def caches(geometry: ModelGeometry, keeps_windows: bool, kv_bits: int = 0, kv_group_size: int = 0) -> Caches:
    """What one sequence's caches are made of. Only caches of the whole context are quantised: `RotatingKVCache` cannot
    be, states are not."""
    width = geometry.activation_bytes
    stored = mlx_quantised(kv_bits, kv_group_size, width) if kv_bits else plain(width)
    growing = slot = largest = state_layers = state = 0
    windows: dict[int, list[tuple[int, int]]] = {}
    for row in stored_rows(geometry, keeps_windows):
        constant = row.state * STATE_BYTES + row.convolution * width
        state, state_layers = state + constant, state_layers + (constant > 0)
        if row.window_tokens:
            windows.setdefault(row.window_tokens, []).append(_pair(row, plain(width)))
            continue
        size, widest = _pair(row, stored)
        growing, slot, largest = growing + (size > 0), slot + size, max(largest, widest)
    shared = tuple(
        Window(tokens, len(found), sum(size for size, _ in found), max(widest for _, widest in found))
        for tokens, found in sorted(windows.items())
    )
    return Caches(growing, slot, largest, shared, state_layers, state)


def head_sizes(geometry: ModelGeometry) -> set[int]:
    """Sizes of the heads that keys and values are kept of."""
    sizes = set()
    for index, kind in enumerate(geometry.layers):
        if kind in ATTENTION:
            measure = geometry.measures[index] if geometry.measures else LayerMeasure()
            key = measure.key_size or geometry.head_size
            sizes |= {key, measure.value_size or (key if measure.key_size else geometry.value_head_size or key)}
    return sizes


def quantisable(geometry: ModelGeometry, keeps_windows: bool) -> bool:
    """Whether mlx-lm can quantise this model's caches: no windows (`RotatingKVCache.to_quantized` is not written), no
    latent rows (their attention reads them unquantised)."""
    latent = LayerKind.LATENT_ATTENTION in geometry.layers
    return not latent and not any(row.window_tokens for row in stored_rows(geometry, keeps_windows))


def trimmable(geometry: ModelGeometry, keeps_windows: bool, tokens: int) -> bool:
    """Whether caches of `tokens` can be cut back, which drafting needs: states cannot be, windows only until they are
    full."""
    return not any(
        row.state or row.convolution or 0 < row.window_tokens <= tokens for row in stored_rows(geometry, keeps_windows)
    )


def attended(geometry: ModelGeometry, keeps_windows: bool, tokens: int, prefill_step: int) -> set[tuple[int, int]]:
    """Head size and number of keys that a chunk attends to, of every kind of attention layer, at the end of a prompt.

    Shared layers attend to another layer's keys of their own kind, latent layers are not among these.
    """
    found = set()
    for index, kind in enumerate(geometry.layers):
        if kind not in ATTENTION:
            continue
        measure = geometry.measures[index] if geometry.measures else LayerMeasure()
        window = measure.window_tokens or geometry.sliding_window_tokens
        keys = tokens
        if keeps_windows and kind is LayerKind.SLIDING_ATTENTION and window:
            keys = min(tokens, window - 1 + prefill_step)
        found.add((measure.key_size or geometry.head_size, keys))
    return found


def _pair(row: LayerRow, stored: KvType) -> tuple[int, int]:
    """Bytes of one token of a layer, and of the larger of the tensors it is stored in."""
    parts = [stored.row_bytes(elements) for elements in (row.key, row.value, row.latent, row.indexer)]
    return sum(parts), max(parts)

"""What mlx-lm's caches of one sequence are made of, and what can be done with them: quantised, cut back.

`kv_layers` says what a layer remembers, `kv_mlx` how mlx-lm stores it. Source: `make_cache` of each model and
`cache.py` of mlx-lm 0.32.2; equal to the real objects' `nbytes`.
"""

from dataclasses import dataclass

from weighbridge_fit.geometry import LayerKind, LayerMeasure, ModelGeometry
from weighbridge_fit.laws import cache_growth, kv_mlx
from weighbridge_fit.laws.kv_layers import ATTENTION, LayerRow
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


def caches(geometry: ModelGeometry, kv_bits: int = 0, kv_group_size: int = 0) -> Caches:
    """What one sequence's caches are made of. `kv_bits` 0: not quantised. Only caches of the whole context are:
    `RotatingKVCache` cannot be, states are not."""
    width = geometry.activation_bytes
    stored = mlx_quantised(kv_bits, kv_group_size, width) if kv_bits else plain(width)
    growing = slot = largest = state_layers = state = 0
    windows: dict[int, list[tuple[int, int]]] = {}
    for row in kv_mlx.held_rows(geometry):
        constant = kv_mlx.state_bytes(row, geometry)
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


def quantisable(geometry: ModelGeometry) -> bool:
    """Whether mlx-lm can quantise this model's caches: no windows (`RotatingKVCache.to_quantized` is not written), no
    latent rows (their attention reads them unquantised)."""
    latent = LayerKind.LATENT_ATTENTION in geometry.layers
    return not latent and not any(row.window_tokens for row in kv_mlx.held_rows(geometry))


def longest_trimmable(geometry: ModelGeometry) -> int | None:
    """The most tokens that caches can hold and still be cut back, which drafting needs: none of states, of windows as
    long as they are not full, of the whole context any (None)."""
    rows = kv_mlx.held_rows(geometry)
    if any(row.state or row.convolution for row in rows):
        return 0
    return min((row.window_tokens - 1 for row in rows if row.window_tokens), default=None)


def trimmable(geometry: ModelGeometry, tokens: int) -> bool:
    """Whether caches of `tokens` can be cut back."""
    longest = longest_trimmable(geometry)
    return longest is None or tokens <= longest


def attended(geometry: ModelGeometry, tokens: int, prefill_step: int) -> set[tuple[int, int]]:
    """Head size and number of keys that a chunk attends to, of every kind of attention layer, at the end of a prompt.

    Shared layers attend to another layer's keys of their own kind, latent layers are not among these.
    """
    found, keeps_windows = set(), kv_mlx.keeps_windows(geometry)
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

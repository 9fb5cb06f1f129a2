"""What one layer keeps of each token and of each sequence, in elements: before any engine decides how it stores them.

Sources: the attention classes of transformers 5.24 and mlx-lm 0.32.2. Attention keeps a key and a value for each of its
key-value heads. Latent attention keeps one compressed row (its rank) and one rotary key, and no value: both are
unpacked from the row. Its sparse variants keep one indexer key more. Recurrent layers keep a state of constant size.
"""

from dataclasses import dataclass

from weighbridge_fit.geometry import LayerKind, LayerMeasure, ModelGeometry
from weighbridge_fit.laws import gated_delta

ATTENTION = frozenset({LayerKind.FULL_ATTENTION, LayerKind.SLIDING_ATTENTION})
_NOTHING = LayerMeasure()


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer's memory in elements.

    `key`, `value`, `latent` and `indexer` are for each token; `window_tokens` bounds how many tokens (0: the context
    does). `cross` are keys and values of another medium's tokens, `state` and `convolution` what is kept of the past:
    for each sequence, however long it is.
    """

    key: int = 0
    value: int = 0
    latent: int = 0
    indexer: int = 0
    window_tokens: int = 0
    state: int = 0
    convolution: int = 0
    cross: int = 0


def layer_row(geometry: ModelGeometry, index: int) -> LayerRow:
    """What layer `index` keeps. Measures of the layer's own go before the geometry's."""
    kind = geometry.layers[index]
    measure = geometry.measures[index] if geometry.measures else _NOTHING
    state, convolution = measure.state_elements, measure.convolution_elements
    if kind is LayerKind.GATED_DELTA:
        state = state or gated_delta.recurrent_elements(geometry)
        convolution = convolution or gated_delta.convolution_elements(geometry)
    if kind is LayerKind.LATENT_ATTENTION:
        latent = geometry.latent_rank + geometry.latent_rope_size
        return LayerRow(latent=latent, indexer=geometry.indexer_key_size, state=state, convolution=convolution)
    if kind not in ATTENTION and kind is not LayerKind.CROSS_ATTENTION:
        return LayerRow(state=state, convolution=convolution)
    heads = measure.kv_heads or geometry.kv_heads
    key = heads * (measure.key_size or geometry.head_size)
    # A layer with sizes of its own and no value size holds its values as keys.
    value = heads * (measure.value_size if measure.key_size else geometry.value_head_size or geometry.head_size)
    if kind is LayerKind.CROSS_ATTENTION:
        return LayerRow(cross=(key + value) * measure.window_tokens)
    window = 0
    if kind is LayerKind.SLIDING_ATTENTION:
        window = measure.window_tokens or geometry.sliding_window_tokens
    return LayerRow(key, value, window_tokens=window, state=state, convolution=convolution)


def layer_rows(geometry: ModelGeometry) -> tuple[LayerRow, ...]:
    """Every layer's memory, in order."""
    return tuple(layer_row(geometry, index) for index in range(len(geometry.layers)))


def keeps_nothing(geometry: ModelGeometry) -> bool:
    """Whether no layer remembers anything, as in encoders (embedding and ranking models): their memory is their
    weights and their workspace."""
    return not any(row != LayerRow(window_tokens=row.window_tokens) for row in layer_rows(geometry))

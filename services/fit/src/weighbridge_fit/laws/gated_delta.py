"""Bytes of gated-delta layers: a state of constant size per sequence, and what a prefill costs where no kernel exists.

State per layer: the last (width - 1) columns of the convolution over keys, queries and values in the activation type,
and one key x value matrix per value head in float32. Source: mlx-lm 0.32.2, `qwen3_5` and `ArraysCache`; equal to the
real objects' `nbytes`.
"""

from weighbridge_fit.geometry import ModelGeometry

FLOAT32_BYTES = 4


def recurrent_elements(geometry: ModelGeometry) -> int:
    """Elements of the recurrent matrices of one layer and one sequence."""
    return geometry.delta_value_heads * geometry.delta_value_size * geometry.delta_key_size


def recurrent_bytes(geometry: ModelGeometry) -> int:
    """The recurrent matrices of one layer and one sequence."""
    return recurrent_elements(geometry) * FLOAT32_BYTES


def convolution_size(geometry: ModelGeometry) -> int:
    """Channels of the convolution: queries and keys of the key heads, values of the value heads."""
    keys = geometry.delta_key_heads * geometry.delta_key_size
    return 2 * keys + geometry.delta_value_heads * geometry.delta_value_size


def convolution_elements(geometry: ModelGeometry) -> int:
    """Inputs of the convolution that one layer keeps of one sequence."""
    return max(0, geometry.delta_conv_width - 1) * convolution_size(geometry)

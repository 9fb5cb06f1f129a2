"""Golden vectors of the laws: published sizes, measured caches, and the growth rule worked by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_fit.calibration import ComputeDevice, mlx
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws import cache_growth, gated_delta, kv, workspace

FULL, DELTA = LayerKind.FULL_ATTENTION, LayerKind.GATED_DELTA
GIB = 1 << 30
MIB = 1 << 20


def attention(layers: int, kv_heads: int, head_size: int) -> ModelGeometry:
    return ModelGeometry(
        "qwen3", kv_heads=kv_heads, head_size=head_size, layers=(FULL,) * layers, activation_bytes=2, attention_heads=32
    )


def hybrid(layers: int, kv_heads: int, head_size: int, keys: int, values: int, size: int) -> ModelGeometry:
    return ModelGeometry(
        "qwen3_5",
        kv_heads=kv_heads,
        head_size=head_size,
        layers=tuple(FULL if (index + 1) % 4 == 0 else DELTA for index in range(layers)),
        delta_key_heads=keys,
        delta_value_heads=values,
        delta_key_size=size,
        delta_value_size=size,
        delta_conv_width=4,
        activation_bytes=2,
    )


QWEN_27B = hybrid(64, 4, 256, 16, 48, 128)
TINY_HYBRID = hybrid(8, 2, 64, 4, 8, 32)


@pytest.mark.parametrize(
    ("name", "layers", "kv_heads", "head_size", "expected"),
    [
        ("Qwen3-0.6B", 28, 8, 128, 114_688),
        ("Qwen3-8B", 36, 8, 128, 147_456),
        ("Qwen3-30B-A3B", 48, 4, 128, 98_304),
        ("Qwen3-32B", 64, 8, 128, 262_144),
    ],
)
def test_bytes_per_token(name: str, layers: int, kv_heads: int, head_size: int, expected: int) -> None:
    assert kv.bytes_per_token(attention(layers, kv_heads, head_size)) == expected


def test_qwen3_0_6b_at_40960_tokens_takes_4_375_gib() -> None:
    assert kv.filled_bytes(attention(28, 8, 128), 40_960) == 4.375 * GIB


def test_a_hybrid_grows_only_in_its_full_attention_layers() -> None:
    assert kv.bytes_per_token(QWEN_27B) == 65_536
    assert kv.filled_bytes(QWEN_27B, 262_144) == 16_384 * MIB  # as logged for Qwen3.6-27B


def test_the_state_of_a_27b_hybrid() -> None:
    assert gated_delta.state_bytes(QWEN_27B) == 153_944_064


def test_measured_caches_of_tiny_models() -> None:
    # 300 prompt and 32 generated tokens in steps of 2048: 512 slots.
    slots = cache_growth.slots_for(332, 2048)
    assert slots == 512
    tiny = attention(8, 2, 64)
    assert kv.filled_bytes(tiny, slots) == 2_097_152
    assert kv.filled_bytes(tiny, slots, 4, 64) == 589_824
    assert kv.filled_bytes(TINY_HYBRID, slots) == 524_288
    assert gated_delta.state_bytes(TINY_HYBRID) == 215_040
    assert kv.filled_bytes(TINY_HYBRID, slots) + gated_delta.state_bytes(TINY_HYBRID) == 739_328
    assert kv.filled_bytes(TINY_HYBRID, slots, 8, 64) + gated_delta.state_bytes(TINY_HYBRID) == 493_568


@pytest.mark.parametrize(("bits", "per_element"), [(8, 1.0625), (4, 0.5625)])
def test_quantised_elements_cost_bits_and_two_scales_per_group(bits: int, per_element: float) -> None:
    assert kv.row_bytes(attention(1, 8, 128), bits, 64) == 8 * 128 * per_element


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([], 0),
        ([1], 256),
        ([256], 256),
        ([256, 1], 512),
        ([257], 512),
        ([300, 300], 812),  # 300 kept, 512 added
        ([300, 212, 1], 768),
        ([100, 200], 356),
        ([100, 156, 1], 512),
    ],
)
def test_growth_worked_by_hand(chunks: list[int], expected: int) -> None:
    assert cache_growth.capacity_after(chunks) == expected


@given(st.integers(1, 6000), st.integers(1, 3000) | st.sampled_from([1, 2, 64, 255, 256, 257, 512]))
def test_a_prompt_is_fed_in_steps_and_its_last_token_alone(tokens: int, step: int) -> None:
    """Skipping rounds of equal steps changes nothing."""
    chunks = [min(step, tokens - 1 - done) for done in range(0, tokens - 1, step)]
    assert cache_growth.slots_for(tokens, step) == cache_growth.capacity_after([*chunks, 1])


def test_the_longest_context_in_steps_of_one_takes_no_loop_over_its_tokens() -> None:
    # 2^62 steps: a loop over them would never end. Steps of one that meet each slab's end waste nothing.
    assert cache_growth.slots_for(1 << 62, 1) == 1 << 62


def test_steps_that_share_the_slab_size_waste_nothing() -> None:
    for step, tokens in itertools.product((64, 128, 256, 512, 2048), range(1, 3000, 37)):
        slots = cache_growth.slots_for(tokens, step)
        assert slots == -(-tokens // 256) * 256


def test_spare_slots_never_exceed_one_slab() -> None:
    for step, tokens in itertools.product((7, 100, 300, 777), range(1, 2500, 41)):
        assert tokens <= cache_growth.slots_for(tokens, step) <= cache_growth.most_slots_for(tokens)


def test_scores_are_materialised_only_without_a_fused_kernel() -> None:
    metal, cpu = mlx(ComputeDevice.METAL).factors("expected"), mlx(ComputeDevice.CPU).factors("expected")
    plain = ModelGeometry("qwen3", attention_heads=24, head_size=128, activation_bytes=2)
    wide = ModelGeometry("qwen3_5", attention_heads=24, head_size=256, activation_bytes=2)
    assert workspace.score_bytes(plain, 2048, 32_768, metal) == 0
    # LM Studio's log of a 27B prefill: 98,304 bytes per key with a chunk of 2048.
    assert workspace.score_bytes(wide, 2048, 1, metal) == 98_304
    assert workspace.score_bytes(plain, 2048, 1, cpu) == 98_304


def test_a_gated_delta_chunk_without_a_kernel_keeps_a_state_per_token() -> None:
    # Measured: 307 MB beside weights and caches at a chunk of 256, 16 value heads of 128 x 128.
    geometry = hybrid(4, 2, 64, 16, 16, 128)
    measured = 307_000_000
    low = workspace.delta_bytes(geometry, 256, mlx(ComputeDevice.CPU).factors("low"))
    high = workspace.delta_bytes(geometry, 256, mlx(ComputeDevice.CPU).factors("high"))
    assert low <= measured <= high
    assert workspace.delta_bytes(geometry, 256, mlx(ComputeDevice.METAL).factors("high")) == 0


def test_float32_activations_widen_the_scales_of_the_largest_product() -> None:
    # Measured on a model with a 49,152 x 576 embedding in groups of 32: 7,077,888 bytes while its head is applied.
    geometry = ModelGeometry(
        "qwen2",
        hidden_size=576,
        vocab_size=49_152,
        activation_bytes=4,
        quantization_bits=4,
        quantization_group_size=32,
    )
    assert workspace.widened_bytes(geometry, half_elements=50_000_000) == 7_077_888


def test_weights_that_are_float32_themselves_are_not_widened() -> None:
    # Measured on random float32 models (32,768 x 512 embedding): the allocator's peak holds no second copy of the head.
    geometry = ModelGeometry("qwen3", hidden_size=512, vocab_size=32_768, activation_bytes=4)
    assert workspace.widened_bytes(geometry, half_elements=0) == 0
    assert workspace.widened_bytes(geometry, half_elements=1000) == 4000
    half = ModelGeometry("qwen3", hidden_size=512, vocab_size=32_768, activation_bytes=2)
    assert workspace.widened_bytes(half, half_elements=50_000_000) == 0


def test_every_figure_is_ordered_and_says_where_it_comes_from() -> None:
    for device in ComputeDevice:
        for name, figure in mlx(device).figures.items():
            assert figure.low <= figure.expected <= figure.high, name
            assert figure.basis and len(figure.date.split("-")) == 3, name
    assert mlx(ComputeDevice.CPU).figures.keys() == mlx(ComputeDevice.METAL).figures.keys()

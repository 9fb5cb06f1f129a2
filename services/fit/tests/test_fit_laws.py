"""Golden vectors of the laws: published sizes, measured caches, and the growth rule worked by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_fit.calibration import ComputeDevice, mlx
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws import cache_growth, mlx_caches, workspace
from weighbridge_fit.laws.mlx_caches import Caches

FULL, DELTA = LayerKind.FULL_ATTENTION, LayerKind.GATED_DELTA
GIB = 1 << 30
MIB = 1 << 20


def whole(geometry: ModelGeometry, kv_bits: int = 0, kv_group_size: int = 0) -> Caches:
    return mlx_caches.caches(geometry, kv_bits, kv_group_size)


def fed(prompt: int, step: int) -> list[int]:
    """Chunks of a prompt as `generate_step` reads it: steps over all but the last token, then the last one."""
    return [*(min(step, prompt - 1 - done) for done in range(0, prompt - 1, step)), 1]


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
    assert whole(attention(layers, kv_heads, head_size)).slot_bytes == expected


def test_qwen3_0_6b_at_40960_tokens_takes_4_375_gib() -> None:
    assert 40_960 * whole(attention(28, 8, 128)).slot_bytes == 4.375 * GIB


def test_a_hybrid_grows_only_in_its_full_attention_layers() -> None:
    assert whole(QWEN_27B).slot_bytes == 65_536
    assert 262_144 * whole(QWEN_27B).slot_bytes == 16_384 * MIB  # as logged for Qwen3.6-27B


def test_the_state_of_a_27b_hybrid() -> None:
    assert whole(QWEN_27B).state_bytes == 153_944_064


def test_measured_caches_of_tiny_models() -> None:
    # 300 prompt and 32 generated tokens in steps of 2048: 512 slots.
    slots = cache_growth.slots_up_to(332, 2048)
    assert slots == 512
    tiny = attention(8, 2, 64)
    assert slots * whole(tiny).slot_bytes == 2_097_152
    assert slots * whole(tiny, 4, 64).slot_bytes == 589_824
    assert slots * whole(TINY_HYBRID).slot_bytes == 524_288
    assert whole(TINY_HYBRID).state_bytes == whole(TINY_HYBRID, 8, 64).state_bytes == 215_040
    assert slots * whole(TINY_HYBRID, 8, 64).slot_bytes + 215_040 == 493_568
    # Four rows of a batch with at most 256 tokens, measured.
    assert 4 * 256 * whole(tiny).slot_bytes == 4_194_304
    assert 4 * (256 * whole(TINY_HYBRID).slot_bytes + 215_040) == 1_908_736


@pytest.mark.parametrize(("bits", "per_element"), [(8, 1.0625), (4, 0.5625)])
def test_quantised_elements_cost_bits_and_two_scales_per_group(bits: int, per_element: float) -> None:
    assert whole(attention(1, 8, 128), bits, 64).slot_bytes == 2 * 8 * 128 * per_element


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


STEPS = st.integers(1, 3000) | st.sampled_from([1, 2, 7, 64, 100, 255, 256, 257, 300, 512])


@given(st.integers(1, 3000), STEPS)
def test_a_contexts_slots_are_the_most_of_every_prompt_up_to_it(tokens: int, step: int) -> None:
    """Skipping rounds of equal steps and shorter prompts changes nothing."""
    prompts = range(max(1, tokens - 300), tokens + 1)
    most = max(cache_growth.capacity_after(fed(prompt, step)) for prompt in prompts)
    assert cache_growth.slots_up_to(tokens, step) == most


def test_a_longer_prompt_may_end_with_fewer_slots_and_a_longer_context_never_does() -> None:
    # By hand, in steps of 100: [100, 100, 56, 1] fills a slab of 256 exactly, and its last token opens a second one;
    # with [100, 100, 57, 1] the third step cuts at 200 and adds 256.
    ends = {tokens: cache_growth.capacity_after(fed(tokens, 100)) for tokens in (257, 258)}
    assert ends == {257: 512, 258: 456}
    assert [cache_growth.slots_up_to(tokens, 100) for tokens in (257, 258)] == [512, 512]


@given(st.integers(1, 20_000), st.integers(0, 600), STEPS)
def test_slots_grow_with_the_context_and_never_exceed_it_by_a_slab(tokens: int, more: int, step: int) -> None:
    slots = cache_growth.slots_up_to(tokens, step)
    assert tokens <= slots <= cache_growth.most_slots_for(tokens)
    assert slots <= cache_growth.slots_up_to(tokens + more, step)


def test_the_longest_context_in_steps_of_one_takes_no_loop_over_its_tokens() -> None:
    # 2^62 steps: a loop over them would never end. Steps of one that meet each slab's end waste nothing.
    assert cache_growth.slots_up_to(1 << 62, 1) == 1 << 62


def test_steps_that_share_the_slab_size_waste_nothing() -> None:
    for step, tokens in itertools.product((64, 128, 256, 512, 2048), range(1, 3000, 37)):
        assert cache_growth.slots_up_to(tokens, step) == -(-tokens // 256) * 256


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

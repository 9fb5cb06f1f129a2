"""Peaks that others have measured and published, against the plan: what MLX's allocator held on Apple silicon.

A published "peak memory" is the allocator's: weights, caches and workspace, without the process around it. Weights are
the published parameter counts at the bits that the format stores for each (4 bit in groups of 64: 4.5), where no file
size is known. Sizes as published, in units of 10^9 bytes where GB stands.
"""

from dataclasses import replace

import pytest
from weighbridge_fit.calibration import ComputeDevice, mlx
from weighbridge_fit.facts import ComponentTotal, WeightFacts, WeightFormat
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws import mlx_caches, workspace
from weighbridge_fit.lines import Phase
from weighbridge_fit.plans.mlx.options import MlxRequest
from weighbridge_fit.plans.mlx.plan import plan

FULL, DELTA, SLIDING = LayerKind.FULL_ATTENTION, LayerKind.GATED_DELTA, LayerKind.SLIDING_ATTENTION
LATENT = LayerKind.LATENT_ATTENTION
METAL = ComputeDevice.METAL
GB, GIB, MIB = 10**9, 1 << 30, 1 << 20

QWEN3_4B = ModelGeometry(
    "qwen3", hidden_size=2560, intermediate_size=9728, vocab_size=151_936, attention_heads=32, kv_heads=8,
    head_size=128, layers=(FULL,) * 36, max_context_tokens=262_144, activation_bytes=2,
)  # fmt: skip
QWEN3_30B_A3B = ModelGeometry(
    "qwen3_moe", hidden_size=2048, intermediate_size=6144, vocab_size=151_936, attention_heads=32, kv_heads=4,
    head_size=128, layers=(FULL,) * 48, max_context_tokens=262_144, activation_bytes=2, experts=128,
    experts_per_token=8, expert_intermediate_size=768,
)  # fmt: skip
QWEN36_35B_A3B = ModelGeometry(
    "qwen3_5_moe", hidden_size=2048, vocab_size=248_320, attention_heads=16, kv_heads=2, head_size=256,
    layers=(DELTA, DELTA, DELTA, FULL) * 10, max_context_tokens=262_144, activation_bytes=2, experts=256,
    experts_per_token=8, expert_intermediate_size=512, delta_key_heads=16, delta_value_heads=32, delta_key_size=128,
    delta_value_size=128, delta_conv_width=4,
)  # fmt: skip
QWEN38_27B = ModelGeometry(
    "qwen3_5", hidden_size=5120, intermediate_size=17_408, vocab_size=248_320, attention_heads=24, kv_heads=4,
    head_size=256, layers=(DELTA, DELTA, DELTA, FULL) * 16, max_context_tokens=262_144, activation_bytes=2,
    delta_key_heads=16, delta_value_heads=48, delta_key_size=128, delta_value_size=128, delta_conv_width=4,
)  # fmt: skip
DEEPSEEK_V3 = ModelGeometry(
    "deepseek_v3", hidden_size=7168, intermediate_size=18_432, vocab_size=129_280, attention_heads=128, kv_heads=128,
    head_size=192, value_head_size=128, layers=(LATENT,) * 61, latent_rank=512, latent_rope_size=64,
    max_context_tokens=163_840, activation_bytes=2, experts=256, experts_per_token=8, expert_intermediate_size=2048,
)  # fmt: skip
GEMMA3_1B = ModelGeometry(
    "gemma3_text", hidden_size=1152, intermediate_size=6912, vocab_size=262_144, attention_heads=4, kv_heads=1,
    head_size=256, layers=tuple(FULL if index % 6 == 5 else SLIDING for index in range(26)),
    sliding_window_tokens=512, max_context_tokens=32_768, activation_bytes=2,
)  # fmt: skip


def allocator_peak(geometry: ModelGeometry, weights: float, context: int) -> int:
    """Expected bytes of weights, caches and the reading of a prompt of that length."""
    size = int(weights)
    facts = WeightFacts(
        name="m",
        format=WeightFormat.SAFETENSORS,
        file_bytes=size,
        tensor_bytes=size,
        tensor_count=1,
        element_count=size,
        largest_tensor_bytes=size,
        precisions=(),
        components=(ComponentTotal("model", 1, size, ()),),
        architecture=geometry.model_type,
        geometry=replace(geometry, quantization_bits=4, quantization_group_size=64),
    )
    outside = ("process", "tokenizer", "allocator_slack")
    return sum(
        line.bytes.expected
        for line in plan(facts, MlxRequest(context_tokens=context), METAL).requirement.lines
        if line.phase in (Phase.RESIDENT, Phase.PREFILL) and line.component not in outside
    )


@pytest.mark.parametrize(
    ("geometry", "parameters", "bits", "measured"),
    [
        (QWEN3_4B, 4.022e9, 16, 9.02),
        (QWEN3_4B, 4.022e9, 8.5, 5.254),
        (QWEN3_4B, 4.022e9, 6.5, 4.25),
        (QWEN3_4B, 4.022e9, 5.5, 3.86),
        (QWEN3_4B, 4.022e9, 4.5, 3.35),
        (QWEN3_30B_A3B, 30.53e9, 8.5, 33.46),
        (QWEN3_30B_A3B, 30.53e9, 6.5, 25.82),
        (QWEN3_30B_A3B, 30.53e9, 5.5, 22.01),
        (QWEN3_30B_A3B, 30.53e9, 4.5, 18.20),
    ],
)
def test_a_prompt_of_2048_tokens(geometry: ModelGeometry, parameters: float, bits: float, measured: float) -> None:
    """mlx-lm's benchmarks on an M4 Max: 2,048 tokens of prompt and 128 of answer."""
    predicted = allocator_peak(geometry, parameters * bits / 8, 2048 + 128)
    assert abs(predicted / (measured * GB) - 1) <= 0.03, predicted


# mlx-lm issue 1480: Qwen3.6-35B-A3B-4bit, mlx-lm 0.31.3, M5 Max.
LONG_PREFILLS = [(8, 21.7), (32, 23.8), (64, 26.7), (100, 29.8), (130, 32.5), (160, 35.2), (176, 36.5), (192, 38.0)]


@pytest.mark.parametrize(("thousands", "measured"), LONG_PREFILLS)
def test_long_prompts_of_a_hybrid_without_a_fused_kernel(thousands: int, measured: float) -> None:
    # 34.66e9 parameters of the language model in 4.5 bits; the rest of the file's 20.4 GB is a vision tower.
    predicted = allocator_peak(QWEN36_35B_A3B, 34.66e9 * 4.5 / 8, thousands * 1024)
    assert abs(predicted / (measured * GB) - 1) <= 0.03, predicted


def test_what_one_more_token_of_a_long_prompt_costs() -> None:
    """Between 32k and 192k tokens, where the chunk's own workspace cancels out; both figures are rounded to 0.1."""
    growth = allocator_peak(QWEN36_35B_A3B, 0, 192 * 1024) - allocator_peak(QWEN36_35B_A3B, 0, 32 * 1024)
    assert abs(growth / ((38.0 - 23.8) * GB) - 1) <= 0.02


def long_prefill_bytes_per_token(geometry: ModelGeometry) -> int:
    """KV + prompt embeddings + scores of a chunk of 2048: what another runtime solves its contexts by."""
    factors = mlx(METAL).factors("expected")
    held = mlx_caches.caches(geometry).slot_bytes
    return held + geometry.hidden_size * 2 + int(workspace.score_bytes(geometry, 2048, 1, factors))


@pytest.mark.parametrize(
    ("geometry", "expected"), [(QWEN36_35B_A3B, 20_480 + 4096 + 65_536), (QWEN38_27B, 65_536 + 10_240 + 98_304)]
)
def test_the_closed_form_of_long_prefills(geometry: ModelGeometry, expected: int) -> None:
    assert long_prefill_bytes_per_token(geometry) == expected


def test_the_closed_form_reproduces_the_published_peaks_within_one_percent() -> None:
    slope = long_prefill_bytes_per_token(QWEN36_35B_A3B)
    base = 21.7 * GB - 8000 * slope
    for thousands, measured in LONG_PREFILLS:
        assert abs((base + thousands * 1000 * slope) / (measured * GB) - 1) <= 0.01, thousands


def test_the_closed_form_reproduces_a_logged_peak() -> None:
    """LM Studio's log for Qwen3.8-27B: 14.95 GiB of weights, 208,384 tokens, 48.88 GiB."""
    predicted = 14.95 * GIB + 208_384 * long_prefill_bytes_per_token(QWEN38_27B)
    assert abs(predicted / (48.88 * GIB) - 1) <= 0.005


@pytest.mark.parametrize(
    ("shorter", "longer", "measured"), [(4096, 8192, 388.3 - 383.2), (8192, 16_384, 398.6 - 388.3)]
)
def test_latent_attention_grows_with_its_rotary_scores(shorter: int, longer: int, measured: float) -> None:
    """mlx-lm issue 839: DeepSeek V3 with its compressed cache."""
    growth = allocator_peak(DEEPSEEK_V3, 0, longer) - allocator_peak(DEEPSEEK_V3, 0, shorter)
    assert abs(growth / (measured * GB) - 1) <= 0.07, growth


def test_a_windowed_model_holds_its_windows() -> None:
    """mlxcel issue 172: gemma3-1b at 32,768 tokens holds 139 MiB, by a formula without windows 832."""
    held = mlx_caches.caches(GEMMA3_1B)
    assert 32_768 * held.slot_bytes + held.window_bytes(32_768) == 139 * MIB
    # Gemma 2's own caches hold the whole context in sliding layers too.
    whole = mlx_caches.caches(replace(GEMMA3_1B, model_type="gemma2"))
    assert 32_768 * whole.slot_bytes == 832 * MIB

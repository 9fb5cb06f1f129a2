"""Planned against measured peaks of real runtime processes whose context was full.

Measured on 2026-11-30 with the runtime of this repository (mlx-lm 0.32.2, mlx 0.32.4, Python 3.11, Linux x86-64, two
cores): VmHWM of the process after one conversation that filled the planned context, default options. Names say model
family, storage and vocabulary; all but the demo model are random weights with the widths of published models.
"""

from dataclasses import replace

import pytest
from weighbridge_fit.calibration import ComputeDevice
from weighbridge_fit.facts import ComponentTotal, PrecisionTotal, WeightFacts, WeightFormat
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.plans.mlx.options import MlxRequest
from weighbridge_fit.plans.mlx.plan import plan

FULL, DELTA = LayerKind.FULL_ATTENTION, LayerKind.GATED_DELTA

TINY = ModelGeometry(
    "qwen3", hidden_size=256, intermediate_size=768, vocab_size=2048, attention_heads=8, kv_heads=2, head_size=64,
    layers=(FULL,) * 8, max_context_tokens=32_768, activation_bytes=2,
)  # fmt: skip
TINY_HYBRID = replace(
    TINY, model_type="qwen3_5", layers=(DELTA, DELTA, DELTA, FULL) * 2, delta_key_heads=4, delta_value_heads=8,
    delta_key_size=32, delta_value_size=32, delta_conv_width=4,
)  # fmt: skip
DEMO = ModelGeometry(
    "qwen2", hidden_size=576, intermediate_size=1536, vocab_size=49_152, attention_heads=9, kv_heads=3, head_size=64,
    layers=(FULL,) * 30, max_context_tokens=8192, activation_bytes=4, quantization_bits=4, quantization_group_size=32,
)  # fmt: skip
QWEN3 = ModelGeometry(
    "qwen3", hidden_size=1024, intermediate_size=3072, vocab_size=49_152, attention_heads=16, kv_heads=8, head_size=128,
    layers=(FULL,) * 4, max_context_tokens=32_768, activation_bytes=2,
)  # fmt: skip
QWEN2 = ModelGeometry(
    "qwen2", hidden_size=896, intermediate_size=4864, vocab_size=32_768, attention_heads=14, kv_heads=2, head_size=64,
    layers=(FULL,) * 6, max_context_tokens=32_768, activation_bytes=2,
)  # fmt: skip
QWEN3_5 = ModelGeometry(
    "qwen3_5", hidden_size=1024, intermediate_size=3072, vocab_size=49_152, attention_heads=8, kv_heads=2,
    head_size=256, layers=(DELTA, DELTA, DELTA, FULL), max_context_tokens=32_768, activation_bytes=2,
    delta_key_heads=16, delta_value_heads=16, delta_key_size=128, delta_value_size=128, delta_conv_width=4,
)  # fmt: skip
FLOAT32 = ModelGeometry(
    "qwen3", hidden_size=512, intermediate_size=1536, vocab_size=32_768, attention_heads=8, kv_heads=4, head_size=64,
    layers=(FULL,) * 6, max_context_tokens=32_768, activation_bytes=4,
)  # fmt: skip
EXPERTS_4 = replace(
    FLOAT32, model_type="qwen3_moe", kv_heads=2, layers=(FULL,) * 4, experts=16, experts_per_token=4,
    expert_intermediate_size=384,
)  # fmt: skip
EXPERTS_8 = replace(EXPERTS_4, experts=32, experts_per_token=8, expert_intermediate_size=192)

# model, geometry, weight bytes, context in tokens, peak in bytes
MEASURED = [
    ("tiny-qwen3-bf16", TINY, 15_739_392, 256, 143_224_832),
    ("tiny-qwen3-bf16", TINY, 15_739_392, 2048, 180_031_488),
    ("tiny-qwen3-bf16", TINY, 15_739_392, 4096, 211_861_504),
    ("tiny-qwen35-bf16", TINY_HYBRID, 15_550_112, 256, 147_566_592),
    ("tiny-qwen35-bf16", TINY_HYBRID, 15_550_112, 1024, 149_934_080),
    ("demo", DEMO, 98_403_840, 256, 290_738_176),
    ("q3-bf16-49k", QWEN3, 226_512_896, 256, 401_362_944),
    ("q3-bf16-49k", QWEN3, 226_512_896, 1024, 454_668_288),
    ("q2-bf16-32k", QWEN2, 237_670_656, 256, 405_602_304),
    ("q35-bf16-49k", QWEN3_5, 254_119_968, 256, 516_317_184),
    ("q3-f32-32k", FLOAT32, 142_636_032, 256, 295_194_624),
    ("q3-f32-32k", FLOAT32, 142_636_032, 1024, 337_305_600),
    ("q3moe-f32-32k", EXPERTS_4, 228_741_120, 256, 383_188_992),
    ("q3moe-f32-32k", EXPERTS_4, 228_741_120, 1024, 416_456_704),
    ("q3moe8-f32-32k", EXPERTS_8, 228_872_192, 256, 389_898_240),
    ("q3moe8-f32-32k", EXPERTS_8, 228_872_192, 1024, 424_448_000),
]


def facts(geometry: ModelGeometry, size: int) -> WeightFacts:
    # The demo model's scales are float16; of the random models each stores everything in one type.
    dtype, width = ("F32", 4) if geometry.activation_bytes == 4 and not geometry.quantization_bits else ("BF16", 2)
    stored = PrecisionTotal(dtype, 1, size // width, size)
    return WeightFacts(
        name="m",
        format=WeightFormat.SAFETENSORS,
        file_bytes=size,
        tensor_bytes=size,
        tensor_count=1,
        element_count=size // width,
        largest_tensor_bytes=size,
        precisions=(stored,),
        components=(ComponentTotal("model", 1, size, (stored,)),),
        architecture=geometry.model_type,
        geometry=geometry,
    )


@pytest.mark.parametrize(
    ("geometry", "weights", "context", "peak"),
    [row[1:] for row in MEASURED],
    ids=[f"{row[0]}-{row[3]}" for row in MEASURED],
)
def test_the_expected_peak_is_within_ten_percent_of_what_was_measured(
    geometry: ModelGeometry, weights: int, context: int, peak: int
) -> None:
    total = plan(facts(geometry, weights), MlxRequest(context_tokens=context), ComputeDevice.CPU).requirement.total
    assert abs(total.expected - peak) <= 0.10 * peak, f"{total.expected / peak - 1:+.1%}"
    assert total.low <= peak <= total.high

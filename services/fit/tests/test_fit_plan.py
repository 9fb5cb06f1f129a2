"""The MLX plan: lines that add up, choices, refusals, monotony, and measured processes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weighbridge_fit.calibration import ComputeDevice
from weighbridge_fit.facts import ComponentTotal, WeightFacts, WeightFormat
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.lines import Line, Phase, Range, Requirement, Source, requirement
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.mlx.options import MlxRequest
from weighbridge_fit.plans.mlx.plan import memory_limit_bytes, plan
from weighbridge_fit.plans.plan import Plan

FULL, DELTA, SLIDING = LayerKind.FULL_ATTENTION, LayerKind.GATED_DELTA, LayerKind.SLIDING_ATTENTION
CPU, METAL = ComputeDevice.CPU, ComputeDevice.METAL

DENSE = ModelGeometry(
    "qwen3",
    hidden_size=1024,
    intermediate_size=3072,
    vocab_size=151_936,
    attention_heads=16,
    kv_heads=8,
    head_size=128,
    layers=(FULL,) * 28,
    max_context_tokens=40_960,
    activation_bytes=2,
)
HYBRID = ModelGeometry(
    "qwen3_5",
    hidden_size=5120,
    intermediate_size=17_408,
    vocab_size=248_320,
    attention_heads=24,
    kv_heads=4,
    head_size=256,
    layers=tuple(FULL if (index + 1) % 4 == 0 else DELTA for index in range(64)),
    delta_key_heads=16,
    delta_value_heads=48,
    delta_key_size=128,
    delta_value_size=128,
    delta_conv_width=4,
    max_context_tokens=262_144,
    activation_bytes=2,
)
# The demo model: SmolLM2-135M as qwen2, 4-bit groups of 32, float32 norms.
DEMO = ModelGeometry(
    "qwen2",
    hidden_size=576,
    intermediate_size=1536,
    vocab_size=49_152,
    attention_heads=9,
    kv_heads=3,
    head_size=64,
    layers=(FULL,) * 30,
    max_context_tokens=8192,
    activation_bytes=4,
    quantization_bits=4,
    quantization_group_size=32,
    tied_embeddings=True,
)
TINY = ModelGeometry(
    "qwen3",
    hidden_size=256,
    intermediate_size=768,
    vocab_size=2048,
    attention_heads=8,
    kv_heads=2,
    head_size=64,
    layers=(FULL,) * 8,
    max_context_tokens=32_768,
    activation_bytes=2,
)
TINY_HYBRID = replace(
    TINY,
    model_type="qwen3_5",
    layers=(DELTA, DELTA, DELTA, FULL) * 2,
    delta_key_heads=4,
    delta_value_heads=8,
    delta_key_size=32,
    delta_value_size=32,
    delta_conv_width=4,
)


def model(geometry: ModelGeometry | None, size: int = 1_200_000_000, **components: int) -> WeightFacts:
    parts = {"model": size, **components}
    return WeightFacts(
        name="m",
        format=WeightFormat.SAFETENSORS,
        file_bytes=sum(parts.values()) + 1000,
        tensor_bytes=sum(parts.values()),
        tensor_count=100,
        element_count=1,
        largest_tensor_bytes=300_000_000,
        precisions=(),
        components=tuple(ComponentTotal(name, 1, value, ()) for name, value in parts.items()),
        architecture=geometry.model_type if geometry else "",
        geometry=geometry,
    )


def lines(made: Plan) -> dict[str, Line]:
    return {line.component: line for line in made.requirement.lines}


def check_sums(needed: Requirement) -> None:
    for bound in ("low", "expected", "high"):
        held = sum(getattr(line.bytes, bound) for line in needed.lines if line.phase is Phase.RESIDENT)
        phases = [
            sum(getattr(line.bytes, bound) for line in needed.lines if line.phase is phase)
            for phase in (Phase.PREFILL, Phase.DECODE)
        ]
        assert getattr(needed.total, bound) == held + max(phases)


@pytest.mark.parametrize("geometry", [DENSE, HYBRID, DEMO, TINY_HYBRID])
@pytest.mark.parametrize("device", [CPU, METAL])
def test_lines_add_up_to_the_total(geometry: ModelGeometry, device: ComputeDevice) -> None:
    made = plan(model(geometry), MlxRequest(), device)
    check_sums(made.requirement)
    assert all(line.basis and not line.on_device for line in made.requirement.lines)
    assert made.requirement.device == Range(0, 0, 0)


def test_phases_do_not_add_up_with_each_other() -> None:
    size = Range.exactly
    needed = requirement(
        (
            Line("a", Phase.RESIDENT, size(10), Source.DERIVED, "x"),
            Line("b", Phase.PREFILL, size(7), Source.DERIVED, "x"),
            Line("c", Phase.DECODE, Range(1, 2, 9), Source.DERIVED, "x", buffer=size(5)),
        )
    )
    assert needed.total == Range(17, 17, 19)
    assert needed.peak_phase is Phase.PREFILL
    assert needed.largest_buffer == size(5)


@pytest.mark.parametrize(
    ("name", "facts", "context", "measured"),
    [
        # Peaks of the resident set of the runtime process (VmHWM), prefill step 256, no allocator cache, Linux x86-64,
        # 2026-11-30; the context is what prompt and answer really held.
        ("demo, long prompt", model(DEMO, 98_403_840), 740, 322_174_976),
        ("demo, short prompt", model(DEMO, 98_403_840), 70, 283_467_776),
        ("tiny dense", model(TINY, 15_739_392), 640, 146_223_104),
        ("tiny hybrid", model(TINY_HYBRID, 15_550_112), 640, 171_474_944),
    ],
)
def test_the_expected_peak_is_within_ten_percent_of_measured_processes(
    name: str, facts: WeightFacts, context: int, measured: int
) -> None:
    asked = MlxRequest(context_tokens=context, prefill_step_tokens=256, allocator_cache_bytes=0)
    total = plan(facts, asked, CPU).requirement.total
    assert abs(total.expected - measured) <= 0.10 * measured, (name, total.expected)
    assert total.low <= measured <= total.high


def test_weights_are_the_headers_bytes_less_what_is_not_loaded() -> None:
    made = plan(model(HYBRID, 15_000, draft=700, vision=300), MlxRequest(), METAL)
    assert made.weight_bytes == 15_000
    assert lines(made)["model"].bytes == Range.exactly(15_000)
    assert [note.code for note in made.notes] == ["NOT_LOADED", "NOT_LOADED"]


def test_a_hybrid_pays_for_16_growing_layers_and_a_constant_state() -> None:
    found = lines(plan(model(HYBRID), MlxRequest(context_tokens=32_768), METAL))
    assert found["kv_cache"].bytes.low == 65_536 * 32_768
    assert found["recurrent_state"].bytes == Range.exactly(153_944_064)
    both = lines(plan(model(HYBRID), MlxRequest(context_tokens=32_768, slots=3), METAL))
    assert both["recurrent_state"].bytes == Range.exactly(3 * 153_944_064)
    assert both["kv_cache"].bytes.low == 3 * found["kv_cache"].bytes.low


@pytest.mark.parametrize(
    ("geometry", "device", "step"), [(DENSE, METAL, 2048), (DENSE, CPU, 512), (HYBRID, METAL, 2048), (HYBRID, CPU, 64)]
)
def test_the_prefill_step_is_chosen_by_device_and_layers(
    geometry: ModelGeometry, device: ComputeDevice, step: int
) -> None:
    assert plan(model(geometry), MlxRequest(), device).shape.prefill_step_tokens == step


def test_defaults_are_filled_in() -> None:
    shape = plan(model(DENSE), MlxRequest(), CPU).shape
    assert (shape.context_tokens, shape.slots, shape.kv_bits) == (4096, 1, 0)
    short = replace(DENSE, max_context_tokens=2048)
    assert plan(model(short), MlxRequest(), CPU).shape.context_tokens == 2048


def test_the_shape_tells_launches_apart_that_cost_differently() -> None:
    texts = {
        plan(model(DENSE), request, device).shape.text()
        for device in (CPU, METAL)
        for request in (
            MlxRequest(),
            MlxRequest(context_tokens=4097),
            MlxRequest(slots=2),
            MlxRequest(prefill_step_tokens=100),
            MlxRequest(kv_bits=8),
            MlxRequest(kv_bits=4),
            MlxRequest(kv_bits=8, kv_group_size=32),
            MlxRequest(allocator_cache_bytes=1),
        )
    }
    assert len(texts) == 16
    assert (
        plan(model(DENSE), MlxRequest(context_tokens=4096, slots=1), CPU).shape
        == plan(model(DENSE), MlxRequest(), CPU).shape
    )


def test_the_allocator_is_bounded_by_the_plan_less_the_process() -> None:
    made = plan(model(DENSE), MlxRequest(), CPU)
    outside = lines(made)["process"].bytes.expected + lines(made)["tokenizer"].bytes.expected
    assert memory_limit_bytes(made) == made.requirement.total.expected - outside


def test_sliding_layers_are_charged_in_full_and_said_so() -> None:
    sliding = replace(DENSE, layers=(FULL, SLIDING) * 14, sliding_window_tokens=1024)
    made = plan(model(sliding), MlxRequest(), CPU)
    assert lines(made)["kv_cache"].bytes == lines(plan(model(DENSE), MlxRequest(), CPU))["kv_cache"].bytes
    assert [note.code for note in made.notes] == ["WINDOW_NOT_USED"]


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (MlxRequest(context_tokens=40_961), "CONTEXT_TOO_LONG", "workload.chat.context_tokens"),
        (MlxRequest(context_tokens=-1), "INVALID_OPTION", "workload.chat.context_tokens"),
        (MlxRequest(slots=-1), "INVALID_OPTION", "workload.chat.slots"),
        (MlxRequest(slots=257), "INVALID_OPTION", "workload.chat.slots"),
        (MlxRequest(prefill_step_tokens=0), "INVALID_OPTION", "options.mlx.prefill_step_tokens"),
        (MlxRequest(kv_bits=3), "INVALID_OPTION", "options.mlx.kv_bits"),
        (MlxRequest(kv_bits=0), "INVALID_OPTION", "options.mlx.kv_bits"),
        (MlxRequest(kv_group_size=64), "INVALID_OPTION", "options.mlx.kv_group_size"),
        (MlxRequest(kv_bits=4, kv_group_size=48), "INVALID_OPTION", "options.mlx.kv_group_size"),
        (MlxRequest(allocator_cache_bytes=-1), "INVALID_OPTION", "options.mlx.allocator_cache_bytes"),
    ],
)
def test_what_cannot_be_is_refused_with_the_field(request_: MlxRequest, reason: str, field: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(model(DENSE), request_, CPU)
    assert (caught.value.reason, caught.value.field) == (reason, field)


def test_a_context_beyond_the_model_says_both_numbers() -> None:
    with pytest.raises(PlanError, match=r"40,960 tokens.*50,000"):
        plan(model(DENSE), MlxRequest(context_tokens=50_000), CPU)


@pytest.mark.parametrize(
    "facts",
    [
        model(None),
        model(replace(DENSE, model_type="deepseek_v4")),
        replace(model(DENSE), format=WeightFormat.GGUF),
        model(replace(DENSE, kv_heads=0)),
        model(replace(DENSE, layers=())),
    ],
)
def test_other_models_are_refused(facts: WeightFacts) -> None:
    with pytest.raises(PlanError) as caught:
        plan(facts, MlxRequest(), CPU)
    assert caught.value.reason == "UNSUPPORTED_ARCHITECTURE"


REQUESTS = st.builds(
    MlxRequest,
    context_tokens=st.integers(1, 40_000),
    slots=st.integers(1, 8),
    prefill_step_tokens=st.sampled_from([None, 64, 256, 512, 2048]),
    kv_bits=st.sampled_from([None, 4, 8]),
)


@settings(max_examples=150, deadline=None)
@given(REQUESTS, st.sampled_from([DENSE, HYBRID, DEMO]), st.sampled_from([CPU, METAL]), st.integers(1, 5000))
def test_more_context_or_slots_never_needs_less(
    asked: MlxRequest, geometry: ModelGeometry, device: ComputeDevice, more: int
) -> None:
    facts = model(replace(geometry, max_context_tokens=0))
    base = plan(facts, asked, device).requirement
    longer = plan(facts, replace(asked, context_tokens=asked.context_tokens + more), device).requirement
    wider = plan(facts, replace(asked, slots=asked.slots + 1), device).requirement
    for bigger in (longer, wider):
        for bound in ("low", "expected", "high"):
            assert getattr(bigger.total, bound) >= getattr(base.total, bound)
    check_sums(longer)


@settings(max_examples=50, deadline=None)
@given(REQUESTS, st.integers(0, 10**12))
def test_heavier_weights_never_need_less(asked: MlxRequest, more: int) -> None:
    light = plan(model(DENSE, 10**9), asked, CPU).requirement.total
    heavy = plan(model(DENSE, 10**9 + more), asked, CPU).requirement.total
    assert (heavy.low, heavy.expected, heavy.high) >= (light.low + more, light.expected + more, light.high + more)


def test_half_precision_experts_on_the_cpu_are_warned_about() -> None:
    experts = replace(DENSE, model_type="qwen3_moe", experts=8, experts_per_token=2, expert_intermediate_size=256)
    codes = {
        device: [note.code for note in plan(model(experts), MlxRequest(), device).notes] for device in (CPU, METAL)
    }
    assert codes == {CPU: ["EXPERTS_NEED_FLOAT32"], METAL: []}


@pytest.mark.parametrize(
    ("size", "device", "expected"),
    [
        (10**9, CPU, 32 << 20),
        (10**9, METAL, 256 << 20),
        (16 << 30, METAL, 1 << 30),
        (200 << 30, METAL, 4 << 30),
    ],
)
def test_the_allocators_cache_is_bounded_by_the_weights(size: int, device: ComputeDevice, expected: int) -> None:
    made = plan(model(DENSE, size), MlxRequest(), device)
    assert made.shape.allocator_cache_bytes == expected
    assert lines(made)["allocator_cache"].bytes.high == expected

"""What is loaded beside an MLX model: adapters, drafters, draft heads, expert slabs, shared projections, saved prompts,
trellis codes. Sizes are worked by hand from shapes."""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weighbridge_fit.calibration import ComputeDevice
from weighbridge_fit.facts import ComponentTotal, PrecisionTotal, Role, TensorFact, WeightFacts, WeightFormat
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws import mlx_experts, mlx_split, mlx_trellis
from weighbridge_fit.lines import Line, Phase, Range
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.mlx.options import MlxRequest
from weighbridge_fit.plans.mlx.plan import plan
from weighbridge_fit.plans.plan import Plan

FULL, DELTA, SLIDING = LayerKind.FULL_ATTENTION, LayerKind.GATED_DELTA, LayerKind.SLIDING_ATTENTION
CPU, METAL = ComputeDevice.CPU, ComputeDevice.METAL
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "U32": 4, "U8": 1, "F8_E4M3": 1, "I32": 4, "I64": 8}

DENSE = ModelGeometry(
    "qwen3", hidden_size=1024, intermediate_size=3072, vocab_size=151_936, attention_heads=16, kv_heads=8,
    head_size=128, layers=(FULL,) * 4, max_context_tokens=40_960, activation_bytes=2,
)  # fmt: skip
HYBRID = replace(
    DENSE, model_type="qwen3_5", layers=(DELTA, DELTA, DELTA, FULL), delta_key_heads=16, delta_value_heads=16,
    delta_key_size=128, delta_value_size=128, delta_conv_width=4, kv_heads=2, head_size=256, attention_heads=8,
)  # fmt: skip
EXPERTS = replace(
    DENSE, model_type="qwen3_moe", experts=16, experts_per_token=4, expert_intermediate_size=256, activation_bytes=2
)


def tensor(name: str, *shape: int, dtype: str = "BF16") -> TensorFact:
    elements = 1
    for size in shape:
        elements *= size
    return TensorFact(name, dtype, shape, elements, elements * WIDTHS[dtype])


def facts(
    geometry: ModelGeometry | None, parts: Mapping[str, list[TensorFact]], *, role: Role = Role.MODEL
) -> WeightFacts:
    labelled = tuple(sorted((part, one) for part, tensors in parts.items() for one in tensors))
    components = []
    for part, tensors in parts.items():
        stored = {one.dtype for one in tensors}
        totals = tuple(
            PrecisionTotal(
                dtype,
                1,
                sum(one.elements for one in tensors if one.dtype == dtype),
                sum(one.bytes for one in tensors if one.dtype == dtype),
            )
            for dtype in sorted(stored)
        )
        components.append(ComponentTotal(part, len(tensors), sum(one.bytes for one in tensors), totals))
    total = sum(component.bytes for component in components)
    return WeightFacts(
        name="m",
        format=WeightFormat.SAFETENSORS,
        file_bytes=total + 1000,
        tensor_bytes=total,
        tensor_count=len(labelled),
        element_count=sum(one.elements for _, one in labelled),
        largest_tensor_bytes=max((one.bytes for _, one in labelled), default=0),
        precisions=(),
        components=tuple(components),
        architecture=geometry.model_type if geometry else "",
        geometry=geometry,
        tensors=labelled,
        role=role,
    )


def attention(layer: int, prefix: str = "model") -> list[TensorFact]:
    block = f"{prefix}.layers.{layer}.self_attn"
    return [
        tensor(f"{block}.q_proj.weight", 2048, 1024),
        tensor(f"{block}.k_proj.weight", 1024, 1024),
        tensor(f"{block}.v_proj.weight", 1024, 1024),
        tensor(f"{block}.o_proj.weight", 1024, 2048),
    ]


def mlp(layer: int, prefix: str = "model") -> list[TensorFact]:
    block = f"{prefix}.layers.{layer}.mlp"
    return [
        tensor(f"{block}.gate_proj.weight", 3072, 1024),
        tensor(f"{block}.up_proj.weight", 3072, 1024),
        tensor(f"{block}.down_proj.weight", 1024, 3072),
    ]


def experts(layer: int, count: int = 16) -> list[TensorFact]:
    block = f"model.layers.{layer}.mlp.switch_mlp"
    return [
        tensor(f"{block}.gate_proj.weight", count, 256, 1024),
        tensor(f"{block}.up_proj.weight", count, 256, 1024),
        tensor(f"{block}.down_proj.weight", count, 1024, 256),
    ]


EMBEDDING = tensor("model.embed_tokens.weight", 151_936, 1024)
DENSE_TENSORS = [EMBEDDING, *(one for layer in range(4) for one in [*attention(layer), *mlp(layer)])]
DENSE_FACTS = facts(DENSE, {"model": DENSE_TENSORS})
# 4 layers x 16 experts x 3 matrices of 256 x 1024 in two bytes.
EXPERT_BYTES = 3 * 256 * 1024 * 2
MOE_TENSORS = [EMBEDDING, *(one for layer in range(4) for one in [*attention(layer), *experts(layer)])]
MOE_FACTS = facts(EXPERTS, {"model": MOE_TENSORS})


def lora(rank: int = 8, *, magnitudes: bool = False, inputs: int = 1024, layers: int = 4) -> WeightFacts:
    tensors = []
    for layer in range(layers):
        path = f"model.layers.{layer}.self_attn.q_proj"
        tensors += [
            tensor(f"{path}.lora_a", inputs, rank, dtype="F32"),
            tensor(f"{path}.lora_b", rank, 2048, dtype="F32"),
        ]
        if magnitudes:
            tensors.append(tensor(f"{path}.m", 2048, dtype="F32"))
    return facts(None, {"model": tensors}, role=Role.ADAPTER)


def lines(made: Plan) -> dict[str, Line]:
    return {line.component: line for line in made.requirement.lines}


def refusal(
    model: WeightFacts, request: MlxRequest, device: ComputeDevice = METAL, **companions: WeightFacts
) -> PlanError:
    named = {name.replace("__", ":"): value for name, value in companions.items()}
    with pytest.raises(PlanError) as caught:
        plan(model, request, device, named)
    return caught.value


# Adapters


def test_an_adapter_costs_its_factors() -> None:
    # Rank x (inputs + outputs) x 4 bytes for each of four layers.
    made = plan(DENSE_FACTS, MlxRequest(adapters=("a",)), METAL, {"adapter:a": lora(8)})
    assert lines(made)["adapter a"].bytes == Range.exactly(4 * 8 * (1024 + 2048) * 4)
    assert "adapter_matrix" not in lines(made)
    chunk = 2048 * (1024 + 2048) * 4
    assert lines(made)["adapter_residual"].bytes.low == 0
    assert chunk <= lines(made)["adapter_residual"].bytes.high <= 4 * chunk


def test_mounted_adapters_add_up_and_one_is_used_at_a_time() -> None:
    pair = {"adapter:a": lora(8), "adapter:b": lora(16)}
    one = plan(DENSE_FACTS, MlxRequest(adapters=("a",)), METAL, pair)
    both = plan(DENSE_FACTS, MlxRequest(adapters=("a", "b")), METAL, pair)
    assert lines(both)["adapter b"].bytes.expected == 2 * lines(both)["adapter a"].bytes.expected
    assert lines(both)["adapter_residual"].bytes == lines(one)["adapter_residual"].bytes


def test_dora_keeps_row_norms_and_makes_its_matrix_at_every_call() -> None:
    made = plan(DENSE_FACTS, MlxRequest(adapters=("a",)), METAL, {"adapter:a": lora(8, magnitudes=True)})
    assert lines(made)["adapter a"].bytes == Range.exactly(4 * (8 * (1024 + 2048) + 2048) * 4)
    assert lines(made)["adapter_matrix"].bytes.low >= 1024 * 2048 * 4
    phases = {line.phase for line in made.requirement.lines if line.component == "adapter_matrix"}
    assert phases == {Phase.PREFILL, Phase.DECODE}


def test_stacked_experts_are_adapted_too() -> None:
    path = "model.layers.0.mlp.switch_mlp.gate_proj"
    adapter = facts(
        None,
        {
            "model": [
                tensor(f"{path}.lora_a", 16 * 8, 1024, dtype="F32"),
                tensor(f"{path}.lora_b", 16, 256, 8, dtype="F32"),
            ]
        },
    )
    made = plan(MOE_FACTS, MlxRequest(adapters=("a",)), METAL, {"adapter:a": adapter})
    assert lines(made)["adapter a"].bytes == Range.exactly(16 * 8 * (1024 + 256) * 4)


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (lora(8, layers=9), "no such projection"),
        (facts(None, {"model": [tensor("model.layers.0.self_attn.q_proj.lora_a", 1024, 8)]}), "no lora_b"),
        (facts(None, {"model": [tensor("a.q_proj.lora_A.weight", 8, 1024)]}), "PEFT"),
        (facts(None, {"model": attention(0)}), "full fine-tune"),
        (
            facts(None, {"model": [tensor("model.layers.0.mlp.gate_proj.lora_a", 1024, 8),
                                   tensor("model.layers.0.mlp.gate_proj.lora_b", 8, 3000)]}),
            "3,072 rows there and the adapter 3,000",
        ),
        (
            facts(None, {"model": [tensor("model.layers.0.mlp.gate_proj.lora_a", 1024, 8),
                                   tensor("model.layers.0.mlp.gate_proj.lora_b", 4, 3072)]}),
            "ranks 8 and 4",
        ),
    ],
)  # fmt: skip
def test_an_adapter_of_another_model_is_refused(adapter: WeightFacts, said: str) -> None:
    error = refusal(DENSE_FACTS, MlxRequest(adapters=("a",)), adapter__a=adapter)
    assert (error.reason, error.field) == ("ADAPTER_MISMATCH", "options.mlx.adapters")
    assert said in error.message


def test_an_adapters_path_may_leave_the_wrappers_prefix_out() -> None:
    wrapped = facts(DENSE, {"model": [replace_name(one) for one in DENSE_TENSORS]})
    assert plan(wrapped, MlxRequest(adapters=("a",)), METAL, {"adapter:a": lora()}).weight_bytes == wrapped.tensor_bytes


def replace_name(one: TensorFact) -> TensorFact:
    return one._replace(name=f"language_model.{one.name}")


@pytest.mark.parametrize("names", [("a+b",), ("a,b",), ("",), ("a", "a"), ("x;y",), tuple(map(str, range(65)))])
def test_names_that_mean_something_else_are_refused(names: tuple[str, ...]) -> None:
    error = refusal(DENSE_FACTS, MlxRequest(adapters=names))
    assert (error.reason, error.field) == ("INVALID_OPTION", "options.mlx.adapters")


# Drafting


def test_a_drafter_costs_its_weights_and_its_own_cache_at_the_same_context() -> None:
    small = replace(DENSE, layers=(FULL,) * 2, kv_heads=4)
    drafter = facts(small, {"model": [*attention(0), *attention(1)]})
    asked = MlxRequest(context_tokens=8192, slots=2, draft_model="d", draft_tokens=4)
    made = plan(DENSE_FACTS, asked, METAL, {"drafter": drafter})
    assert lines(made)["drafter"].bytes == Range.exactly(drafter.tensor_bytes)
    assert lines(made)["drafter_kv_cache"].bytes.low == 2 * 8192 * 2 * 2 * 4 * 128 * 2
    # Drafted tokens take slots before they are accepted or cut back.
    assert lines(made)["drafter_kv_cache"].bytes.high == 2 * (8192 + 4 + 255) * 2 * 2 * 4 * 128 * 2
    assert made.weight_bytes == DENSE_FACTS.tensor_bytes + drafter.tensor_bytes
    # Five rows are verified at once.
    plain = plan(DENSE_FACTS, MlxRequest(context_tokens=8192, slots=2), METAL)
    assert lines(made)["logits"].bytes.expected * 2 == lines(plain)["logits"].bytes.expected * 5
    # The drafter reads its prompt first, and is smaller: the model's own reading is the peak.
    assert lines(made)["activations"] == lines(plain)["activations"]
    assert "drafter_prefill" not in lines(made)


def prefill(made: Plan) -> tuple[int, int, int]:
    found = [line.bytes for line in made.requirement.lines if line.phase is Phase.PREFILL]
    return sum(one.low for one in found), sum(one.expected for one in found), sum(one.high for one in found)


def test_the_larger_of_two_prefills_counts() -> None:
    large = facts(replace(DENSE, intermediate_size=100_000), {"model": attention(0)})
    made = plan(DENSE_FACTS, MlxRequest(draft_model="d"), METAL, {"drafter": large})
    own, drafters = prefill(plan(DENSE_FACTS, MlxRequest(), METAL)), prefill(plan(large, MlxRequest(), METAL))
    assert drafters > own
    assert prefill(made) == (own[0], *drafters[1:])


@pytest.mark.parametrize("inner", [3072, 6000, 100_000])
def test_a_drafter_that_outgrows_its_model_never_lowers_a_bound(inner: int) -> None:
    """The drafter has little to read for a token and much for each pair of them; where it outgrows the model, the
    bounds go on rising."""
    small = replace(DENSE, intermediate_size=1, hidden_size=64, attention_heads=64)
    drafter = facts(small, {"model": attention(0)})
    target = facts(replace(DENSE, intermediate_size=inner), {"model": DENSE_TENSORS})
    before = (0, 0, 0)
    for context in range(1, 30_000, 977):
        asked = MlxRequest(context_tokens=context, draft_model="d")
        total = plan(target, asked, CPU, {"drafter": drafter}).requirement.total
        now = (total.low, total.expected, total.high)
        assert all(less <= more for less, more in zip(before, now, strict=True))
        before = now


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        (facts(replace(DENSE, vocab_size=7), {"model": attention(0)}), "vocabulary"),
        (facts(replace(HYBRID, vocab_size=DENSE.vocab_size), {"model": attention(0)}), "cannot be cut back"),
        (facts(None, {"model": attention(0)}), "cannot draft with this model"),
        (facts(replace(DENSE, model_type="gemma4_dspark"), {"model": attention(0)}), "cannot draft with this model"),
        (facts(replace(DENSE, max_context_tokens=512), {"model": attention(0)}), "at most 512 tokens"),
    ],
)
def test_drafters_that_cannot_draft_are_refused(drafter: WeightFacts, said: str) -> None:
    error = refusal(DENSE_FACTS, MlxRequest(draft_model="d", context_tokens=4096), drafter=drafter)
    assert (error.reason, error.field) == ("DRAFTER_MISMATCH", "options.mlx.draft_model")
    assert said in error.message


def test_a_hybrid_cannot_be_drafted_for_by_another_model() -> None:
    """mlx-lm raises for it: a recurrent state cannot be cut back."""
    error = refusal(facts(HYBRID, {"model": attention(3)}), MlxRequest(draft_model="d"), drafter=DENSE_FACTS)
    assert (error.reason, error.field) == ("INVALID_OPTION", "options.mlx.draft_model")


def test_windows_can_be_cut_back_until_they_are_full() -> None:
    windowed = replace(DENSE, model_type="llama", layers=(SLIDING, FULL) * 2, sliding_window_tokens=1024)
    model = facts(windowed, {"model": DENSE_TENSORS})
    short = MlxRequest(context_tokens=1000, draft_model="d")
    plan(model, short, METAL, {"drafter": DENSE_FACTS})
    assert refusal(model, replace(short, context_tokens=1024), drafter=DENSE_FACTS).reason == "INVALID_OPTION"
    # Who names no context gets the longest that can be drafted for: one less than the window.
    made = plan(model, replace(short, context_tokens=0), METAL, {"drafter": DENSE_FACTS})
    assert made.shape.context_tokens == 1023  # type: ignore[attr-defined]


def test_a_drafter_for_short_contexts_lowers_the_usual_one() -> None:
    drafter = facts(replace(DENSE, max_context_tokens=512), {"model": attention(0)})
    made = plan(DENSE_FACTS, MlxRequest(draft_model="d"), METAL, {"drafter": drafter})
    assert made.shape.context_tokens == 512  # type: ignore[attr-defined]


def test_a_draft_head_costs_its_component_one_layer_of_cache_and_a_state_to_go_back_to() -> None:
    head = [tensor("mtp.fc.weight", 1024, 2048), *attention(0, "mtp")]
    model = facts(HYBRID, {"model": DENSE_TENSORS, "draft": head})
    plain = plan(model, MlxRequest(context_tokens=4096), METAL)
    made = plan(model, MlxRequest(context_tokens=4096, draft_head=True), METAL)
    found = lines(made)
    assert found["draft_head"].bytes == Range.exactly(sum(one.bytes for one in head))
    assert found["draft_head_kv_cache"].bytes.low == 4096 * 2 * 2 * 256 * 2
    assert found["draft_rollback"].bytes == lines(plain)["recurrent_state"].bytes
    assert [note.code for note in plain.notes] == ["NOT_LOADED"]
    assert "NOT_LOADED" not in [note.code for note in made.notes]
    assert made.weight_bytes == model.tensor_bytes


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (MlxRequest(draft_head=True), "DRAFT_HEAD_MISSING", "draft_head"),
        (MlxRequest(draft_head=True, draft_model="d"), "INVALID_OPTION", "draft_head"),
        (MlxRequest(draft_tokens=2), "INVALID_OPTION", "draft_tokens"),
        (MlxRequest(draft_head=True, draft_tokens=0), "INVALID_OPTION", "draft_tokens"),
        (MlxRequest(draft_model="d"), "DRAFTER_MISMATCH", "draft_model"),
        (MlxRequest(prompt_cache_bytes=-1), "INVALID_OPTION", "prompt_cache_bytes"),
        (MlxRequest(expert_slab_bytes=GIB), "INVALID_OPTION", "expert_slab_bytes"),
        (MlxRequest(split_lane="gpu"), "INVALID_OPTION", "split_lane"),
    ],
)
def test_what_cannot_be_is_refused_with_the_field(request_: MlxRequest, reason: str, field: str) -> None:
    error = refusal(DENSE_FACTS, request_)
    assert (error.reason, error.field) == (reason, f"options.mlx.{field}")


# Experts in a slab


def test_a_slab_is_whole_slots_and_stands_for_all_experts() -> None:
    # A slot is three pieces of 512 KiB, each a whole number of 16 KiB pages.
    made = plan(MOE_FACTS, MlxRequest(expert_slab_bytes=20 * EXPERT_BYTES + 5000), METAL)
    assert lines(made)["model_expert_slab"].bytes == Range.exactly(20 * EXPERT_BYTES)
    assert lines(made)["model"].bytes == Range.exactly(MOE_FACTS.tensor_bytes - 4 * 16 * EXPERT_BYTES)
    assert made.weight_bytes == MOE_FACTS.tensor_bytes - 44 * EXPERT_BYTES


def test_every_part_of_a_slot_lies_on_a_page() -> None:
    tensors = [
        tensor("model.layers.3.mlp.experts.gate_proj.weight", 4, 10, 10),
        tensor("model.layers.3.mlp.experts.gate_proj.scales", 4, 10, 1),
    ]
    found = mlx_experts.experts_of(tensors, 4)
    assert (found.bytes, found.layers, found.slot_bytes) == (4 * 110 * 2, 1, 2 * 16 * KIB)


def test_single_and_stacked_experts_are_the_same_slots() -> None:
    single = [
        tensor(f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.weight", 256, 1024)
        for layer in range(2) for number in range(4) for part in ("gate", "up", "down")
    ]  # fmt: skip
    kept = [
        tensor("model.layers.0.mlp.shared_experts.gate_proj.weight", 256, 1024),
        tensor("model.layers.0.mlp.gate.weight", 4, 1024),
    ]
    found = mlx_experts.experts_of([*single, *kept], 4)
    assert (found.bytes, found.layers, found.slot_bytes) == (8 * EXPERT_BYTES, 2, EXPERT_BYTES)


def test_a_slab_never_holds_more_than_all_experts() -> None:
    made = plan(MOE_FACTS, MlxRequest(expert_slab_bytes=GIB), METAL)
    assert lines(made)["model_expert_slab"].bytes == Range.exactly(64 * EXPERT_BYTES)


def test_fewer_slots_than_one_token_needs_are_refused_with_what_is_needed() -> None:
    error = refusal(MOE_FACTS, MlxRequest(expert_slab_bytes=4 * EXPERT_BYTES - 1))
    assert (error.reason, error.field) == ("EXPERT_SLAB_TOO_SMALL", "options.mlx.expert_slab_bytes")
    assert "0.01 GiB" in error.message
    plan(MOE_FACTS, MlxRequest(expert_slab_bytes=4 * EXPERT_BYTES), METAL)
    # Two conversations, and 4 drafted tokens with the one before them, never more than there are.
    assert refusal(MOE_FACTS, MlxRequest(slots=2, expert_slab_bytes=7 * EXPERT_BYTES)).reason == "EXPERT_SLAB_TOO_SMALL"
    plan(MOE_FACTS, MlxRequest(slots=2, expert_slab_bytes=8 * EXPERT_BYTES), METAL)
    assert mlx_experts.working_slots(experts=256, experts_per_token=8, rows=4) == 32
    assert mlx_experts.working_slots(experts=16, experts_per_token=8, rows=4) == 16


def test_a_draft_heads_experts_have_a_slab_of_their_own() -> None:
    head = [
        tensor("mtp.fc.weight", 1024, 2048),
        *(one._replace(name=one.name.replace("model.", "mtp.", 1)) for one in experts(0)),
    ]
    model = facts(EXPERTS, {"model": MOE_TENSORS, "draft": head})
    made = plan(model, MlxRequest(draft_head=True, draft_tokens=3, expert_slab_bytes=16 * EXPERT_BYTES), METAL)
    assert lines(made)["draft_head"].bytes == Range.exactly(1024 * 2048 * 2)
    assert lines(made)["draft_head_expert_slab"].bytes == Range.exactly(16 * EXPERT_BYTES)


def test_without_tensors_experts_cannot_be_told() -> None:
    error = refusal(replace(MOE_FACTS, tensors=()), MlxRequest(expert_slab_bytes=GIB))
    assert (error.reason, error.field) == ("INVALID_OPTION", "options.mlx.expert_slab_bytes")


# A second device, saved prompts


@pytest.mark.parametrize(
    ("rows", "fraction", "expected"),
    [(17_408, 0.55, 9600), (6144, 0.375, 2304), (127, 0.5, 0), (128, 0.9, 64), (1024, 0.001, 64), (1024, 0.999, 960)],
)
def test_shares_are_multiples_of_64_with_64_on_both_sides(rows: int, fraction: float, expected: int) -> None:
    assert mlx_split.share(rows, fraction) == expected


def test_a_second_devices_copy_is_its_share_and_its_buffers() -> None:
    one = mlx_split.SharedShape(inputs=1024, outputs=2048)
    # 0.375 x 2048 = 768 rows in float16, and 512 rows of input and of output.
    assert mlx_split.copy_bytes(one, 0.375, 300) == 2 * (768 * 1024 + 512 * (1024 + 768))
    whole = mlx_split.SharedShape(inputs=1024, outputs=3072, matrices=3)
    assert mlx_split.copy_bytes(whole, 0.55, 9999) == 2 * (3 * 1664 * 1024 + 2048 * (1024 + 1024))


def test_one_copy_serves_all_layers_of_a_shape() -> None:
    made = lines(plan(DENSE_FACTS, MlxRequest(split_lane="ane"), METAL))["split_lane"].bytes
    shapes = [
        mlx_split.SharedShape(1024, 2048),
        mlx_split.SharedShape(2048, 1024),
        mlx_split.SharedShape(1024, 3072, 3),
    ]
    assert made.high == sum(mlx_split.copy_bytes(shape, 0.55, 2048) for shape in shapes)
    assert made.low == max(mlx_split.copy_bytes(shape, 0.375, 2048) for shape in shapes)
    assert lines(plan(DENSE_FACTS, MlxRequest(split_lane="cpu"), METAL))["split_lane"].bytes.low == 0
    assert "split_lane" not in lines(plan(DENSE_FACTS, MlxRequest(split_lane="none"), METAL))
    assert refusal(DENSE_FACTS, MlxRequest(split_lane="ane"), CPU).reason == "INVALID_OPTION"


def test_saved_prompts_are_optional() -> None:
    plain = plan(DENSE_FACTS, MlxRequest(), METAL).requirement.total
    made = plan(DENSE_FACTS, MlxRequest(prompt_cache_bytes=GIB), METAL).requirement.total
    assert (made.low, made.expected, made.high) == (plain.low, plain.expected, plain.high + GIB)


# Trellis codes


def trellis(layer: int, bits: int, *, interleaved: bool = False) -> list[TensorFact]:
    block = f"model.layers.{layer}.mlp"
    words = 1024 * bits // 32
    coded = [tensor(f"{block}.{part}_proj.weight", 3072, words, dtype="U32") for part in ("gate", "up")]
    down = (2, 3072, 48) if interleaved else (3072, words)
    coded.append(tensor(f"{block}.down_proj.weight", *down, dtype="U32"))
    return [*coded, *(tensor(f"{block}.{part}_proj.scales", 3072, dtype="F16") for part in ("gate", "up", "down"))]


@pytest.mark.parametrize(("bits", "interleaved"), [(2, False), (3, False), (3, True), (4, False)])
def test_trellis_codes_cost_what_they_store_and_one_matrix_expanded(bits: int, interleaved: bool) -> None:
    tensors = [
        EMBEDDING,
        *(one for n in range(4) for one in [*attention(n), *trellis(n, bits, interleaved=interleaved)]),
    ]
    model = facts(replace(DENSE, activation_bytes=4), {"model": tensors})
    made = plan(model, MlxRequest(), METAL)
    # k bits and a 16-bit scale for each row of 1024.
    assert sum(one.bytes for one in trellis(0, bits, interleaved=interleaved)) == 3 * 3072 * (1024 * bits // 8 + 2)
    assert lines(made)["model"].bytes == Range.exactly(model.tensor_bytes)
    # Scales in float16 beside bfloat16 weights widen nothing: they are used inside the product.
    assert lines(made)["trellis_expand"].bytes == Range.exactly(3072 * 1024 * 2)
    assert lines(made)["trellis_scatter"].bytes == Range(0, 128 * 1024 * 4, 128 * 1024 * 4)
    assert [note.code for note in made.notes] == ["NOT_LAUNCHED"]
    assert {matrix.bits for matrix in mlx_trellis.matrices(tensors, 1024)} == {bits}


@pytest.mark.parametrize("shape", [(3072, 161), (3072, 32 * 5), (2, 3072, 49), (3, 3072, 48), (3071, 96)])
def test_trellis_codes_of_another_format_are_refused(shape: tuple[int, ...]) -> None:
    path = "model.layers.0.mlp.down_proj"
    odd = [tensor(f"{path}.weight", *shape, dtype="U32"), tensor(f"{path}.scales", 3072, dtype="F16")]
    assert refusal(facts(DENSE, {"model": odd}), MlxRequest()).reason == "UNSUPPORTED_ARCHITECTURE"


def test_affine_quantisation_is_no_trellis() -> None:
    path = "model.layers.0.mlp.up_proj"
    affine = [tensor(f"{path}.weight", 3072, 128, dtype="U32"), tensor(f"{path}.scales", 3072, 16, dtype="F16")]
    assert mlx_trellis.matrices(affine, 1024) == []


# Together


def test_what_is_priced_only_is_no_launch_and_says_why() -> None:
    assert plan(DENSE_FACTS, MlxRequest(), METAL).shape.launched  # type: ignore[attr-defined]
    for request, companions in (
        (MlxRequest(adapters=("a",)), {"adapter:a": lora()}),
        (MlxRequest(draft_model="d"), {"drafter": DENSE_FACTS}),
        (MlxRequest(prompt_cache_bytes=1), {}),
        (MlxRequest(split_lane="cpu"), {}),
    ):
        made = plan(DENSE_FACTS, request, METAL, companions)
        assert not made.shape.launched  # type: ignore[attr-defined]
        assert [note.code for note in made.notes] == ["NOT_LAUNCHED"]
    llama = plan(facts(replace(DENSE, model_type="llama"), {"model": DENSE_TENSORS}), MlxRequest(), METAL)
    assert "models of type llama" in llama.notes[-1].message


def test_the_shape_tells_options_apart() -> None:
    companions = {"adapter:a": lora(), "adapter:b": lora(), "drafter": DENSE_FACTS}
    requests = [
        MlxRequest(), MlxRequest(adapters=("a",)), MlxRequest(adapters=("a", "b")), MlxRequest(draft_model="d"),
        MlxRequest(draft_model="d", draft_tokens=5), MlxRequest(prompt_cache_bytes=1), MlxRequest(split_lane="cpu"),
    ]  # fmt: skip
    texts = [plan(DENSE_FACTS, request, METAL, companions).shape.text() for request in requests]
    assert len(set(texts)) == len(requests)
    assert texts[0] == "mlx;device=metal;context=4096;slots=1;prefill=2048;kv=plain;cache=268435456"


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30_000), st.integers(1, 4), st.sampled_from([None, 4, 8]), st.integers(0, 3), st.randoms())
def test_options_and_tensors_only_add(
    context: int, slots: int, kv_bits: int | None, more_layers: int, chance: random.Random
) -> None:
    """More of anything never needs less, at every bound: context, slots, adapters, tensors."""
    companions = {"adapter:a": lora(chance.choice([1, 8, 64])), "drafter": DENSE_FACTS}
    asked = MlxRequest(context_tokens=context, slots=slots, kv_bits=kv_bits)
    base = plan(DENSE_FACTS, asked, CPU, companions).requirement.total
    grown = facts(DENSE, {"model": [*DENSE_TENSORS, *(tensor(f"more.{n}", 64, 64) for n in range(more_layers))]})
    larger = (
        plan(DENSE_FACTS, replace(asked, adapters=("a",)), CPU, companions),
        plan(DENSE_FACTS, replace(asked, draft_model="d"), CPU, companions),
        plan(DENSE_FACTS, replace(asked, prompt_cache_bytes=chance.randint(0, GIB)), CPU, companions),
        plan(DENSE_FACTS, replace(asked, split_lane="cpu"), CPU, companions),
        plan(DENSE_FACTS, replace(asked, context_tokens=context + chance.randint(0, 9000)), CPU, companions),
        plan(grown, asked, CPU, companions),
    )
    for made in larger:
        total = made.requirement.total
        assert total.low >= base.low and total.expected >= base.expected and total.high >= base.high


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70), st.integers(0, 3))
def test_a_larger_slab_never_needs_less_and_is_never_larger_than_asked(slots: int, spare: int) -> None:
    asked = (slots + 4) * EXPERT_BYTES + spare
    made = plan(MOE_FACTS, MlxRequest(expert_slab_bytes=asked), METAL)
    assert lines(made)["model_expert_slab"].bytes.high <= asked
    larger = plan(MOE_FACTS, MlxRequest(expert_slab_bytes=asked + EXPERT_BYTES), METAL)
    assert larger.requirement.total.expected >= made.requirement.total.expected
    assert made.requirement.total.expected <= plan(MOE_FACTS, MlxRequest(), METAL).requirement.total.expected


# What is in the files and not in memory, or not as it lies there


def test_layers_beyond_the_last_and_keys_of_sharing_layers_are_not_loaded() -> None:
    """DeepSeek's draft layer, and projections that Gemma 4 files keep for layers that read another's keys."""
    beyond = facts(DENSE, {"model": [*DENSE_TENSORS, *attention(4)]})
    assert plan(beyond, MlxRequest(), METAL).weight_bytes == DENSE_FACTS.tensor_bytes
    sharing = replace(
        DENSE, model_type="gemma4_text", layers=(SLIDING, FULL, LayerKind.SHARED, LayerKind.SHARED),
        sliding_window_tokens=512,
    )  # fmt: skip
    made = plan(facts(sharing, {"model": DENSE_TENSORS}), MlxRequest(), METAL)
    # Keys and values of two layers, 1024 x 1024 each.
    assert made.weight_bytes == DENSE_FACTS.tensor_bytes - 2 * 2 * 1024 * 1024 * 2


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I32"])
def test_weights_that_are_converted_while_loading_are_not_priced(dtype: str) -> None:
    odd = [tensor("model.layers.0.mlp.up_proj.weight", 3072, 1024, dtype=dtype)]
    error = refusal(facts(DENSE, {"model": [*DENSE_TENSORS, *odd]}), MlxRequest())
    assert error.reason == "UNSUPPORTED_ARCHITECTURE"
    assert dtype in error.message


def test_a_few_counters_convert_nothing() -> None:
    counters = [tensor("model.position_ids", 512, dtype="I64"), tensor("model.steps", 4, dtype="I32")]
    plan(facts(DENSE, {"model": [*DENSE_TENSORS, *counters]}), MlxRequest(), METAL)


@pytest.mark.parametrize(
    "geometry",
    [
        replace(DENSE, model_type="deepseek_v4"),
        replace(DENSE, model_type="NemotronH_Nano_Omni_Reasoning_V3"),
        replace(DENSE, model_type="nemotron_h", layers=(LayerKind.STATE_SPACE, FULL)),
        replace(DENSE, layers=(LayerKind.LINEAR_ATTENTION, FULL)),
        replace(DENSE, model_type="llama", layers=(SLIDING, FULL)),
        replace(DENSE, model_type="deepseek_v3", layers=(LayerKind.LATENT_ATTENTION,)),
        # A rotary part that is wider than the head it is a part of.
        replace(
            DENSE, model_type="deepseek_v3", layers=(LayerKind.LATENT_ATTENTION,), latent_rank=8, latent_rope_size=128
        ),
    ],
)
def test_what_no_law_here_decides_is_refused_not_guessed(geometry: ModelGeometry) -> None:
    assert refusal(facts(geometry, {"model": DENSE_TENSORS}), MlxRequest()).reason == "UNSUPPORTED_ARCHITECTURE"

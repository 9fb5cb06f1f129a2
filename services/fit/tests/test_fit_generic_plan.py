"""GENERIC plans: lines by engine and on which side they are, and defaults."""

from dataclasses import replace

import pytest
from fit_generic import CARD, HOST, LLAMA, UNIFIED, facts, lines, machine, note_codes
from fit_shapes import GIB, MIB, QWEN35_GGUF, from_gguf, geometry
from weighbridge_fit.capacity import Capacity, Ceiling, DeviceCeiling, Pool
from weighbridge_fit.facts import PrecisionTotal, WeightFormat
from weighbridge_fit.families.generic import GenericChatFamily
from weighbridge_fit.families.mlx import compute_device
from weighbridge_fit.gguf.types import TENSOR_TYPES
from weighbridge_fit.laws.kv import KvLaw
from weighbridge_fit.model import Model
from weighbridge_fit.model_config import geometry_from_config
from weighbridge_fit.planning import answer
from weighbridge_fit.plans.generic.options import GenericRequest
from weighbridge_fit.plans.generic.plan import plan
from weighbridge_fit.plans.mlx.options import MlxRequest
from weighbridge_fit.plans.mlx.plan import plan as mlx_plan
from weighbridge_fit.plans.plan import Engine
from weighbridge_fit.solving import solve_context
from weighbridge_fit.verdict import Verdict, judge

# The six files that were measured: bytes of the file, its embedding's type, and what lay on the device (GiB).
G11 = [
    (13.327, "IQ4_XS", 12.698),
    (13.370, "Q3_K", 12.861),
    (13.469, "Q4_K", 12.803),
    (14.036, "IQ4_XS", 13.407),
    (14.266, "IQ4_XS", 13.637),
    (14.369, "Q4_K", 13.703),
]


@pytest.mark.parametrize(("file_gib", "kind", "device_gib"), G11)
def test_g11_llama_cpp_leaves_the_embeddings_in_host_memory_in_their_own_type(
    file_gib: float, kind: str, device_gib: float
) -> None:
    block = next(entry for entry in TENSOR_TYPES.values() if entry.name == kind)
    embedding = 248_320 * 5120 // block.block_elements * block.block_bytes
    file = int(file_gib * GIB)
    tensors = {"token_embd.weight": embedding, "output.weight": GIB, "blk.0.attn_q.weight": file - embedding - GIB}
    made = lines(plan(facts(from_gguf(QWEN35_GGUF), file, tensors=tensors), GenericRequest(), CARD))
    assert made["model"].on_device
    assert made["model"].bytes.expected / GIB == pytest.approx(device_gib, abs=0.0011)
    assert not made["embeddings"].on_device
    assert made["embeddings"].bytes.expected == embedding
    # Where there is one memory, it is all there.
    assert (
        lines(plan(facts(from_gguf(QWEN35_GGUF), file, tensors=tensors), GenericRequest(), UNIFIED))[
            "model"
        ].bytes.expected
        == file
    )


def test_tied_embeddings_lie_on_both_sides() -> None:
    tied = {"token_embd.weight": GIB, "blk.0.attn_q.weight": 3 * GIB}
    made = lines(plan(facts(LLAMA, 4 * GIB, tensors=tied), GenericRequest(), CARD))
    assert (made["model"].bytes.expected, made["embeddings"].bytes.expected) == (4 * GIB, GIB)


def test_blocks_of_a_draft_head_stay_in_the_file() -> None:
    drafting = replace(LLAMA, draft_layers=1)
    tensors = {"token_embd.weight": GIB, "output.weight": GIB, "blk.31.a": 2 * GIB, "blk.32.a": GIB}
    made = plan(facts(drafting, 5 * GIB, tensors=tensors), GenericRequest(), HOST)
    assert lines(made)["model"].bytes.expected == 4 * GIB
    assert "DRAFT_HEAD_NOT_USED" in note_codes(made)


def test_llama_cpps_lines_and_which_side_they_are_on() -> None:
    made = plan(facts(LLAMA), GenericRequest(context_tokens=8192, slots=2), CARD)
    found = lines(made)
    assert set(found) == {"model", "kv_cache", "compute", "compute_host", "device_context", "process"}
    assert [name for name, line in found.items() if not line.on_device] == ["compute_host", "process"]
    assert found["kv_cache"].bytes.expected == 2 * 8192 * 131_072
    assert found["compute"].bytes.expected == 258.50 * MIB
    assert found["compute_host"].bytes.expected == 512 * (16_384 + 4096) * 4 + 2 * 128_256 * 4
    assert (made.engine, made.weight_bytes) == (Engine.GENERIC, 8 * GIB)
    assert made.shape.text() == "generic;law=llama_cpp;context=8192;slots=2;kv=f16;batch=512;on=card"
    on_host = lines(plan(facts(LLAMA), GenericRequest(), HOST))
    assert not any(line.on_device for line in on_host.values())
    assert "device_context" not in on_host


def test_caches_of_every_kind_have_a_line_of_their_own() -> None:
    hybrid = lines(plan(facts(from_gguf(QWEN35_GGUF)), GenericRequest(context_tokens=65_536, slots=4), CARD))
    assert hybrid["kv_cache"].bytes.expected == 16_384 * MIB
    assert hybrid["recurrent_state"].bytes.expected == int(598.5 * MIB)
    windows = lines(plan(facts(geometry("Gemma-3-27B")), GenericRequest(context_tokens=32_768, slots=2), CARD))
    # Unified: 2 x 1,024 + 512 cells; each conversation on its own: 2 x (1,024 + 512).
    row = 2 * 16 * 128 * 2
    assert windows["kv_window"].bytes.expected == 52 * 2560 * row
    assert windows["kv_window"].bytes.high == 52 * 2 * 1536 * row
    latent = lines(plan(facts(geometry("DeepSeek-V3.1")), GenericRequest(context_tokens=4096), CARD))
    assert latent["kv_latent"].bytes.expected == 61 * 576 * 2 * 4096


def test_vllm_takes_its_share_of_the_card_and_says_what_its_pool_holds() -> None:
    card = machine(64 * GIB, 80 * GIB)
    model = facts(LLAMA, 16 * GIB, WeightFormat.SAFETENSORS)
    made = plan(model, GenericRequest(context_tokens=8192, device_share=0.95), card)
    assert made.requirement.device.expected == int(0.95 * 80 * GIB)
    pool = next(note for note in made.notes if note.code == "POOL")
    # Llama's measured activations are 0.77 to 1.97 GiB, and CUDA's own 0.25.
    expected = (0.95 * 80 - 16 - (0.77 + 1.97) / 2 - 0.25) * GIB / 131_072
    assert int(pool.metadata["tokens"]) == pytest.approx(expected, abs=32)
    assert made.shape.text().endswith("batch=8192;share=0.95;on=card")
    # More of its pool is used, and the card is as full as before.
    longer = plan(model, GenericRequest(context_tokens=131_072, device_share=0.95), card)
    assert longer.requirement.device.expected == made.requirement.device.expected
    assert lines(longer)["kv_cache"].bytes.expected == 16 * lines(made)["kv_cache"].bytes.expected


def test_vllm_says_what_share_would_do_where_it_would_not_start() -> None:
    model = facts(LLAMA, 16 * GIB, WeightFormat.SAFETENSORS)
    made = plan(model, GenericRequest(context_tokens=8192, device_share=0.5), CARD)
    note = next(note for note in made.notes if note.code == "POOL_TOO_SMALL")
    share = float(note.metadata["device_share"])
    assert f"{share:.2f}" in note.message
    enough = plan(model, GenericRequest(context_tokens=8192, device_share=share + 0.001), CARD)
    assert "POOL_TOO_SMALL" not in note_codes(enough)
    hopeless = plan(facts(LLAMA, 60 * GIB, WeightFormat.SAFETENSORS), GenericRequest(law="vllm"), CARD)
    assert "is enough" not in next(note for note in hopeless.notes if note.code == "POOL_TOO_SMALL").message


def test_vllm_loads_float32_in_half() -> None:
    wide = (PrecisionTotal("F32", 10, 10, 4 * GIB),)
    model = facts(replace(LLAMA, activation_bytes=4), 4 * GIB, WeightFormat.SAFETENSORS, precisions=wide)
    made = lines(plan(model, GenericRequest(context_tokens=1024), CARD))
    assert made["model"].bytes.expected == 2 * GIB
    assert made["kv_cache"].bytes.expected == 1024 * 131_072


def test_an_activation_that_nobody_measured_is_assumed() -> None:
    measured, assumed = (
        lines(plan(facts(shape, format=WeightFormat.SAFETENSORS), GenericRequest(), CARD))["activations"]
        for shape in (LLAMA, geometry("gpt-oss-20b"))
    )
    assert (measured.source.value, assumed.source.value) == ("MEASURED", "ASSUMED")
    assert measured.bytes.high < assumed.bytes.high
    few = plan(facts(LLAMA, format=WeightFormat.SAFETENSORS), GenericRequest(micro_batch_tokens=2048), CARD)
    assert lines(few)["activations"].bytes.expected == measured.bytes.expected // 4


def test_one_model_costs_the_same_by_mlxs_law_as_by_its_engine() -> None:
    model = facts(geometry("Qwen3-0.6B"), GIB, WeightFormat.SAFETENSORS)
    asked = GenericRequest(context_tokens=8192, slots=2, law="mlx", kv_type="8", micro_batch_tokens=512)
    by_law = plan(model, asked, UNIFIED)
    engines = MlxRequest(context_tokens=8192, slots=2, kv_bits=8, prefill_step_tokens=512)
    by_engine = mlx_plan(model, engines, compute_device(UNIFIED))
    assert by_law.requirement == by_engine.requirement
    assert by_law.engine is Engine.GENERIC


def test_models_that_mlxs_family_does_not_plan_are_priced_by_the_law_alone() -> None:
    found = geometry_from_config({"model_type": "gemma3n", "text_config": {}, "torch_dtype": "bfloat16"})
    model = facts(found, 8 * GIB, WeightFormat.SAFETENSORS)
    made = lines(plan(model, GenericRequest(context_tokens=16_384, law="mlx"), UNIFIED))
    row = 2 * 2 * 256 * 2
    assert made["kv_cache"].bytes.expected == 4 * 16_384 * row
    assert made["kv_window"].bytes.expected == 16 * 512 * row
    assert made["window_growth"].bytes.expected == 16 * (511 + 2048 - 512) * row
    assert made["prompt_embeddings"].bytes.expected == 16_384 * 2048 * 2


@pytest.mark.parametrize(
    ("format", "capacity", "law"),
    [
        (WeightFormat.GGUF, CARD, KvLaw.LLAMA_CPP),
        (WeightFormat.GGUF, UNIFIED, KvLaw.LLAMA_CPP),
        (WeightFormat.SAFETENSORS, UNIFIED, KvLaw.MLX),
        (WeightFormat.SAFETENSORS, CARD, KvLaw.VLLM),
        (WeightFormat.SAFETENSORS, HOST, KvLaw.VLLM),
    ],
)
def test_the_default_law_is_that_of_whoever_loads_such_files(
    format: WeightFormat, capacity: Capacity, law: KvLaw
) -> None:
    made = plan(facts(LLAMA, format=format), GenericRequest(), capacity)
    assert made.shape.law is law  # type: ignore[attr-defined]
    assert next(note for note in made.notes if note.code == "PRICED_ONLY").metadata == {"law": law.value}


def h100(share: float = 0.95) -> Capacity:
    """79.19 GiB of physical memory, of which the ledger lets 95 % be filled."""
    physical = round(79.19 * GIB)
    ceiling = Ceiling(round(share * physical), round(share * physical))
    host = Ceiling(256 * GIB, 256 * GIB)
    both = Ceiling(host.effective + ceiling.effective, host.effective + ceiling.effective)
    return Capacity(Pool.DISCRETE, host, both, (DeviceCeiling("gpu0", ceiling, total=physical),))


def test_g7_vllms_share_is_one_of_the_cards_physical_memory() -> None:
    """llm-d-planner 205: 14.99 + 1.89 + 0.25 + 58.11 = 75.24 GiB, 0.95 of 79.19."""
    model = facts(LLAMA, round(14.99 * GIB), WeightFormat.SAFETENSORS)
    made = plan(model, GenericRequest(context_tokens=8192, device_share=0.95), h100())
    assert made.requirement.device.expected == int(round(79.19 * GIB) * 0.95)
    pool = next(note for note in made.notes if note.code == "POOL")
    # Of Llama's activations the middle of what was measured is expected, 1.37 GiB; of the run above it was 1.89.
    assert int(pool.metadata["pool_bytes"]) / GIB == pytest.approx(58.11 + 1.89 - 1.37, abs=0.02)


def test_an_engine_within_its_own_share_fills_no_more_than_that() -> None:
    model = facts(LLAMA, round(14.99 * GIB), WeightFormat.SAFETENSORS)
    made = plan(model, GenericRequest(context_tokens=8192, device_share=0.95), h100())
    assert judge(made.requirement, h100()).verdict is Verdict.RUNS
    # The ledger lets less be filled than vLLM would take.
    assert judge(made.requirement, h100(0.9)).verdict is Verdict.TIGHT


def test_a_share_that_is_too_small_is_no_runs_and_bounds_the_context() -> None:
    """vLLM does not start then, however much of the card is free."""
    model, capacity = Model(facts(LLAMA, 16 * GIB, WeightFormat.SAFETENSORS)), machine(64 * GIB, 80 * GIB)
    asked = GenericRequest(context_tokens=8192, device_share=0.2)
    made = answer(GenericChatFamily(), model, asked, capacity)
    assert (made.assessment.verdict, made.assessment.reason_code) == (Verdict.TIGHT, "EXCEEDS_OWN_BUDGET")
    assert "20% of the card that vLLM is told to take are 16.00 GiB" in made.assessment.reason
    # 16 GiB of weights, at most 1.97 of activations and 0.75 of CUDA's own leave 5.28 GiB of 24 at 128 KiB a token.
    asked = replace(asked, device_share=0.3)
    largest = solve_context(GenericChatFamily(), model, asked, capacity)
    assert largest == pytest.approx((24 - 16 - 1.97 - 0.75) * GIB / 131_072, abs=256)
    larger = answer(GenericChatFamily(), model, replace(asked, context_tokens=largest + 256), capacity)
    assert larger.assessment.verdict is Verdict.TIGHT

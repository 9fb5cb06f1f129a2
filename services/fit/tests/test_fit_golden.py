"""Golden vectors: closed forms that reproduce a published measurement, each by the number it was published with.

G1 to G7 and G9 are here, with the table of KV formulas; G10 is in the tests of diffusers trees, G11 in those of GENERIC
plans, G8 is a law of images and G12 one of probes. Users' reports are in test_fit_golden_reports.
"""

from typing import Any

import pytest
from fit_shapes import GEMMA3N_GGUF, GIB, MIB, QWEN35_GGUF, caches_by_formula, from_gguf, geometry, gib
from weighbridge_fit.geometry import LayerKind
from weighbridge_fit.laws import kv, kv_llama_cpp, kv_vllm, prefill
from weighbridge_fit.laws.kv import KvLaw
from weighbridge_fit.laws.kv_types import VLLM_TYPES
from weighbridge_fit.model_config import geometry_from_config

TABLE = [
    ("Llama-3.1-8B", 16.00),
    ("Llama-3.1-70B", 40.00),
    ("Qwen3-0.6B", 14.00),
    ("Qwen3-32B", 32.00),
    ("Gemma-3-27B", 10.41),
    ("gpt-oss-20b", 3.00),
    ("Qwen3.6-27B", 8.00),
    ("LFM2-1.2B", 1.50),
    ("DeepSeek-V3.1", 8.58),
]


@pytest.mark.parametrize(("name", "published"), TABLE)
def test_table_0_1_keys_and_values_at_131072_tokens(name: str, published: float) -> None:
    assert gib(caches_by_formula(name, 131_072)) == pytest.approx(published, abs=0.005)


def test_table_0_1_a_hybrids_state_comes_once_for_each_sequence() -> None:
    one, two = (kv.cache_bytes(geometry("Qwen3.6-27B"), KvLaw.LLAMA_CPP, 131_072 // n, n) for n in (1, 2))
    assert gib(one.state) == pytest.approx(0.15, abs=0.005)
    assert (two.growing, two.state) == (one.growing, 2 * one.state)


UNSLOTH_4757 = [
    ("Gemma-3-27B", 131_072, 10.41),
    ("Qwen3.6-27B", 262_144, 16.00),
    ("DeepSeek-V3.1", 163_840, 10.72),
    ("Kimi-K2.5", 262_144, 17.16),
    ("Qwen3-0.6B", 40_960, 4.38),
]


@pytest.mark.parametrize(("name", "tokens", "published"), UNSLOTH_4757)
def test_unsloth_4757_and_g1(name: str, tokens: int, published: float) -> None:
    assert gib(caches_by_formula(name, tokens)) == pytest.approx(published, abs=0.0051)


def test_unsloth_4757_glm_5_counts_its_draft_heads_layer() -> None:
    found = geometry("GLM-5")
    assert (len(found.layers), found.draft_layers, found.indexer_key_size) == (78, 1, 128)
    row = found.latent_rank + found.latent_rope_size
    assert gib((78 + 1) * row * 2 * 202_752) == pytest.approx(17.18, abs=0.006)
    # Without the draft head, and without the indexer's keys, which that figure leaves out.
    held = kv.cache_bytes(found, KvLaw.LLAMA_CPP, 202_752)
    assert held.latent == 78 * (row + 128) * 2 * 202_752


def test_g1_to_the_byte() -> None:
    assert gib(caches_by_formula("Gemma-3-27B", 131_072)) == pytest.approx(10.406, abs=0.0005)
    assert gib(caches_by_formula("DeepSeek-V3.1", 163_840)) == pytest.approx(10.723, abs=0.0005)
    assert caches_by_formula("Qwen3-0.6B", 40_960) == 4.375 * GIB


@pytest.mark.parametrize("made", [lambda: geometry("Qwen3.6-27B"), lambda: from_gguf(QWEN35_GGUF)])
def test_g2_g3_lmstudio_1862_gguf_parser_28_only_full_layers_of_a_hybrid_grow(made: Any) -> None:
    found = made()
    # n_ctx 262,144 for four sequences together, as logged.
    four = kv.cache_bytes(found, KvLaw.LLAMA_CPP, 65_536, sequences=4)
    assert four.growing == 16_384 * MIB
    assert four.state / MIB == pytest.approx(598.50)
    assert kv.cache_bytes(found, KvLaw.LLAMA_CPP, 1024, sequences=3).state / MIB == pytest.approx(448.88, abs=0.006)
    one = kv.cache_bytes(found, KvLaw.LLAMA_CPP, 1024)
    # S 144.0 and R 5.625 MiB
    assert one.state == 149.625 * MIB


@pytest.mark.parametrize(("sequences", "micro_batch"), [(1, 2048), (4, 512)])
def test_g4_g5_gemma3n_shares_caches_and_its_windows_are_rounded_up(sequences: int, micro_batch: int) -> None:
    found = from_gguf(GEMMA3N_GGUF)
    kinds = [found.count(kind) for kind in (LayerKind.SLIDING_ATTENTION, LayerKind.FULL_ATTENTION, LayerKind.SHARED)]
    assert kinds == [16, 4, 15]
    assert kv_llama_cpp.window_cells(512, 4096, sequences, micro_batch) == 2560
    held = kv.cache_bytes(found, KvLaw.LLAMA_CPP, 4096 // sequences, sequences, micro_batch=micro_batch)
    assert held.windowed / MIB == 80.00
    assert held.growing / MIB == 32.00


def test_g5_the_same_model_from_its_config() -> None:
    found = geometry_from_config({"model_type": "gemma3n", "text_config": {"num_kv_shared_layers": 15}})
    assert found is not None
    assert kv.cache_bytes(found, KvLaw.LLAMA_CPP, 4096, micro_batch=2048).total == 112 * MIB


def test_g4_llama_cpp_27680_deepseek_v4_keeps_keys_alone_in_its_window() -> None:
    metadata = {
        "general.architecture": "deepseek4",
        "deepseek4.block_count": 43,
        "deepseek4.embedding_length": 4096,
        "deepseek4.attention.head_count": 64,
        "deepseek4.attention.head_count_kv": 1,
        "deepseek4.attention.key_length": 512,
        "deepseek4.attention.sliding_window": 128,
    }
    config = {"model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64}
    for found in (from_gguf(metadata), geometry_from_config(config)):
        assert found is not None
        assert kv_llama_cpp.window_cells(128, 64_000, 1, 4096) == 4352
        assert kv.cache_bytes(found, KvLaw.LLAMA_CPP, 64_000, micro_batch=4096).windowed == 182.75 * MIB


def test_g6_hf_mem_60_vllm_charges_every_layer_for_the_whole_context() -> None:
    found = geometry("gpt-oss-120b")
    per_token = sum(kv.layer_bytes_per_token(found, index) for index in range(36))
    assert per_token == 73_728
    pool = 78_384 * 73_728
    assert gib(pool) == pytest.approx(5.38, abs=0.005)
    assert kv_vllm.pool_tokens(pool, per_token) == 78_384
    assert kv_vllm.pool_tokens(pool - 1, per_token) == 78_384 - 16


def test_g6_hf_mem_pr_70_one_model_two_engines() -> None:
    found = geometry("gpt-oss-20b")
    assert gib(kv.cache_bytes(found, KvLaw.VLLM, 8192, sequences=32).total) == 12.00
    assert gib(32 * caches_by_formula("gpt-oss-20b", 8192)) == pytest.approx(6.09, abs=0.005)


@pytest.mark.parametrize(
    ("name", "kind", "pool_gib", "tokens"),
    [
        ("Llama-3.1-8B", None, 58.11, 476_016),
        ("Qwen2.5-7B", None, 58.53, 1_096_000),
        ("Qwen2.5-7B", "fp8", 58.53, 2_192_000),
    ],
)
def test_llm_d_planner_205_tokens_of_a_pool(name: str, kind: str | None, pool_gib: float, tokens: int) -> None:
    found, stored = geometry(name), VLLM_TYPES[kind] if kind else None
    per_token = sum(kv.layer_bytes_per_token(found, index, stored) for index in range(len(found.layers)))
    pool = tokens * per_token
    assert gib(pool) == pytest.approx(pool_gib, abs=0.005)
    assert kv_vllm.pool_tokens(pool, per_token) == tokens


@pytest.mark.parametrize(
    ("weights", "activation", "other", "pool"), [(14.99, 1.89, 0.25, 58.11), (14.25, 2.21, 0.24, 58.53)]
)
def test_g7_llm_d_planner_194_the_budget_of_a_card_adds_up(
    weights: float, activation: float, other: float, pool: float
) -> None:
    parts = [int(part * GIB) for part in (weights, activation, other)]
    # 79.19 GiB is what an H100 of 80 GB has.
    left = kv_vllm.pool_bytes(int(79.19 * GIB), 0.95, *parts)
    assert gib(left) == pytest.approx(pool, abs=0.011)


M5_MAX_8K, M5_MAX = 21.7, {32: 23.8, 64: 26.7, 100: 29.8, 130: 32.5, 160: 35.2, 176: 36.5, 192: 38.0}


def slope(name: str) -> int:
    """Bytes of one more token of context while a prompt is read in chunks of 2,048."""
    found = geometry(name)
    growing = sum(kv.layer_bytes_per_token(found, index) for index in range(len(found.layers)))
    return growing + prefill.mlx_embedding_bytes(found, 1) + prefill.mlx_score_bytes(found, 2048, 1)


@pytest.mark.parametrize(("thousand", "within"), [(1000, 0.01), (1024, 0.02)])
def test_g9_mlx_lm_1480_peaks_of_long_prompts(thousand: int, within: float) -> None:
    assert slope("Qwen3.6-35B-A3B") == 20_480 + 4_096 + 65_536
    for thousands, measured in M5_MAX.items():
        predicted = M5_MAX_8K + (thousands - 8) * thousand * slope("Qwen3.6-35B-A3B") / 1e9
        assert predicted == pytest.approx(measured, rel=within)


def test_g9_the_peak_that_lm_studio_logged() -> None:
    assert slope("Qwen3.6-27B") == 65_536 + 10_240 + 98_304
    assert 14.95 + gib(208_384 * slope("Qwen3.6-27B")) == pytest.approx(48.73, abs=0.005)
    assert 14.95 + gib(208_384 * slope("Qwen3.6-27B")) == pytest.approx(48.88, rel=0.004)

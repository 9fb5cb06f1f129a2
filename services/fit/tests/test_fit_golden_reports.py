"""Users' reports of wrong estimates that a header and a formula decide, by issue and with the number published there.

Rows that a header and a formula cannot decide, and why:

- lmstudio#1631 (11.5 GB for qwen3.5-9b at 110k), llmfit#203 (8.5 GB for Qwen3.5-9B Q8_0 at 8k), gpustack#2101 (about
  32 GB for gemma3-27b at 85k): totals of processes whose file, its size or its settings were not published.
- ollama#10128 (6,097 + 5,419 MiB): two cards of an old build with its own split; that q8_0 takes 17/32 of f16 is
  tested.
- ollama#10737, #10911: no measurement was published, only that the estimate was too large; that it fits is tested.
- ollama#10765 (2.6 GiB), #1906 (23,697 MiB): the model is not named.
- gpustack#2412 (926 MiB), #2443 (4,158 MiB), #2614: process sizes of unnamed files; that encoders have no cache is
  tested.
- lilbee#762 (1,562 MiB for rwkv7-1.5b): the file's quantisation is not named; its state is tested.
- Worked heuristics without geometry (clamp(weights x 5e-6) and the like) are another product's, not this one's.
"""

import pytest
from fit_shapes import GEMMA4_12B_GGUF, GIB, KIB, LFM2_GGUF, MIB, caches_by_formula, from_gguf, geometry, gib
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws import kv, prefill
from weighbridge_fit.laws.kv import KvLaw
from weighbridge_fit.laws.kv_layers import keeps_nothing
from weighbridge_fit.laws.kv_types import LLAMA_CPP_TYPES
from weighbridge_fit.model_config import geometry_from_config


def test_gguf_parser_31_and_35_an_array_of_heads_is_read_whole() -> None:
    found = from_gguf(LFM2_GGUF)
    assert (found.count(LayerKind.FULL_ATTENTION), found.count(LayerKind.SHORT_CONVOLUTION)) == (6, 10)
    at_4k, at_32k = (kv.cache_bytes(found, KvLaw.LLAMA_CPP, tokens) for tokens in (4096, 32_768))
    assert at_32k.growing == 8 * at_4k.growing == 12 * KIB * 32_768
    assert kv.cache_bytes(found, KvLaw.LLAMA_CPP, 131_072).growing == 1.5 * GIB


def test_lilbee_762_rwkv7_keeps_a_small_state_and_nothing_that_grows() -> None:
    metadata = {
        "general.architecture": "rwkv7",
        "rwkv7.block_count": 24,
        "rwkv7.embedding_length": 2048,
        "rwkv7.wkv.head_size": 64,
    }
    held = kv.cache_bytes(from_gguf(metadata), KvLaw.LLAMA_CPP, 32_768)
    assert held.total == held.state == 24 * (2048 * 64 + 2 * 2048) * 4


def test_ollama_10128_quantised_keys_and_values_take_17_thirtyseconds() -> None:
    found = geometry("Qwen2.5-7B")
    full, small = (
        kv.cache_bytes(found, KvLaw.LLAMA_CPP, 262_144, 1, LLAMA_CPP_TYPES[kind]) for kind in ("f16", "q8_0")
    )
    assert (full.total, small.total) == (14_336 * MIB, 7_616 * MIB)


def test_mlxcel_172_windows_of_gemma3_1b() -> None:
    assert caches_by_formula("gemma3-1b", 32_768) == 139 * MIB
    assert sum(kv.layer_bytes_per_token(geometry("gemma3-1b"), 0) for _ in range(26)) * 32_768 == 832 * MIB
    # mlx-lm rotates its windows, so that it holds exactly that.
    assert kv.cache_bytes(geometry("gemma3-1b"), KvLaw.MLX, 32_768).total == 139 * MIB


def test_llama_toolchest_58_heads_and_widths_of_each_layer() -> None:
    held = kv.cache_bytes(from_gguf(GEMMA4_12B_GGUF), KvLaw.LLAMA_CPP, 131_072, 1, LLAMA_CPP_TYPES["q8_0"])
    assert held.growing == 8 * 131_072 * 2 * 512 // 32 * 34
    assert held.windowed == 40 * (1024 + 512) * 2 * 8 * 256 // 32 * 34
    # The estimate was 58 GB for a model that runs in 24: beside 12 GB of weights there is room for this.
    assert gib(held.total) < 1.5


@pytest.mark.parametrize("blocks", [65, 88, 1024])
def test_ods_5508_arrays_longer_than_64_layers(blocks: int) -> None:
    """Nemotron 3 Super: 88 layers, 8 of them attention with two heads of 128."""
    attention = {round((place + 1) * blocks / 9) for place in range(8)}
    heads = [2 if index in attention else 0 for index in range(blocks)]
    forward = [1856 if index % 2 and index not in attention else 0 for index in range(blocks)]
    metadata = {
        "general.architecture": "nemotron_h_moe",
        "nemotron_h_moe.block_count": blocks,
        "nemotron_h_moe.embedding_length": 4096,
        "nemotron_h_moe.attention.head_count": [32 if kv_heads else 0 for kv_heads in heads],
        "nemotron_h_moe.attention.head_count_kv": heads,
        "nemotron_h_moe.attention.key_length": 128,
        "nemotron_h_moe.feed_forward_length": forward,
        "nemotron_h_moe.ssm.conv_kernel": 4,
        "nemotron_h_moe.ssm.inner_size": 8192,
        "nemotron_h_moe.ssm.state_size": 128,
        "nemotron_h_moe.ssm.group_count": 8,
    }
    found = from_gguf(metadata)
    assert found.count(LayerKind.FULL_ATTENTION) == 8
    assert kv.cache_bytes(found, KvLaw.LLAMA_CPP, 32_768).growing == 0.25 * GIB


@pytest.mark.parametrize("name", ["bert", "nomic-bert", "modern-bert"])
def test_gpustack_2412_2443_2614_encoders_have_no_cache(name: str) -> None:
    metadata = {f"{name}.block_count": 24, f"{name}.embedding_length": 1024, f"{name}.attention.head_count": 16}
    found = from_gguf({"general.architecture": name, **metadata})
    assert keeps_nothing(found)
    for law in KvLaw:
        assert kv.cache_bytes(found, law, 8192, sequences=16).total == 0


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "nomic_bert", "modernbert"])
def test_the_same_from_configs(name: str) -> None:
    config = {"model_type": name, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    found = geometry_from_config(config)
    assert found is not None
    assert keeps_nothing(found)


# llama.cpp's own log lines: model, vocabulary, hidden size, compute buffer in MiB.
COMPUTE_BUFFERS = [
    ("Llama 3 8B", 128_256, 4096, 258.50),
    ("Qwen2.5 7B", 152_064, 3584, 304.00),
    ("GLM-4 9B", 151_552, 4096, 304.00),
]


@pytest.mark.parametrize(("name", "vocabulary", "hidden", "logged"), COMPUTE_BUFFERS)
def test_compute_buffers_as_llama_cpp_logs_them(name: str, vocabulary: int, hidden: int, logged: float) -> None:
    found = ModelGeometry("llama", hidden_size=hidden, vocab_size=vocabulary)
    assert prefill.llama_cpp_compute_bytes(found, 512) == logged * MIB


@pytest.mark.parametrize(
    ("hidden", "cells", "logged"), [(4096, 512, 9.01), (4096, 2048, 12.01), (3584, 4096, 15.01), (4096, 32_768, 72.01)]
)
def test_host_buffers_as_llama_cpp_logs_them(hidden: int, cells: int, logged: float) -> None:
    found = ModelGeometry("llama", hidden_size=hidden)
    assert prefill.llama_cpp_host_compute_bytes(found, 512, cells) / MIB == pytest.approx(logged, abs=0.011)

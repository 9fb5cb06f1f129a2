"""The law of caches: how it rounds, what engines make of each kind of layer, and what must hold for every shape."""

from dataclasses import replace
from typing import Any

import pytest
from fit_shapes import CONFIGS, MIB, dense, geometry
from hypothesis import given, settings
from hypothesis import strategies as st
from weighbridge_fit.geometry import LayerKind, LayerMeasure, ModelGeometry
from weighbridge_fit.laws import kv, kv_llama_cpp, kv_mlx, kv_vllm
from weighbridge_fit.laws.kv import KvLaw
from weighbridge_fit.laws.kv_layers import layer_row
from weighbridge_fit.laws.kv_sum import CacheBytes
from weighbridge_fit.laws.kv_types import LLAMA_CPP_TYPES, VLLM_TYPES, mlx_quantised, plain
from weighbridge_fit.model_config import geometry_from_config

FULL, SLIDING = LayerKind.FULL_ATTENTION, LayerKind.SLIDING_ATTENTION
# One row of keys and values: 2 x 2 heads x 64 x 2 bytes = 512 bytes for each token and layer.
PLAIN = ModelGeometry(
    "llama", hidden_size=256, attention_heads=4, kv_heads=2, head_size=64, layers=(FULL,) * 4, activation_bytes=2
)
WINDOWS = replace(PLAIN, layers=(SLIDING, SLIDING, SLIDING, FULL), sliding_window_tokens=1024)


@pytest.mark.parametrize(("tokens", "cells"), [(1, 256), (256, 256), (257, 512), (4000, 4096)])
def test_llama_cpp_rounds_cells_up_for_all_sequences_together(tokens: int, cells: int) -> None:
    assert kv.cache_bytes(PLAIN, KvLaw.LLAMA_CPP, tokens).growing == 4 * 512 * cells
    # 3 x 100 tokens are 300 cells, and not three times 256.
    assert kv.cache_bytes(PLAIN, KvLaw.LLAMA_CPP, 100, sequences=3).growing == 4 * 512 * 512


@pytest.mark.parametrize(
    ("context", "sequences", "micro_batch", "cells"),
    [
        (32_768, 1, 512, 1536),
        (32_768, 4, 512, 4608),
        (32_768, 1, 2048, 3072),
        (1000, 1, 512, 1024),
        (100, 1, 512, 256),
    ],
)
def test_llama_cpp_windows_are_a_batch_longer_and_never_longer_than_the_context(
    context: int, sequences: int, micro_batch: int, cells: int
) -> None:
    held = kv.cache_bytes(WINDOWS, KvLaw.LLAMA_CPP, context, sequences, micro_batch=micro_batch)
    assert held.windowed == 3 * 512 * cells


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (8192, 512)])
def test_vllm_takes_blocks_of_16_tokens_for_every_layer(tokens: int, blocks: int) -> None:
    held = kv.cache_bytes(WINDOWS, KvLaw.VLLM, tokens, sequences=2)
    assert (held.growing, held.windowed) == (2 * 512 * 16 * blocks, 2 * 3 * 512 * 16 * blocks)


NEMOTRON_NANO_9B = dense(56, 40, 8, 128, 4480, model_type="nemotron_h", hybrid_override_pattern="M-M*" * 14) | {
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_groups": 8,
}


@pytest.mark.parametrize(
    ("config", "block", "padding_percent"),
    [
        # As logged: attention blocks in tokens, and by how much a state's page is padded.
        (CONFIGS["Qwen3.6-27B"], 784, 0.13),
        (CONFIGS["Qwen3.6-35B-A3B"], 1056, 0.76),
        (NEMOTRON_NANO_9B, 672, None),
    ],
)
def test_vllm_blocks_are_as_long_as_it_logs_them(
    config: dict[str, Any], block: int, padding_percent: float | None
) -> None:
    found = geometry_from_config(config)
    assert found is not None
    assert kv_vllm.block_tokens(found, plain(2)) == block
    if padding_percent is not None:
        heads = found.delta_value_heads
        state = heads * 128 * 128 * 4 + 3 * (2 * 16 + heads) * 128 * 2
        page = block * 2 * found.kv_heads * 256 * 2
        assert 100 * (page - state) / state == pytest.approx(padding_percent, abs=0.005)


def test_vllm_pages_hold_a_state_where_layers_keep_one() -> None:
    held = kv.cache_bytes(geometry("Qwen3.6-27B"), KvLaw.VLLM, 10_000, sequences=3)
    assert held.state == 3 * 48 * 784 * 4096
    assert held.growing == 3 * 16 * 4096 * (13 * 784)


def test_mlx_grows_in_slabs_and_rotates_windows_of_the_models_that_it_rotates() -> None:
    held = kv.cache_bytes(WINDOWS, KvLaw.MLX, 5000)
    assert (held.growing, held.windowed) == (512 * 5120, 3 * 512 * 1024)
    whole = kv.cache_bytes(replace(WINDOWS, model_type="gemma2"), KvLaw.MLX, 5000)
    assert (whole.growing, whole.windowed) == (4 * 512 * 5120, 0)
    every = kv.cache_bytes(replace(WINDOWS, layers=(SLIDING,) * 4), KvLaw.MLX, 5000)
    assert (every.growing, every.windowed) == (4 * 512 * 5120, 0)
    # Chunks that are no whole slabs: of [300, 300, 1] tokens the second is added to the 300 held, in 512 slots.
    assert kv.cache_bytes(PLAIN, KvLaw.MLX, 601, micro_batch=300).growing == 4 * 512 * 812
    # At most any chunks leave 255 slots more than there are tokens.
    assert kv_mlx.cache_bytes(PLAIN, 5000, 1, plain(2), None).growing == 4 * 512 * 5255


def test_mlx_windows_are_longer_while_a_prompt_is_read() -> None:
    # 1,023 tokens are kept when a chunk of 2,048 is appended.
    assert kv_mlx.window_growth_bytes(WINDOWS, 100_000, 2048, plain(2)) == 3 * 512 * (1023 + 2048 - 1024)
    assert kv_mlx.window_growth_bytes(PLAIN, 100_000, 2048, plain(2)) == 0


def test_layers_measures_go_before_the_geometrys() -> None:
    own = LayerMeasure(kv_heads=1, key_size=512, value_size=256, window_tokens=64)
    mixed = replace(WINDOWS, measures=(own, LayerMeasure(), LayerMeasure(key_size=32), LayerMeasure()))
    rows = [layer_row(mixed, index) for index in range(4)]
    assert [(row.key, row.value, row.window_tokens) for row in rows] == [
        (512, 256, 64),
        (128, 128, 1024),
        # A width of its own without one for values: they are the keys.
        (64, 0, 1024),
        (128, 128, 0),
    ]


def test_attention_and_a_state_in_one_layer_both_count() -> None:
    both = replace(PLAIN, measures=(LayerMeasure(state_elements=1000, convolution_elements=10),) * 4)
    held = kv.cache_bytes(both, KvLaw.LLAMA_CPP, 256, sequences=2)
    assert (held.growing, held.state) == (4 * 512 * 512, 2 * 4 * 1010 * 4)
    # mlx-lm keeps the convolution's inputs in the activation type.
    assert kv.cache_bytes(both, KvLaw.MLX, 256, sequences=2).state == 2 * 4 * (1000 * 4 + 10 * 2)


def test_latent_rows_are_keys_alone_and_indexers_differ_by_engine() -> None:
    found = geometry("GLM-5")
    tokens, layers = 4096, 78
    row, index = 576 * 2, 128
    assert kv.cache_bytes(found, KvLaw.LLAMA_CPP, tokens).latent == layers * tokens * (row + index * 2)
    # vLLM keeps the indexer's key in float8 with one float32 scale.
    assert kv.cache_bytes(found, KvLaw.VLLM, tokens).latent == layers * tokens * (row + index + 4)
    # mlx-lm keeps zeros beside it.
    assert kv.cache_bytes(found, KvLaw.MLX, tokens).latent == layers * tokens * (row + 2 * index * 2)
    # mlx-lm unpacks DeepSeek V2's: keys of 192 and values of 128 for each of 128 heads.
    unpacked = replace(geometry("DeepSeek-V3.1"), model_type="deepseek_v2")
    held = kv.cache_bytes(unpacked, KvLaw.MLX, tokens)
    assert (held.latent, held.growing) == (0, 61 * tokens * 128 * (192 + 128) * 2)


def test_a_transcriber_holds_the_encoders_frames_from_the_start() -> None:
    config = {"model_type": "whisper", "d_model": 1280, "decoder_layers": 32, "decoder_attention_heads": 20}
    found = geometry_from_config(config)
    assert found is not None
    short, long = (kv.cache_bytes(found, KvLaw.VLLM, tokens, sequences=2) for tokens in (16, 448))
    assert short.state == long.state == 2 * 32 * 1500 * 2 * 1280 * 2
    assert long.growing == 28 * short.growing == 2 * 32 * 448 * 2 * 1280 * 2


@pytest.mark.parametrize(
    ("kind", "elements", "expected"),
    [
        (LLAMA_CPP_TYPES["f16"], 1024, 2048),
        (LLAMA_CPP_TYPES["q8_0"], 1024, 1088),
        (LLAMA_CPP_TYPES["q4_0"], 1024, 576),
        (LLAMA_CPP_TYPES["q5_1"], 1024, 768),
        (LLAMA_CPP_TYPES["q8_0"], 33, 68),
        (VLLM_TYPES["fp8"], 1024, 1024),
        # mlx-lm: b/8 + 2 a/g bytes for each element, 1.0625 and 0.5625 of them.
        (mlx_quantised(8, 64, 2), 1024, 1088),
        (mlx_quantised(4, 64, 2), 1024, 576),
    ],
)
def test_rows_are_whole_blocks(kind: kv.KvType, elements: int, expected: int) -> None:
    assert kind.row_bytes(elements) == expected


def test_llama_cpp_types_are_ggmls() -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    for name, kind in LLAMA_CPP_TYPES.items():
        assert (kind.block_elements, kind.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]


SHAPES = [*(geometry(name) for name in CONFIGS), PLAIN, WINDOWS]
shapes = st.sampled_from(SHAPES)
laws = st.sampled_from(list(KvLaw))
contexts = st.integers(1, 300_000)
counts = st.integers(1, 64)
batches = st.sampled_from([0, 64, 256, 512, 1000, 2048, 8192])


def parts(held: CacheBytes) -> tuple[int, ...]:
    return held.growing, held.windowed, held.latent, held.state


@settings(max_examples=150, deadline=None)
@given(shapes, laws, contexts, st.integers(0, 5000), counts, batches)
def test_a_longer_context_or_more_sequences_never_take_less(
    found: ModelGeometry, law: KvLaw, context: int, more: int, sequences: int, batch: int
) -> None:
    base = kv.cache_bytes(found, law, context, sequences, micro_batch=batch)
    longer = kv.cache_bytes(found, law, context + more, sequences, micro_batch=batch)
    wider = kv.cache_bytes(found, law, context, sequences + 1, micro_batch=batch)
    for bigger in (longer, wider):
        assert all(large >= small for large, small in zip(parts(bigger), parts(base), strict=True))
    assert base.total == sum(parts(base))


@settings(max_examples=100, deadline=None)
@given(shapes, laws, contexts, counts)
def test_a_window_never_takes_more_than_the_whole_context(
    found: ModelGeometry, law: KvLaw, context: int, sequences: int
) -> None:
    whole = replace(found, layers=tuple(FULL if kind is SLIDING else kind for kind in found.layers))
    held = kv.cache_bytes(found, law, context, sequences).total
    most = kv.cache_bytes(whole, law, context, sequences).total
    if law is KvLaw.MLX:
        # A window that is not full yet grows by 256 slots beyond whatever a chunk left, and not to whole slabs.
        row = max(kv.layer_bytes_per_token(found, index) for index in range(len(found.layers)))
        most += sequences * found.count(SLIDING) * 255 * row
    assert held <= most


@settings(max_examples=100, deadline=None)
@given(shapes, st.sampled_from(["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]), contexts, counts)
def test_quantised_never_takes_more_than_unquantised(
    found: ModelGeometry, kind: str, context: int, sequences: int
) -> None:
    full = kv.cache_bytes(found, KvLaw.LLAMA_CPP, context, sequences, LLAMA_CPP_TYPES["f16"])
    small = kv.cache_bytes(found, KvLaw.LLAMA_CPP, context, sequences, LLAMA_CPP_TYPES[kind])
    assert all(less <= more for less, more in zip(parts(small), parts(full), strict=True))
    assert small.state == full.state


@settings(max_examples=60, deadline=None)
@given(shapes, contexts)
def test_the_sum_of_layers_is_the_model(found: ModelGeometry, context: int) -> None:
    """Every layer alone, added up, is the model: for llama.cpp, whose layers do not depend on each other."""
    alone = CacheBytes()
    for index in range(len(found.layers)):
        measures = found.measures[index : index + 1]
        alone += kv.cache_bytes(
            replace(found, layers=found.layers[index : index + 1], measures=measures), KvLaw.LLAMA_CPP, context
        )
    assert alone == kv.cache_bytes(found, KvLaw.LLAMA_CPP, context)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 1 << 40), st.integers(1, 1 << 20))
def test_a_pool_holds_what_it_says_and_not_a_block_more(pool: int, per_token: int) -> None:
    tokens = kv_vllm.pool_tokens(pool, per_token)
    assert tokens % 16 == 0
    assert tokens * per_token <= pool < (tokens + 16) * per_token


def test_one_law_for_every_engine_says_what_the_engines_own_module_says() -> None:
    assert kv.cache_bytes(PLAIN, KvLaw.LLAMA_CPP, 1024).growing == 4 * 512 * kv_llama_cpp.full_cells(1024, 1) == 2 * MIB

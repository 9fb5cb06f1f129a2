"""Geometry of every architecture: as the libraries that run it see it, from configs and from GGUF headers; and nothing
but a sentence or None for what cannot be read."""

from typing import Any

import pytest
from fit_shapes import CONFIGS, GEMMA4_12B_GGUF, dense, from_gguf, geometry
from hypothesis import given, settings
from hypothesis import strategies as st
from weighbridge_fit.config.architectures import ARCHITECTURES
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.geometry import LayerKind, LayerMeasure
from weighbridge_fit.gguf.architecture import geometry_from_metadata
from weighbridge_fit.gguf.layers import READERS
from weighbridge_fit.model_config import geometry_from_config

transformers = pytest.importorskip("transformers")

# What transformers calls kinds of layers, and what they remember.
THEIR_KINDS = {
    "full_attention": {LayerKind.FULL_ATTENTION},
    "sliding_attention": {LayerKind.SLIDING_ATTENTION},
    "chunked_attention": {LayerKind.SLIDING_ATTENTION},
    "indexed_attention": {LayerKind.LATENT_ATTENTION},
    "linear_attention": {LayerKind.STATE_SPACE, LayerKind.GATED_DELTA},
    "conv": {LayerKind.SHORT_CONVOLUTION},
    "hybrid": {LayerKind.FULL_ATTENTION},
    "moe": {LayerKind.MEMORYLESS},
    "mlp": {LayerKind.MEMORYLESS},
    "heavily_compressed_attention": {LayerKind.SLIDING_ATTENTION},
    "compressed_sparse_attention": {LayerKind.SLIDING_ATTENTION},
}
# Their classes' defaults do not say what these need; published configs do.
UNSAID = {"bamba", "kimi_linear", "lfm2_moe", "mimo_v2_flash"}
# transformers attends in these as an encoder does, layer kinds or not.
ENCODERS = {"modernbert"}
KNOWN = sorted(name for name in ARCHITECTURES if name in transformers.CONFIG_MAPPING)


@pytest.mark.parametrize("name", KNOWN)
def test_layers_are_those_of_transformers_own_class(name: str) -> None:
    theirs = transformers.CONFIG_MAPPING[name]()
    config = theirs.to_dict()
    found = geometry_from_config({**config, "model_type": name})
    if name in UNSAID:
        assert found is None
        return
    assert found is not None
    section = config.get("text_config") or config
    if name != "whisper":
        assert len(found.layers) == getattr(theirs, "text_config", theirs).num_hidden_layers
    named = section.get("layer_types")
    # Shared layers have a kind of attention too, and another's keys.
    shared = section.get("num_kv_shared_layers") or 0
    if named and name not in ENCODERS:
        for kind, label in zip(found.layers[: len(named) - shared], named, strict=False):
            assert kind in THEIR_KINDS[label]
        assert found.count(LayerKind.SHARED) == shared
    if section.get("sliding_window") and LayerKind.SLIDING_ATTENTION in found.layers:
        assert found.sliding_window_tokens == section["sliding_window"]


def test_more_than_a_hundred_architectures_are_read() -> None:
    assert len(ARCHITECTURES) >= 100
    assert len(READERS) >= 100


def test_a_models_text_section_goes_before_the_model() -> None:
    """Gemma 3 4B leaves out heads and widths; Mistral Small is a Mistral within; Kimi K2.5 a DeepSeek within."""
    gemma = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    found = geometry_from_config({"model_type": "gemma3", "text_config": gemma})
    assert found is not None
    assert (found.attention_heads, found.kv_heads, found.head_size, found.vocab_size) == (8, 4, 256, 262_208)
    assert found.count(LayerKind.FULL_ATTENTION) == 5
    inner = dense(40, 32, 8, 128, 5120, model_type="mistral")
    found = geometry_from_config({"model_type": "mistral3", "text_config": inner, "vision_config": {}})
    assert found is not None
    assert (found.model_type, found.layers, found.kv_heads) == ("mistral3", (LayerKind.FULL_ATTENTION,) * 40, 8)
    assert geometry("Kimi-K2.5").latent_rank == 512


def test_gemma_4_has_wide_heads_in_full_layers_and_keeps_values_beside_keys() -> None:
    text = {
        "model_type": "gemma4_text",
        "hidden_size": 3840,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 1024,
    }
    found = geometry_from_config({"model_type": "gemma4", "text_config": text})
    assert found is not None
    assert found.measures[0] == LayerMeasure(8, 256, 256)
    assert found.measures[5] == LayerMeasure(1, 512, 512)
    # The file of the same model says the same.
    of_file = from_gguf(GEMMA4_12B_GGUF)
    assert (of_file.layers, of_file.measures) == (found.layers, found.measures)


def test_a_model_that_reads_both_ways_is_an_encoder() -> None:
    both = {**CONFIGS["gemma3-1b"], "use_bidirectional_attention": True}
    found = geometry_from_config(both)
    assert found is not None
    assert set(found.layers) == {LayerKind.MEMORYLESS}


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"model_type": "falcon", "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}, 1),
        (
            {"model_type": "falcon", "num_attention_heads": 128, "hidden_size": 8192, "new_decoder_architecture": True}
            | {"num_kv_heads": 8},
            8,
        ),
        ({"model_type": "gpt_bigcode", "n_head": 48, "n_embd": 6144}, 1),
        ({"model_type": "dbrx", "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}}, 8),
        ({"model_type": "mpt", "n_heads": 32, "d_model": 4096}, 32),
        (
            {"model_type": "chatglm", "num_attention_heads": 32, "hidden_size": 4096, "multi_query_attention": True}
            | {"multi_query_group_num": 2, "kv_channels": 128},
            2,
        ),
    ],
)
def test_key_and_value_heads_by_their_many_names(config: dict[str, Any], heads: int) -> None:
    found = geometry_from_config({**config, "num_hidden_layers": 4})
    assert found is not None
    assert found.kv_heads == heads


@pytest.mark.parametrize("pattern", ["M-*M", "MEM*"])
def test_nemotron_h_names_each_layer_by_a_letter(pattern: str) -> None:
    config = dense(4, 32, 2, 128, 4096, model_type="nemotron_h", hybrid_override_pattern=pattern) | {
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_groups": 8,
    }
    found = geometry_from_config(config)
    assert found is not None
    letters = {"M": LayerKind.STATE_SPACE, "-": LayerKind.MEMORYLESS, "E": LayerKind.MEMORYLESS}
    assert found.layers == tuple(letters.get(letter, LayerKind.FULL_ATTENTION) for letter in pattern)
    # 8,192 inner channels x 128; 3 inputs of 8,192 + 2 x 8 x 128 channels.
    assert found.measures[0] == LayerMeasure(state_elements=1_048_576, convolution_elements=3 * 10_240)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "hidden_size": 4096},
        {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128},
        {"model_type": "nemotron_h", "hidden_size": 4096, "num_attention_heads": 32},
        {"model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32},
        {"model_type": "whisper", "d_model": 1280},
        {"model_type": "warp_drive", "hidden_size": 4096, "num_hidden_layers": 32},
    ],
)
def test_what_a_config_leaves_out_is_never_guessed(config: dict[str, Any]) -> None:
    assert geometry_from_config(config) is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": 4096.0}, "hidden_size"),
        ({"num_key_value_heads": [8]}, "num_key_value_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["warp_attention"] * 32}, "layer_types"),
        ({"text_config": 7}, "text_config"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(WeightError) as caught:
        geometry_from_config({**CONFIGS["Llama-3.1-8B"], **change})
    assert caught.value.reason is WeightReason.CONFIG_INVALID
    assert field in caught.value.message


LATENT_GGUF: dict[str, Any] = {
    "general.architecture": "deepseek2",
    "deepseek2.block_count": 61,
    "deepseek2.embedding_length": 7168,
    "deepseek2.attention.head_count": 128,
    "deepseek2.attention.head_count_kv": 1,
    "deepseek2.attention.key_length": 576,
    "deepseek2.attention.value_length": 512,
    "deepseek2.attention.key_length_mla": 192,
    "deepseek2.attention.value_length_mla": 128,
    "deepseek2.attention.kv_lora_rank": 512,
    "deepseek2.rope.dimension_count": 64,
}


def test_latent_rows_of_new_files_and_unpacked_heads_of_old_ones() -> None:
    found = from_gguf(LATENT_GGUF)
    assert set(found.layers) == {LayerKind.LATENT_ATTENTION}
    assert (found.latent_rank, found.latent_rope_size, found.head_size, found.value_head_size) == (512, 64, 192, 128)
    old = {key: value for key, value in LATENT_GGUF.items() if not key.endswith("_mla")}
    old |= {"deepseek2.attention.head_count_kv": 128, "deepseek2.attention.key_length": 192}
    unpacked = from_gguf({**old, "deepseek2.attention.value_length": 128})
    assert set(unpacked.layers) == {LayerKind.FULL_ATTENTION}
    assert (unpacked.kv_heads, unpacked.head_size, unpacked.value_head_size) == (128, 192, 128)


def test_blocks_of_a_draft_head_are_no_layers_of_the_model() -> None:
    metadata = {
        "general.architecture": "glm4moe",
        "glm4moe.block_count": 47,
        "glm4moe.nextn_predict_layers": 1,
        "glm4moe.embedding_length": 4096,
        "glm4moe.attention.head_count": 96,
        "glm4moe.attention.head_count_kv": 8,
        "glm4moe.attention.key_length": 128,
    }
    found = from_gguf(metadata)
    assert (len(found.layers), found.draft_layers) == (46, 1)
    assert geometry_from_metadata({**metadata, "glm4moe.nextn_predict_layers": 47}, {}, tied=False) is None


PLAIN_GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 32,
    "llama.embedding_length": 4096,
    "llama.attention.head_count": 32,
}


@pytest.mark.parametrize("value", ["8", -1, 2.0, True, 2**40])
def test_heads_of_the_wrong_type_count_as_absent(value: Any) -> None:
    found = from_gguf({**PLAIN_GGUF, "llama.attention.head_count_kv": value})
    assert found.kv_heads == from_gguf(PLAIN_GGUF).kv_heads == 32


@pytest.mark.parametrize("value", [[8, "8"], [], [8] * 3, [2**40] * 32, [0] * 32, [[8]] * 32])
def test_an_array_of_heads_that_is_not_one_for_each_layer_is_no_geometry(value: list[Any]) -> None:
    assert geometry_from_metadata({**PLAIN_GGUF, "llama.attention.head_count_kv": value}, {}, tied=False) is None
    whole = from_gguf({**PLAIN_GGUF, "llama.attention.head_count_kv": [8] * 32})
    assert (whole.kv_heads, whole.measures) == (8, ())


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(-2, 2**40), st.text(max_size=3), st.booleans()), max_size=70),
)
KEYS = sorted(
    {
        *("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv", "attention.key_length"),
        *("attention.value_length", "attention.key_length_mla", "attention.kv_lora_rank", "rope.dimension_count"),
        *("attention.sliding_window", "attention.sliding_window_pattern", "attention.shared_kv_layers"),
        *("full_attention_interval", "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.group_count"),
        *("ssm.time_step_rank", "wkv.head_size", "token_shift_count", "shortconv.l_cache", "nextn_predict_layers"),
        *("feed_forward_length", "kda.head_dim", "attention.indexer.key_length", "attention.key_length_swa"),
    }
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(READERS)), st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=3))
def test_no_metadata_makes_anything_but_a_bounded_geometry_or_none(name: str, given_keys: dict[str, Any]) -> None:
    metadata = {"general.architecture": name, **{f"{name}.{key}": value for key, value in given_keys.items()}}
    found = geometry_from_metadata(metadata, {}, tied=False)
    if found is not None:
        assert 0 < len(found.layers) <= 4096
        assert len(found.measures) in (0, len(found.layers))
        assert all(0 <= value <= 2**124 for measure in found.measures for value in measure_sizes(measure))


FIELDS = sorted(
    {
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "layer_types"),
        *("sliding_window", "num_kv_shared_layers", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"),
        *("hybrid_override_pattern", "mamba_d_state", "mamba_expand", "mamba_n_groups", "mamba_d_conv", "conv_L_cache"),
        *("full_attn_idxs", "linear_attn_config", "attn_layer_period", "text_config", "hybrid_layer_pattern"),
        *("block_types", "global_head_dim", "attn_config", "state_size", "vocab_size", "torch_dtype"),
    }
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(ARCHITECTURES)), st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=3))
def test_no_config_makes_anything_but_a_bounded_geometry_none_or_a_sentence(name: str, config: dict[str, Any]) -> None:
    try:
        found = geometry_from_config({**config, "model_type": name})
    except WeightError as error:
        assert error.reason is WeightReason.CONFIG_INVALID
        return
    if found is not None:
        assert 0 < len(found.layers) <= 8192
        assert len(found.measures) in (0, len(found.layers))


def measure_sizes(measure: LayerMeasure) -> tuple[int, ...]:
    return (
        measure.kv_heads,
        measure.key_size,
        measure.value_size,
        measure.window_tokens,
        measure.state_elements,
        measure.convolution_elements,
    )

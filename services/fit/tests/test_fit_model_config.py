"""config.json: what mlx-lm would make of it, and a sentence for every field of the wrong type."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from weighbridge_fit.components import Component, activation_bytes, language_component
from weighbridge_fit.describe import describe
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.facts import TensorFact
from weighbridge_fit.geometry import LayerKind
from weighbridge_fit.model_config import geometry_from_config, quantization_words

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
HYBRID_TEXT: dict[str, Any] = {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "intermediate_size": 17_408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248_320,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "full_attention_interval": 4,
    "max_position_embeddings": 262_144,
}


def test_a_dense_model() -> None:
    geometry = geometry_from_config(QWEN3)
    assert geometry is not None
    assert (geometry.hidden_size, geometry.kv_heads, geometry.head_size, geometry.vocab_size) == (1024, 8, 128, 151_936)
    assert geometry.layers == (LayerKind.FULL_ATTENTION,) * 28
    assert (geometry.max_context_tokens, geometry.activation_bytes, geometry.tied_embeddings) == (40_960, 2, True)


def test_head_size_and_kv_heads_have_mlx_lms_defaults() -> None:
    config = {key: value for key, value in QWEN3.items() if key not in ("head_dim", "num_key_value_heads")}
    geometry = geometry_from_config({**config, "model_type": "qwen2"})
    assert geometry is not None
    assert (geometry.head_size, geometry.kv_heads) == (64, 16)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_5", "text_config": HYBRID_TEXT},
        {"model_type": "qwen3_5", **HYBRID_TEXT},
        {"model_type": "qwen3_5_text", **HYBRID_TEXT},
    ],
    ids=["nested", "flat", "text"],
)
def test_a_hybrid_has_every_fourth_layer_full(config: dict[str, Any]) -> None:
    geometry = geometry_from_config(config)
    assert geometry is not None
    assert geometry.count(LayerKind.FULL_ATTENTION) == 16
    assert geometry.count(LayerKind.GATED_DELTA) == 48
    assert geometry.layers[3] is LayerKind.FULL_ATTENTION
    assert (geometry.delta_key_heads, geometry.delta_value_heads, geometry.delta_conv_width) == (16, 48, 4)


def test_layer_types_name_sliding_layers() -> None:
    names = ["full_attention", "sliding_attention"] * 14
    geometry = geometry_from_config({**QWEN3, "layer_types": names, "sliding_window": 1024})
    assert geometry is not None
    assert geometry.count(LayerKind.SLIDING_ATTENTION) == 14
    assert geometry.sliding_window_tokens == 1024


def test_another_architecture_has_no_geometry() -> None:
    assert geometry_from_config({**QWEN3, "model_type": "warp_drive"}) is None
    assert geometry_from_config({}) is None
    assert geometry_from_config({"model_type": 7}) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", "28"),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", None),
        ("num_hidden_layers", True),
        ("hidden_size", 1024.0),
        ("hidden_size", -1),
        ("num_attention_heads", [16]),
        ("num_attention_heads", 0),
        ("num_key_value_heads", {}),
        ("vocab_size", 2**40),
        ("tie_word_embeddings", "yes"),
        ("layer_types", "full_attention"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["warp_attention"] * 28),
        ("text_config", 7),
        ("quantization", "4bit"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(field: str, value: Any) -> None:
    with pytest.raises(WeightError) as caught:
        geometry_from_config({**QWEN3, field: value})
    assert caught.value.reason is WeightReason.CONFIG_INVALID
    assert field in caught.value.message
    assert caught.value.file == "config.json"


def test_quantisation_in_words() -> None:
    assert quantization_words({"quantization": {"bits": 4, "group_size": 32}}) == "affine 4 bit, groups of 32"
    assert quantization_words({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}).startswith("mxfp4")
    assert quantization_words({"quantization_config": {"quant_method": "fp8"}}) == "fp8"
    assert quantization_words({}) == ""


def tensor(name: str, dtype: str) -> TensorFact:
    return TensorFact(name, dtype, (1,), 1, 1)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([tensor("w", "BF16"), tensor("q", "U32")], 2),
        ([tensor("w", "F16"), tensor("input_layernorm.weight", "F32")], 4),
        ([tensor("w", "F16"), tensor("n", "BF16")], 4),
        ([tensor("w", "BF16"), tensor("model.layers.0.linear_attn.A_log", "F32")], 2),
        ([tensor("q", "U32")], 0),
    ],
)
def test_activations_are_as_wide_as_the_weights_promote_to(tensors: list[TensorFact], expected: int) -> None:
    assert activation_bytes(tensors) == expected


@pytest.mark.parametrize(
    ("name", "tied", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", True, Component.MODEL),
        ("lm_head.weight", False, Component.MODEL),
        ("lm_head.weight", True, Component.UNUSED),
        ("mtp.layers.0.mlp.up_proj.weight", False, Component.DRAFT),
        ("language_model.mtp.fc.weight", False, Component.DRAFT),
        ("model.visual.blocks.0.attn.qkv.weight", False, Component.VISION),
        ("vision_tower.patch_embed.weight", False, Component.VISION),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True, Component.UNUSED),
    ],
)
def test_parts_that_mlx_lm_does_not_open(name: str, tied: bool, expected: Component) -> None:
    assert language_component(name, tied) is expected


def test_a_config_of_the_wrong_type_is_an_error_of_the_model(tmp_path: Path) -> None:
    save_file({"a": np.zeros((2,), np.float16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "hidden_size": "1024"}))
    with pytest.raises(WeightError) as caught:
        describe(tmp_path, lambda path: path if path.exists() else None)
    assert caught.value.reason is WeightReason.CONFIG_INVALID

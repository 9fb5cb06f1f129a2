"""config.json of a transformers or MLX folder, from plain values to geometry.

Field meanings and defaults of Qwen models are mlx-lm's (0.32), because that is what loads them here; of other models,
transformers'.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weighbridge_fit.config import recurrent
from weighbridge_fit.config.architectures import ARCHITECTURES, TEXT_SECTIONS, Architecture, base_geometry
from weighbridge_fit.config.attention import named_layers
from weighbridge_fit.config.fields import CONFIG_NAME, MAX_LAYERS, MAX_SIZE, MAX_WORD, Fields, Unsaid, word
from weighbridge_fit.geometry import LayerKind, ModelGeometry

__all__ = [
    "CONFIG_NAME",
    "GATED_DELTA_TYPES",
    "MAX_LAYERS",
    "MAX_SIZE",
    "MAX_WORD",
    "QWEN_TYPES",
    "architecture",
    "geometry_from_config",
    "quantization_words",
]

GATED_DELTA_TYPES = frozenset({"qwen3_5", "qwen3_5_text", "qwen3_5_moe"})
QWEN_TYPES = frozenset({"qwen2", "qwen3", "qwen3_moe"}) | GATED_DELTA_TYPES
"""What the MLX engine plans."""
_DELTA = GATED_DELTA_TYPES | {"qwen3_5_moe_text", "qwen3_next", "prism_hadamard_qwen35"}
_QWEN = QWEN_TYPES | _DELTA

# mlx-lm: layer i is full attention iff (i + 1) % interval == 0.
DEFAULT_FULL_ATTENTION_INTERVAL = 4
_FLOAT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def architecture(config: Mapping[str, Any]) -> str:
    """The model's own type name; "" when the config does not say."""
    return word(config.get("model_type"))


def geometry_from_config(config: Mapping[str, Any], activation_bytes: int = 0) -> ModelGeometry | None:
    """Geometry of a language model; None for an architecture that is not known or a config that leaves out what its
    caches depend on.

    `activation_bytes` as learned from the weights; 0 takes the config's dtype. Raises CONFIG_INVALID, naming the field.
    """
    model_type = architecture(config)
    if model_type in _QWEN:
        return _qwen(config, model_type, activation_bytes)
    section, name = _language_section(config)
    known = _known(section, model_type)
    if known is None:
        return None
    fields = Fields(section, name, known.defaults)
    bits, group_size = _quantization(config)
    try:
        made = known.read(fields, base_geometry(fields, model_type))
    except Unsaid:
        return None
    return replace(
        made,
        activation_bytes=_config_activation_bytes(config, fields) or activation_bytes or 2,
        quantization_bits=bits,
        quantization_group_size=group_size,
        tied_embeddings=fields.flag("tie_word_embeddings", config.get("tie_word_embeddings") is True),
    )


def _language_section(config: Mapping[str, Any]) -> tuple[Any, str]:
    """The section that describes the language model, and its name."""
    for name in TEXT_SECTIONS:
        if config.get(name) is not None:
            return config[name], name
    return config, CONFIG_NAME


def _known(section: Any, model_type: str) -> Architecture | None:
    """By the language model's own type, else by the whole model's."""
    inner = word(section.get("model_type")) if isinstance(section, Mapping) else ""
    return ARCHITECTURES.get(inner) or ARCHITECTURES.get(model_type)


def _qwen(config: Mapping[str, Any], model_type: str, activation_bytes: int) -> ModelGeometry:
    fields = Fields(config.get("text_config", config), "text_config")
    layers = _layers(model_type, fields)
    heads = fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    bits, group_size = _quantization(config)
    made = ModelGeometry(
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size", 0),
        vocab_size=fields.size("vocab_size"),
        attention_heads=heads,
        kv_heads=fields.size("num_key_value_heads", heads),
        head_size=fields.size("head_dim", hidden // heads),
        layers=layers,
        sliding_window_tokens=fields.size("sliding_window", 0) if LayerKind.SLIDING_ATTENTION in layers else 0,
        experts=fields.size("num_experts", 0),
        experts_per_token=fields.size("num_experts_per_tok", 0),
        expert_intermediate_size=fields.size("moe_intermediate_size", 0),
        max_context_tokens=fields.size("max_position_embeddings", 0),
        activation_bytes=activation_bytes or _config_activation_bytes(config, fields) or 2,
        quantization_bits=bits,
        quantization_group_size=group_size,
        tied_embeddings=fields.flag("tie_word_embeddings", model_type == "qwen2"),
        draft_layers=fields.lenient("mtp_num_hidden_layers"),
    )
    return recurrent.gated_delta(fields, made, layers) if model_type in _DELTA else made


def _layers(model_type: str, fields: Fields) -> tuple[LayerKind, ...]:
    if not fields.has("num_hidden_layers"):
        fields.size("num_hidden_layers")
    count = fields.layer_count()
    if model_type in _DELTA:
        # The interval decides in mlx-lm, whatever layer_types says.
        interval = fields.size("full_attention_interval", DEFAULT_FULL_ATTENTION_INTERVAL) or count + 1
        full, delta = LayerKind.FULL_ATTENTION, LayerKind.GATED_DELTA
        return tuple(full if (index + 1) % interval == 0 else delta for index in range(count))
    return named_layers(fields, count) or (LayerKind.FULL_ATTENTION,) * count


def _quantization(config: Mapping[str, Any]) -> tuple[int, int]:
    """Bits and group size of MLX quantisation; zeros when there is none or it is another kind's."""
    section = config.get("quantization")
    if section is None:
        return 0, 0
    fields = Fields(section, "quantization")
    return fields.size("bits", 0), fields.size("group_size", 0)


def quantization_words(config: Mapping[str, Any]) -> str:
    """Quantisation in words; "" when the config names none."""
    bits, group_size = _quantization(config)
    if bits:
        mode = word(config["quantization"].get("mode")) or "affine"
        return f"{mode} {bits} bit, groups of {group_size}"
    method = config.get("quantization_config")
    return word(method.get("quant_method")) if isinstance(method, Mapping) else ""


def _config_activation_bytes(config: Mapping[str, Any], fields: Fields) -> int:
    """Width of the type that the config names, 0 when it names none."""
    for name in (fields.text("dtype"), fields.text("torch_dtype"), word(config.get("dtype"))):
        if name in _FLOAT_BYTES:
            return _FLOAT_BYTES[name]
    return _FLOAT_BYTES.get(word(config.get("torch_dtype")), 0)

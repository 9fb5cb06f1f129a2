"""config.json of a transformers or MLX folder, from plain values to geometry.

Every field is type-checked: a config is as untrusted as a weight file, and a layer count of a billion or a head count
of "8" must become a sentence, not a hang or a wrong price. Field meanings and defaults are mlx-lm's (0.32), because
that is what loads the model.
"""

from collections.abc import Mapping
from typing import Any

from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.geometry import LayerKind, ModelGeometry

CONFIG_NAME = "config.json"
# No published model comes near these; they bound loops and arithmetic.
MAX_LAYERS = 4096
MAX_SIZE = 1 << 31
# Names of architectures and methods are short words.
MAX_WORD = 128

GATED_DELTA_TYPES = frozenset({"qwen3_5", "qwen3_5_text", "qwen3_5_moe"})
QWEN_TYPES = frozenset({"qwen2", "qwen3", "qwen3_moe"}) | GATED_DELTA_TYPES

# mlx-lm: layer i is full attention iff (i + 1) % interval == 0.
DEFAULT_FULL_ATTENTION_INTERVAL = 4
DEFAULT_CONV_WIDTH = 4

_LAYER_KINDS = {
    "full_attention": LayerKind.FULL_ATTENTION,
    "sliding_attention": LayerKind.SLIDING_ATTENTION,
    "linear_attention": LayerKind.GATED_DELTA,
}
_FLOAT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def architecture(config: Mapping[str, Any]) -> str:
    """The model's own type name; "" when the config does not say."""
    return _word(config.get("model_type"))


def geometry_from_config(config: Mapping[str, Any], activation_bytes: int = 0) -> ModelGeometry | None:
    """Geometry of a Qwen model, or None for another architecture.

    `activation_bytes` as learned from the weights; 0 takes the config's dtype. Raises CONFIG_INVALID, naming the field.
    """
    model_type = architecture(config)
    if model_type not in QWEN_TYPES:
        return None
    fields = _Fields(config.get("text_config", config), "text_config")
    layers = _layers(model_type, fields)
    heads = fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    bits, group_size = _quantization(config)
    delta = model_type in GATED_DELTA_TYPES
    return ModelGeometry(
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size", 0),
        vocab_size=fields.size("vocab_size"),
        attention_heads=heads,
        kv_heads=fields.size("num_key_value_heads", heads),
        head_size=fields.size("head_dim", hidden // heads),
        layers=layers,
        sliding_window_tokens=fields.size("sliding_window", 0) if LayerKind.SLIDING_ATTENTION in layers else 0,
        delta_key_heads=fields.size("linear_num_key_heads") if delta else 0,
        delta_value_heads=fields.size("linear_num_value_heads") if delta else 0,
        delta_key_size=fields.size("linear_key_head_dim") if delta else 0,
        delta_value_size=fields.size("linear_value_head_dim") if delta else 0,
        delta_conv_width=fields.size("linear_conv_kernel_dim", DEFAULT_CONV_WIDTH) if delta else 0,
        experts=fields.size("num_experts", 0),
        experts_per_token=fields.size("num_experts_per_tok", 0),
        expert_intermediate_size=fields.size("moe_intermediate_size", 0),
        max_context_tokens=fields.size("max_position_embeddings", 0),
        activation_bytes=activation_bytes or _config_activation_bytes(config, fields),
        quantization_bits=bits,
        quantization_group_size=group_size,
        tied_embeddings=fields.flag("tie_word_embeddings", model_type == "qwen2"),
    )


class _Fields:
    """Typed access to one section of a config."""

    def __init__(self, section: Any, name: str) -> None:
        if not isinstance(section, Mapping):
            raise _invalid(name, "must be an object", section)
        self._section = section

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 to 2^31; `default` when the field is absent or null."""
        value = self._section.get(name)
        if value is None:
            if default is None:
                raise _invalid(name, "is missing", None)
            return default
        if type(value) is not int or not (1 if default is None else 0) <= value <= MAX_SIZE:
            raise _invalid(name, "must be a whole positive number", value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._section.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise _invalid(name, "must be true or false", value)
        return value

    def text(self, name: str) -> str:
        """A string, "" when absent."""
        value = self._section.get(name)
        return value if isinstance(value, str) else ""

    def names(self, name: str) -> list[str] | None:
        """A list of strings, None when absent."""
        value = self._section.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _invalid(name, "must be a list of names", value)
        return value


def _layers(model_type: str, fields: _Fields) -> tuple[LayerKind, ...]:
    count = fields.size("num_hidden_layers")
    if count > MAX_LAYERS:
        raise _invalid("num_hidden_layers", f"must be at most {MAX_LAYERS}", count)
    if model_type in GATED_DELTA_TYPES:
        # The interval decides in mlx-lm, whatever layer_types says.
        interval = fields.size("full_attention_interval", DEFAULT_FULL_ATTENTION_INTERVAL) or count + 1
        full, delta = LayerKind.FULL_ATTENTION, LayerKind.GATED_DELTA
        return tuple(full if (index + 1) % interval == 0 else delta for index in range(count))
    names = fields.names("layer_types")
    if names is None:
        return (LayerKind.FULL_ATTENTION,) * count
    if len(names) != count:
        raise _invalid("layer_types", f"must name {count} layers", names)
    unknown = [name for name in names if name not in _LAYER_KINDS]
    if unknown:
        raise _invalid("layer_types", "names a kind of layer that is not known", unknown[0])
    return tuple(_LAYER_KINDS[name] for name in names)


def _quantization(config: Mapping[str, Any]) -> tuple[int, int]:
    """Bits and group size of MLX quantisation; zeros when there is none or it is another kind's."""
    section = config.get("quantization")
    if section is None:
        return 0, 0
    fields = _Fields(section, "quantization")
    return fields.size("bits", 0), fields.size("group_size", 0)


def quantization_words(config: Mapping[str, Any]) -> str:
    """Quantisation in words; "" when the config names none."""
    bits, group_size = _quantization(config)
    if bits:
        mode = _word(config["quantization"].get("mode")) or "affine"
        return f"{mode} {bits} bit, groups of {group_size}"
    method = config.get("quantization_config")
    return _word(method.get("quant_method")) if isinstance(method, Mapping) else ""


def _word(value: Any) -> str:
    """A short text; "" for anything else."""
    return value if isinstance(value, str) and len(value) <= MAX_WORD else ""


def _config_activation_bytes(config: Mapping[str, Any], fields: _Fields) -> int:
    name = fields.text("dtype") or fields.text("torch_dtype") or _word(config.get("torch_dtype"))
    return _FLOAT_BYTES.get(name, 2)


def _invalid(field: str, rule: str, value: Any) -> WeightError:
    shown = "" if value is None else f", not {str(value)[:60]!r}"
    return WeightError(WeightReason.CONFIG_INVALID, f"the field {field} {rule}{shown}", file=CONFIG_NAME)

"""Whether an MLX plan can be made of a model at all. What cannot be priced exactly, or within a stated range, is
refused: a guess that says so is better than a number that is wrong."""

import re

from weighbridge_fit.components import Component
from weighbridge_fit.facts import TensorFact, WeightFacts, WeightFormat
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.plans.errors import UNSUPPORTED_ARCHITECTURE, PlanError
from weighbridge_fit.plans.mlx.architectures import ARCHITECTURES, architecture_of

# Stored types that mlx-lm converts at load, so that a header does not tell what is held: float8 weights become half
# precision, packed words of other quantisers (AWQ, GPTQ, compressed-tensors) are repacked.
_CONVERTED_PREFIXES = ("F8", "F4", "F6")
_CONVERTED = frozenset({"I32", "I8"})
# Counters and position tables are stored as integers too, and are small.
_SMALL_SHARE = 0.01

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,5})\.(.*)")
_OWN_KEYS = ("self_attn.k_proj.", "self_attn.v_proj.", "self_attn.k_norm.")


def loaded_tensors(facts: WeightFacts, geometry: ModelGeometry) -> list[TensorFact]:
    """The model's tensors that mlx-lm keeps: not those of layers beyond the last (DeepSeek's draft layer), nor keys and
    values of layers that share another's (Gemma 4). None where the facts came without tensors."""
    return [tensor for tensor in facts.component_tensors(Component.MODEL) if not _dropped(tensor.name, geometry)]


def loaded_bytes(facts: WeightFacts, geometry: ModelGeometry) -> int:
    """Their bytes."""
    tensors = facts.component_tensors(Component.MODEL)
    dropped = sum(tensor.bytes for tensor in tensors if _dropped(tensor.name, geometry))
    return facts.component_bytes(Component.MODEL) - dropped


def _dropped(name: str, geometry: ModelGeometry) -> bool:
    found = _LAYER.search(name)
    if found is None:
        return False
    index = int(found.group(1))
    if index >= len(geometry.layers):
        return True
    return geometry.layers[index] is LayerKind.SHARED and found.group(2).startswith(_OWN_KEYS)


def supported(facts: WeightFacts) -> ModelGeometry:
    """The geometry of a model that the laws here price. Raises PlanError UNSUPPORTED_ARCHITECTURE."""
    geometry = facts.geometry
    if facts.format is not WeightFormat.SAFETENSORS:
        raise _unsupported("The MLX engine loads folders of safetensors; this model is stored in another format.")
    if geometry is None or geometry.model_type not in ARCHITECTURES:
        named = f"of type {facts.architecture!r}" if facts.architecture else "without a config that names its type"
        known = ", ".join(sorted(ARCHITECTURES))
        raise _unsupported(f"This is a model {named}; MLX plans are made for {known}.")
    if architecture_of(geometry) is None:
        kinds = ", ".join(sorted({kind.value for kind in geometry.layers})) or "none"
        raise _unsupported(f"No {geometry.model_type} of mlx-lm has layers like this model's: {kinds}.")
    missing = [name for name, value in _needed(geometry).items() if not value]
    if missing:
        message = f"The model's geometry does not say its {', '.join(missing)}."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model.facts.geometry", message)
    if LayerKind.LATENT_ATTENTION in geometry.layers and geometry.head_size <= geometry.latent_rope_size:
        message = (
            f"A head of {geometry.head_size:,} elements has no room for {geometry.latent_rope_size:,} rotary ones and "
            "others beside them."
        )
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model.facts.geometry", message)
    converted = _converted_types(facts)
    if converted:
        message = (
            f"The weights are stored as {', '.join(converted)}, which mlx-lm converts when it loads them: their size "
            "in memory is not known. An MLX conversion of the model can be priced."
        )
        raise _unsupported(message)
    return geometry


def _needed(geometry: ModelGeometry) -> dict[str, int]:
    needed = {
        "hidden_size": geometry.hidden_size,
        "vocab_size": geometry.vocab_size,
        "attention_heads": geometry.attention_heads,
        "layers": len(geometry.layers),
        "activation_bytes": geometry.activation_bytes,
    }
    kinds = frozenset(geometry.layers)
    if kinds & {LayerKind.FULL_ATTENTION, LayerKind.SLIDING_ATTENTION}:
        needed |= {"kv_heads": geometry.kv_heads, "head_size": geometry.head_size}
    if LayerKind.SLIDING_ATTENTION in kinds:
        windows = (measure.window_tokens for measure in geometry.measures)
        needed["sliding_window_tokens"] = geometry.sliding_window_tokens or max(windows, default=0)
    if LayerKind.LATENT_ATTENTION in kinds:
        needed |= {
            "latent_rank": geometry.latent_rank,
            "latent_rope_size": geometry.latent_rope_size,
            "head_size": geometry.head_size,
        }
    if LayerKind.GATED_DELTA in kinds:
        needed |= {
            "delta_key_heads": geometry.delta_key_heads,
            "delta_value_heads": geometry.delta_value_heads,
            "delta_key_size": geometry.delta_key_size,
            "delta_value_size": geometry.delta_value_size,
            "delta_conv_width": geometry.delta_conv_width,
        }
    for kind in kinds & {LayerKind.STATE_SPACE, LayerKind.SHORT_CONVOLUTION}:
        needed[f"{kind.value} measures"] = _has_measures(geometry, kind)
    return needed


def _has_measures(geometry: ModelGeometry, kind: LayerKind) -> bool:
    """Whether every layer of a kind whose sizes are its own says them."""
    if len(geometry.measures) != len(geometry.layers):
        return False
    return all(
        measure.convolution_elements and (measure.state_elements or kind is not LayerKind.STATE_SPACE)
        for layer, measure in zip(geometry.layers, geometry.measures, strict=True)
        if layer is kind
    )


def _converted_types(facts: WeightFacts) -> list[str]:
    loaded = [total for total in facts.components if total.component == Component.MODEL]
    stored = [precision for total in loaded for precision in total.precisions]
    enough = _SMALL_SHARE * sum(precision.bytes for precision in stored)
    return sorted(
        precision.dtype
        for precision in stored
        if precision.dtype.startswith(_CONVERTED_PREFIXES)
        or (precision.dtype in _CONVERTED and precision.bytes > enough)
    )


def _unsupported(message: str) -> PlanError:
    return PlanError(UNSUPPORTED_ARCHITECTURE, "model", message)

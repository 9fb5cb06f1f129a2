"""Geometry from GGUF metadata, for architectures whose keys are known."""

from collections.abc import Mapping
from typing import Any

from weighbridge_fit.config.fields import MAX_WORD
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.gguf.layers import READERS
from weighbridge_fit.gguf.metadata import Metadata

_ATTENDING = frozenset({LayerKind.FULL_ATTENTION, LayerKind.SLIDING_ATTENTION, LayerKind.LATENT_ATTENTION})


def architecture(metadata: Mapping[str, Any]) -> str:
    """general.architecture, "" when absent or not a string."""
    value = metadata.get("general.architecture")
    return value if isinstance(value, str) and len(value) <= MAX_WORD else ""


def geometry_from_metadata(metadata: Mapping[str, Any], arrays: Mapping[str, int], tied: bool) -> ModelGeometry | None:
    """Geometry of a language model; None when the architecture is not known or a key that its caches depend on is
    missing. `arrays` are the lengths of metadata arrays, `tied` says that there is no output matrix of its own."""
    name = architecture(metadata)
    reader = READERS.get(name)
    if reader is None:
        return None
    data = Metadata(metadata, name)
    blocks, hidden = data.layer_count(), data.size("embedding_length")
    # Blocks of a draft head are counted in, but hold a cache only where it is used.
    draft = data.size("nextn_predict_layers")
    if not hidden or blocks <= draft:
        return None
    heads = data.size("attention.head_count")
    key = data.size("attention.key_length", hidden // heads if heads else 0)
    value = data.size("attention.value_length", key)
    base = ModelGeometry(
        model_type=name,
        hidden_size=hidden,
        intermediate_size=data.size("feed_forward_length"),
        vocab_size=data.size("vocab_size") or arrays.get("tokenizer.ggml.tokens", 0),
        attention_heads=heads,
        kv_heads=data.size("attention.head_count_kv", heads),
        head_size=key,
        value_head_size=0 if value == key else value,
        experts=data.size("expert_count"),
        experts_per_token=data.size("expert_used_count"),
        expert_intermediate_size=data.size("expert_feed_forward_length"),
        max_context_tokens=data.size("context_length"),
        activation_bytes=2,
        tied_embeddings=tied,
        draft_layers=draft,
    )
    made = reader(data, base, blocks - draft)
    if made is None or (_ATTENDING & set(made.layers) and not heads):
        return None
    return made

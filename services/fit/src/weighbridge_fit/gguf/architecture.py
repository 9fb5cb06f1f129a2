"""Geometry from GGUF metadata, for architectures whose keys are known. Facts only: no engine here loads it from them.

A key of the wrong type is treated as absent (CVE-2024-8063 was a block count that was not a number).
"""

from collections.abc import Mapping
from typing import Any

from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.model_config import MAX_LAYERS, MAX_SIZE, MAX_WORD

# Architectures whose every layer is full attention over key-value heads.
PLAIN_ATTENTION = frozenset({"llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe"})


def architecture(metadata: Mapping[str, Any]) -> str:
    """general.architecture, "" when absent or not a string."""
    value = metadata.get("general.architecture")
    return value if isinstance(value, str) and len(value) <= MAX_WORD else ""


def geometry_from_metadata(metadata: Mapping[str, Any], arrays: Mapping[str, int], tied: bool) -> ModelGeometry | None:
    """Geometry of a plain attention model; None when the architecture is another or a needed key is missing."""
    name = architecture(metadata)
    if name not in PLAIN_ATTENTION:
        return None

    def size(key: str, default: int = 0) -> int:
        value = metadata.get(f"{name}.{key}")
        return value if type(value) is int and 0 < value <= MAX_SIZE else default

    layers, hidden, heads = size("block_count"), size("embedding_length"), size("attention.head_count")
    if not layers or layers > MAX_LAYERS or not hidden or not heads:
        return None
    return ModelGeometry(
        model_type=name,
        hidden_size=hidden,
        intermediate_size=size("feed_forward_length"),
        vocab_size=size("vocab_size") or arrays.get("tokenizer.ggml.tokens", 0),
        attention_heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        head_size=size("attention.key_length", hidden // heads),
        layers=(LayerKind.FULL_ATTENTION,) * layers,
        experts=size("expert_count"),
        experts_per_token=size("expert_used_count"),
        expert_intermediate_size=size("expert_feed_forward_length"),
        max_context_tokens=size("context_length"),
        activation_bytes=2,
        tied_embeddings=tied,
    )

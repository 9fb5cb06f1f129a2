"""The measures of a language model that decide its working memory. Plain values, no disk in here."""

from dataclasses import dataclass, field
from enum import Enum


class LayerKind(Enum):
    """How one layer remembers the past."""

    FULL_ATTENTION = "full_attention"
    SLIDING_ATTENTION = "sliding_attention"
    GATED_DELTA = "gated_delta"
    LATENT_ATTENTION = "latent_attention"
    SHARED = "shared"
    STATE_SPACE = "state_space"
    SHORT_CONVOLUTION = "short_convolution"
    LINEAR_ATTENTION = "linear_attention"
    MEMORYLESS = "memoryless"
    CROSS_ATTENTION = "cross_attention"


@dataclass(frozen=True, slots=True)
class LayerMeasure:
    """One layer where layers differ in more than their kind. Zero: as the geometry says for all; `value_size` zero
    beside a `key_size`: values are not held apart from keys (K = V)."""

    kv_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    window_tokens: int = 0
    state_elements: int = 0
    convolution_elements: int = 0


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Sizes of one model. Zero means that it does not apply or that the model does not say.

    `activation_bytes` is the width of one activation element as the weights' own dtypes promote to; keys and values are
    stored in it.
    """

    model_type: str
    hidden_size: int = 0
    intermediate_size: int = 0
    vocab_size: int = 0
    attention_heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    layers: tuple[LayerKind, ...] = field(default=())
    sliding_window_tokens: int = 0
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_key_size: int = 0
    delta_value_size: int = 0
    delta_conv_width: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    max_context_tokens: int = 0
    activation_bytes: int = 0
    quantization_bits: int = 0
    quantization_group_size: int = 0
    tied_embeddings: bool = False
    latent_rank: int = 0
    latent_rope_size: int = 0
    value_head_size: int = 0
    draft_layers: int = 0
    indexer_key_size: int = 0
    measures: tuple[LayerMeasure, ...] = ()

    def count(self, kind: LayerKind) -> int:
        """Number of layers of one kind."""
        return self.layers.count(kind)

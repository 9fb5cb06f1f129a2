"""Which part of a model a tensor belongs to, and which parts a loader opens."""

from collections.abc import Iterable
from enum import StrEnum

from weighbridge_fit.facts import TensorFact

# Widths of the dtypes that activations can take; integers are codes or counters and do not widen anything.
_FLOAT_WIDTHS = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}
HALF_PRECISIONS = frozenset({"F16", "BF16"})
# Tensors that mlx-lm keeps in float32 whatever the model computes in, and that do not widen activations: the decay of a
# gated-delta or state-space layer is used inside its float32 recurrence, its output norm casts back, routers choose by
# a float32 correction and cast their sum, Hadamard signs are applied in float32 (mlx-lm 0.32: qwen3_5, qwen3_next,
# nemotron_h, deepseek_v3, laguna, prism_hadamard_qwen35).
_FLOAT32_BY_DESIGN = (
    *(".A_log", ".dt_bias", ".linear_attn.norm.weight", ".mixer.D"),
    *(".e_score_correction_bias", ".signs"),
)
# Towers and projectors of other media: what mlx-lm's wrappers leave out (0.32: qwen3_5, gemma3, gemma4, mistral3).
_VISION_PREFIXES = tuple(
    f"{prefix}{part}"
    for prefix in ("", "model.")
    for part in (
        *("visual.", "vision_tower.", "vision_embedder.", "audio_tower."),
        *("multi_modal_projector.", "embed_vision.", "embed_audio."),
    )
)


class Component(StrEnum):
    """Parts of a language model's folder."""

    MODEL = "model"
    DRAFT = "draft"
    VISION = "vision"
    UNUSED = "unused"


def language_component(name: str, tied_embeddings: bool) -> Component:
    """The part of a transformers or MLX checkpoint that a tensor belongs to.

    mlx-lm 0.32 opens only MODEL: multi-token-prediction heads and vision towers are dropped, and so are an output head
    that is tied to the embeddings and precomputed rotary frequencies.
    """
    if "mtp." in name:
        return Component.DRAFT
    if name.startswith(_VISION_PREFIXES):
        return Component.VISION
    if (tied_embeddings and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq"):
        return Component.UNUSED
    return Component.MODEL


def activation_bytes(tensors: Iterable[TensorFact]) -> int:
    """Width of one activation element: what the dtypes of a model's own tensors promote to in MLX. 0 when unknown.

    One float32 norm makes every activation after it float32, and with it the keys and values; float16 and bfloat16
    together also make float32 (MLX's promotion rules).
    """
    dtypes = {
        tensor.dtype
        for tensor in tensors
        if tensor.dtype in _FLOAT_WIDTHS and not tensor.name.endswith(_FLOAT32_BY_DESIGN)
    }
    if dtypes >= HALF_PRECISIONS:
        return 4
    return max((_FLOAT_WIDTHS[dtype] for dtype in dtypes), default=0)

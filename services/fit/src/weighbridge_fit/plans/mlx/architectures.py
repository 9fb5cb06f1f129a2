"""Which models the laws here price as mlx-lm runs them, and how mlx-lm stores their past.

A model_type is in the table when mlx-lm 0.32.2 has it, its caches are ones that `laws.mlx_caches` describes, and a tiny
model of that type holds what the law says, to the byte (test_fit_mlx_exact). Everything else is refused, so that it is
guessed and said to be guessed: among the types of well-known models that is deepseek_v4 (mlx-lm has none), the omni
variants of Nemotron 3 (mlx-lm has only nemotron_h), and what keeps caches of its own kind (deepseek_v41, kimi_k3,
longcat_flash, minimax_m3_vl).
"""

from dataclasses import dataclass

from weighbridge_fit.geometry import LayerKind, ModelGeometry


@dataclass(frozen=True, slots=True)
class Architecture:
    """How mlx-lm treats a model_type, beside the caches that it makes.

    `fused`: it attends through MLX's kernel, which reads quantised caches too; otherwise by hand, with all scores.
    `launched`: the MLX engine of this version runs it, so that a plan is a launch.
    """

    fused: bool = True
    launched: bool = False


_PRICED = Architecture()
_LAUNCHED = Architecture(launched=True)

ARCHITECTURES: dict[str, Architecture] = {
    "qwen": _PRICED,
    "qwen2": _LAUNCHED,
    "qwen2_moe": _PRICED,
    "qwen2_vl": _PRICED,
    "qwen2_5_vl": _PRICED,
    "qwen3": _LAUNCHED,
    "qwen3_moe": _LAUNCHED,
    "qwen3_next": _PRICED,
    "qwen3_5": _LAUNCHED,
    "qwen3_5_text": _LAUNCHED,
    "qwen3_5_moe": _PRICED,
    "qwen3_vl": _PRICED,
    "qwen3_vl_moe": _PRICED,
    "prism_hadamard_qwen35": _PRICED,
    "llama": _PRICED,
    "mistral": _PRICED,
    "ministral3": _PRICED,
    "mistral3": _PRICED,
    "mixtral": _PRICED,
    "gemma": _PRICED,
    # Caps its scores between two products of its own.
    "gemma2": Architecture(fused=False),
    "gemma3": _PRICED,
    "gemma3_text": _PRICED,
    "gemma4": _PRICED,
    "gemma4_text": _PRICED,
    "gemma4_unified": _PRICED,
    "phi3": _PRICED,
    "olmo2": _PRICED,
    "olmo3": _PRICED,
    "granite": _PRICED,
    "glm4": _PRICED,
    "starcoder2": _PRICED,
    "seed_oss": _PRICED,
    "smollm3": _PRICED,
    "cohere": _PRICED,
    "cohere2": _PRICED,
    "gpt_oss": _PRICED,
    "laguna": _PRICED,
    "lfm2": _PRICED,
    "nemotron_h": _PRICED,
    "deepseek_v3": _PRICED,
    "kimi_k2": _PRICED,
}

_PRICED_KINDS = frozenset(LayerKind) - {LayerKind.LINEAR_ATTENTION, LayerKind.CROSS_ATTENTION}


def architecture_of(geometry: ModelGeometry) -> Architecture | None:
    """How mlx-lm treats this model; None where no law here prices it."""
    if not geometry.layers or not _PRICED_KINDS.issuperset(geometry.layers):
        return None
    return ARCHITECTURES.get(geometry.model_type)


def attends_fused(geometry: ModelGeometry) -> bool:
    """Whether attention goes through MLX's kernel."""
    found = architecture_of(geometry)
    return found is not None and found.fused

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
    """How mlx-lm treats a model_type.

    `windows`: its sliding layers get caches of their window; otherwise they hold the whole context. `fused`: it attends
    through MLX's kernel, which reads quantised caches too; otherwise by hand, with all scores. `launched`: the MLX
    engine of this version runs it, so that a plan is a launch.
    """

    windows: bool = False
    fused: bool = True
    launched: bool = False


_WHOLE = Architecture()
_WINDOWS = Architecture(windows=True)
_LAUNCHED = Architecture(launched=True)

ARCHITECTURES: dict[str, Architecture] = {
    "qwen": _WHOLE,
    "qwen2": _LAUNCHED,
    "qwen2_moe": _WHOLE,
    "qwen2_vl": _WHOLE,
    "qwen2_5_vl": _WHOLE,
    "qwen3": _LAUNCHED,
    "qwen3_moe": _LAUNCHED,
    "qwen3_next": _WHOLE,
    "qwen3_5": _LAUNCHED,
    "qwen3_5_text": _LAUNCHED,
    "qwen3_5_moe": _WHOLE,
    "qwen3_vl": _WHOLE,
    "qwen3_vl_moe": _WHOLE,
    "prism_hadamard_qwen35": _WHOLE,
    "llama": _WINDOWS,
    "mistral": _WINDOWS,
    "ministral3": _WINDOWS,
    # The wrapper of Mistral 3 has no make_cache, so that every layer gets a cache of the whole context.
    "mistral3": _WHOLE,
    "mixtral": _WHOLE,
    "gemma": _WHOLE,
    # Caps its scores between two products of its own.
    "gemma2": Architecture(fused=False),
    "gemma3": _WINDOWS,
    "gemma3_text": _WINDOWS,
    "gemma4": _WINDOWS,
    "gemma4_text": _WINDOWS,
    "gemma4_unified": _WINDOWS,
    "phi3": _WHOLE,
    "olmo2": _WHOLE,
    "olmo3": _WINDOWS,
    "granite": _WHOLE,
    "glm4": _WHOLE,
    "starcoder2": _WHOLE,
    "seed_oss": _WHOLE,
    "smollm3": _WHOLE,
    "cohere": _WHOLE,
    "cohere2": _WINDOWS,
    "gpt_oss": _WINDOWS,
    "laguna": _WINDOWS,
    "lfm2": _WHOLE,
    "nemotron_h": _WHOLE,
    "deepseek_v3": _WHOLE,
    "kimi_k2": _WHOLE,
}

_PRICED_KINDS = frozenset(LayerKind) - {LayerKind.LINEAR_ATTENTION}


def architecture_of(geometry: ModelGeometry) -> Architecture | None:
    """How mlx-lm treats this model; None where no law here prices it."""
    if not geometry.layers or not _PRICED_KINDS.issuperset(geometry.layers):
        return None
    return ARCHITECTURES.get(geometry.model_type)


def attends_fused(geometry: ModelGeometry) -> bool:
    """Whether attention goes through MLX's kernel."""
    found = architecture_of(geometry)
    return found is not None and found.fused


def keeps_windows(geometry: ModelGeometry) -> bool:
    """Whether sliding layers get caches of their window.

    Where every layer is sliding, the window came from a config without layer types, which mlx-lm reads as full
    attention throughout (its Llama cannot even be made without one full layer).
    """
    found = architecture_of(geometry)
    whole = geometry.count(LayerKind.SLIDING_ATTENTION) < len(geometry.layers)
    return found is not None and found.windows and whole

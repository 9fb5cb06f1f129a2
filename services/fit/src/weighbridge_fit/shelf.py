"""Whether a folder is a model, or a shelf: a folder that other models' folders lie in. Told by names alone."""

import re
from collections.abc import Iterable, Iterator, Mapping, Set

from weighbridge_fit import weight_names

CONFIG_NAME = "config.json"
PIPELINE_NAME = "model_index.json"
# Lies beside a language model's weights; a diffusers tree keeps it in a folder of its own.
_TOKENIZERS = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json"})
# Folders of one model's components: as the pipelines of diffusers 0.35 name them, and as ComfyUI sorts its files.
_COMPONENT = re.compile(
    r"(?:unet|transformer|prior|decoder|encoder|vae|audio_vae|vqvae|vqgan|movq|controlnet|motion_adapter|adapter|refiner"
    r"|text_encoder|text_encoders|image_encoder|vision_encoder|language_encoder|language_model|mllm|bert|vocoder"
    r"|connectors|projection_model|safety_checker|super_res|prior_prior|prior_text_encoder|prior_image_encoder"
    r"|dit|ae|diffusion_models?|checkpoints|clip|clip_vision|llm|tae|taesd|loras?|high_noise_model|low_noise_model)(?:_\d+)?"
)


def models_on_shelf(weights: Mapping[str, Iterable[str]], others: Mapping[str, Set[str]]) -> list[str]:
    """The models' folders that a folder holds, in order; none where it is a model itself.

    Args:
        weights: weight files by the folder that they are in, seen from the folder in question ("" for that one).
        others: likewise all other files.
    """
    if weights.get(""):
        whole = _whole(weights, others)
        return whole if len(whole) > 1 else []
    pipelines = [parent for parent, names in others.items() if parent and PIPELINE_NAME in names]
    whole = _whole(weights, others)
    # Text encoders may bring a tokenizer too; a language model beside a folder of autoencoders has a name of its own.
    strangers = [parent for parent in whole if not _COMPONENT.fullmatch(_top(parent))]
    is_tree = any(_COMPONENT.fullmatch(_top(parent)) for parent in weights)
    if is_tree and not pipelines and not strangers:
        return whole if len(whole) > 1 else []  # a diffusers tree without its index
    described = [_above_components(parent) for parent in weights if CONFIG_NAME in others.get(parent, ())]
    models = _topmost([*pipelines, *described])
    if not models and any(name.endswith(weight_names.GGUF) for names in weights.values() for name in names):
        return []  # files of one model, sorted into folders: their tensors tell
    found = _topmost([*models, *map(_above_components, weights)])
    return found if models or len(found) > 1 else []


def _whole(weights: Mapping[str, Iterable[str]], others: Mapping[str, Set[str]]) -> list[str]:
    """Folders of language models, with all that one needs."""
    return _topmost(
        parent
        for parent in weights
        if parent and CONFIG_NAME in others.get(parent, ()) and _TOKENIZERS & others.get(parent, frozenset())
    )


def _above_components(parent: str) -> str:
    """The folder of the model that a folder may be a component of."""
    parts = parent.split("/")
    depth = next((depth for depth, part in enumerate(parts) if depth and _COMPONENT.fullmatch(part)), len(parts))
    return "/".join(parts[:depth])


def _topmost(parents: Iterable[str]) -> list[str]:
    """Those that lie in none of the others."""
    every = set(parents)
    return sorted(parent for parent in every if not any(above in every for above in _above(parent)))


def _above(parent: str) -> Iterator[str]:
    """The folders that a folder lies in."""
    parts = parent.split("/")
    return ("/".join(parts[:depth]) for depth in range(1, len(parts)))


def _top(parent: str) -> str:
    return parent.split("/")[0]

"""Which component each tensor of a model's files belongs to, and the architecture that their names tell."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from weighbridge_fit.components import Component, language_component
from weighbridge_fit.facts import FileFacts, Labelled, Role, TensorFact
from weighbridge_fit.model_config import MAX_WORD
from weighbridge_fit.recognise.stable_diffusion import (
    HIGH_NOISE,
    Part,
    architecture_of,
    component_of,
    standalone_component,
)

# What the class of a diffusers component, in its own config.json, loads as.
_CLASSES = (
    (re.compile(r"ControlNet"), Part.CONTROL_NET),
    (re.compile(r"AutoencoderTiny"), Part.TAESD),
    (re.compile(r"Autoencoder|VQModel"), Part.VAE),
    (re.compile(r"Transformer|UNet|WanModel"), Part.DIFFUSION_MODEL),
)
_HIGH_NOISE = re.compile(r"high.?noise", re.IGNORECASE)
# What adapters have beside their pairs of matrices: scales, and differences of biases and norms.
_BESIDE_PAIRS = (".alpha", ".scale", ".diff", ".diff_b", ".dora_scale")
_ROLE_COMPONENTS = {Role.DRAFTER: Component.DRAFT, Role.PROJECTOR: Component.VISION, Role.ADAPTER: Part.LORA}


def diffusers_class(config: Mapping[str, Any]) -> str:
    """The class that a diffusers component or pipeline names as its own; "" for others."""
    name = config.get("_class_name")
    return name if isinstance(name, str) and len(name) <= MAX_WORD else ""


def label_role(files: Sequence[FileFacts], role: Role) -> list[Labelled]:
    """Every tensor as the one component that an adapter, drafter or projector is."""
    component = str(_ROLE_COMPONENTS[role])
    return [(component, tensor) for file in files for tensor in file.tensors]


def label_language(files: Sequence[FileFacts], tied_embeddings: bool) -> list[Labelled]:
    """A transformers or MLX folder: the model, its draft head, its vision tower. Files in folders are components."""
    return [
        (file.component or str(language_component(tensor.name, tied_embeddings)), tensor)
        for file in files
        for tensor in file.tensors
    ]


def label_diffusers_component(files: Sequence[FileFacts], class_name: str) -> list[Labelled]:
    """One component's folder of a diffusers tree, named by its class; checkpoints beside it by their tensors."""
    component = next((part for pattern, part in _CLASSES if pattern.search(class_name)), Part.DIFFUSION_MODEL)
    labelled: list[Labelled] = []
    for file in files:
        own = standalone_component(file.tensors)
        apart = own if own in (Part.VAE, Part.T5XXL, Part.CLIP_VISION) else component
        labelled += [(str(apart), tensor) for tensor in file.tensors]
    return labelled


def label_files(files: Sequence[FileFacts]) -> list[Labelled]:
    """Files that no configuration describes: single checkpoints, parts of an image model, language models."""
    image = image_architecture(files) != ""
    labelled: list[Labelled] = []
    for file in files:
        labelled += _label_file(file, image)
    return labelled


def image_architecture(files: Sequence[FileFacts]) -> str:
    """The architecture of the image or video model among some files, "" when there is none."""
    for file in files:
        found = "" if file.component else architecture_of(file.tensors)
        if found:
            return found
    return ""


def is_adapter(files: Sequence[FileFacts]) -> bool:
    """Whether the tensors of some files are those of a low-rank adapter."""
    paired = False
    for file in files:
        for tensor in file.tensors:
            if component_of(tensor.name) == Part.LORA:
                paired = True
            elif not tensor.name.endswith(_BESIDE_PAIRS):
                return False  # a model's own tensor: its other names need no look
    return paired


def _label_file(file: FileFacts, image: bool) -> list[Labelled]:
    tensors = file.tensors
    if file.component:
        return [(file.component, tensor) for tensor in tensors]
    alone = standalone_component(tensors)
    if alone == Part.LLM and not image:
        return [(str(language_component(tensor.name, False)), tensor) for tensor in tensors]
    if alone:
        if alone == Part.DIFFUSION_MODEL and _HIGH_NOISE.search(file.name):
            alone = HIGH_NOISE
        return [(str(alone), tensor) for tensor in tensors]
    return [(_in_checkpoint(tensor), tensor) for tensor in tensors]


def _in_checkpoint(tensor: TensorFact) -> str:
    """A tensor of a checkpoint of several components; those that nothing names are the model's."""
    return str(component_of(tensor.name) or Component.MODEL)

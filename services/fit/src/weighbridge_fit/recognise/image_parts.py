"""Folders of an image or video model in parts: a diffusion model, with its encoders and autoencoder beside it."""

from collections.abc import Mapping

from weighbridge_fit.components import Component
from weighbridge_fit.facts import Role, WeightFacts, WeightFormat
from weighbridge_fit.recognise.stable_diffusion import HIGH_NOISE, Part

_PARTS = frozenset({*Part, HIGH_NOISE})
_AS_PART = {Component.MODEL: Part.LLM}
"""A language model's own file says nothing of being an encoder: beside a diffusion model it is one."""
_FORMATS = frozenset({WeightFormat.SAFETENSORS, WeightFormat.GGUF, WeightFormat.TORCH_CHECKPOINT, WeightFormat.MIXED})


def is_in_parts(folder: WeightFacts) -> bool:
    """Whether a folder's facts are those of a diffusion model with a file for each of its parts."""
    names = _names(folder)
    return (
        folder.role is Role.MODEL
        and folder.format in _FORMATS
        and Part.DIFFUSION_MODEL in names
        and names <= _PARTS
        and len(folder.files) == len(names) > 1
    )


def roles_of(parts: Mapping[str, WeightFacts]) -> Mapping[str, str] | None:
    """The file of each part by its component, from the facts of each file by its name; None where a file holds more
    than one component, or two hold the same."""
    roles: dict[str, str] = {}
    for name, facts in parts.items():
        components = _names(facts)
        if len(components) != 1 or (component := components.pop()) in roles:
            return None
        roles[component] = name
    return roles if Part.DIFFUSION_MODEL in roles else None


def _names(facts: WeightFacts) -> set[str]:
    # A language model's output head that is tied, and the like, is no part of its own.
    held = {total.component for total in facts.components} - {Component.UNUSED}
    return {_AS_PART.get(name, name) for name in held}  # type: ignore[call-overload] # components are words

"""What a model is launched and asked with beside its weights: data, by catalogue id, else by architecture and file."""

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from weighbridge_fit.model import Model

MADE_FOR_SIDE_PX = 1024
"""Side of the pictures that every image model of the last three years was made for."""
MOST_STEPS = 100
"""The engine clamps a request's steps to this, silently."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Defaults of one model. `architecture` is said where no tensors are known that say it, `related_to` is the nearest
    one with measured buffers where the model's own has none. `vae_tiling` None: on a card, whose driver may not give
    out the buffer of a whole decode in one piece. `tiling_seams`: tiles of its autoencoder leave visible seams.
    `cfg_scale` None: the engine's default. `distilled`: trained for just these steps, with which the engine is
    launched. `img2img`: whether starting from a picture was assessed on sd-server, None if it was not. Steps and
    guidance change no byte."""

    default_side_px: int
    architecture: str = ""
    related_to: str = ""
    vae_tiling: bool | None = None
    tiling_seams: bool = False
    tensor_type_rules: str = ""
    steps: int = 20
    cfg_scale: float | None = None
    distilled: bool = False
    img2img: bool | None = None


def profile_for(model: Model, architecture: str) -> Profile:
    """The profile of a catalogue model by its id, of any other by its architecture and, where that tells more, by its
    file: what its name says, what its tensors lack. A catalogue entry's own word is the last."""
    document = _document()
    entry = model.entry
    values: dict[str, Any] = {**document["default"], **document["architectures"].get(architecture, {})}
    known = document["models"].get(entry.catalog_id) if entry is not None else None
    values |= known if known is not None else _variant(model, architecture)
    if entry is not None:
        values["default_side_px"] = entry.default_side_px or values["default_side_px"]
        values["steps"] = entry.recommended_steps or values["steps"]
        values["cfg_scale"] = entry.guidance or values["cfg_scale"]
    values["default_side_px"] = values["default_side_px"] or MADE_FOR_SIDE_PX
    values["steps"] = min(values["steps"], MOST_STEPS)
    return Profile(**values)


def catalogue_ids() -> tuple[str, ...]:
    """The models that have a profile of their own."""
    return tuple(_document()["models"])


def is_rendered(architecture: str) -> bool:
    """Whether sd-server is known to render an architecture, its buffers measured or not."""
    return architecture in _document()["architectures"]


def _variant(model: Model, architecture: str) -> dict[str, Any]:
    """What tells models of one architecture apart: the first rule that fits."""
    names = _file_names(model)
    for rule in _document()["variants"]:
        if architecture not in rule.get("architectures", (architecture,)):
            continue
        if "without" in rule:
            tensors = model.facts.tensors
            if tensors and not any(rule["without"] in fact.name for _, fact in tensors):
                return dict(rule["values"])
            continue
        found = next(filter(None, (re.search(rule["name"], name, re.IGNORECASE) for name in names)), None)
        if found is not None:
            said = {field: int(number) for field, number in found.groupdict().items()}
            return {**rule["values"], **said}
    return {}


def _file_names(model: Model) -> tuple[str, ...]:
    """What may say which variant it is: the file, and the folder where that was named."""
    if model.entry is not None and (files := model.entry.main_files()):
        return (files[0].name,)
    return (*(file.name for file in model.facts.files[:1]), model.facts.name)


@cache
def _document() -> dict[str, Any]:
    text = resources.files("weighbridge_fit.calibration").joinpath("sd_profiles.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document

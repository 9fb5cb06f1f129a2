"""What decides the price of a model beside its weights: data, by catalogue id, else by architecture."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from weighbridge_fit.model import Model

MADE_FOR_SIDE_PX = 1024
"""Side of the pictures that every image model of the last three years was made for."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Defaults of one model. `architecture` is said where no tensors are known that say it, `related_to` is the nearest
    one with measured buffers where the model's own has none. `tiling_seams`: tiles of its autoencoder leave visible
    seams. `cfg_scale` None: the engine's default; steps and guidance change no byte."""

    default_side_px: int
    architecture: str = ""
    related_to: str = ""
    vae_tiling: bool = False
    tiling_seams: bool = False
    tensor_type_rules: str = ""
    steps: int = 20
    cfg_scale: float | None = None


def profile_for(model: Model, architecture: str) -> Profile:
    """The profile of a catalogue model by its id, of any other by its architecture."""
    document = _document()
    entry = model.entry
    values: dict[str, Any] = {**document["default"], **document["architectures"].get(architecture, {})}
    if entry is not None:
        values |= document["models"].get(entry.catalog_id, {})
        if entry.default_side_px:
            values["default_side_px"] = entry.default_side_px
        if entry.recommended_steps:
            values["steps"] = entry.recommended_steps
    values["default_side_px"] = values["default_side_px"] or MADE_FOR_SIDE_PX
    return Profile(**values)


@cache
def _document() -> dict[str, Any]:
    text = resources.files("weighbridge_fit.calibration").joinpath("sd_profiles.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document

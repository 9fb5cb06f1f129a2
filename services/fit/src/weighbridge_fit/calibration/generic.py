"""Figures of engines that are priced and never run here, from `generic.json` beside this file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from weighbridge_fit.calibration import Figure
from weighbridge_fit.lines import Range, Source

GIB = 1 << 30


@dataclass(frozen=True)
class GenericCalibration:
    """Figures by engine and name. `activations` are vLLM's measured activations by model type, in bytes."""

    engine: str
    figures: Mapping[str, Mapping[str, Figure]]
    activations: Mapping[str, Range]


@cache
def generic() -> GenericCalibration:
    """The calibration."""
    document = json.loads(resources.files(__package__).joinpath("generic.json").read_text("utf-8"))
    figures = {
        engine: {
            name: Figure(row["low"], row["expected"], row["high"], Source(row["source"]), row["basis"], row["date"])
            for name, row in rows.items()
        }
        for engine, rows in document["figures"].items()
    }
    activations = {
        name: Range(int(low * GIB), int((low + high) / 2 * GIB), int(high * GIB))
        for name, (low, high) in document["activation_gib_by_type"].items()
    }
    return GenericCalibration(document["engine"], figures, activations)

"""Figures of pipelines that run in diffusers, from `diffusers.json` beside this file."""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources

from weighbridge_fit.calibration import Figure
from weighbridge_fit.lines import Source


@cache
def figures() -> Mapping[str, Figure]:
    """All figures by name; the unit is in each one's basis."""
    document = json.loads(resources.files(__package__).joinpath("diffusers.json").read_text("utf-8"))
    return {
        name: Figure(row["low"], row["expected"], row["high"], Source(row["source"]), row["basis"], row["date"])
        for name, row in document["figures"].items()
    }

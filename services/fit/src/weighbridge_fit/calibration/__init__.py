"""Pricing constants that belong to an engine build: data, each with its source, so that a new release is a data
change."""

import json
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import resources
from typing import Any

from weighbridge_fit.lines import Range, Source

BOUNDS = ("low", "expected", "high")


class ComputeDevice(Enum):
    """What MLX computes on."""

    CPU = "cpu"
    METAL = "metal"


@dataclass(frozen=True, slots=True)
class Figure:
    """One constant with its uncertainty and where it comes from. The unit is in its name."""

    low: float
    expected: float
    high: float
    source: Source
    basis: str
    date: str

    @property
    def range(self) -> Range:
        """The constant as a range of bytes."""
        return Range(int(self.low), int(self.expected), int(self.high))

    def at(self, bound: str) -> float:
        """The value at one bound: low, expected or high."""
        return {"low": self.low, "expected": self.expected, "high": self.high}[bound]


@dataclass(frozen=True, slots=True)
class WorkspaceFactors:
    """The factors of `laws.workspace` at one bound."""

    hidden: float
    expert_output: float
    query: float
    key_value: float
    intermediate: float
    float32_share: float
    score_copies: float
    latent_score_copies: float
    state_space_copies: float
    growth_copies: float
    delta_states_per_token: float
    delta_graph_bytes: float
    logit_copies: float
    fused_head_sizes: frozenset[int]


@dataclass(frozen=True)
class Calibration:
    """All constants of one engine build on one device."""

    engine: str
    figures: dict[str, Figure]
    fused_head_sizes: frozenset[int]

    def __getitem__(self, name: str) -> Figure:
        return self.figures[name]

    def factors(self, bound: str) -> WorkspaceFactors:
        """The workspace factors at one bound: low, expected or high."""
        return WorkspaceFactors(
            hidden=self["hidden_elements"].at(bound),
            expert_output=self["expert_output_elements"].at(bound),
            query=self["query_elements"].at(bound),
            key_value=self["key_value_elements"].at(bound),
            intermediate=self["intermediate_elements"].at(bound),
            float32_share=self["float32_share"].at(bound),
            score_copies=self["score_copies"].at(bound),
            latent_score_copies=self["latent_score_copies"].at(bound),
            state_space_copies=self["state_space_copies"].at(bound),
            growth_copies=self["growth_copies"].at(bound),
            delta_states_per_token=self["delta_states_per_token"].at(bound),
            delta_graph_bytes=self["delta_graph_bytes"].at(bound),
            logit_copies=self["logit_copies"].at(bound),
            fused_head_sizes=self.fused_head_sizes,
        )


@cache
def mlx(device: ComputeDevice) -> Calibration:
    """The calibration of the MLX runtime, from `mlx.json` beside this file."""
    document = json.loads(resources.files(__package__).joinpath("mlx.json").read_text("utf-8"))
    figures = {name: _figure(row) for name, row in document["figures"][device.value].items()}
    return Calibration(document["engine"], figures, frozenset(document["fused_head_sizes"][device.value]))


def _figure(row: dict[str, Any]) -> Figure:
    return Figure(row["low"], row["expected"], row["high"], Source(row["source"]), row["basis"], row["date"])

"""The calibration of stable-diffusion.cpp's working buffers, from `sd.json` beside this file.

`sd.json` is made from measured rows by `services/fit/calibrate/sd.py`; nobody edits it by hand.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import ceil
from types import MappingProxyType
from typing import Any

from weighbridge_fit.lines import Range


@dataclass(frozen=True, slots=True)
class Spread:
    """How far measured bytes lie from what a law expects, as factors of it, over all rows that were looked at."""

    low: float
    high: float

    def around(self, expected: float, least: float | None = None) -> Range:
        """The range of bytes around an expected figure; `least` replaces it where the law is known to lie high."""
        return Range(
            int((expected if least is None else min(expected, least)) * self.low),
            ceil(expected),
            ceil(expected * self.high),
        )


@dataclass(frozen=True, slots=True)
class Curve:
    """A buffer over attention tokens: measured at knots, between and beyond them a parabola of known curvature.

    `pair_bytes` is that curvature: what one more pair of tokens costs in scores, or in a mask. So a law of the form
    a + b·n + c·n² is met exactly however far apart the knots are. Below the first knot the buffer stays what it is
    there; beyond the last it grows with the tokens and their pairs.
    """

    tokens: tuple[int, ...]
    sizes: tuple[int, ...]
    pair_bytes: float
    spread: Spread

    def bytes(self, tokens: int) -> float:
        """The expected buffer."""
        if tokens <= self.tokens[0]:
            return float(self.sizes[0])
        if tokens >= self.tokens[-1]:
            last = self.tokens[-1]
            return (self.sizes[-1] / last + self.pair_bytes * (tokens - last)) * tokens
        after = bisect_right(self.tokens, tokens)
        left, right = self.tokens[after - 1], self.tokens[after]
        share = (tokens - left) / (right - left)
        straight = self.sizes[after - 1] * (1 - share) + self.sizes[after] * share
        return straight - self.pair_bytes * (tokens - left) * (right - tokens)

    def range(self, tokens: int, text: float = 0.0) -> Range:
        """The buffer with its uncertainty; `text` is what a long prompt adds."""
        expected = self.bytes(tokens)
        return self.spread.around(expected + text, expected * min(1.0, tokens / self.tokens[0]))


@dataclass(frozen=True, slots=True)
class DiffusionLaw:
    """The diffusion model's buffer of one architecture: a curve for each way that its attention can go.

    `plain` without flash attention. With it `flash`; `masked` if the tokens are no multiple of 256, because a mask of
    all pairs is then made; `masked_below` if only a coarser level's are not. Names that end with `_extended` are for
    prompts of more than the usual length, or for videos, where that makes another graph. `text_token_bytes`: what each
    further text token costs where the picture attends across to the text, without and with flash attention.
    """

    curves: Mapping[str, Curve]
    text_token_bytes: tuple[int, int]

    def curve(self, way: str, extension: str) -> Curve:
        """The curve of a way. An extended one that nobody measured is taken from the mask's, which is the larger."""
        for name in (way + extension, "masked" + extension if way != "plain" else way, way, "masked"):
            if name in self.curves:
                return self.curves[name]
        raise KeyError(way)


@dataclass(frozen=True, slots=True)
class AutoencoderLaw:
    """One direction of an autoencoder: bytes per pixel by latent frames, a constant, and its middle attention.

    `attention_px_bytes` are bytes per pixel that are held beside the scores of that attention, which are one float32
    per pair of latent cells; None where there is no attention, or none that ever was the largest.
    """

    per_pixel: tuple[tuple[int, float], ...]
    flat: float
    attention_px_bytes: float | None
    spread: Spread

    def rate(self, frames: int) -> float:
        """Bytes per pixel at a number of latent frames; between measured ones the larger neighbour, beyond them in
        proportion, so that it never shrinks as frames are added."""
        best = 0.0
        for count, rate in self.per_pixel:
            best = max(best, rate)
            if count >= frames:
                return best
        count = self.per_pixel[-1][0]
        return best * frames / count


@dataclass(frozen=True, slots=True)
class WorkLaw:
    """ggml-cpu's scratch for products with quantised or half-precision weights: the widest input of one product.

    `row_elements` per token in the diffusion model, where `joint` says whether text tokens are in the same product;
    `encoder_row_elements` per token in the text encoder.
    """

    row_elements: int
    joint: bool
    encoder_row_elements: int


@dataclass(frozen=True, slots=True)
class SdCalibration:
    """All figures of one build of the engine."""

    engine: str
    build: str
    date: str
    diffusion: Mapping[str, DiffusionLaw]
    autoencoders: Mapping[str, AutoencoderLaw]
    encoders: Mapping[str, tuple[tuple[int, int], ...]]
    encoder_spread: Spread
    vision: tuple[float, float]
    """Bytes per pair of patches and per patch."""
    work: Mapping[str, WorkLaw]
    figures: Mapping[str, Range]


@cache
def stable_diffusion() -> SdCalibration:
    """The calibration in `sd.json`."""
    document: dict[str, Any] = json.loads(resources.files(__package__).joinpath("sd.json").read_text("utf-8"))
    return SdCalibration(
        engine=document["engine"],
        build=document["build"],
        date=document["date"],
        diffusion=MappingProxyType({name: _diffusion(law) for name, law in document["diffusion"].items()}),
        autoencoders=MappingProxyType({name: _autoencoder(law) for name, law in document["autoencoders"].items()}),
        encoders=MappingProxyType(
            {name: tuple((int(n), int(b)) for n, b in law["bytes"]) for name, law in document["encoders"].items()}
        ),
        encoder_spread=Spread(**document["encoder_spread"]),
        vision=(document["vision"]["pair_bytes"], document["vision"]["patch_bytes"]),
        work=MappingProxyType({name: WorkLaw(**law) for name, law in document["work"].items()}),
        figures=MappingProxyType(
            {name: Range(row["low"], row["expected"], row["high"]) for name, row in document["figures"].items()}
        ),
    )


def _curve(law: dict[str, Any]) -> Curve:
    tokens, sizes = zip(*law["knots"], strict=True)
    return Curve(tuple(tokens), tuple(sizes), law["pair_bytes"], Spread(law["low"], law["high"]))


def _diffusion(law: dict[str, Any]) -> DiffusionLaw:
    text = law.get("text_token_bytes", {"plain": 0, "flash": 0})
    curves = {name: _curve(row) for name, row in law.items() if name != "text_token_bytes"}
    return DiffusionLaw(MappingProxyType(curves), (text["plain"], text["flash"]))


def _autoencoder(law: dict[str, Any]) -> AutoencoderLaw:
    return AutoencoderLaw(
        tuple((int(n), float(r)) for n, r in law["per_pixel"]),
        law["flat"],
        law["attention_px_bytes"],
        Spread(law["low"], law["high"]),
    )

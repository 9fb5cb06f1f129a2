"""Bytes that each part holds once loaded: exact where its tensors are known, a range where only its size is."""

import re
from collections import Counter
from dataclasses import dataclass

from weighbridge_fit.laws.sd_resident import (
    AS_STORED,
    BLOCKS,
    CPU_ALIGNMENT,
    WIDEST_ALIGNMENT,
    Family,
    Retyping,
    resident_bytes,
    resident_type,
)
from weighbridge_fit.lines import Range, Source
from weighbridge_fit.plans.sd.parts import LoadedPart, Weight
from weighbridge_fit.plans.sd.remembered import Remembered


@dataclass(frozen=True, slots=True)
class Held:
    """What one part holds. `largest` is its largest tensor, `converted` the file's bytes of the largest tensors that
    change their type on loading, `linear_type` the type that most of its matrices are kept in."""

    component: str
    bytes: Range
    source: Source
    basis: str
    largest: int = 0
    converted: tuple[int, ...] = ()
    linear_type: str = ""


MATRIX = 2
MOST_THREADS_SEEN = 64
"""Only so many of the largest conversions can be under way at once, whatever the machine."""


@dataclass(frozen=True, slots=True)
class _Factor:
    """Bytes in memory per byte of the file, by what the file stores."""

    low: float
    expected: float
    high: float
    basis: str


_KINDS = (
    ("F32", re.compile("F32")),
    ("BF16", re.compile("BF16")),
    ("F16", re.compile("F16")),
    ("F8", re.compile("F8")),
    ("K-quant", re.compile("I?Q[1-6]_K|IQ|TQ|MXFP4")),
    ("legacy quant", re.compile("Q[458]_[01]")),
)
_FACTORS = {
    # Convolution kernels become F16: a UNet's F32 file shrinks to 0.68 (SD 1.5), a transformer's hardly at all.
    "F32": _Factor(0.66, 0.9, 1.0, "0.66-1.0 x an F32 file: kernels become F16"),
    "BF16": _Factor(1.0, 1.01, 1.05, "1.0-1.05 x a BF16 file: norms become F32"),
    "F16": _Factor(0.98, 1.0, 1.04, "0.98-1.04 x an F16 file: norms become F32"),
    "F8": _Factor(1.9, 2.0, 2.02, "2 x an F8 file: every weight becomes F16"),
    "K-quant": _Factor(0.98, 1.02, 1.25, "0.98-1.25 x a K-quant: what cannot be kept becomes F32"),
    "legacy quant": _Factor(0.98, 1.0, 1.12, "0.98-1.12 x a legacy quant: what cannot be kept becomes F32"),
}
_ENCODER_FACTORS = {
    # Vocabularies are lookup tables, which BF16 and K-quants of become F32. Measured: a BF16 encoder holds 1.08
    # (Qwen2.5-VL-7B) to 1.31 (CLIP-L) x its file, a Q4_K one 1.47 (Qwen2.5-VL-7B) to 2.13 (umT5, 256,000 rows).
    "BF16": _Factor(1.0, 1.12, 1.35, "1.0-1.35 x a BF16 encoder: its lookup table becomes F32"),
    "K-quant": _Factor(1.0, 1.45, 2.3, "1.0-2.3 x a K-quant encoder: its lookup table becomes F32"),
}
_UNSAID = _Factor(0.66, 1.05, 2.02, "0.66-2.02 x the file: its stored type is not known")
_ENCODERS = frozenset({"llm", "t5xxl", "clip_l", "clip_g"})


def held_bytes(part: LoadedPart, family: Family, retyping: Retyping, on_card: bool) -> Held:
    """What a part holds after loading. `on_card`: drivers pad more than the host does."""
    if not part.weights:
        return _plausibly(part, retyping)
    return _HELD.get(
        part,
        (family, retyping, on_card),
        lambda: _exactly(part.component, part.weights, family, retyping, on_card),
    )


_HELD: Remembered[Held] = Remembered()


def _exactly(component: str, weights: tuple[Weight, ...], family: Family, retyping: Retyping, on_card: bool) -> Held:
    size = padded = largest = 0
    converted: list[int] = []
    linear: Counter[str] = Counter()
    for weight in weights:
        fact = weight.fact
        one = resident_bytes(fact, weight.name, weight.row, family, retyping, CPU_ALIGNMENT)
        if not one:
            continue
        size += one
        padded += -(-one // WIDEST_ALIGNMENT) * WIDEST_ALIGNMENT
        largest = max(largest, one)
        kept = resident_type(weight.name, fact.dtype, fact.shape, weight.row, family, retyping)
        if kept != fact.dtype:
            converted.append(fact.bytes)
        if len(fact.shape) == MATRIX:
            linear[kept] += one
    converted.sort(reverse=True)
    count = len(weights)
    basis = f"{count:,} tensors of the header, each as the engine keeps it"
    if retyping != AS_STORED:
        basis += ", after the retyping that was asked for"
    return Held(
        component,
        Range(size, size, padded if on_card else size),
        Source.DERIVED,
        basis,
        largest,
        tuple(converted[:MOST_THREADS_SEEN]),
        max(linear, key=lambda name: linear[name], default=""),
    )


def _plausibly(part: LoadedPart, retyping: Retyping) -> Held:
    kind = next((name for name, pattern in _KINDS if pattern.search(part.quantization)), "")
    factor = _FACTORS.get(kind, _UNSAID)
    if part.component in _ENCODERS:
        factor = _ENCODER_FACTORS.get(kind, factor)
    low, expected, high = factor.low, factor.expected, factor.high
    stored = f"{part.file_bytes:,} bytes of {part.quantization or 'an unknown type'}"
    basis = f"no tensors known: {factor.basis}; {stored}"
    if retyping != AS_STORED:
        low, expected, high, words = _retyped(part, factor, retyping)
        basis += f"; {words}"
    size = part.file_bytes
    return Held(part.component, Range(int(low * size), int(expected * size), int(high * size)), Source.ASSUMED, basis)


def _retyped(part: LoadedPart, factor: _Factor, retyping: Retyping) -> tuple[float, float, float, str]:
    """Bytes in memory per byte of the file after a retyping, and the reason in words.

    Matrices take the new type, all else stays: how much of a file is matrices differs by architecture.
    """
    stored = next((BLOCKS[name] for name in _WIDEST_FIRST if name in part.quantization.upper()), None)
    if not retyping.to or retyping.rules or stored is None:
        # From the widest to the narrowest type there is: a retyped file can become anything in between.
        elements, width = BLOCKS[retyping.to] if retyping.to else BLOCKS["F32"]
        per_element = width / elements
        low, high = min(factor.low, per_element / 4), max(factor.high, per_element * 8)
        return low, min(max(low, factor.expected), high), high, "retyped, so between the extremes"
    elements, width = BLOCKS[retyping.to]
    ratio = width / elements / (stored[1] / stored[0])

    def at(share: float, rest: float) -> float:
        return share * ratio + (1 - share) * rest

    fewest, usual, most = _MATRICES.get(part.component, _MATRICES[DIFFUSION_MODEL])
    bounds = [at(share, rest) for share in (fewest, most) for rest in (factor.low, factor.high)]
    words = f"matrices become {retyping.to}, {ratio:.2f} of their bytes: {fewest:.0%} to {most:.0%} of such a file"
    return min(bounds), at(usual, factor.expected), max(bounds), words


DIFFUSION_MODEL = "diffusion_model"
_MATRICES = {
    # The part of a file that is retyped: fewest, usual, most. From resident bytes at F16, Q8_0 and Q4_0
    # (stable-diffusion-cpp-python 0.4.7, 2026-11-30): SD 1.5's UNet 0.31, SD3.5 medium 0.82, SDXL 0.87, FLUX.1 and
    # Qwen-Image 1.0. Checkpoints in one file are UNets with their encoders, models in parts are transformers; an
    # autoencoder is kernels, which no type changes.
    "model": (0.3, 0.85, 1.0),
    DIFFUSION_MODEL: (0.3, 1.0, 1.0),
    "vae": (0.0, 0.0, 0.1),
}
_WIDEST_FIRST = sorted(BLOCKS, key=len, reverse=True)
"""Longer names before those that are part of them: BF16 before F16."""

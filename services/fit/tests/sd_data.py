"""Measured rows and tensor tables of stable-diffusion.cpp, as the tests of its prices read them.

`data/sd/measurements.json.gz`: what one build allocated (stable-diffusion-cpp-python 0.4.7, CPU, measured 2026-11-30).
`data/sd/tensors.json.gz`: the tensors of each architecture by the engine's own names, slowest dimension first.
"""

import gzip
import json
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from weighbridge_fit.facts import ComponentTotal, TensorFact, WeightFacts, WeightFormat
from weighbridge_fit.model import Model
from weighbridge_fit.plans.sd.options import TYPES, SdRequest

DATA = Path(__file__).parent / "data" / "sd"
MIB, GIB = 1 << 20, 1 << 30

# Elements and bytes of a block, from the GGUF specification.
BLOCK = {
    "F64": (1, 8),
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "F8_E4M3": (1, 1),
    "F8_E5M2": (1, 1),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_K": (256, 144),
}


@cache
def rows() -> list[dict[str, Any]]:
    """Every measured row."""
    document = json.loads(gzip.decompress((DATA / "measurements.json.gz").read_bytes()))
    found: list[dict[str, Any]] = document["rows"]
    return found


@cache
def tables() -> dict[str, list[tuple[str, tuple[int, ...], str]]]:
    """(name, shape, type in memory of an F16 file) of every tensor, by architecture."""
    document = json.loads(gzip.decompress((DATA / "tensors.json.gz").read_bytes()))
    return {
        name: [(tensor, tuple(shape), kept) for tensor, shape, kept in tensors]
        for name, tensors in document["architectures"].items()
    }


def stored(name: str, shape: tuple[int, ...], file_type: str) -> TensorFact:
    """A tensor as the measured files store it: what does not fill a block of a quantised file is F16 there, and so are
    SD3's positions."""
    elements, size = BLOCK[file_type]
    if len(shape) < 2 or shape[-1] % elements or (elements > 1 and name.endswith("pos_embed")):
        file_type, elements, size = "F16", 1, 2
    count = prod(shape)
    return TensorFact(name, file_type, shape, count, count // elements * size)


@cache
def facts_of(architecture: str, file_type: str) -> WeightFacts:
    """One checkpoint with all parts of an architecture."""
    tensors = tuple(sorted((("", stored(name, shape, file_type)) for name, shape, _ in tables()[architecture])))
    return facts(tensors, architecture)


def facts(tensors: tuple[tuple[str, TensorFact], ...], name: str = "m", digest: str = "") -> WeightFacts:
    """Facts of some tensors."""
    size = sum(fact.bytes for _, fact in tensors)
    return WeightFacts(
        name=name,
        format=WeightFormat.SAFETENSORS,
        file_bytes=size,
        tensor_bytes=size,
        tensor_count=len(tensors),
        element_count=sum(fact.elements for _, fact in tensors),
        largest_tensor_bytes=max((fact.bytes for _, fact in tensors), default=0),
        precisions=(),
        components=(ComponentTotal("", len(tensors), size, ()),),
        tensors=tensors,
        model_digest=digest,
    )


def model_of(architecture: str, file_type: str = "F16") -> Model:
    """A model with all its parts in one file."""
    return Model(facts_of(architecture, file_type))


def request_of(row: dict[str, Any], **changed: Any) -> SdRequest:
    """What a row rendered, with the flags that it was launched with."""
    flags = list(row["flags"])
    given: dict[str, Any] = {"width_px": row.get("width", 0), "height_px": row.get("height", 0)}
    for flag, name in (
        ("--diffusion-fa", "flash_attention"),
        ("--vae-tiling", "vae_tiling"),
        ("--vae-conv-direct", "vae_conv_direct"),
        ("--diffusion-conv-direct", "diffusion_conv_direct"),
        ("--mmap", "mmap"),
    ):
        if flag in flags:
            given[name] = True
    if "--type" in flags:
        given["weight_type"] = flags[flags.index("--type") + 1]
    if "--tensor-type-rules" in flags:
        given["tensor_type_rules"] = flags[flags.index("--tensor-type-rules") + 1]
    return SdRequest(**(given | changed))


def known_types() -> frozenset[str]:
    """Types that a retyping can name, in lower case."""
    return frozenset(TYPES)

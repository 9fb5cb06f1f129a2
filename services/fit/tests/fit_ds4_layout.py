"""Models for ds4 as fit sees them: facts and header-only files, and machines to plan them on.

V4 Flash is laid out as the writer of sparse models lays it out, which a real ds4-server accepts; with a header of
5,335,588 bytes it reproduces the published files to the byte.
"""

import struct
from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path

from weighbridge_common import ds4_layout
from weighbridge_common.ds4_layout import LAYERS, MIXES, TYPES, Mix
from weighbridge_fit.capacity import Capacity, Ceiling, DeviceCeiling, Pool
from weighbridge_fit.catalog.entry import CatalogEntry
from weighbridge_fit.catalog.manifest import read_manifest
from weighbridge_fit.catalog.resolve import known_by_sizes
from weighbridge_fit.facts import ComponentTotal, FileSummary, TensorFact, WeightFacts, WeightFormat
from weighbridge_fit.model import Model

GIB, MIB = 1 << 30, 1 << 20
HEADER_BYTES = 5_335_588
FLASH_RATIOS = (0, 0, *(4, 128) * 20, 4)
"""Of V4 Flash, layer by layer, as ds4 8d57664 checks them."""


def tensor(name: str, dtype: str, *shape: int) -> TensorFact:
    _, block, size = TYPES[dtype]
    return TensorFact(name, dtype, shape, prod(shape), prod(shape) // block * size)


def flash(mix: Mix = "q2", q4_layers: Collection[int] = ()) -> tuple[TensorFact, ...]:
    """Every tensor of V4 Flash; `q4_layers` have Q4_K experts."""
    return tuple(tensor(each.name, each.type, *each.shape) for each in ds4_layout.flash(mix, q4_layers))


_MEASURED = ("token_embd", "attn_kv.", "attn_compressor_ape", "indexer_compressor_norm", "_exps.")


def slim(tensors: Sequence[TensorFact]) -> tuple[TensorFact, ...]:
    """The same bytes in a header that is read in a tenth of the time: what no measure is read from is one tensor."""
    kept = tuple(each for each in tensors if any(part in each.name for part in _MEASURED))
    rest = sum(each.bytes for each in tensors) - sum(each.bytes for each in kept)
    return (*kept, tensor("output.weight", "I8", rest))


def pro() -> tuple[TensorFact, ...]:
    """V4 PRO by its shape: more layers than Flash has. Its own sizes are not published; these are Flash's, 61 times."""
    found = slim(flash())
    more = [
        each._replace(name=each.name.replace(f"blk.{twin}.", f"blk.{layer}."))
        for layer in range(LAYERS, 61)
        for twin in (41 + layer % 2,)
        for each in found
        if each.name.startswith(f"blk.{twin}.")
    ]
    return (*found, *more)


def _experts(layers: Sequence[int], gate: str, down: str, hidden: int, inner: int, experts: int) -> list[TensorFact]:
    return [
        tensor(f"blk.{layer}.ffn_{part}_exps.weight", dtype, *shape, experts)
        for layer in layers
        for part, dtype, shape in (
            ("gate", gate, (hidden, inner)),
            ("up", gate, (hidden, inner)),
            ("down", down, (inner, hidden)),
        )
    ]


def v41(mix: Mix = "q2") -> tuple[TensorFact, ...]:
    """V4.1 Flash by its measures: 40 layers of 384 experts, Engram tables, and one tensor for all that stays."""
    gate, down = MIXES[mix]
    tables = tensor("blk.1.engram_embd.weight", "I8", 202_778_032_400)
    stays = tensor("output.weight", "I8", 10_061_367_744)
    return (tables, stays, *_experts(range(40), gate, down, 5120, 2304, 384))


def glm() -> tuple[TensorFact, ...]:
    """GLM 5.2 by its measures: 75 layers of 256 experts in IQ2_XXS, and one tensor for all that stays."""
    stays = tensor("output.weight", "I8", 21_048_719_424)
    return (stays, *_experts(range(3, 78), "IQ2_XXS", "IQ2_XXS", 6144, 2048, 256))


def facts_of(
    tensors: Sequence[TensorFact], architecture: str = "deepseek4", header: int = HEADER_BYTES, name: str = "model.gguf"
) -> WeightFacts:
    """The facts of one whole GGUF file that holds these tensors."""
    size = sum(each.bytes for each in tensors)
    return WeightFacts(
        name=name,
        format=WeightFormat.GGUF,
        file_bytes=size + header,
        tensor_bytes=size,
        tensor_count=len(tensors),
        element_count=sum(each.elements for each in tensors),
        largest_tensor_bytes=max((each.bytes for each in tensors), default=0),
        precisions=(),
        components=(ComponentTotal("model", len(tensors), size, ()),),
        files=(FileSummary(name, size + header, header, WeightFormat.GGUF, len(tensors)),),
        architecture=architecture,
        tensors=tuple(sorted(("model", each) for each in tensors)),
    )


def companion(size: int, *names: str) -> WeightFacts:
    """A companion's facts: so many bytes under these tensor names."""
    tensors = [tensor(name, "I8", size // max(1, len(names))) for name in names or ("weight",)]
    return facts_of(tensors, "", header=0, name="companion.gguf")


def write_sparse(path: Path, tensors: Sequence[TensorFact], architecture: str = "deepseek4") -> None:
    """A GGUF file with these tensors' header, whose data are holes: large to read, small on disk."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    infos, offset = b"", 0
    for each in tensors:
        infos += text(each.name) + struct.pack(f"<I{len(each.shape)}Q", len(each.shape), *each.shape)
        infos += struct.pack("<IQ", TYPES[each.dtype][0], offset)
        offset += -(-each.bytes // 32) * 32
    pairs = text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1) + pairs + infos
    with path.open("wb") as file:
        file.write(head)
        file.truncate(-(-len(head) // 32) * 32 + offset)


def entry(catalog_id: str) -> CatalogEntry:
    """An entry of the project's own catalogue."""
    name = f"{catalog_id}.json"
    return read_manifest((Path(__file__).parents[3] / "catalog" / "models" / name).read_bytes(), name)


def listed(catalog_id: str) -> Model:
    """A catalogue model of which only the sizes of its files are known."""
    return known_by_sizes(entry(catalog_id))


def unified(ram_gib: float, platform: str = "darwin/arm64", limit_gib: float | None = None) -> Capacity:
    """One memory, with the ledger's ceiling: 70 % (80 % from 96 GiB), at least all but 16 GiB, at most all but 4."""
    share = 0.8 if ram_gib >= 96 else 0.7
    automatic = int(min(max(ram_gib * share, ram_gib - 16), ram_gib - 4) * GIB)
    limit = None if limit_gib is None else int(limit_gib * GIB)
    ceiling = Ceiling(automatic, automatic if limit is None else min(limit, automatic), limit)
    return Capacity(Pool.UNIFIED, ceiling, ceiling, (), int(ram_gib * GIB), platform)


def with_card(ram_gib: int, card_gib: int, platform: str = "linux/x86_64") -> Capacity:
    """A machine with one card: 95 % of it, and 60 % (80 % from 96 GiB) of host memory, at most 96 GiB."""
    host = min(int(ram_gib * (0.8 if ram_gib >= 96 else 0.6) * GIB), 96 * GIB)
    card = int(card_gib * 0.95 * GIB)
    device = DeviceCeiling("GPU-0", Ceiling(card, card))
    total = Ceiling(host + card, host + card)
    return Capacity(Pool.DISCRETE, Ceiling(host, host), total, (device,), ram_gib * GIB, platform)


def processor(ram_gib: int, platform: str = "linux/x86_64") -> Capacity:
    """A machine without a card."""
    host = min(int(ram_gib * (0.8 if ram_gib >= 96 else 0.6) * GIB), 96 * GIB)
    return Capacity(Pool.CPU, Ceiling(host, host), Ceiling(host, host), (), ram_gib * GIB, platform)

"""The calibration of ds4, from `ds4.json` beside this file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import resources

from weighbridge_fit.calibration import Figure
from weighbridge_fit.laws.ds4_context import ContextLayers
from weighbridge_fit.laws.ds4_v41 import SessionTable
from weighbridge_fit.lines import Source


class Compute(Enum):
    """What ds4 computes on."""

    METAL = "metal"
    CUDA = "cuda"
    CPU = "cpu"


class Layout(Enum):
    """The memory layout of a build, by the month it appeared in; the newest one also stands for later builds."""

    MAY = "2026-05"
    JULY = "2026-07"


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A published file whose layout is known to the byte: its size tells it apart. `routed` are (layers, experts,
    bytes of one expert)."""

    name: str
    file_bytes: int
    family: str
    non_routed_bytes: int
    hidden_size: int
    used: int
    routed: tuple[tuple[int, int, int], ...]
    embedding_bytes: int = 0
    largest_tensor_bytes: int = 0
    disk_only_bytes: int = 0
    draft_block: bool = False


@dataclass(frozen=True)
class Ds4Calibration:
    """Figures by name, tables, and what is published. `flash` are the context's measures of V4 Flash, `flash_hidden`
    its width, `flash_vocab` the rows of its vocabulary."""

    engine: str
    figures: Mapping[str, Figure]
    v41_session: SessionTable
    flash: ContextLayers
    flash_hidden: int
    flash_vocab: int
    published: tuple[PublishedFile, ...]

    def __getitem__(self, name: str) -> Figure:
        return self.figures[name]


@cache
def ds4() -> Ds4Calibration:
    """The calibration, read once."""
    document = json.loads(resources.files(__package__).joinpath("ds4.json").read_text("utf-8"))
    flash = document["flash"]
    return Ds4Calibration(
        engine=document["engine"],
        figures={
            name: Figure(row["low"], row["expected"], row["high"], Source(row["source"]), row["basis"], row["date"])
            for name, row in document["figures"].items()
        },
        v41_session=SessionTable(**document["v41_session"]),
        flash=ContextLayers(tuple(flash["ratios"]), flash["row_size"], flash["indexer_size"], flash["window_tokens"]),
        flash_hidden=flash["hidden_size"],
        flash_vocab=flash["vocab_size"],
        published=tuple(
            PublishedFile(**{**row, "routed": tuple(tuple(group) for group in row["routed"])})
            for row in document["published_files"]
        ),
    )

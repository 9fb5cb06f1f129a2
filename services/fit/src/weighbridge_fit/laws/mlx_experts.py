"""Experts held in a slab of slots instead of all at once: the others are read from disk when they are needed.

A slot holds one expert of one layer: its projections and their scales, each on a 16 KiB boundary so that a read goes
straight into it. The slab is whole slots. Fewer slots than one token (or one verification of drafted tokens) needs in a
single layer cannot work. Source: the expert runtime of mlx-bun (August 2026): slots = working + kept, working at least
min(experts, experts per token x rows).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from weighbridge_fit.facts import TensorFact

ALIGNMENT = 16 * 1024

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,5})\.")
_ONE_EXPERT = re.compile(r"\.experts\.(\d{1,6})\.")
_ALL_EXPERTS = re.compile(r"\.(?:switch_mlp|switch_glu|experts)\.")


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a set of tensors: their bytes, the layers that have them, and a slot's bytes (those of the
    layer with the largest ones)."""

    bytes: int = 0
    layers: int = 0
    slot_bytes: int = 0


def experts_of(tensors: Iterable[TensorFact], experts: int) -> Experts:
    """Finds routed experts by name: one tensor per expert (`experts.<n>.`), or stacked with the experts in front.

    Shared experts, routers and their biases are no routed experts.
    """
    slots: dict[int, dict[str, int]] = {}
    total = 0
    for tensor in tensors:
        layer = _LAYER.search(tensor.name)
        if layer is None or experts < 1:
            continue
        one = _ONE_EXPERT.search(tensor.name)
        if one is not None:
            piece, size = tensor.name.replace(one.group(0), ".experts.", 1), tensor.bytes
        elif _ALL_EXPERTS.search(tensor.name) and len(tensor.shape) > 1 and tensor.shape[0] == experts:
            piece, size = tensor.name, -(-tensor.bytes // experts)
        else:
            continue
        total += tensor.bytes
        pieces = slots.setdefault(int(layer.group(1)), {})
        pieces[piece] = max(pieces.get(piece, 0), size)
    aligned = [sum(-(-size // ALIGNMENT) * ALIGNMENT for size in pieces.values()) for pieces in slots.values()]
    return Experts(total, len(slots), max(aligned, default=0))


def working_slots(experts: int, experts_per_token: int, rows: int) -> int:
    """Experts that one layer may need at once for so many tokens."""
    return min(experts, experts_per_token * rows)

"""Curves of the diffusion models' buffers over their attention tokens."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil
from typing import Any

from sd_rows import EXTENDED_MARGINS, MARGINS, Diffusion, Point, from_measured, tokens_of
from weighbridge_fit.laws.sd_buffers import EXTENDED, attention_way, extended, position_bytes
from weighbridge_fit.laws.sd_shapes import (
    ARCHITECTURES,
    CLIP_CHUNK,
    RenderShape,
    TextRule,
    attention_tokens,
    image_tokens,
)

LEAST_TOKENS, SMALL_TOKENS = 1024, 256
KNOT_STEP, ROWS_PER_KNOT = 1.10, 5
LOWERING, SWEEPS = 0.985, 1000


def diffusion_laws(rows: Iterable[dict[str, Any]], sized: Iterable[list[Any]]) -> dict[str, Any]:
    """A curve per architecture and way of attention."""
    found: dict[str, list[Diffusion]] = defaultdict(list)
    for row in rows:
        entry = from_measured(row)
        if entry is not None:
            found[entry[0]].append(entry)
    for name, width, height, frames, text, pictures, flash, size in sized:
        shape = RenderShape(width, height, frames)
        tokens = image_tokens(name, shape) + sum(tokens_of(name, wide, high) for wide, high in pictures)
        found[name].append((name, tokens, text, frames, height << 16 | width, bool(flash), size))
    return {name: _architecture_laws(name, found[name]) for name in sorted(found)}


def _architecture_laws(name: str, entries: list[Diffusion]) -> dict[str, Any]:
    row = ARCHITECTURES[name]
    groups: dict[str, list[Point]] = defaultdict(list)
    across: list[tuple[bool, int, int, int]] = []
    for _, images, text, frames, size, flash, measured in sorted(set(entries)):
        if row.text is TextRule.CLIP and text > CLIP_CHUNK:
            across.append((flash, images, text - CLIP_CHUNK, measured))
            continue
        # Where cropping SD3's positions is the larger, that row says nothing of the blocks, but for the least pictures.
        positions = row.position_rows and measured <= position_bytes(name, size & 0xFFFF, size >> 16, text)
        if positions and images >= SMALL_TOKENS:
            continue
        tokens = attention_tokens(name, images, text)
        groups[attention_way(name, tokens, flash) + extended(name, text, frames)].append((tokens, measured))
    laws: dict[str, Any] = {}
    for way, points in sorted(groups.items()):
        pair = {"plain": float(row.pair_bytes), "masked": 8.0, "masked_below": 0.5}.get(way.removesuffix(EXTENDED), 0.0)
        laws[way] = curve(points, pair, EXTENDED_MARGINS if way.endswith(EXTENDED) else MARGINS)
    if row.text is TextRule.CLIP:
        laws["text_token_bytes"] = {
            "plain": _text_token(name, laws, (entry for entry in across if not entry[0])),
            "flash": _text_token(name, laws, (entry for entry in across if entry[0])),
        }
    return laws


def _text_token(name: str, laws: dict[str, Any], across: Iterable[tuple[bool, int, int, int]]) -> int:
    """What a further text token costs where the picture attends across to the text: keys and values of one layer."""
    most = 0.0
    for flash, images, beyond, measured in across:
        if images >= LEAST_TOKENS:
            expected = bytes_at(laws[attention_way(name, images, flash)], images)
            most = max(most, (measured - expected) / beyond)
    return ceil(most)


def curve(points: Iterable[Point], pair_bytes: float, margins: tuple[float, float] = MARGINS) -> dict[str, Any]:
    """The lowest curve that no measured point is above, found by lowering a high one step by step."""
    spans: dict[int, list[float]] = defaultdict(list)
    for tokens, size in points:
        spans[tokens].append(size)
    most = sorted((tokens, max(sizes)) for tokens, sizes in spans.items())
    knots = _knots([tokens for tokens, _ in most])
    values = _rising(knots, _lowered(knots, most, pair_bytes), pair_bytes)
    law: dict[str, Any] = {
        "pair_bytes": pair_bytes,
        "rows": len(most),
        "knots": [[tokens, ceil(value)] for tokens, value in zip(knots, values, strict=True)],
    }
    shares = [size / bytes_at(law, tokens) for tokens, sizes in sorted(spans.items()) for size in sizes]
    law["low"] = round(min(shares) * margins[0], 3)
    law["high"] = round(max(1.0, *shares) * margins[1], 3)
    return law


def _knots(tokens: Sequence[int]) -> list[int]:
    """Token counts between which one parabola holds: far enough apart, and with rows in between."""
    knots, inside = [tokens[0]], 0
    for count in tokens[1:]:
        inside += 1
        if inside >= ROWS_PER_KNOT and count >= knots[-1] * KNOT_STEP:
            knots.append(count)
            inside = 0
    if len(knots) > 1 and inside < ROWS_PER_KNOT:
        knots.pop()
    return knots if knots[-1] == tokens[-1] else [*knots, tokens[-1]]


def _lowered(knots: Sequence[int], points: Sequence[Point], pair_bytes: float) -> list[float]:
    """Bytes at the knots: each lowered a little at a time, as far as the points on both its sides allow."""
    around: list[list[tuple[float, int, float]]] = [[] for _ in knots]
    after = 1
    for tokens, size in points:
        while after < len(knots) - 1 and tokens > knots[after]:
            after += 1
        if len(knots) == 1:
            around[0].append((1.0, 0, size))
            continue
        left, right = knots[after - 1], knots[after]
        share = (tokens - left) / (right - left)
        raised = size + pair_bytes * (tokens - left) * (right - tokens)
        if share < 1:
            around[after - 1].append((1 - share, after, raised))
        if share > 0:
            around[after].append((share, after - 1, raised))
    top = max(size / tokens for tokens, size in points)
    values = [1.5 * top * tokens for tokens in knots]
    for _ in range(SWEEPS):
        moved = False
        for index, near in enumerate(around):
            needed = max(
                ((size - (1 - weight) * values[other]) / weight for weight, other, size in near), default=values[index]
            )
            lower = max(needed, values[index] * LOWERING)
            moved |= lower < values[index] * (1 - 1e-9)
            values[index] = min(values[index], lower)
        if not moved:
            break
    return values


def _rising(knots: Sequence[int], values: Sequence[float], pair_bytes: float) -> list[float]:
    """The same, raised where a curve would fall as tokens are added, at a knot or at the foot of a parabola."""
    risen = [values[0]]
    for (left, right), value in zip(pairwise(knots), values[1:], strict=True):
        risen.append(max(value, risen[-1] + pair_bytes * (right - left) ** 2))
    return risen


def bytes_at(law: dict[str, Any], tokens: int) -> float:
    """What a law in the making expects; as `calibration.sd.Curve.bytes` does."""
    knots, pair = law["knots"], law["pair_bytes"]
    if tokens <= knots[0][0]:
        return float(knots[0][1])
    for (left, below), (right, above) in pairwise(knots):
        if tokens <= right:
            share = (tokens - left) / (right - left)
            return float(below + (above - below) * share - pair * (tokens - left) * (right - tokens))
    last, size = knots[-1]
    return float((size / last + pair * (tokens - last)) * tokens)

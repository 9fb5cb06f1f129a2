"""Makes `weighbridge_fit/calibration/sd.json` from measured rows. Deterministic: the same rows give the same bytes.

    python services/fit/calibrate/sd.py            writes the file
    python services/fit/calibrate/sd.py --check    compares, and exits 1 where they differ

Input are `tests/data/sd/measurements.json.gz` (buffers and processes of an engine build) and beside it
`sizings.json.gz` (graphs of the same engine, sized by its own allocator). The latter's held-out section is never read
here.

Laws come from the engine's code (`laws.sd_shapes`, `laws.sd_buffers`); here their figures are found. Arithmetic is
plain Python floats in a fixed order, rounded at the end, so no version of a numerical library can change a digit.
"""

import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from weighbridge_fit.laws.sd_buffers import EXTENDED, MASK_STEP_TOKENS, attention_way, extended, position_bytes
from weighbridge_fit.laws.sd_shapes import (
    ARCHITECTURES,
    CLIP_CHUNK,
    Autoencoder,
    RenderShape,
    TextRule,
    attention_tokens,
    context_tokens,
    image_tokens,
    round_up,
    rounded,
)

HERE = Path(__file__).parent
DATA = HERE.parent / "tests" / "data" / "sd"
OUTPUT = HERE.parent / "src" / "weighbridge_fit" / "calibration" / "sd.json"

MEASURED_NAMES = {"flux1dev": "flux1", "flux2dev": "flux2", "qwenimage": "qwen_image", "qwenedit": "qwen_image"}
"""Names of the measured rows that are another in the recogniser of architectures."""
WITH_VISION = "qwenedit"
ENCODER_ROW_ELEMENTS = {"clip": 3072, "clip_h": 4096, "clip_g": 5120, "t5": 10240}
ENCODER_ROWS = {"flux2": 32768, "klein4b": 9728, "klein9b": 12288, "zimage": 9728, "qwen_image": 18944}
"""Inner widths of the text encoders, from their configs: the widest input of a product."""

LARGE_PX = 512 * 512
LEAST_TOKENS, SMALL_TOKENS = 1024, 256
ATTENTION_CELL_PX = {Autoencoder.WAN22: 16}
"""Pixels along the side of what an autoencoder's middle attends to: 8, where nothing else is said."""
KNOT_STEP, ROWS_PER_KNOT = 1.10, 5
LOWERING, SWEEPS = 0.985, 1000
MARGINS = MARGIN_LOW, MARGIN_HIGH = 0.95, 1.05
EXTENDED_MARGINS = 0.85, 1.10
"""Beyond the least and the largest measured, for sizes that nobody has measured."""

Point = tuple[int, float]
Diffusion = tuple[str, int, int, int, int, bool, int]
"""Architecture, image tokens, text tokens, frames, height x 65536 + width, flash attention, bytes."""


def main(arguments: Sequence[str]) -> int:
    text = document(*read())
    if "--check" in arguments:
        same = OUTPUT.read_text("utf-8") == text
        print("unchanged" if same else f"{OUTPUT} is not what the rows give: run this without --check")
        return 0 if same else 1
    OUTPUT.write_text(text, "utf-8")
    print(f"wrote {OUTPUT}")
    return 0


def read() -> tuple[dict[str, Any], dict[str, Any]]:
    """Measured rows and sized graphs."""
    return tuple(json.loads(gzip.decompress((DATA / name).read_bytes())) for name in _FILES)  # type: ignore[return-value]


_FILES = ("measurements.json.gz", "sizings.json.gz")


def document(measured: dict[str, Any], sized: dict[str, Any]) -> str:
    """The calibration as text: one law or figure a line."""
    rows = [row for row in measured["rows"] if row["kind"] == "compute" and "error" not in row]
    parts = {
        "engine": sized["engine"],
        "build": sized["build"],
        "date": sized["date"],
        "comment": "Made by services/fit/calibrate/sd.py from the rows in services/fit/tests/data/sd: edit those, not "
        "this file. Knots: attention tokens and bytes. low and high: factors of what is expected.",
        "diffusion": diffusion_laws(rows, sized["diffusion"]),
        "autoencoders": autoencoder_laws(sized["autoencoder"]),
        "encoders": encoder_laws(rows, sized["text"]),
        "encoder_spread": {"low": 0.85, "high": 1.05},
        "vision": vision_law(sized["text"]),
        "work": work_laws(rows),
        "figures": process_figures(measured["rows"]),
    }
    return _text(parts) + "\n"


# --- diffusion ---------------------------------------------------------------------------------------------------


def diffusion_laws(rows: Iterable[dict[str, Any]], sized: Iterable[list[Any]]) -> dict[str, Any]:
    """A curve per architecture and way of attention."""
    found: dict[str, list[Diffusion]] = defaultdict(list)
    for row in rows:
        entry = _from_measured(row)
        if entry is not None:
            found[entry[0]].append(entry)
    for name, width, height, frames, text, pictures, flash, size in sized:
        shape = RenderShape(width, height, frames)
        tokens = image_tokens(name, shape) + sum(_tokens(name, wide, high) for wide, high in pictures)
        found[name].append((name, tokens, text, frames, height << 16 | width, bool(flash), size))
    return {name: _architecture_laws(name, found[name]) for name in sorted(found)}


def _from_measured(row: dict[str, Any]) -> Diffusion | None:
    name = MEASURED_NAMES.get(row["arch"], row["arch"])
    case = row["case"]
    # A second pass, a picture that the vision tower also reads, a prompt of so many words: other rows cover them.
    if name not in ARCHITECTURES or case.startswith(("hires", "prompt")) or "--diffusion-conv-direct" in row["flags"]:
        return None
    frames = int(case[6:]) if case.startswith("frames") else 1
    pictures = int(case[3:]) if case.startswith("ref") else 0
    size = (row["width"], row["height"])
    shape = RenderShape(*size, frames, reference_images=(rounded(name, *size),) * pictures)
    width, height = rounded(name, *size)
    flash = any(flag in ("--fa", "--diffusion-fa") for flag in row["flags"])
    tokens, text = image_tokens(name, shape), context_tokens(name, shape, row["arch"] == WITH_VISION)
    return name, tokens, text, frames, height << 16 | width, flash, row["compute_bytes"]["diffusion"]


def _tokens(name: str, width: int, height: int) -> int:
    side = ARCHITECTURES[name].token_px
    return -(-width // side) * -(-height // side)


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


# --- autoencoders ------------------------------------------------------------------------------------------------


def autoencoder_laws(sized: Iterable[list[Any]]) -> dict[str, Any]:
    """A law for each autoencoder, direction and kind of convolution."""
    kinds = {name: row.autoencoder for name, row in ARCHITECTURES.items()}
    cells = {kind: ATTENTION_CELL_PX.get(kind, 8) for kind in Autoencoder}
    groups: dict[str, list[list[Any]]] = defaultdict(list)
    sides: dict[str, int] = {}
    for name, graph, width, height, frames, direct, flash, size in sized:
        kind = Autoencoder.KL if name == "sdxl_rescaled" else kinds[name]
        way = graph.removeprefix("tiny_")
        label = "kl_rescaled" if name == "sdxl_rescaled" else kind.value
        key = f"{'tiny_' if way != graph else ''}{label}.{way}{'.direct' if direct else ''}"
        groups[key].append([width * height, (frames - 1) // 4 + 1, bool(flash), size])
        sides[key] = cells[kind]
    laws = {key: _autoencoder_law(key, groups[key], sides[key]) for key in sorted(groups)}
    for key in [key for key in laws if key.startswith("tiny_wan")]:
        laws.setdefault(f"{key}.direct", laws[key])  # not sized with direct convolutions: taken to save nothing
    return dict(sorted(laws.items()))


def _autoencoder_law(key: str, rows: list[list[Any]], cell_px: int) -> dict[str, Any]:
    attention = None if key.startswith("tiny_") else _attention_px(rows, cell_px)
    rates: dict[int, float] = {}
    flat = 0.0
    usual = [row for row in rows if not _attends(row, cell_px, attention)]
    for pixels, frames, _, size in usual:
        if pixels >= 256 * 256:
            rates[frames] = max(rates.get(frames, 0.0), size / pixels)
    rates = {frames: round(rate + 0.005, 2) for frames, rate in sorted(rates.items())}
    for pixels, frames, _, size in usual:
        flat = max(flat, size - rates[frames] * pixels)
    law: dict[str, Any] = {
        "per_pixel": [[frames, rate] for frames, rate in rates.items()],
        "flat": ceil(flat),
        "attention_px_bytes": attention,
        "rows": len(rows),
    }
    spans = [size / (rates[frames] * pixels + law["flat"]) for pixels, frames, _, size in usual]
    return law | {"low": round(min(spans) * MARGIN_LOW, 3), "high": MARGIN_HIGH}


def _pairs(pixels: int, flash: bool, cell_px: int) -> int:
    cells = pixels // (cell_px * cell_px)
    if not flash:
        return 4 * cells * cells
    return 8 * cells * round_up(cells, MASK_STEP_TOKENS) if cells % MASK_STEP_TOKENS else 0


def _attention_px(rows: list[list[Any]], cell_px: int) -> float | None:
    """Bytes per pixel beside the scores, from graphs whose scores alone are more than half of the buffer: the fewest,
    because where convolutions are still larger there is more beside them."""
    beside = [
        (size - _pairs(pixels, False, cell_px)) / pixels
        for pixels, frames, flash, size in rows
        if not flash and frames == 1 and size / 2 < _pairs(pixels, False, cell_px) < size
    ]
    return round(min(beside) + 0.005, 2) if beside else None


def _attends(row: list[Any], cell_px: int, attention: float | None) -> bool:
    """Whether the attention decides this graph's buffer."""
    pixels, frames, flash, size = row
    if attention is None or frames > 1:
        return False
    pairs = _pairs(pixels, flash, cell_px)
    return pairs > 0 and pairs + attention * pixels >= 0.97 * size


# --- text encoders -----------------------------------------------------------------------------------------------


def encoder_laws(rows: Iterable[dict[str, Any]], sized: Iterable[list[Any]]) -> dict[str, Any]:
    """Bytes by tokens: one point where the engine always reads the same number, else as sized."""
    points: dict[str, dict[int, int]] = defaultdict(dict)
    for name, graph, tokens, size in sized:
        if graph == "language_model":
            points[name][tokens] = size
    for row in rows:
        name = MEASURED_NAMES.get(row["arch"], row["arch"])
        if name in ARCHITECTURES and name not in ENCODER_ROWS:
            tokens = {TextRule.UMT5: 512, TextRule.T5: 256}.get(ARCHITECTURES[name].text, CLIP_CHUNK)
            points[name][tokens] = max(points[name].get(tokens, 0), row["compute_bytes"]["text_encoder"])
    return {name: {"bytes": [list(point) for point in sorted(points[name].items())]} for name in sorted(points)}


def vision_law(sized: Iterable[list[Any]]) -> dict[str, Any]:
    """Scores per pair of patches and activations per patch, from the fewest and the most patches."""
    points = sorted((patches, size) for _, graph, patches, size in sized if graph == "vision")
    (few, least), (many, most) = points[0], points[-1]
    pair = round((most / many - least / few) / (many - few), 3)
    patch = max((size - pair * patches * patches) / patches for patches, size in points)
    return {"pair_bytes": pair, "patch_bytes": round(patch + 0.05, 1), "rows": len(points)}


# --- the process -------------------------------------------------------------------------------------------------


def work_laws(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The widest product's input per token, from half-precision rows: two bytes an element."""
    widest: dict[str, tuple[int, float]] = {}
    for row in rows:
        entry = _from_measured(row)
        if (
            entry is None
            or row["file_type"] != "F16"
            or row["width"] * row["height"] < LARGE_PX
            or row["case"] != "txt2img"
        ):
            continue
        if any("direct" in flag for flag in row["flags"]):
            continue
        name, images, text = entry[:3]
        tokens = attention_tokens(name, images, text) if _joint(name) else images
        # The text encoder's own scratch is larger in small pictures: the row with the most tokens shows the model's.
        widest[name] = max(widest.get(name, (0, 0.0)), (tokens, (row["cpu_work_bytes"] - 128) / 2 / tokens))
    return {
        name: {
            "row_elements": ceil(elements),
            "joint": _joint(name),
            "encoder_row_elements": ENCODER_ROWS.get(name) or _encoder_width(name),
        }
        for name, (_, elements) in sorted(widest.items())
    }


def _joint(name: str) -> bool:
    """Whether text and image tokens are in one product: FLUX's single blocks and all blocks of Z-Image."""
    return ARCHITECTURES[name].text in (TextRule.T5, TextRule.PADDED_LLM, TextRule.BLOCKED_LLM)


def _encoder_width(name: str) -> int:
    text = ARCHITECTURES[name].text
    if text in (TextRule.T5, TextRule.UMT5, TextRule.CLIP_AND_T5):
        return ENCODER_ROW_ELEMENTS["t5"]
    return ENCODER_ROW_ELEMENTS[{"sdxl": "clip_g", "sd21": "clip_h"}.get(name, "clip")]


def process_figures(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Figures of whole processes: least, middle and most of the unmodified server's rows."""
    rows = list(rows)
    real = [row for row in rows if row["kind"] == "real"]
    plain = [row for row in real if not {"--mmap", "--type"} & set(row["flags"])]
    # Retyping what the engine has to widen leaves its read buffer in the heap: those are not the base.
    settled = [row for row in plain if row["load_peak_rss"] == row["load_rss"]]
    base: Callable[[dict[str, Any]], int] = lambda row: row["load_rss"] - row["params_total"]  # noqa: E731
    small = [base(row) for row in settled if not row["arch"].startswith("klein")]
    large = [base(row) for row in settled if row["arch"].startswith("klein")]
    left = [base(row) for row in real if base(row) > 1.5 * max(small) and not row["arch"].startswith("klein")]
    renders = [row["rss_after"] - row["load_rss"] for row in settled if row.get("rss_after")]
    full = [row for row in rows if row["kind"] == "compute" and row.get("file_type") == "F32"]
    plain_work = [row["cpu_work_bytes"] for row in full if not any("fa" in flag for flag in row["flags"])]
    flash_work = [row["cpu_work_bytes"] for row in full if any("fa" in flag for flag in row["flags"])]
    return {
        "base_clip_t5": _figure(small, "resident set after loading less the weights; CLIP and T5 tokenizers"),
        "base_language_model": _figure(large, "the same with the tables of a language model's tokenizer"),
        "retyping_left": _figure(
            [value - min(small) for value in left], "what conversion buffers leave in the heap after loading"
        ),
        "render": _figure(renders, "growth of the resident set by a first render, scratch included"),
        "work_plain": _figure(plain_work, "ggml-cpu's scratch where no product needs any: float32 weights"),
        "work_flash": _figure(flash_work, "the same with flash attention, which has rows of its own"),
    }


def _figure(values: Sequence[int], basis: str) -> dict[str, Any]:
    ordered = sorted(values)
    return {
        "low": round(ordered[0] * MARGIN_LOW),
        "expected": ordered[len(ordered) // 2],
        "high": round(ordered[-1] * (1.5 if len(ordered) < 8 else MARGIN_HIGH)),
        "source": "MEASURED",
        "rows": len(ordered),
        "basis": basis,
    }


# --- text --------------------------------------------------------------------------------------------------------


def _text(value: Any, depth: int = 0) -> str:
    """JSON with one law or figure a line, so that a change of calibration can be read as a change."""
    if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
        pad = " " * (depth + 1)
        lines = [f"{pad}{json.dumps(key)}: {_text(inner, depth + 1)}" for key, inner in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"
    return json.dumps(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

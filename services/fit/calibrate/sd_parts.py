"""Figures of autoencoders and text encoders, of ggml-cpu's scratch, and of whole processes."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import Any

from sd_rows import MARGIN_HIGH, MARGIN_LOW, MEASURED_NAMES, from_measured
from weighbridge_fit.laws.sd_buffers import MASK_STEP_TOKENS
from weighbridge_fit.laws.sd_shapes import ARCHITECTURES, CLIP_CHUNK, Autoencoder, TextRule, attention_tokens, round_up

ENCODER_ROW_ELEMENTS = {"clip": 3072, "clip_h": 4096, "clip_g": 5120, "t5": 10240}
ENCODER_ROWS = {"flux2": 32768, "klein4b": 9728, "klein9b": 12288, "zimage": 9728, "qwen_image": 18944}
"""Inner widths of the text encoders, from their configs: the widest input of a product."""
LARGE_PX = 512 * 512
ATTENTION_CELL_PX = {Autoencoder.WAN22: 16}
"""Pixels along the side of what an autoencoder's middle attends to: 8, where nothing else is said."""


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


def work_laws(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The widest product's input per token, from half-precision rows: two bytes an element."""
    widest: dict[str, tuple[int, float]] = {}
    for row in rows:
        entry = from_measured(row)
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

"""The rows that figures are found from, and the names and tokens behind them."""

from typing import Any

from weighbridge_fit.laws.sd_shapes import ARCHITECTURES, RenderShape, context_tokens, image_tokens, rounded

MEASURED_NAMES = {"flux1dev": "flux1", "flux2dev": "flux2", "qwenimage": "qwen_image", "qwenedit": "qwen_image"}
"""Names of the measured rows that are another in the recogniser of architectures."""
WITH_VISION = "qwenedit"
MARGINS = MARGIN_LOW, MARGIN_HIGH = 0.95, 1.05
EXTENDED_MARGINS = 0.85, 1.10
"""Beyond the least and the largest measured, for sizes that nobody has measured."""

Point = tuple[int, float]
Diffusion = tuple[str, int, int, int, int, bool, int]
"""Architecture, image tokens, text tokens, frames, height x 65536 + width, flash attention, bytes."""


def from_measured(row: dict[str, Any]) -> Diffusion | None:
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


def tokens_of(name: str, width: int, height: int) -> int:
    side = ARCHITECTURES[name].token_px
    return -(-width // side) * -(-height // side)

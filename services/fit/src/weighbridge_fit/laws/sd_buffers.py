"""Working buffers of stable-diffusion.cpp, one per phase: text encoder, diffusion model, autoencoder.

The engine sizes one graph per phase and frees its buffer before the next begins, so of these only the largest counts.
They do not depend on the type of the weights, on the batch (images are made one after another) or on guidance. All
functions raise KeyError for an architecture without a law; `is_priced` asks first.

Source: graphs of the engine's own code, sized by its own allocator; see `docs/pricing/stable-diffusion-buffers.md`.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import ceil
from types import MappingProxyType

from weighbridge_fit.calibration.sd import AutoencoderLaw, stable_diffusion
from weighbridge_fit.laws.sd_shapes import (
    ARCHITECTURES,
    CLIP_CHUNK,
    Autoencoder,
    BufferOptions,
    RenderShape,
    TextRule,
    attention_tokens,
    context_tokens,
    encoder_tokens,
    image_tokens,
    latent_frames,
    prompt_chunks,
    references,
    round_up,
    rounded,
    tile_px,
    vision_patches,
)
from weighbridge_fit.lines import NOTHING, Range

MASK_STEP_TOKENS = 256
"""Keys are padded to a multiple of this for flash attention; what is padded is masked, and the mask has all pairs."""
FLOAT32_BYTES = 4
EXTENDED = "_extended"
USUAL_CONTEXT_TOKENS: Mapping[TextRule, int] = MappingProxyType(
    {
        TextRule.CLIP_AND_T5: 154,
        TextRule.T5: 256,
        TextRule.PADDED_LLM: 512,
        TextRule.LLM: 320,
        TextRule.BLOCKED_LLM: 192,
    }
)
"""Text tokens up to which a prompt is one chunk, or short beside any picture."""
POSITION_SPREAD = 1.05
DIRECT_CONVOLUTION_LOW = 0.5
"""What direct convolutions can save in a UNet, at most and in small pictures only: from 1024 pixels square it is under
one per cent, so the expected figure is without."""
MASK_BYTES = 8
"""A mask while it is made: zeros and their padded copy, both float32."""
SD3_CONTEXT_WIDTH, SD3_LATENT_CHANNELS, SD3_SMALL_INPUTS = 4096, 16, 8288
QWEN_WIDTH = 3584


def is_priced(architecture: str) -> bool:
    """Whether the laws of this module know an architecture."""
    return architecture in ARCHITECTURES


def text_bytes(architecture: str, shape: RenderShape, options: BufferOptions | None = None) -> Range:
    """The text encoder's buffer, or its vision tower's while it looks at a reference image."""
    calibration = stable_diffusion()
    row, vision = ARCHITECTURES[architecture], options is not None and options.vision
    expected = _interpolated(calibration.encoders[architecture], encoder_tokens(architecture, shape, vision))
    if vision and row.text is TextRule.LLM:
        pair, patch = calibration.vision
        for wide, high in shape.reference_images:
            patches = vision_patches(wide, high)
            expected = max(expected, pair * patches * patches + patch * patches)
            # The picture's embeddings are an input of the text encoder's graph: a quarter of the patches.
            expected += patches // 4 * QWEN_WIDTH * FLOAT32_BYTES
    return calibration.encoder_spread.around(expected)


def diffusion_bytes(architecture: str, shape: RenderShape, options: BufferOptions | None = None) -> Range:
    """The diffusion model's buffer, which is kept from the first step to the last."""
    options = options or BufferOptions()
    images = image_tokens(architecture, shape)
    context = context_tokens(architecture, shape, options.vision)
    flash = options.flash_attention or options.flash_attention_everywhere
    found = tokens_bytes(architecture, images, context, shape.frames, flash=flash)
    if options.diffusion_conv_direct and ARCHITECTURES[architecture].unet:
        found = Range(int(found.low * DIRECT_CONVOLUTION_LOW), found.expected, found.high)
    if ARCHITECTURES[architecture].position_rows:
        width, height = rounded(architecture, shape.width_px, shape.height_px)
        positions = position_bytes(architecture, width, height, context)
        found = found.cover(Range(positions, positions, ceil(positions * POSITION_SPREAD)))
    return found


def tokens_bytes(architecture: str, images: int, context: int, frames: int = 1, *, flash: bool) -> Range:
    """The buffer of the transformer's blocks by tokens: `images` of picture and references, `context` of text."""
    law = stable_diffusion().diffusion[architecture]
    tokens = attention_tokens(architecture, images, context)
    way, extension = attention_way(architecture, tokens, flash), extended(architecture, context, frames)
    text = 0
    if ARCHITECTURES[architecture].text is TextRule.CLIP:
        text = law.text_token_bytes[flash] * max(0, context - CLIP_CHUNK)
    found = law.curve(way, extension).range(tokens, text)
    # Few extended graphs were sized: what the usual one of as many tokens may need bounds them too.
    return Range(found.low, found.expected, max(found.high, law.curve(way, "").range(tokens).high))


def attention_way(architecture: str, tokens: int, flash: bool) -> str:
    """Which of a law's curves holds for a number of attention tokens."""
    if not flash:
        return "plain"
    if tokens % MASK_STEP_TOKENS:
        return "masked"
    return "masked_below" if ARCHITECTURES[architecture].unet and tokens // 4 % MASK_STEP_TOKENS else "flash"


def extended(architecture: str, context: int, frames: int) -> str:
    """The ending of a curve's name for prompts that are longer than usual, and for videos whose frames each have a
    time step of their own (Wan 2.2 5B): both change which tensors live together, not only how large they are."""
    row = ARCHITECTURES[architecture]
    if row.autoencoder is Autoencoder.WAN22:
        return EXTENDED if frames > 1 else ""
    return EXTENDED if context > USUAL_CONTEXT_TOKENS.get(row.text, context) else ""


def position_bytes(architecture: str, width_px: int, height_px: int, context: int) -> int:
    """SD3's learned positions while they are cropped to the picture: whole rows of the table, then the crop twice.

    Exact, from `cropped_pos_embed`; the largest for pictures that are higher than wide.
    """
    row = ARCHITECTURES[architecture]
    rows, columns = -(-height_px // row.token_px), -(-width_px // row.token_px)
    table = FLOAT32_BYTES * row.width * (row.position_rows * rows + 2 * rows * columns)
    cells = (width_px // row.cell_px) * (height_px // row.cell_px)
    inputs = FLOAT32_BYTES * (context * SD3_CONTEXT_WIDTH + cells * SD3_LATENT_CHANNELS)
    return table + inputs + SD3_SMALL_INPUTS


def vae_decode_bytes(architecture: str, shape: RenderShape, options: BufferOptions | None = None) -> Range:
    """The autoencoder's buffer while it makes pixels, of one tile if it works in tiles."""
    options = options or BufferOptions()
    width, height = rounded(architecture, shape.width_px, shape.height_px)
    return _autoencoder_bytes(architecture, (width, height), shape.frames, options, encode=False)


def vae_encode_bytes(architecture: str, shape: RenderShape, options: BufferOptions | None = None) -> Range:
    """The autoencoder's buffer while it reads the source image and the reference images; nothing without any."""
    options = options or BufferOptions()
    pictures: list[tuple[tuple[int, int], int]] = [(size, 1) for size in references(architecture, shape)]
    if shape.source_image:
        # Wan 2.2 5B encodes the first frame alone; Wan 2.1 a whole clip, of which the first frame is the image.
        frames = 1 if ARCHITECTURES[architecture].autoencoder is Autoencoder.WAN22 else shape.frames
        pictures.append((rounded(architecture, shape.width_px, shape.height_px), frames))
    found = NOTHING
    for size, frames in pictures:
        found = found.cover(_autoencoder_bytes(architecture, size, frames, options, encode=True))
    return found


def _autoencoder_bytes(
    architecture: str, size: tuple[int, int], frames: int, options: BufferOptions, *, encode: bool
) -> Range:
    row = ARCHITECTURES[architecture]
    wide, high = tile_px(architecture, options, *size, encode=encode)
    law = stable_diffusion().autoencoders[autoencoder_key(row.autoencoder, options, encode=encode)]
    flash = options.flash_attention_everywhere
    cell = 16 if row.autoencoder is Autoencoder.WAN22 else 8
    return autoencoder_law_bytes(law, wide * high, latent_frames(frames) if row.frames else 1, cell, flash)


def autoencoder_key(autoencoder: Autoencoder, options: BufferOptions, *, encode: bool) -> str:
    """The name of the law in the calibration."""
    kind = autoencoder.value
    if options.tiny_autoencoder and autoencoder is not Autoencoder.TINY:
        kind = f"tiny_{kind}"
    elif options.vae_rescaled and autoencoder is Autoencoder.KL:
        kind = "kl_rescaled"
    return f"{kind}.{'encode' if encode else 'decode'}{'.direct' if options.vae_conv_direct else ''}"


def autoencoder_law_bytes(law: AutoencoderLaw, pixels: int, frames: int, cell_px: int, flash: bool) -> Range:
    """One autoencoder graph: its convolutions, or the attention in its middle where that is larger.

    That attention has a score for each pair of latent cells, so it is the larger one from about 6.8 megapixels at once,
    and from 4 where convolutions are direct. Flash attention (`--fa`, not `--diffusion-fa`) does away with the scores,
    except for a mask if the cells are no multiple of 256.
    """
    expected = law.rate(frames) * pixels + law.flat
    if law.attention_px_bytes is not None:
        cells = pixels // (cell_px * cell_px)
        pairs = FLOAT32_BYTES * cells * cells
        if flash:
            ragged = cells % MASK_STEP_TOKENS
            pairs = MASK_BYTES * cells * round_up(cells, MASK_STEP_TOKENS) if ragged else 0
        if pairs:
            expected = max(expected, pairs + law.attention_px_bytes * pixels)
    return law.spread.around(expected)


def _interpolated(knots: Sequence[tuple[int, int]], tokens: int) -> float:
    """Between measured token counts in a straight line, which lies above a law that bends upwards; beyond the last with
    the square, as attention scores grow."""
    first, last = knots[0], knots[-1]
    if tokens <= first[0]:
        return float(first[1])
    if tokens >= last[0]:
        return last[1] * (tokens / last[0]) ** 2
    after = bisect_left(knots, tokens, key=lambda knot: knot[0])
    (left, below), (right, above) = knots[after - 1], knots[after]
    return below + (above - below) * (tokens - left) / (right - left)


__all__ = [
    "ARCHITECTURES",
    "BufferOptions",
    "RenderShape",
    "diffusion_bytes",
    "is_priced",
    "prompt_chunks",
    "rounded",
    "text_bytes",
    "vae_decode_bytes",
    "vae_encode_bytes",
]

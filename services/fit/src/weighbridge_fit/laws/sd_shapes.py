"""What stable-diffusion.cpp makes of a request before it allocates anything: sizes rounded up, tokens counted.

Every rule here is the engine's own code, so there is nothing to calibrate; the bytes that follow from the tokens are
in `laws.sd_buffers`. Source: stable-diffusion.cpp as vendored by stable-diffusion-cpp-python 0.4.7
(`align_image_size`, `get_tile_sizes`, the conditioners, `auto_resize_ref_image`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import ceil, floor, sqrt
from types import MappingProxyType


class TextRule(Enum):
    """How a prompt becomes tokens that the diffusion model attends to."""

    CLIP = "clip"  # cross-attention to 77 tokens per 75 of the prompt
    UMT5 = "umt5"  # cross-attention to 512 tokens, always
    CLIP_AND_T5 = "clip_and_t5"  # SD3: joined with the image's tokens, 154 per 75 of the prompt
    T5 = "t5"  # FLUX.1: joined, 256 per 255 of the prompt
    PADDED_LLM = "padded_llm"  # FLUX.2: joined, 512 or as many as prompt and template have
    LLM = "llm"  # Qwen-Image: joined, prompt and what is kept of the template
    BLOCKED_LLM = "blocked_llm"  # Z-Image: joined, text's and image's tokens each rounded up to 32


class Autoencoder(Enum):
    """Which autoencoder turns latents into pixels."""

    KL = "kl"
    KL_16 = "kl_16"  # 16 latent channels: SD3, FLUX.1, Z-Image
    KL_FLUX2 = "kl_flux2"  # the same network behind 16 pixels per latent cell
    WAN = "wan"  # Wan 2.1 and Qwen-Image
    WAN22 = "wan22"
    TINY = "tiny_kl"  # SDXS was trained with it


@dataclass(frozen=True, slots=True)
class SdArchitecture:
    """What the engine's code fixes for one architecture.

    `multiple_px`: sides are rounded up to it. `token_px`: side of one attention token at the finest level that attends.
    `cell_px`: side of one latent cell, the unit of tiles. `pair_bytes`: attention scores per pair of tokens, float32
    times heads. `unet`: coarser levels attend too, each with a quarter of the tokens of the one before. `frames`: makes
    videos. `references`: takes reference images. `template_tokens`: what the engine's own words add to a prompt in the
    language model, and `dropped_tokens` how many of those the diffusion model does not see.
    """

    name: str
    multiple_px: int
    token_px: int
    cell_px: int
    pair_bytes: int
    text: TextRule
    autoencoder: Autoencoder
    unet: bool = False
    frames: bool = False
    references: bool = False
    template_tokens: int = 0
    dropped_tokens: int = 0
    position_rows: int = 0
    """Side of a learned position table that is cropped to the image, in tokens: SD3 copies whole rows of it."""
    width: int = 0
    """Elements of one row entry of that table."""


def _table(*rows: SdArchitecture) -> Mapping[str, SdArchitecture]:
    return MappingProxyType({row.name: row for row in rows})


ARCHITECTURES: Mapping[str, SdArchitecture] = _table(
    SdArchitecture("sd15", 64, 8, 8, 32, TextRule.CLIP, Autoencoder.KL, unet=True),
    SdArchitecture("sd21", 64, 8, 8, 20, TextRule.CLIP, Autoencoder.KL, unet=True),
    SdArchitecture("sd1_tiny", 64, 8, 8, 32, TextRule.CLIP, Autoencoder.KL, unet=True),
    SdArchitecture("sdxs512", 64, 16, 8, 32, TextRule.CLIP, Autoencoder.TINY, unet=True),
    SdArchitecture("sdxl", 64, 16, 8, 40, TextRule.CLIP, Autoencoder.KL, unet=True),
    SdArchitecture("sd3m", 8, 16, 8, 96, TextRule.CLIP_AND_T5, Autoencoder.KL_16, position_rows=192, width=1536),
    SdArchitecture("sd35m", 8, 16, 8, 96, TextRule.CLIP_AND_T5, Autoencoder.KL_16, position_rows=384, width=1536),
    SdArchitecture("sd35l", 8, 16, 8, 152, TextRule.CLIP_AND_T5, Autoencoder.KL_16, position_rows=192, width=2432),
    SdArchitecture("flux1", 8, 16, 8, 96, TextRule.T5, Autoencoder.KL_16, references=True),
    SdArchitecture(
        "flux2", 16, 16, 16, 192, TextRule.PADDED_LLM, Autoencoder.KL_FLUX2, references=True, template_tokens=33
    ),
    SdArchitecture(
        "klein4b", 16, 16, 16, 96, TextRule.PADDED_LLM, Autoencoder.KL_FLUX2, references=True, template_tokens=12
    ),
    SdArchitecture(
        "klein9b", 16, 16, 16, 128, TextRule.PADDED_LLM, Autoencoder.KL_FLUX2, references=True, template_tokens=12
    ),
    SdArchitecture("zimage", 8, 16, 8, 120, TextRule.BLOCKED_LLM, Autoencoder.KL_16, template_tokens=8),
    SdArchitecture(
        "qwen_image",
        8,
        16,
        8,
        96,
        TextRule.LLM,
        Autoencoder.WAN,
        references=True,
        template_tokens=39,
        dropped_tokens=34,
    ),
    SdArchitecture("wan21_1.3b", 16, 16, 8, 48, TextRule.UMT5, Autoencoder.WAN, frames=True),
    SdArchitecture("wan21_14b", 16, 16, 8, 160, TextRule.UMT5, Autoencoder.WAN, frames=True),
    SdArchitecture("wan22_5b", 32, 32, 16, 96, TextRule.UMT5, Autoencoder.WAN22, frames=True),
)


@dataclass(frozen=True, slots=True)
class RenderShape:
    """What is rendered, as the request says it.

    `prompt_tokens` counts the prompt alone, without the engine's template; 0 stands for a short prompt. Reference
    images are (width, height) in pixels as sent. `source_image`: an image to start from is encoded first. `batch`
    changes no buffer: the engine makes images one after another.
    """

    width_px: int
    height_px: int
    frames: int = 1
    batch: int = 1
    prompt_tokens: int = 0
    reference_images: tuple[tuple[int, int], ...] = ()
    source_image: bool = False


@dataclass(frozen=True, slots=True)
class BufferOptions:
    """Launch options that change a working buffer.

    `flash_attention_everywhere`: `--fa`, in the autoencoder too; `flash_attention` is the diffusion model's alone.
    `vae_tile_px`: side of a tile in pixels, None for the engine's default of 32 latent cells. `vae_rescaled`: the
    engine rescales the kernels of an autoencoder that came inside an SDXL checkpoint, which a separate one is spared.
    `vision`: the text encoder's vision tower is loaded, so that it looks at the reference images.
    `diffusion_conv_direct` is here for completeness: no measured buffer of a diffusion model became smaller by it.
    """

    flash_attention: bool = False
    flash_attention_everywhere: bool = False
    vae_tiling: bool = False
    vae_tile_px: int | None = None
    diffusion_conv_direct: bool = False
    vae_conv_direct: bool = False
    tiny_autoencoder: bool = False
    vae_rescaled: bool = False
    vision: bool = False


SHORT_PROMPT_TOKENS = 10
"""What stands for a prompt of unknown length: the measured rows' own."""
CLIP_CHUNK, CLIP_CHUNK_TEXT = 77, 75
T5_CHUNK, T5_CHUNK_TEXT = 256, 255
PADDED_TEXT_TOKENS = 512
TOKEN_BLOCK = 32
"""Z-Image pads both its sequences to multiples of this (`SEQ_MULTI_OF`)."""
DEFAULT_TILE_CELLS, SMALLEST_TILE_CELLS = 32, 4
ENCODE_TILE_FACTOR = 1.30539
LARGEST_REFERENCE_PX = 1024 * 1024
VISION_PATCH_PX, VISION_STEP_PX = 14, 28
SMALLEST_VISION_PX, LARGEST_VISION_PX = 384 * 384, 560 * 560
VISION_TEMPLATE_TOKENS, VISION_DROPPED_TOKENS, TOKENS_PER_PICTURE = 69, 64, 7
"""Template of the editing pipeline, what of it is dropped, and the words around each picture."""


def round_up(value: int, multiple: int) -> int:
    """The next multiple at or above a value."""
    return -(-value // multiple) * multiple


def rounded(architecture: str, width_px: int, height_px: int) -> tuple[int, int]:
    """Sides as the engine rounds them up before it allocates anything. KeyError for an unknown architecture."""
    multiple = ARCHITECTURES[architecture].multiple_px
    return round_up(width_px, multiple), round_up(height_px, multiple)


def latent_frames(frames: int) -> int:
    """Frames of the latent: the first, and one for each four more."""
    return (max(1, frames) - 1) // 4 + 1


def references(architecture: str, shape: RenderShape) -> tuple[tuple[int, int], ...]:
    """Reference images as the engine resizes them: to the picture's area, at most one megapixel, in its own steps."""
    row = ARCHITECTURES[architecture]
    if not row.references:
        return ()
    width, height = rounded(architecture, shape.width_px, shape.height_px)
    area, step = min(LARGEST_REFERENCE_PX, width * height), 32 if row.text is TextRule.LLM else 16
    resized = []
    for wide, high in shape.reference_images:
        side = sqrt(area * wide // high)
        resized.append(
            (max(step, floor(side / step + 0.5) * step), max(step, floor(side * high / wide / step + 0.5) * step))
        )
    return tuple(resized)


def image_tokens(architecture: str, shape: RenderShape) -> int:
    """Tokens of the picture's latent and of the reference images."""
    row = ARCHITECTURES[architecture]
    width, height = rounded(architecture, shape.width_px, shape.height_px)
    frames = latent_frames(shape.frames) if row.frames else 1
    return _tokens(row, width, height) * frames + sum(
        _tokens(row, wide, high) for wide, high in references(architecture, shape)
    )


def prompt_chunks(architecture: str, shape: RenderShape) -> int:
    """How many chunks of fixed length a prompt takes; 1 where the text encoder has no chunks."""
    tokens = shape.prompt_tokens or SHORT_PROMPT_TOKENS
    match ARCHITECTURES[architecture].text:
        case TextRule.CLIP | TextRule.CLIP_AND_T5:
            return ceil(tokens / CLIP_CHUNK_TEXT)
        case TextRule.T5:
            return ceil(tokens / T5_CHUNK_TEXT)
        case _:
            return 1


def encoder_tokens(architecture: str, shape: RenderShape, vision: bool = False) -> int:
    """Tokens that the text encoder reads in one run."""
    row = ARCHITECTURES[architecture]
    tokens = shape.prompt_tokens or SHORT_PROMPT_TOKENS
    match row.text:
        case TextRule.CLIP | TextRule.CLIP_AND_T5:
            return CLIP_CHUNK
        case TextRule.T5:
            return T5_CHUNK
        case TextRule.UMT5:
            return PADDED_TEXT_TOKENS
        case TextRule.LLM if vision and shape.reference_images:
            pictures = (
                vision_patches(wide, high) // (VISION_STEP_PX // VISION_PATCH_PX) ** 2 + TOKENS_PER_PICTURE
                for wide, high in shape.reference_images
            )
            return VISION_TEMPLATE_TOKENS + tokens + sum(pictures)
        case TextRule.PADDED_LLM if row.name != "flux2":
            return max(PADDED_TEXT_TOKENS, tokens + row.template_tokens)
        case _:
            return tokens + row.template_tokens


def context_tokens(architecture: str, shape: RenderShape, vision: bool = False) -> int:
    """Text tokens that the diffusion model attends to."""
    row = ARCHITECTURES[architecture]
    read = encoder_tokens(architecture, shape, vision)
    match row.text:
        case TextRule.CLIP | TextRule.T5:
            return read * prompt_chunks(architecture, shape)
        case TextRule.CLIP_AND_T5:
            return 2 * read * prompt_chunks(architecture, shape)
        case TextRule.PADDED_LLM:
            return max(PADDED_TEXT_TOKENS, read)
        case TextRule.LLM:
            return read - (VISION_DROPPED_TOKENS if vision and shape.reference_images else row.dropped_tokens)
        case _:
            return read


def attention_tokens(architecture: str, images: int, context: int) -> int:
    """Tokens of one attention of the diffusion model: the image's, joined with the text's where it does that."""
    match ARCHITECTURES[architecture].text:
        case TextRule.CLIP | TextRule.UMT5:
            return images
        case TextRule.BLOCKED_LLM:
            return round_up(images, TOKEN_BLOCK) + round_up(context, TOKEN_BLOCK)
        case _:
            return images + context


def vision_patches(width_px: int, height_px: int) -> int:
    """Patches of one reference image in Qwen's vision tower, after resizing to between 384 and 560 pixels square."""
    step = VISION_STEP_PX
    wide, high = floor(width_px / step + 0.5) * step, floor(height_px / step + 0.5) * step
    if wide * high > LARGEST_VISION_PX:
        shrink = sqrt(width_px * height_px / LARGEST_VISION_PX)
        wide, high = (max(step, floor(side / shrink / step) * step) for side in (width_px, height_px))
    elif wide * high < SMALLEST_VISION_PX:
        grow = sqrt(SMALLEST_VISION_PX / (width_px * height_px))
        wide, high = (ceil(side * grow / step) * step for side in (width_px, height_px))
    return (wide // VISION_PATCH_PX) * (high // VISION_PATCH_PX)


def tile_px(architecture: str, options: BufferOptions, width_px: int, height_px: int, encode: bool) -> tuple[int, int]:
    """What the autoencoder works on at once: a tile, or the whole picture. Tiles of an encoder are 1.305 times as
    wide; none is larger than the picture."""
    if not options.vae_tiling:
        return width_px, height_px
    cell = ARCHITECTURES[architecture].cell_px
    requested = DEFAULT_TILE_CELLS if options.vae_tile_px is None else options.vae_tile_px // cell
    cells = requested if requested >= SMALLEST_TILE_CELLS else DEFAULT_TILE_CELLS
    cells = int(cells * ENCODE_TILE_FACTOR) if encode else cells
    wide, high = (max(SMALLEST_TILE_CELLS, min(cells, side // cell)) * cell for side in (width_px, height_px))
    return wide, high


def _tokens(row: SdArchitecture, width_px: int, height_px: int) -> int:
    return -(-width_px // row.token_px) * -(-height_px // row.token_px)

"""What stable-diffusion.cpp makes of a request before it allocates anything: sizes rounded up, tokens counted.

Every rule here is the engine's own code, so there is nothing to calibrate; the bytes that follow from the tokens are
in `laws.sd_buffers`. Source: stable-diffusion.cpp as vendored by stable-diffusion-cpp-python 0.4.7.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class TextRule(Enum):
    """How a prompt's tokens become tokens that the diffusion model attends to."""

    CROSS_ATTENTION = "cross_attention"  # CLIP, 77 per 75 prompt tokens; never joined with the image's tokens
    CROSS_ATTENTION_T5 = "cross_attention_t5"  # umT5, always 512; never joined
    JOINT_CLIP_T5 = "joint_clip_t5"  # SD3: CLIP and T5 side by side, 154 per 75 prompt tokens
    JOINT_T5 = "joint_t5"  # FLUX.1: 256 per 255 prompt tokens
    JOINT_PADDED = "joint_padded"  # FLUX.2: padded to 512, more only if the prompt is longer
    JOINT_QWEN = "joint_qwen"  # Qwen-Image: the prompt and 5 tokens of the template
    JOINT_MULTIPLE = "joint_multiple"  # Z-Image: prompt and template, rounded up to 32, as are the image's tokens


class Autoencoder(Enum):
    """Which autoencoder turns latents into pixels."""

    KL = "kl"
    KL_FLUX = "kl_flux"  # 16 latent channels: SD3, FLUX.1, Z-Image
    KL_FLUX2 = "kl_flux2"  # the same network behind 16 pixels per latent cell
    WAN = "wan"  # Wan 2.1 and Qwen-Image
    WAN22 = "wan22"


@dataclass(frozen=True, slots=True)
class SdArchitecture:
    """What the engine's code fixes for one architecture.

    `multiple_px`: sides are rounded up to it. `token_px`: pixels along the side of one attention token at the finest
    level that attends. `cell_px`: pixels along the side of one latent cell, the unit of tile sizes. `unet`: attends at
    several levels, each with a quarter of the tokens of the one before.
    """

    name: str
    multiple_px: int
    token_px: int
    cell_px: int
    text: TextRule
    autoencoder: Autoencoder
    unet: bool = False
    video: bool = False
    template_tokens: int = 0


def _table(*rows: SdArchitecture) -> Mapping[str, SdArchitecture]:
    return MappingProxyType({row.name: row for row in rows})


ARCHITECTURES: Mapping[str, SdArchitecture] = _table(
    SdArchitecture("sd15", 64, 8, 8, TextRule.CROSS_ATTENTION, Autoencoder.KL, unet=True),
    SdArchitecture("sd21", 64, 8, 8, TextRule.CROSS_ATTENTION, Autoencoder.KL, unet=True),
    SdArchitecture("sd1_tiny", 64, 8, 8, TextRule.CROSS_ATTENTION, Autoencoder.KL, unet=True),
    SdArchitecture("sdxs512", 64, 8, 8, TextRule.CROSS_ATTENTION, Autoencoder.KL, unet=True),
    SdArchitecture("sdxl", 64, 16, 8, TextRule.CROSS_ATTENTION, Autoencoder.KL, unet=True),
    SdArchitecture("sd3m", 8, 16, 8, TextRule.JOINT_CLIP_T5, Autoencoder.KL_FLUX),
    SdArchitecture("sd35m", 8, 16, 8, TextRule.JOINT_CLIP_T5, Autoencoder.KL_FLUX),
    SdArchitecture("sd35l", 8, 16, 8, TextRule.JOINT_CLIP_T5, Autoencoder.KL_FLUX),
    SdArchitecture("flux1dev", 8, 16, 8, TextRule.JOINT_T5, Autoencoder.KL_FLUX),
    SdArchitecture("flux1schnell", 8, 16, 8, TextRule.JOINT_T5, Autoencoder.KL_FLUX),
    SdArchitecture("flux2dev", 16, 16, 16, TextRule.JOINT_PADDED, Autoencoder.KL_FLUX2, template_tokens=32),
    SdArchitecture("klein4b", 16, 16, 16, TextRule.JOINT_PADDED, Autoencoder.KL_FLUX2, template_tokens=12),
    SdArchitecture("klein9b", 16, 16, 16, TextRule.JOINT_PADDED, Autoencoder.KL_FLUX2, template_tokens=12),
    SdArchitecture("zimage", 8, 16, 8, TextRule.JOINT_MULTIPLE, Autoencoder.KL_FLUX, template_tokens=8),
    SdArchitecture("qwenimage", 8, 16, 8, TextRule.JOINT_QWEN, Autoencoder.WAN, template_tokens=39),
    SdArchitecture("qwenedit", 8, 16, 8, TextRule.JOINT_QWEN, Autoencoder.WAN, template_tokens=39),
    SdArchitecture("wan21_1.3b", 16, 16, 8, TextRule.CROSS_ATTENTION_T5, Autoencoder.WAN, video=True),
    SdArchitecture("wan21_14b", 16, 16, 8, TextRule.CROSS_ATTENTION_T5, Autoencoder.WAN, video=True),
    SdArchitecture("wan22_5b", 32, 32, 16, TextRule.CROSS_ATTENTION_T5, Autoencoder.WAN22, video=True),
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

    `vae_tile_px`: side of a tile in pixels, None for the engine's default of 32 latent cells. `vae_rescaled`: the engine
    rescales the kernels of an autoencoder that came inside an SDXL checkpoint, instead of taking a separate one.
    `vision`: the text encoder's vision tower is loaded and looks at the reference images.
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


SHORT_PROMPT_TOKENS = 20


def round_up(value: int, multiple: int) -> int:
    """The next multiple at or above a value."""
    return -(-value // multiple) * multiple


def rounded(architecture: str, width_px: int, height_px: int) -> tuple[int, int]:
    """Sides as the engine rounds them up before it allocates anything. KeyError for an unknown architecture."""
    multiple = ARCHITECTURES[architecture].multiple_px
    return round_up(width_px, multiple), round_up(height_px, multiple)

"""What can be asked of an sd-server plan, checked and with every default filled in."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from weighbridge_fit.capacity import Pool
from weighbridge_fit.laws.sd_resident import BLOCKS, Retyping
from weighbridge_fit.laws.sd_shapes import ARCHITECTURES, BufferOptions, RenderShape, round_up
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.sd.pools import Backend
from weighbridge_fit.plans.sd.profiles import Profile
from weighbridge_fit.plans.sd.sizes import SideRange, Tier, multiple_of, tier_size

LONGEST_SIDE_PX = 16_384
"""Sides beyond it are no pictures: the engine would try, and fail in its allocator."""
MOST_BATCH, MOST_FRAMES, MOST_IMAGES = 8, 1024, 16
"""A batch is clamped to 8 by the engine; the others are more than any model of today takes."""
MOST_PROMPT_TOKENS = 32_768
MOST_THREADS = 1024
LARGEST_TILE_PX = 4096
MOST_RULES, LONGEST_PATTERN = 32, 200
_SAFE_PATTERN = re.compile(r"[A-Za-z0-9_.\\^$|\[\]()*+?:-]+")

TYPES = {name.lower(): name for name in BLOCKS if name != "I32"}
"""Types that weights can be converted to, by the engine's word in lower case."""


@dataclass(frozen=True, slots=True)
class SdRequest:
    """A workload and options as asked; None, zero and "" are defaults."""

    width_px: int = 0
    height_px: int = 0
    tier: Tier | None = None
    batch: int = 0
    frames: int = 0
    reference_images: int = 0
    source_images: int = 0
    prompt_tokens: int = 0
    vae_tiling: bool | None = None
    vae_tile_px: int | None = None
    flash_attention: bool | None = None
    diffusion_conv_direct: bool | None = None
    vae_conv_direct: bool | None = None
    offload_to_cpu: bool | None = None
    text_encoder_on_cpu: bool | None = None
    vae_on_cpu: bool | None = None
    weight_type: str | None = None
    tensor_type_rules: str | None = None
    mmap: bool | None = None
    threads: int | None = None
    backend: str | None = None


@dataclass(frozen=True, slots=True)
class SdShape:
    """A workload and options as planned. `tile_px` 0: the engine's own tiles; `threads` 0: its own number; `offload`:
    weights stay in host memory and come to the card when used. `parts` names the further files by digest, because the
    same diffusion model costs more with a larger text encoder; `pool` is where the engine keeps weights, and all that
    `backend`, what its build is for ("": not known), changes."""

    architecture: str
    width_px: int
    height_px: int
    batch: int
    frames: int
    reference_images: int
    source_images: int
    prompt_tokens: int
    vae_tiling: bool
    tile_px: int
    flash_attention: bool
    diffusion_conv_direct: bool
    vae_conv_direct: bool
    offload: bool
    text_encoder_on_cpu: bool
    vae_on_cpu: bool
    weight_type: str
    tensor_type_rules: str
    mmap: bool
    threads: int
    pool: str
    backend: str = ""
    parts: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        """Canonical text: launches with the same text cost the same."""
        switches = {
            "tiling": self.vae_tiling,
            "fa": self.flash_attention,
            "conv": self.diffusion_conv_direct,
            "vaeconv": self.vae_conv_direct,
            "offload": self.offload,
            "textcpu": self.text_encoder_on_cpu,
            "vaecpu": self.vae_on_cpu,
            "mmap": self.mmap,
        }
        parts = ",".join(f"{role}:{digest[:16]}" for role, digest in self.parts)
        return (
            f"sd;pool={self.pool};size={self.width_px}x{self.height_px};batch={self.batch};frames={self.frames};"
            f"references={self.reference_images};sources={self.source_images};prompt={self.prompt_tokens};"
            f"{';'.join(f'{name}={int(on)}' for name, on in switches.items())};tile={self.tile_px};"
            f"type={self.weight_type or 'stored'};rules={self.tensor_type_rules or 'none'};threads={self.threads};"
            f"parts={parts or 'none'}"
        )

    def render(self) -> RenderShape:
        """What is rendered, as the buffer laws ask for it: references have the picture's own size."""
        size = (self.width_px, self.height_px)
        return RenderShape(
            *size,
            frames=max(1, self.frames),
            batch=self.batch,
            prompt_tokens=self.prompt_tokens,
            reference_images=(size,) * self.reference_images,
            source_image=self.source_images > 0,
        )

    def buffers(self, *, tiny: bool, rescaled: bool, vision: bool) -> BufferOptions:
        """What changes a working buffer. `tiny`: a tiny autoencoder decodes; `rescaled`: SDXL's own autoencoder does;
        `vision`: the text encoder looks at references."""
        return BufferOptions(
            flash_attention=self.flash_attention,
            vae_tiling=self.vae_tiling,
            vae_tile_px=self.tile_px or None,
            diffusion_conv_direct=self.diffusion_conv_direct,
            vae_conv_direct=self.vae_conv_direct,
            tiny_autoencoder=tiny,
            vae_rescaled=rescaled,
            vision=vision,
        )


def settle(
    request: SdRequest, architecture: str, profile: Profile, sides: SideRange, parts: Mapping[str, str], pool: str
) -> SdShape:
    """Fills defaults in and refuses what cannot be. `offload` is left to the plan unless somebody chose.

    Raises PlanError INVALID_OPTION.
    """
    known = ARCHITECTURES.get(architecture)
    _within("workload.image.batch", "images in one go", request.batch, 0, MOST_BATCH)
    _within("workload.image.frames", "frames", request.frames, 0, MOST_FRAMES)
    _within("workload.image.reference_images", "reference images", request.reference_images, 0, MOST_IMAGES)
    _within("workload.image.source_images", "source images", request.source_images, 0, MOST_IMAGES)
    _within("workload.image.prompt_tokens", "tokens of a prompt", request.prompt_tokens, 0, MOST_PROMPT_TOKENS)
    _within("options.sd.threads", "threads", request.threads or 0, 0, MOST_THREADS)
    if request.frames > 1 and known is not None and not known.frames:
        message = "This model renders single images: it has no frames."
        raise PlanError("INVALID_OPTION", "workload.image.frames", message)
    width, height = _size(request, architecture, profile, sides)
    tile = request.vae_tile_px or 0
    _within("options.sd.vae_tile_px", "pixels of a tile", tile, 0, LARGEST_TILE_PX)
    rules = profile.tensor_type_rules if request.tensor_type_rules is None else request.tensor_type_rules
    retyping(request.weight_type or "", rules)
    return SdShape(
        architecture=architecture,
        width_px=width,
        height_px=height,
        batch=request.batch or 1,
        frames=request.frames,
        reference_images=request.reference_images,
        source_images=request.source_images,
        prompt_tokens=request.prompt_tokens,
        vae_tiling=_tiles(request, profile, pool),
        tile_px=round_up(tile, known.cell_px if known else UNKNOWN_CELL_PX),
        flash_attention=bool(request.flash_attention),
        diffusion_conv_direct=bool(request.diffusion_conv_direct),
        vae_conv_direct=bool(request.vae_conv_direct),
        offload=bool(request.offload_to_cpu),
        text_encoder_on_cpu=bool(request.text_encoder_on_cpu),
        vae_on_cpu=bool(request.vae_on_cpu),
        weight_type=TYPES[request.weight_type.lower()] if request.weight_type else "",
        tensor_type_rules=rules,
        mmap=bool(request.mmap),
        threads=request.threads or 0,
        pool=pool,
        backend=backend_of(request) or "",
        parts=tuple(sorted(parts.items())),
    )


def backend_of(request: SdRequest) -> Backend | None:
    """What the build is for, None if nobody said. Raises PlanError INVALID_OPTION."""
    if not request.backend:
        return None
    try:
        return Backend(request.backend.lower())
    except ValueError:
        known = ", ".join(Backend)
        message = f"fit knows no build of sd-server for {request.backend[:40]!r}; it knows {known}."
        raise PlanError("INVALID_OPTION", "options.sd.backend", message) from None


UNKNOWN_CELL_PX = 16
"""Pixels of a latent cell where the autoencoder is not known: the coarser of the two kinds there are."""


def retyping(weight_type: str, rules: str) -> Retyping:
    """The conversions that `--type` and `--tensor-type-rules` ask for.

    Patterns are searched in every tensor's name, so they are kept to a form that cannot be made to run for long: no
    repeated groups, at most two repetitions, no references back.

    Raises PlanError INVALID_OPTION.
    """
    if weight_type and weight_type.lower() not in TYPES:
        message = f"sd-server knows no type {weight_type[:40]!r}. Among those it knows: f32, f16, q8_0, q4_0, q4_K."
        raise PlanError("INVALID_OPTION", "options.sd.weight_type", message)
    field = "options.sd.tensor_type_rules"
    items = [item for item in rules.split(",") if item]
    if len(items) > MOST_RULES:
        raise PlanError("INVALID_OPTION", field, f"At most {MOST_RULES} rules can be given, these are {len(items)}.")
    made = []
    for item in items:
        pattern, equals, to = item.partition("=")
        if not equals or to.lower() not in TYPES:
            message = f"A rule is PATTERN=TYPE with a type that sd-server knows; {item[:60]!r} is none."
            raise PlanError("INVALID_OPTION", field, message)
        made.append((_pattern(pattern, field), TYPES[to.lower()]))
    return Retyping(TYPES[weight_type.lower()] if weight_type else "", tuple(made))


def _pattern(text: str, field: str) -> re.Pattern[str]:
    repeats = len(re.findall(r"(?<!\\)[*+?]", text))
    nested = re.search(r"\)[*+?{]", text) or re.search(r"\\[1-9]|\(\?", text)
    if len(text) > LONGEST_PATTERN or not _SAFE_PATTERN.fullmatch(text) or repeats > 2 or nested:
        message = (
            "A rule's pattern may have letters, digits, dots, anchors, classes and alternatives, at most two "
            f"repetitions and no repeated group; {text[:60]!r} is more."
        )
        raise PlanError("INVALID_OPTION", field, message)
    try:
        return re.compile(text)
    except re.error as error:
        raise PlanError("INVALID_OPTION", field, f"The pattern {text[:60]!r} is not one: {error.msg}.") from error


def _size(request: SdRequest, architecture: str, profile: Profile, sides: SideRange) -> tuple[int, int]:
    _within("workload.image.width_px", "pixels of width", request.width_px, 0, LONGEST_SIDE_PX)
    _within("workload.image.height_px", "pixels of height", request.height_px, 0, LONGEST_SIDE_PX)
    multiple = multiple_of(architecture)
    asked = (request.width_px, request.height_px)
    if request.tier is not None:
        return tier_size(profile, request.tier, sides, asked if all(asked) else (1, 1))
    standard = tier_size(profile, Tier.STANDARD, sides)
    return round_up(asked[0] or standard[0], multiple), round_up(asked[1] or standard[1], multiple)


def _tiles(request: SdRequest, profile: Profile, pool: str) -> bool:
    """Whether a picture is decoded in tiles."""
    if request.vae_tiling is not None:
        return request.vae_tiling
    if profile.vae_tiling is not None:
        return profile.vae_tiling
    return pool == Pool.DISCRETE.value.lower() and not request.vae_on_cpu


def _within(field: str, what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        message = f"Between {least} and {most:,} {what} can be asked for, {value:,} were."
        raise PlanError("INVALID_OPTION", field, message)

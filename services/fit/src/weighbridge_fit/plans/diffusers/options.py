"""What can be asked of a price for a diffusers tree, checked and with every default filled in."""

from dataclasses import dataclass
from enum import Enum

from weighbridge_fit.capacity import Pool
from weighbridge_fit.catalog.entry import PixelRange
from weighbridge_fit.model import Model
from weighbridge_fit.plans.diffusers.pipelines import Pipeline
from weighbridge_fit.plans.errors import PlanError

SMALLEST_SIDE_PX, LARGEST_SIDE_PX = 64, 8192
"""Sides that can be asked for where the catalogue says nothing narrower."""
MAX_BATCH, MAX_FRAMES, MAX_IMAGES, MAX_PROMPT_TOKENS = 64, 4096, 16, 32_768
LOAD_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Offload(Enum):
    """What leaves the card while something else computes there."""

    NONE = "none"
    MODEL = "model"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, slots=True)
class DiffusersRequest:
    """A workload and options as asked; None, zero and "" are defaults. `scale` is a quality tier's share of the default
    side, 0 where the size is asked for in pixels."""

    width_px: int = 0
    height_px: int = 0
    scale: float = 0.0
    batch: int = 0
    frames: int = 0
    reference_images: int = 0
    source_images: int = 0
    prompt_tokens: int = 0
    offload: str | None = None
    load_dtype: str | None = None
    tiled_decode: bool | None = None


@dataclass(frozen=True, slots=True)
class DiffusersShape:
    """A workload and options as planned. `vae_dtype` is `load_dtype`, or float32 where the pipeline has it so."""

    pipeline: str
    width_px: int
    height_px: int
    frames: int
    batch: int
    reference_images: int
    source_images: int
    text_tokens: int
    offload: Offload
    load_dtype: str
    vae_dtype: str
    tiled_decode: bool

    @property
    def area_px(self) -> int:
        """Pixels of one frame."""
        return self.width_px * self.height_px

    @property
    def load_bytes(self) -> int:
        """Width of an element in what loads."""
        return LOAD_BYTES[self.load_dtype]

    @property
    def vae_bytes(self) -> int:
        """Width of an element in the autoencoder."""
        return LOAD_BYTES[self.vae_dtype]

    def text(self) -> str:
        """Canonical text: runs with the same text cost the same."""
        return (
            f"diffusers;pipeline={self.pipeline};width={self.width_px};height={self.height_px};frames={self.frames};"
            f"batch={self.batch};references={self.reference_images};sources={self.source_images};"
            f"prompt={self.text_tokens};offload={self.offload.value};dtype={self.load_dtype};vae={self.vae_dtype};"
            f"tiled={int(self.tiled_decode)}"
        )


def side_range(model: Model) -> tuple[int, int]:
    """The sides that are in range as width and as height, in pixels."""
    width, height = _ranges(model)
    return max(width.smallest, height.smallest), min(width.largest, height.largest)


def settle(request: DiffusersRequest, model: Model, pipeline: Pipeline, pool: Pool) -> DiffusersShape:
    """Fills in and checks. Raises PlanError INVALID_OPTION."""
    width, height = _size(request, model, pipeline)
    usual = model.entry.frames.usual if model.entry and model.entry.frames else 0
    frames = _within(request.frames, MAX_FRAMES, "workload.image.frames") or usual or pipeline.frames
    if frames > 1 and not pipeline.video:
        raise PlanError("INVALID_OPTION", "workload.image.frames", "This pipeline makes pictures, not videos.")
    load_dtype = request.load_dtype or ("float32" if pool is Pool.CPU else "bfloat16")
    if load_dtype not in LOAD_BYTES:
        known = ", ".join(LOAD_BYTES)
        raise PlanError("INVALID_OPTION", "options.generic.load_dtype", f"load_dtype is one of {known}.")
    try:
        offload = Offload(request.offload or "none")
    except ValueError as error:
        known = ", ".join(kind.value for kind in Offload)
        raise PlanError("INVALID_OPTION", "options.generic.offload", f"offload is one of {known}.") from error
    if pool is not Pool.DISCRETE:
        # Where there is one memory, nothing can leave it.
        offload = Offload.NONE
    return DiffusersShape(
        pipeline=pipeline.name,
        width_px=width,
        height_px=height,
        # The latent joins frames: what does not fill one is computed all the same.
        frames=1 + _rounded_up(frames - 1, pipeline.temporal),
        batch=_within(request.batch, MAX_BATCH, "workload.image.batch") or 1,
        reference_images=_within(request.reference_images, MAX_IMAGES, "workload.image.reference_images"),
        source_images=_within(request.source_images, MAX_IMAGES, "workload.image.source_images"),
        text_tokens=_within(request.prompt_tokens, MAX_PROMPT_TOKENS, "workload.image.prompt_tokens")
        or pipeline.text_tokens,
        offload=offload,
        load_dtype=load_dtype,
        vae_dtype="float32" if pipeline.vae_float32 and request.load_dtype is None else load_dtype,
        tiled_decode=bool(request.tiled_decode),
    )


def _size(request: DiffusersRequest, model: Model, pipeline: Pipeline) -> tuple[int, int]:
    """Width and height: as asked, by tier, or the pipeline's own; rounded up to what the latent divides."""
    wide, high = _ranges(model)
    width = request.width_px or wide.usual or pipeline.side_px[0]
    height = request.height_px or high.usual or pipeline.side_px[1]
    if request.scale:
        scale = min(request.scale, wide.largest / width, high.largest / height)
        scale = max(scale, wide.smallest / width, high.smallest / height)
        width, height = int(width * scale), int(height * scale)
    for side, bounds, name in ((width, wide, "width_px"), (height, high, "height_px")):
        if not bounds.smallest <= side <= bounds.largest:
            message = f"{name} is {side}; this model makes {bounds.smallest} to {bounds.largest}."
            raise PlanError("INVALID_OPTION", f"workload.image.{name}", message)
    return _rounded_up(width, pipeline.side_step), _rounded_up(height, pipeline.side_step)


def _ranges(model: Model) -> tuple[PixelRange, PixelRange]:
    anything = PixelRange(SMALLEST_SIDE_PX, LARGEST_SIDE_PX)
    if model.entry is None:
        return anything, anything
    return model.entry.width or anything, model.entry.height or anything


def _rounded_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


def _within(value: int, most: int, field: str) -> int:
    if not 0 <= value <= most:
        raise PlanError("INVALID_OPTION", field, f"{field.rpartition('.')[2]} must be from 0 to {most}.")
    return value

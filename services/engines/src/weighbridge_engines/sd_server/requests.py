"""From a request for images to a render: checked, with every default filled in, and nothing in it but what it says.

What depends on no model is checked first, sizes against the model's plan after that, pictures last: they are decoded
for the size that is planned. All of it before anything is loaded or queued.
"""

import math
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from weighbridge_proto.engines.v1 import image_service_pb2 as image_pb
from weighbridge_proto.errors import RequestError, invalid_argument
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb
from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge_engines.sd_server import pictures
from weighbridge_engines.sd_server.img2img import why_not_from_source, why_nothing_is_left
from weighbridge_engines.sd_server.jobs import RenderJob
from weighbridge_engines.sd_server.pictures import OutputFormat

MOST_STEPS = 100
"""sd-server clamps to it without a word."""

MOST_BATCH = 8
"""Likewise."""

MOST_GUIDANCE = 100.0
"""Models are made for 1 to 15."""

LEAST_SIDE_PX, LARGEST_SIDE_PX = 64, 4096
"""What sd-server advertises (and does not enforce: 65536 x 65536 reaches its allocator). No model's range is wider."""

MOST_PROMPT_CHARS = 20_000
"""sd-server's text encoder took 130 s for as many (2026-11-30)."""

MOST_REFERENCES = 16
"""As fit prices them."""

LARGEST_SEED = 2**31 - 1

DEFAULT_STEPS = 20
"""sd-server's own, where a plan names none."""

SHORT_PROMPT_TOKENS = 75
"""What one pass of the shortest text encoder (CLIP) reads: every plan has room for it."""

BYTES_PER_TOKEN = 3
"""A token of English is some four characters, one of Chinese about one, of three bytes."""

PROMPT_STEP_TOKENS = 128
"""Longer prompts are planned for in steps, or each would be a shape of its own to the ledger's observations."""

_FORMATS = {
    image_pb.IMAGE_FORMAT_UNSPECIFIED: OutputFormat.PNG,
    image_pb.IMAGE_FORMAT_PNG: OutputFormat.PNG,
    image_pb.IMAGE_FORMAT_JPEG: OutputFormat.JPEG,
    image_pb.IMAGE_FORMAT_WEBP: OutputFormat.WEBP,
}

_TAG = re.compile(r"<(?=[^\W\d]|[/|!])")
"""The beginning of anything that an engine may take for more than text: ``<sd_cpp_extra_args>`` (overrides size, steps,
everything), ``<lora:NAME:1>`` (a file, in builds that parse it), ``<|im_start|>`` and other special tokens."""


@dataclass(frozen=True)
class ImageRequest:
    """A request whose every field is right, as far as that can be told without a model.

    Attributes:
        message: the request itself.
        prompt: see :func:`plain_text`.
        negative_prompt: likewise.
        seed: as asked for, or chosen.
        output: file format of the images.
    """

    message: image_pb.GenerateImageRequest
    prompt: str
    negative_prompt: str
    seed: int
    output: OutputFormat

    @property
    def has_source(self) -> bool:
        """Whether it starts from a picture."""
        return bool(self.message.source_images)

    def workload(self, with_source: bool = True) -> plan_pb2.Workload:
        """What the model must be able to render."""
        asked = self.message.size
        image = plan_pb2.ImageWorkload(
            width_px=asked.width_px,
            height_px=asked.height_px,
            batch=asked.batch or 1,
            quality=asked.quality,
            reference_images=len(self.message.reference_images),
            source_images=int(self.has_source and with_source),
            prompt_tokens=max(asked.prompt_tokens, *map(_planned_tokens, (self.prompt, self.negative_prompt))),
        )
        return plan_pb2.Workload(image=image)

    def why_source_unused(self, plan: fit_pb.PlanModelResponse) -> str:
        """Why the source image will not be used, as a sentence; empty: it will, or there is none.

        Raises:
            RequestError: FAILED_PRECONDITION SOURCE_NOT_SUPPORTED: the request demands that it be used.
        """
        if not self.has_source:
            return ""
        rendering, message = plan.launch.sd.rendering, self.message
        why_not = why_not_from_source(rendering, plan.model_name) or why_nothing_is_left(
            rendering,
            plan.model_name,
            self._steps(rendering),
            message.strength if message.HasField("strength") else None,
            has_mask=message.HasField("mask"),
        )
        if why_not and self.message.require_source:
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, "SOURCE_NOT_SUPPORTED", why_not)
        return why_not

    def check_plan(self, plan: fit_pb.PlanModelResponse) -> None:
        """Refuse what this model does not render.

        Raises:
            RequestError: INVALID_ARGUMENT SIZE_OUT_OF_RANGE; FAILED_PRECONDITION REFERENCES_NOT_SUPPORTED.
        """
        rendering, asked, planned = plan.launch.sd.rendering, self.message.size, plan.workload.image
        least = max(LEAST_SIDE_PX, rendering.min_side)
        for field, asked_px, planned_px, largest in (
            ("size.width_px", asked.width_px, planned.width_px, rendering.max_width),
            ("size.height_px", asked.height_px, planned.height_px, rendering.max_height),
        ):
            most = min(LARGEST_SIDE_PX, largest or LARGEST_SIDE_PX)
            by_tier = asked.quality != plan_pb2.QUALITY_TIER_UNSPECIFIED
            if not least <= planned_px <= most or (asked_px and not by_tier and not least <= asked_px <= most):
                raise _out_of_range(field, asked_px or planned_px, least, most, plan.model_name)
        if self.message.reference_images and any(note.code == "REFERENCES_IGNORED" for note in plan.notes):
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "REFERENCES_NOT_SUPPORTED",
                f"{plan.model_name} takes no reference images. Leave them out, or start from one as source image.",
            )

    def job(self, plan: fit_pb.PlanModelResponse, with_source: bool) -> RenderJob:
        """The render, of the size that is planned. Decodes pictures: seconds for large ones, so not on a loop.

        Raises:
            RequestError: INVALID_ARGUMENT INVALID_IMAGE: a picture is none, too large, broken, or an animation.
        """
        rendering, size, message = plan.launch.sd.rendering, plan.workload.image, self.message
        width, height = size.width_px, size.height_px
        source_png, mask_png = self._source(width, height)
        references = tuple(
            pictures.for_engine(pictures.read(image.data, f"reference_images[{number}].data"), width, height)
            for number, image in enumerate(message.reference_images)
        )
        default_guidance = rendering.guidance if rendering.HasField("guidance") else None
        return RenderJob(
            prompt=self.prompt,
            negative_prompt=self.negative_prompt,
            width=width,
            height=height,
            batch=size.batch or 1,
            steps=self._steps(rendering),
            guidance=message.guidance if message.HasField("guidance") else default_guidance,
            seed=self.seed,
            sampler=message.sampler,
            scheduler=message.scheduler,
            source_png=source_png if with_source else None,
            strength=message.strength if with_source and message.HasField("strength") else None,
            mask_png=mask_png if with_source else None,
            reference_pngs=references,
        )

    def _steps(self, rendering: plan_pb2.SdRendering) -> int:
        return self.message.steps if self.message.HasField("steps") else rendering.steps or DEFAULT_STEPS

    def _source(self, width: int, height: int) -> tuple[bytes | None, bytes | None]:
        """Source and mask for the engine. Both are looked at also where they will not be used."""
        if not self.has_source:
            return None, None
        source = pictures.read(self.message.source_images[0].data, "source_images[0].data")
        mask_png = None
        if self.message.HasField("mask"):
            mask = pictures.read(self.message.mask.data, "mask.data", "L")
            if mask.size != source.size:
                sizes = "{} x {}, and the source image {} x {}".format(*mask.size, *source.size)
                raise invalid_argument("mask.data", f"has {sizes} pixels: they must be the same", "INVALID_IMAGE")
            mask_png = pictures.for_engine(mask, width, height)
        return pictures.for_engine(source, width, height), mask_png


def check(message: image_pb.GenerateImageRequest) -> ImageRequest:
    """A request as it is understood; a seed is chosen where it names none.

    Raises:
        RequestError: INVALID_ARGUMENT with the field.
    """
    for field, text in (("prompt", message.prompt), ("negative_prompt", message.negative_prompt)):
        if len(text) > MOST_PROMPT_CHARS:
            raise _invalid(field, f"has {len(text):,} characters; at most {MOST_PROMPT_CHARS:,} are taken")
    if not plain_text(message.prompt).strip():
        raise _invalid("prompt", "says nothing to show")
    _check_size(message.size)
    if message.HasField("steps"):
        _within("steps", message.steps, 1, MOST_STEPS)
    if message.HasField("guidance"):
        _within("guidance", message.guidance, 0, MOST_GUIDANCE)
    if message.HasField("seed"):
        _within("seed", message.seed, 0, LARGEST_SEED)
    if message.format not in _FORMATS:
        raise _invalid("format", "is none that is known here: PNG, JPEG or WebP")
    _check_pictures(message)
    return ImageRequest(
        message,
        plain_text(message.prompt),
        plain_text(message.negative_prompt),
        message.seed if message.HasField("seed") else secrets.randbelow(LARGEST_SEED + 1),
        _FORMATS[message.format],
    )


def plain_text(prompt: str) -> str:
    """A prompt of which the engine sees nothing but the text.

    A space is put behind each ``<`` that a letter, a slash, a bar or an exclamation mark follows. So no tag, of this
    build or another, is recognised, and every word of it is there to be drawn. NUL, at which the engine would stop
    reading, becomes a space. Weights such as ``(word:1.2)`` are left to the engine: they change no parameter.
    """
    return _TAG.sub("< ", prompt.replace("\0", " "))


def _check_size(size: plan_pb2.ImageWorkload) -> None:
    for field, side in (("size.width_px", size.width_px), ("size.height_px", size.height_px)):
        if side and not LEAST_SIDE_PX <= side <= LARGEST_SIDE_PX and not _is_aspect(size, side):
            raise _out_of_range(field, side, LEAST_SIDE_PX, LARGEST_SIDE_PX, "sd-server")
    if bool(size.width_px) != bool(size.height_px):
        raise _invalid("size", "has one side: give width and height, or neither")
    _within("size.batch", size.batch or 1, 1, MOST_BATCH)
    if size.quality not in plan_pb2.QualityTier.values():
        raise _invalid("size.quality", "is none that is known here: draft, standard or high")
    if size.frames not in (0, 1):
        raise _invalid("size.frames", "must be left out: single images are rendered here")
    if size.prompt_tokens < 0:
        raise _invalid("size.prompt_tokens", "must not be negative")


def _is_aspect(size: plan_pb2.ImageWorkload, side: int) -> bool:
    """Whether a side only says, with the other one, the aspect of a tier's size."""
    return size.quality != plan_pb2.QUALITY_TIER_UNSPECIFIED and 0 < side <= LARGEST_SIDE_PX


def _check_pictures(message: image_pb.GenerateImageRequest) -> None:
    if len(message.source_images) > 1:
        raise _invalid("source_images", "must be one: an image starts from one")
    if len(message.reference_images) > MOST_REFERENCES:
        raise _invalid("reference_images", f"must be at most {MOST_REFERENCES}")
    if message.HasField("strength"):
        _within("strength", message.strength, 0, 1)
    needing_source: Iterable[tuple[str, bool]] = (
        ("mask", message.HasField("mask")),
        ("strength", message.HasField("strength")),
        ("require_source", message.require_source),
    )
    for field, is_given in needing_source:
        if is_given and not message.source_images:
            raise _invalid(field, "is of no use without a source image")


def _planned_tokens(prompt: str) -> int:
    """Tokens to plan for; 0: what every plan has room for. Estimated, because the tokenizer is the engine's."""
    tokens = math.ceil(len(prompt.encode()) / BYTES_PER_TOKEN)
    return 0 if tokens <= SHORT_PROMPT_TOKENS else math.ceil(tokens / PROMPT_STEP_TOKENS) * PROMPT_STEP_TOKENS


def _within(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # so that NaN is refused too
        raise _invalid(field, f"is {value:,}; it must be {least:,} to {most:,}")


def _out_of_range(field: str, side: int, least: int, most: int, who: str) -> RequestError:
    return invalid_argument(
        field,
        f"is {side:,} pixels; {who} renders {least} to {most}",
        "SIZE_OUT_OF_RANGE",
        {"least_px": least, "most_px": most},
    )


def _invalid(field: str, why: str) -> RequestError:
    return invalid_argument(field, why, "INVALID_IMAGE_REQUEST")

"""Options that several commands share."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click
from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge.machines import parse_machine
from weighbridge.models import path_here
from weighbridge.options import ENGINES, parse_options
from weighbridge.sizes import parse_size

F = TypeVar("F", bound=Callable[..., Any])

ENGINE_KIND_OF_NAME = {
    "mlx": plan_pb2.ENGINE_KIND_MLX,
    "sd": plan_pb2.ENGINE_KIND_SD,
    "ds4": plan_pb2.ENGINE_KIND_DS4,
    "generic": plan_pb2.ENGINE_KIND_GENERIC,
}

QUALITY_OF_NAME = {
    "draft": plan_pb2.QUALITY_TIER_DRAFT,
    "standard": plan_pb2.QUALITY_TIER_STANDARD,
    "high": plan_pb2.QUALITY_TIER_HIGH,
}

PRIORITY_OF_NAME = {
    "background": lease_pb2.PRIORITY_BACKGROUND,
    "normal": lease_pb2.PRIORITY_NORMAL,
    "interactive": lease_pb2.PRIORITY_INTERACTIVE,
}

AUTOMATIC = "auto"
"""A limit that is none: what the machine allows by itself."""

ENGINE_CHOICE = click.Choice(["mlx", "sd", "ds4"])
"""The engines that can load a model."""


class MachineParam(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on, to type checkers alone
    """``unified:64``, ``discrete:64+24``, ``cpu:32``."""

    name = "machine"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> machine_pb2.Machine | None:
        """See click.ParamType."""
        if isinstance(value, machine_pb2.Machine):
            return value
        try:
            return parse_machine(str(value))
        except ValueError as wrong:
            self.fail(str(wrong), param, ctx)


LARGEST_SIDE_PX = 99_999
"""Of a size that is asked about; what renders it takes less."""


class PixelsParam(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on, to type checkers alone
    """``1024x768``: width and height in pixels, each of at most ``most_px``."""

    name = "WxH"

    def __init__(self, most_px: int = LARGEST_SIDE_PX) -> None:
        self._most_px = most_px

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """See click.ParamType."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([1-9][0-9]*)[xX×]([1-9][0-9]*)", str(value))
        if match is None:
            self.fail(f"{value!r} is no size. Write width and height in pixels: 1024x1024.", param, ctx)
        if max(map(len, match.groups())) > len(str(self._most_px)) or max(map(int, match.groups())) > self._most_px:
            self.fail(f"{value!r} is too large: a side has at most {self._most_px:,} pixels.", param, ctx)
        return int(match[1]), int(match[2])


class RowsParam(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on, to type checkers alone
    """``512,1024,768x512``: whole numbers and sizes with commas between them."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """See click.ParamType."""
        if isinstance(value, tuple):
            return value
        parts = tuple(part.strip().replace("_", "") for part in str(value).split(","))
        if not all(re.fullmatch(r"[1-9][0-9]{0,11}|[1-9][0-9]{0,4}[xX×][1-9][0-9]{0,4}", part) for part in parts):
            message = (
                f"{value!r} are no rows. Write contexts or sizes with commas between them: 4096,8192 or 512,768x512."
            )
            self.fail(message, param, ctx)
        return parts


class PositionParam(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on, to type checkers alone
    """``EPOCH:REVISION``: a point in the ledger's changes."""

    name = "EPOCH:REVISION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """See click.ParamType."""
        if isinstance(value, tuple):
            return value
        epoch, _, revision = str(value).rpartition(":")
        if not epoch or re.fullmatch(r"\d{1,18}", revision, re.ASCII) is None:
            self.fail(
                f"{value!r} is no point in the changes. Write it as `watch` tells it: EPOCH:REVISION.", param, ctx
            )
        return epoch, int(revision)


class LimitParam(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on, to type checkers alone
    """``24GiB`` in bytes; ``auto``, in place of bytes."""

    name = "SIZE|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """See click.ParamType."""
        if isinstance(value, int) or str(value).lower() == AUTOMATIC:
            return value if isinstance(value, int) else AUTOMATIC
        try:
            return parse_size(str(value))
        except ValueError as wrong:
            self.fail(f"{wrong} Or write auto for what the machine allows.", param, ctx)


def json_option(command: F) -> F:
    """``--json``."""
    return click.option("--json", "json_output", is_flag=True, help="Print protobuf JSON instead of text.")(command)


def machine_option(command: F) -> F:
    """``--machine``."""
    return click.option(
        "--machine",
        type=MachineParam(),
        help="A what-if machine instead of this one: unified:64, discrete:64+24, cpu:32 (GiB), with or without a "
        "platform: unified:64@darwin/arm64.",
    )(command)


def engine_option(command: F) -> F:
    """``--engine``: which engine service."""
    return click.option("--engine", type=ENGINE_CHOICE, help="The engine. Default: as the model needs.")(command)


def workload_options(command: F) -> F:
    """``--context``, ``--slots`` and ``--set``: what the model shall be able to do, and choices of the engine."""
    for option in (
        click.option(
            "--set", "settings", multiple=True, metavar="NAME=VALUE", help="An option of the engine. Repeatable."
        ),
        click.option("--slots", type=click.IntRange(1, 1024), help="Conversations held at once."),
        click.option("--context", type=click.IntRange(1, 1 << 40), help="Prompt and answer together, in tokens."),
    ):
        command = option(command)
    return command


def image_options(command: F) -> F:
    """``--size``, ``--quality``, ``--frames`` and what else a render is asked for."""
    for option in (
        click.option("--prompt-tokens", type=click.IntRange(1, 1 << 20), help="Longest prompt of a render, in tokens."),
        click.option("--sources", type=click.IntRange(0, 64), help="Images that a render starts from."),
        click.option("--references", type=click.IntRange(0, 64), help="Reference images that a render looks at."),
        click.option("--batch", type=click.IntRange(1, 64), help="Images rendered in one go."),
        click.option("--frames", type=click.IntRange(1, 100_000), help="Frames of a video."),
        click.option("--quality", type=click.Choice(list(QUALITY_OF_NAME)), help="Size by tier instead of pixels."),
        click.option("--size", type=PixelsParam(), help="Width and height of an image in pixels, such as 1024x1024."),
    ):
        command = option(command)
    return command


def image_workload(
    size: tuple[int, int] | None,
    quality: str | None,
    frames: int | None,
    batch: int | None,
    references: int | None,
    sources: int | None,
    prompt_tokens: int | None,
) -> plan_pb2.Workload | None:
    """The workload of the options of images; None if none is given.

    Raises:
        click.UsageError: two sizes.
    """
    if size is not None and quality is not None:
        raise click.UsageError("--size and --quality both say how large: give one.")
    if all(given is None for given in (size, quality, frames, batch, references, sources, prompt_tokens)):
        return None
    width, height = size or (0, 0)
    return plan_pb2.Workload(
        image=plan_pb2.ImageWorkload(
            width_px=width,
            height_px=height,
            quality=QUALITY_OF_NAME[quality] if quality else plan_pb2.QUALITY_TIER_UNSPECIFIED,
            frames=frames or 0,
            batch=batch or 0,
            reference_images=references or 0,
            source_images=sources or 0,
            prompt_tokens=prompt_tokens or 0,
        )
    )


def one_workload(image: plan_pb2.Workload | None, chat: plan_pb2.Workload | None) -> plan_pb2.Workload | None:
    """The workload of whichever options were given; None if none were.

    Raises:
        click.UsageError: those of both kinds.
    """
    if image is not None and chat is not None:
        raise click.UsageError("Sizes and frames are for images, --context and --slots are for chat: give one kind.")
    return image or chat


def chat_workload(context: int | None, slots: int | None) -> plan_pb2.Workload | None:
    """The workload of ``--context`` and ``--slots``; None if neither is given."""
    if context is None and slots is None:
        return None
    return plan_pb2.Workload(chat=plan_pb2.ChatWorkload(context_tokens=context or 0, slots=slots or 0))


def engine_options(settings: tuple[str, ...], engine: str | None) -> plan_pb2.EngineOptions | None:
    """The options of ``--set``. A model's parts are named as the model is: files as seen from here, or below the models
    root.

    Raises:
        click.BadParameter: they cannot be set.
    """
    try:
        options = parse_options(settings, engine if engine in ENGINES else None)
    except ValueError as wrong:
        raise click.BadParameter(str(wrong), param_hint="'--set'") from None
    if options is None:
        return None
    if options.WhichOneof("engine") == "sd":
        for role, path in options.sd.parts.items():
            if (found := path_here(path)) is not None:
                options.sd.parts[role] = str(found)
    elif options.WhichOneof("engine") == "ds4":
        for name in ("drafter_file", "vision_file"):
            if options.ds4.HasField(name) and (found := path_here(getattr(options.ds4, name))) is not None:
                setattr(options.ds4, name, str(found))
    return options

"""`image`: pictures from a prompt."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import click
from rich.console import Console
from weighbridge_proto.channel import MAX_MESSAGE_BYTES
from weighbridge_proto.engines.v1 import image_service_pb2

from weighbridge.cli.arguments import QUALITY_OF_NAME, PixelsParam, engine_options, image_workload
from weighbridge.cli.image_display import RenderDisplay, finished_line, size_line
from weighbridge.cli.image_failures import in_options
from weighbridge.cli.image_files import SUFFIXES, PictureFiles, choose_format, unwritten_words
from weighbridge.cli.image_preview import preview, protocol
from weighbridge.cli.output import console, print_json, say
from weighbridge.cli.running import CommandError, cancelled_by_signals, engine_kinds_here, open_suite, run_command
from weighbridge.client import Suite
from weighbridge.engine_client import Engine
from weighbridge.failures import CallError, ExitCode
from weighbridge.pictures import Picture, with_pictures
from weighbridge.sizes import format_size

IMAGE_ENGINE = "sd"
"""The engine that renders images."""

FORMAT_OF_NAME = {
    "png": image_service_pb2.IMAGE_FORMAT_PNG,
    "jpeg": image_service_pb2.IMAGE_FORMAT_JPEG,
    "webp": image_service_pb2.IMAGE_FORMAT_WEBP,
}

ROOM_FOR_THE_REST = 64 * 1024
"""Of a request, beside its images: prompts and lengths."""

MOST_IMAGES = 8
"""sd-server renders no more in one go."""

LARGEST_SIDE_PX = 4096
"""sd-server renders no larger; what a model's own limits are, the engine says."""

_MOST_INT32 = 2**31 - 1

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("-o", "--output", metavar="FILE", help="File or folder for the image. Default: named after the prompt.")
@click.option("--size", type=PixelsParam(LARGEST_SIDE_PX), help="Width and height in pixels, such as 1024x1024.")
@click.option("--quality", type=click.Choice(list(QUALITY_OF_NAME)), help="Size by tier instead of pixels.")
@click.option("--steps", type=click.IntRange(1, _MOST_INT32), help="Sampling steps.")
@click.option("--guidance", type=click.FloatRange(min=0), help="How closely to follow the prompt.")
@click.option("--seed", type=click.IntRange(0, _MOST_INT32), help="Same seed, same request: same image.")
@click.option("--sampler", default="", help="Sampler, as the engine names it.")
@click.option("--scheduler", default="", help="Scheduler, as the engine names it.")
@click.option("--count", type=click.IntRange(1, MOST_IMAGES), default=1, show_default=True, help="How many images.")
@click.option("--negative", default="", metavar="TEXT", help="What not to show.")
@click.option("--from", "source", type=_FILE, help="Image to start from.")
@click.option("--strength", type=click.FloatRange(0, 1), help="How far to leave that image.")
@click.option("--mask", type=_FILE, help="Where to repaint that image: white is repainted.")
@click.option("--require-source", is_flag=True, help="Fail if the model cannot start from that image.")
@click.option("--reference", "references", type=_FILE, multiple=True, help="Image to refer to. Repeatable.")
@click.option(
    "--format", "image_format", type=click.Choice(list(SUFFIXES)), help="Format. Default: as FILE ends, else png."
)
@click.option("--strip-metadata", is_flag=True, help="Leave out the generation data, the prompt among it.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="An option of the engine. Repeatable.")
@click.option("--force", is_flag=True, help="Replace files that are there.")
@click.option("--open", "opens", is_flag=True, help="Open the images when they are done.")
@click.option("--preview/--no-preview", "previews", default=True, help="Show them where the terminal can.")
@click.option("--json", "json_output", is_flag=True, help="Print each event as JSON; images by their files' names.")
def image(
    model: str,
    prompt: str | None,
    output: str | None,
    size: tuple[int, int] | None,
    quality: str | None,
    steps: int | None,
    guidance: float | None,
    seed: int | None,
    sampler: str,
    scheduler: str,
    count: int,
    negative: str,
    source: Path | None,
    strength: float | None,
    mask: Path | None,
    require_source: bool,
    references: tuple[Path, ...],
    image_format: str | None,
    strip_metadata: bool,
    settings: tuple[str, ...],
    force: bool,
    opens: bool,
    previews: bool,
    json_output: bool,
) -> None:
    """Render PROMPT with MODEL into a file, and print its name.

    PROMPT is read from standard input if it is - or left out. A model that is not loaded is loaded first. Several
    images go to numbered files. Ctrl-C cancels the render and leaves no half file.
    """
    if source is None and (strength is not None or mask is not None or require_source):
        raise click.UsageError("--strength, --mask and --require-source are of use with --from alone.")
    text = _prompt(prompt)
    workload = image_workload(size, quality, None, count, None, None, None)
    assert workload is not None, "the count is always said"
    chosen_format = choose_format(image_format, output)
    request = image_service_pb2.GenerateImageRequest(
        prompt=text,
        negative_prompt=negative,
        size=workload.image,
        steps=steps,
        guidance=guidance,
        seed=seed,
        sampler=sampler,
        scheduler=scheduler,
        strength=strength,
        require_source=require_source,
        format=FORMAT_OF_NAME[chosen_format],
        strip_metadata=strip_metadata,
        options=engine_options(settings, IMAGE_ENGINE),
    )

    async def body() -> None:
        files = PictureFiles(output, text, count, chosen_format, force=force)
        _add_images(request, source, mask, references)
        async with open_suite() as suite:
            engine = image_engine(suite)
            request.model.CopyFrom(await suite.resolve_model(model))
            with cancelled_by_signals():
                try:
                    paths = await render(engine, request, files, previews=previews, json_output=json_output)
                except CallError as failed:
                    if json_output:
                        raise  # for a program, which knows the contract
                    raise CallError(in_options(failed.failure, source, mask, references)) from failed
        for path in paths if opens else ():
            click.launch(str(path))

    run_command("image", body, json_output=json_output)


def image_engine(suite: Suite) -> Engine:
    """The engine that renders images.

    Raises:
        CommandError: none runs here.
    """
    here = engine_kinds_here()
    if IMAGE_ENGINE not in here:
        others = f"What runs: {', '.join(here)}. " if here else ""
        raise CommandError(
            f"No engine for images runs here. {others}Start the suite with `weighbridge up --engines mlx,sd`.",
            ExitCode.UNREACHABLE,
        )
    return suite.engine(IMAGE_ENGINE)


async def render(
    engine: Engine,
    request: image_service_pb2.GenerateImageRequest,
    files: PictureFiles,
    *,
    previews: bool,
    json_output: bool,
) -> list[Path]:
    """Render into ``files``; names of images go to standard output, everything else to standard error.

    Raises:
        CallError: the render failed.
        CommandError: an image could not be written. Those before it stand.
    """
    to = console(stderr=True)
    kept = _Kept(files, json_output=json_output)
    seed = request.seed if request.HasField("seed") else None
    async with nullcontext() if json_output else RenderDisplay(to, engine) as display:
        try:
            async for event in with_pictures(engine.generate_image(request)):
                if isinstance(event, Picture):
                    kept.take(event)
                    continue
                finished = event.finished if event.HasField("finished") else None
                seed = finished.seed if finished else seed
                if display is None:
                    print_json(event, one_line=True)
                    continue
                await display.show(event)
                if finished:
                    if previews:
                        _show(to, kept.pictures, finished)
                    for path in kept.paths:
                        click.echo(str(path))
                    _say_how_it_went(request, finished, request.size.batch)
        except CallError:
            kept.check_all(seed)
            raise
    kept.check_all(seed)
    return kept.paths


class _Kept:
    """The images of one render that are written, up to the first that cannot be."""

    def __init__(self, files: PictureFiles, *, json_output: bool) -> None:
        self._files = files
        self._json_output = json_output
        self._error: OSError | None = None
        self.pictures: list[Picture] = []
        self.paths: list[Path] = []

    def take(self, picture: Picture) -> None:
        """Write an image, and say so."""
        if self._error is not None:
            return
        try:
            path, replaced = self._files.save(picture.index, picture.data)
        except OSError as error:
            self._error = error  # raised when the render is over, which tells the seed
            return
        self.paths.append(path)
        self.pictures.append(picture)
        if self._json_output:
            print_json({"image": _image_json(picture, path, replaced=replaced)}, one_line=True)
        elif replaced:
            say(f"Replaced {path}.")

    def check_all(self, seed: int | None) -> None:
        """All images are written. ``seed``: of the first one; None: it is not known.

        Raises:
            CommandError: one is not.
        """
        if self._error is None:
            return
        count = len(self.paths)
        missing = self._files.paths[count:]
        first = None if seed is None else seed + count
        raise CommandError(unwritten_words(self._error, missing, self.paths, first)) from self._error


def _say_how_it_went(
    request: image_service_pb2.GenerateImageRequest, finished: image_service_pb2.ImageFinished, count: int
) -> None:
    if finished.source_skipped_reason:
        say(f"The image of --from was not used. {finished.source_skipped_reason}")
    if line := size_line(request.size, finished.size):
        say(line)
    say(finished_line(finished, count))


def _show(to: Console, pictures: list[Picture], finished: image_service_pb2.ImageFinished) -> None:
    how = protocol(os.environ) if to.is_terminal else None
    if how is None:
        return
    for picture in pictures:
        shown = preview(picture.data, how, finished.size.width_px, finished.size.height_px, to.width)
        to.file.write(shown)  # past rich, which would fold and escape it
        to.file.flush()


def _image_json(picture: Picture, path: Path, *, replaced: bool) -> dict[str, object]:
    return {
        "image_index": picture.index,
        "file": str(path),
        "media_type": picture.media_type,
        "size_bytes": str(len(picture.data)),
        "replaced": replaced,
    }


def _prompt(given: str | None) -> str:
    if given is None and sys.stdin.isatty():
        raise click.UsageError("There is no prompt: give PROMPT, or pipe it in.")
    text = sys.stdin.read().strip() if given in (None, "-") else str(given)
    if not text.strip():
        raise click.UsageError("The prompt is empty.")
    return text


def _add_images(
    request: image_service_pb2.GenerateImageRequest,
    source: Path | None,
    mask: Path | None,
    references: tuple[Path, ...],
) -> None:
    given = [path for path in (source, mask, *references) if path is not None]
    together = sum(path.stat().st_size for path in given)
    if together > MAX_MESSAGE_BYTES - ROOM_FOR_THE_REST:
        raise CommandError(
            f"The images given are {format_size(together)} together. A request takes {format_size(MAX_MESSAGE_BYTES)}: "
            "make them smaller.",
            ExitCode.USAGE,
        )
    if source is not None:
        request.source_images.add().data = source.read_bytes()
    if mask is not None:
        request.mask.data = mask.read_bytes()
    for path in references:
        request.reference_images.add().data = path.read_bytes()

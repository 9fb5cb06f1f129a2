"""What sd-server is asked for and what comes of it, whoever asks and however it is asked."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from weighbridge_engines.host.kind import Runtime


@dataclass(frozen=True)
class RenderJob:
    """One render, validated.

    Attributes:
        prompt: what to show, without anything that sd-server takes for more than text.
        negative_prompt: what not to show.
        width: in pixels, a multiple of what the model rounds up to.
        height: in pixels, likewise.
        batch: how many images, 1 to 8.
        steps: sampling steps, 1 to 100.
        guidance: None: the engine's default.
        seed: of the first image; the others follow it by one.
        sampler: as the engine names it; empty: its default.
        scheduler: as the engine names it; empty: its default.
        source_png: an image to start from.
        strength: how far to leave the source, 0 to 1; None: the engine's default.
        mask_png: where to repaint.
        reference_pngs: images to refer to.
    """

    prompt: str
    negative_prompt: str
    width: int
    height: int
    batch: int
    steps: int
    guidance: float | None
    seed: int
    sampler: str = ""
    scheduler: str = ""
    source_png: bytes | None = None
    strength: float | None = None
    mask_png: bytes | None = None
    reference_pngs: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class RenderProgress:
    """A render goes on.

    Attributes:
        phase: text_encode, encode, sampling or decode.
        done: of the phase, for all images together.
        total: likewise.
    """

    phase: str
    done: int
    total: int


@dataclass(frozen=True)
class Rendered:
    """A render is done.

    Attributes:
        images: PNG files as the engine made them.
        width: in pixels, as rendered.
        height: in pixels, as rendered.
        seconds: how long it took.
    """

    images: tuple[bytes, ...]
    width: int
    height: int
    seconds: float


class ImageRuntime(Runtime, Protocol):
    """A started engine process that renders."""

    def check(self, job: RenderJob) -> None:
        """Refuse what the engine would silently replace by its default.

        Raises:
            RequestError: INVALID_ARGUMENT UNKNOWN_SAMPLER or UNKNOWN_SCHEDULER.
        """
        ...

    def render(self, job: RenderJob) -> AsyncGenerator[RenderProgress | Rendered, None]:
        """One render: progress, then the images. Nothing but the end of the process stops it.

        Raises:
            RequestError: the engine refuses it or fails at it, and lives.
            EngineLostError: the engine is gone.
        """
        ...

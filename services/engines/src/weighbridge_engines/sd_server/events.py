"""What an sd-server's output tells, as values. :mod:`weighbridge_engines.sd_server.output` makes them from lines."""

from dataclasses import dataclass
from enum import StrEnum

from weighbridge_engines.sd_server.jobs import RenderProgress


class Phase(StrEnum):
    """What a render is at, in this order; ``ENCODE`` only with a source or reference image."""

    ENCODE = "encode"
    TEXT_ENCODE = "text_encode"
    SAMPLING = "sampling"
    DECODE = "decode"


class FailureKind(StrEnum):
    """What a line says went wrong."""

    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """An allocation failed. In a render the server lives on; while it loads, it ends."""
    MISSING_FILE = "MISSING_FILE"
    """A file that was named is not there."""
    MISSING_PART = "MISSING_PART"
    """A part that was named could not be read, or no text encoder was named."""
    WRONG_FILE = "WRONG_FILE"
    """A file is no model, or none that this build knows."""
    TRUNCATED_FILE = "TRUNCATED_FILE"
    """A file ends before its tensors do."""
    MISSING_TENSOR = "MISSING_TENSOR"
    """The files together lack a tensor of the model: mostly one of a part that was not named."""
    WRONG_SHAPE = "WRONG_SHAPE"
    """A part belongs to another model."""
    WRONG_ARGUMENT = "WRONG_ARGUMENT"
    """This build does not know a flag, or not that value of it."""
    UNREADABLE_SOURCE = "UNREADABLE_SOURCE"
    """It could not decode an image that it was given, and goes on without."""
    RENDER_FAILED = "RENDER_FAILED"
    """A render failed; an earlier failure may say why."""
    LOAD_FAILED = "LOAD_FAILED"
    """The load failed; an earlier failure may say why."""
    CRASH = "CRASH"
    """It aborts: a failed assertion, or an exception that nobody caught."""


@dataclass(frozen=True)
class LoadProgress:
    """Tensors loaded, of those in all files together."""

    done: int
    total: int


@dataclass(frozen=True)
class ModelVersion:
    """What it takes the model for, such as "Flux.2 klein"."""

    name: str


@dataclass(frozen=True)
class PartMemory:
    """What a part of the model holds.

    Attributes:
        part: text_encoders, diffusion_model, vae, controlnet or pmid.
        size_bytes: as printed, to 0.01 MiB.
        on_device: whether it lies on a card.
    """

    part: str
    size_bytes: int
    on_device: bool


@dataclass(frozen=True)
class ParamsMemory:
    """What the loaded weights hold, each part to 0.01 MiB."""

    parts: tuple[PartMemory, ...]

    @property
    def host_bytes(self) -> int:
        """In the machine's memory."""
        return sum(part.size_bytes for part in self.parts if not part.on_device)

    @property
    def device_bytes(self) -> int:
        """On cards."""
        return sum(part.size_bytes for part in self.parts if part.on_device)


@dataclass(frozen=True)
class Listening:
    """The model is loaded and a port is about to be bound.

    No proof that it was bound, nor that what answers there is this server.
    """


@dataclass(frozen=True)
class SizeAligned:
    """A size was rounded up to a multiple of ``multiple`` pixels. Told before the render starts."""

    asked_width: int
    asked_height: int
    width: int
    height: int
    multiple: int


@dataclass(frozen=True)
class RenderStarted:
    """A render of this size began, in pixels."""

    width: int
    height: int


@dataclass(frozen=True)
class RenderEnded:
    """A render was completed.

    Attributes:
        seconds: how long it took, without waiting before it and encoding of its answer after.
        used_source: whether it started from, or referred to, an image that it was given.
    """

    seconds: float
    used_source: bool


@dataclass(frozen=True)
class SdFailure:
    """Something went wrong.

    Attributes:
        kind: what.
        text: the server's own words, without level, file and line.
        subject: the part, file, tensor or flag that it is about; empty where it names none.
        size_bytes: what could not be allocated; None where it does not say.
        while_loaded: whether the model had been loaded by then.
        is_fatal: whether the process ends by it.
    """

    kind: FailureKind
    text: str
    subject: str = ""
    size_bytes: int | None = None
    while_loaded: bool = False
    is_fatal: bool = False


Event = (
    LoadProgress
    | ModelVersion
    | ParamsMemory
    | Listening
    | SizeAligned
    | RenderStarted
    | RenderProgress
    | RenderEnded
    | SdFailure
)

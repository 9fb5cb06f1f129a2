"""What a ds4-server's output tells, as values. :mod:`weighbridge_engines.ds4.output` makes them from lines."""

from dataclasses import dataclass
from enum import StrEnum


class FailureKind(StrEnum):
    """What a line says went wrong."""

    LOCK_HELD = "LOCK_HELD"
    """Another ds4 process has the machine's lock; the subject is its process id, where it wrote one."""
    LOCK_UNUSABLE = "LOCK_UNUSABLE"
    """The lock's file cannot be opened or locked."""
    WRONG_ARGUMENT = "WRONG_ARGUMENT"
    """This build does not take a flag, or not that value of it."""
    NOT_TOGETHER = "NOT_TOGETHER"
    """Flags, or a flag and this model, do not go together in this build."""
    PORT_TAKEN = "PORT_TAKEN"
    """Another program holds the port. It is found only after the whole model is loaded."""
    CANNOT_LISTEN = "CANNOT_LISTEN"
    """The address cannot be bound for another reason."""
    NO_FOLDER = "NO_FOLDER"
    """A folder that it needs cannot be entered or made."""
    MISSING_FILE = "MISSING_FILE"
    """A model file cannot be opened."""
    WRONG_FILE = "WRONG_FILE"
    """A file is no model, or none that this build knows."""
    TRUNCATED_FILE = "TRUNCATED_FILE"
    """A file ends before its tensors do: mostly a download that was cut off."""
    BACKEND_MISSING = "BACKEND_MISSING"
    """The build has no such backend, or the machine no such device."""
    SHADERS_MISSING = "SHADERS_MISSING"
    """The sources of its Metal kernels are not in its working directory, or do not compile."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """Memory, mapped or of a device, could not be had."""
    CACHE_TOO_SMALL = "CACHE_TOO_SMALL"
    """The expert cache does not hold what one prompt is read through."""
    DEVICE_FAULT = "DEVICE_FAULT"
    """The device failed in a computation. The process may live on and fail every request from then on."""


@dataclass(frozen=True)
class Ds4Failure:
    """Something went wrong.

    Attributes:
        kind: what.
        text: its own words, without the time and its name.
        subject: the process, flag or file that it is about; empty where it names none.
        while_loaded: whether the model had been loaded by then.
    """

    kind: FailureKind
    text: str
    subject: str = ""
    while_loaded: bool = False


@dataclass(frozen=True)
class LoadProgress:
    """Bytes of weights brought to where they are computed on, as printed, to 0.01 GiB.

    Attributes:
        done_bytes: since the load began, not since the last line.
        total_bytes: of all; 0 where it does not say.
    """

    done_bytes: int
    total_bytes: int = 0


@dataclass(frozen=True)
class Warming:
    """It touches every page of so many bytes of weights, which takes minutes where they are not in memory yet."""

    size_bytes: int


@dataclass(frozen=True)
class Warmed:
    """All pages were touched."""

    seconds: float


@dataclass(frozen=True)
class BackendReady:
    """Weights are where they are computed on. Sessions are allocated next."""

    name: str


@dataclass(frozen=True)
class MemoryPlan:
    """What it says that it will hold, each part to 0.01 GiB, for one session.

    Less than it will hold: the workspace of prefill is left out, and while experts are streamed most weights that stay.

    Attributes:
        total_bytes: of all parts.
        kv_bytes: keys and values.
        buffers_bytes: scratch beside them.
    """

    total_bytes: int
    kv_bytes: int
    buffers_bytes: int


@dataclass(frozen=True)
class ContextBuffers:
    """Keys, values and scratch of one session, to 0.01 MiB.

    Attributes:
        size_bytes: in all.
        context_tokens: the context that it was given.
        backend: metal, cuda or cpu.
    """

    size_bytes: int
    context_tokens: int
    backend: str


@dataclass(frozen=True)
class SessionBuffers:
    """What several sessions together ask for at least, to 0.01 GiB."""

    sessions: int
    size_bytes: int


@dataclass(frozen=True)
class Listening:
    """The model is loaded and the port is bound."""

    host: str
    port: int


@dataclass(frozen=True)
class Span:
    """Which part of which prompt a request's lines are about, in tokens.

    Attributes:
        cached: those that were computed before.
        prompt: the whole prompt's.
        new: those that are computed now.
    """

    cached: int
    prompt: int
    new: int


@dataclass(frozen=True)
class PromptStarted:
    """A request's prompt begins to be computed."""

    span: Span


@dataclass(frozen=True)
class PromptProgress:
    """A chunk of a prompt is computed.

    Attributes:
        span: of the request.
        done: tokens.
        total: tokens that are to be computed.
        tokens_per_s: on the average so far.
        rebuilds: whether it computes again what it had before, for a tool call's place in the history.
    """

    span: Span
    done: int
    total: int
    tokens_per_s: float
    rebuilds: bool = False


@dataclass(frozen=True)
class PromptDone:
    """The prompt is computed; the answer begins."""

    span: Span
    seconds: float


@dataclass(frozen=True)
class Decoding:
    """So many tokens of an answer are made. Printed every 50."""

    span: Span
    generated: int
    tokens_per_s: float


@dataclass(frozen=True)
class RequestEnded:
    """Nothing is computed for a request any more.

    Not every request ends with such a line: one whose prompt failed while its client was there ends without a word.

    Attributes:
        span: of the request; None where the line does not say.
        generated: tokens of the answer.
        finish: stop, length, tool_calls or error; empty where its client was gone before the answer began.
        error: why, in its own words.
    """

    span: Span | None
    generated: int = 0
    finish: str = ""
    error: str = ""


LoadEvent = LoadProgress | Warming | Warmed | BackendReady | MemoryPlan | ContextBuffers | SessionBuffers | Listening
RequestEvent = PromptStarted | PromptProgress | PromptDone | Decoding | RequestEnded
Event = LoadEvent | RequestEvent | Ds4Failure

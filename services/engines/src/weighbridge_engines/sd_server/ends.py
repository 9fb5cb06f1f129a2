"""Why sd-server ended, and why a render failed: from its output and its exit to a cause, a sentence and what to do.

An exit alone says little: sd-server leaves with 1 whatever is wrong with a model, with 0 when its port is taken, and by
SIGABRT for want of memory as for a broken header. What it printed tells them apart.
"""

import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weighbridge_common.sizes import format_gib

from weighbridge_engines.sd_server.events import FailureKind, SdFailure
from weighbridge_engines.sd_server.output import OutputReader
from weighbridge_engines.supervisor import exits
from weighbridge_engines.supervisor.exits import ExitCause, ExitExplanation, ExitFacts, FatalLine

TITLE = "The sd-server engine"

CANNOT_BIND = "CANNOT_BIND"
"""Code of the end that no line explains: it leaves with 0, without a word, where it cannot bind its address."""

NO_TEXT_ENCODER = "IMPORTANT NOTICE: No text encoders provided"

_MOST_TELLING_FIRST = (
    FailureKind.WRONG_ARGUMENT,
    FailureKind.MISSING_FILE,
    FailureKind.TRUNCATED_FILE,
    FailureKind.WRONG_SHAPE,
    FailureKind.WRONG_FILE,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.CRASH,
    FailureKind.MISSING_PART,
    FailureKind.MISSING_TENSOR,
    FailureKind.UNREADABLE_SOURCE,
    FailureKind.RENDER_FAILED,
    FailureKind.LOAD_FAILED,
)
"""One fault makes several lines, on two streams whose order is lost: a file that is not there makes a part fail and
tensors be missing too, and a GGUF whose counts are absurd ends in std::bad_alloc."""

_PARTS_BY_TENSOR = (
    ("text_encoders.llm.", "the text encoder llm", "llm"),
    ("text_encoders.clip_l.", "the text encoder clip_l", "clip_l"),
    ("text_encoders.clip_g.", "the text encoder clip_g", "clip_g"),
    ("text_encoders.t5xxl.", "the text encoder t5xxl", "t5xxl"),
    ("cond_stage_model.", "the text encoder", ""),
    ("conditioner.", "the text encoder", ""),
    ("first_stage_model.", "the autoencoder (vae)", "vae"),
    ("tae.", "the tiny autoencoder (taesd)", "taesd"),
    ("model.diffusion_model.", "the diffusion model", ""),
)
"""How the engine names tensors, whatever the file calls them: the prefix, the part for people, and its role among the
parts of a model; "" where the prefix tells none, or the model itself is that part."""


@dataclass(frozen=True)
class RenderTrouble:
    """Why a render failed while the server lives on.

    Attributes:
        kind: OUT_OF_MEMORY or RENDER_FAILED.
        message: a sentence, and what to do.
        metadata: figures.
    """

    kind: FailureKind
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)


def explain_end(facts: ExitFacts, output: OutputReader) -> ExitExplanation:
    """Why the process ended.

    ``metadata["failure"]`` is the kind of failure, or :data:`CANNOT_BIND`, where the output tells more than the exit.
    """
    told_by_exit = facts.signal_number in (signal.SIGKILL, signal.SIGILL, *exits.ASKS_TO_END)
    if facts.asked or facts.guard_lost or facts.start_errno is not None or told_by_exit:
        return exits.explain(facts, TITLE)
    if facts.exit_code == 0 and output.is_listening:
        message = (
            f"{TITLE} ended by itself, as it does when it cannot take its address: another program holds the port. "
            "Load the model again; it is given another port."
        )
        return _explanation(facts, ExitCause.EXITED, message, CANNOT_BIND)
    failure = _what_ended_it(facts, output)
    if failure is None:
        return exits.explain(facts, TITLE)
    cause = _CAUSES.get(failure.kind, ExitCause.EXITED if facts.signal_number is None else ExitCause.CRASHED)
    return _explanation(facts, cause, _MESSAGES[failure.kind](failure), failure.kind.value)


def explain_render(failures: Iterable[SdFailure]) -> RenderTrouble:
    """Why a render gave no picture, from the failures that were read since it was asked for."""
    out_of_memory = [failure for failure in failures if failure.kind is FailureKind.OUT_OF_MEMORY]
    if not out_of_memory:
        return RenderTrouble(
            FailureKind.RENDER_FAILED,
            "sd-server made no picture of this request and did not say why. Its log may; it renders on.",
        )
    size_bytes = max((failure.size_bytes or 0) for failure in out_of_memory)
    needed = f" {format_gib(size_bytes)} in one piece" if size_bytes else ""
    return RenderTrouble(
        FailureKind.OUT_OF_MEMORY,
        f"The render ran out of memory: it needed{needed or ' more than there is'}. A smaller size needs less, and so "
        "do flash attention and a tiled autoencoder.",
        {"size_bytes": str(size_bytes)} if size_bytes else {},
    )


def fatal_line(line: str, *, from_stderr: bool = True) -> FatalLine | None:
    """Whether sd-server cannot go on after a line, whatever came before it."""
    for event in OutputReader().read(line, from_stderr=from_stderr):
        if isinstance(event, SdFailure) and event.is_fatal:
            cause = _CAUSES.get(event.kind, ExitCause.EXITED)
            return FatalLine(cause, event.text, specific=cause is ExitCause.OUT_OF_MEMORY)
    return None


def _what_ended_it(facts: ExitFacts, output: OutputReader) -> SdFailure | None:
    if not output.is_listening:
        return _most_telling(output.failures)
    fatal = _most_telling(failure for failure in output.failures if failure.while_loaded)
    if fatal is None and facts.signal_number == signal.SIGSEGV:
        # FLUX without any text encoder loads with a warning and crashes in its first render.
        return next((failure for failure in output.failures if failure.text.startswith(NO_TEXT_ENCODER)), None)
    return fatal


def _most_telling(failures: Iterable[SdFailure]) -> SdFailure | None:
    return min(
        failures, key=lambda failure: (_MOST_TELLING_FIRST.index(failure.kind), not failure.subject), default=None
    )


def _explanation(facts: ExitFacts, cause: ExitCause, message: str, failure: str) -> ExitExplanation:
    return ExitExplanation(
        cause, message, {**exits.explain(facts, TITLE).metadata, "cause": cause.value, "failure": failure}
    )


def _wrong_argument(failure: SdFailure) -> str:
    which = f" ({failure.subject})" if failure.subject else ""
    return (
        f"This build of sd-server does not take a flag that it was given{which}: {failure.text}. "
        "A newer or older build may."
    )


def _missing_file(failure: SdFailure) -> str:
    return f"{_file(failure)} is not there. Get the model again, or name the part that is."


def _truncated_file(failure: SdFailure) -> str:
    return f"{_file(failure)} is cut off: it ends before its tensors do. Get it again."


def _wrong_shape(failure: SdFailure) -> str:
    part, _ = _part(failure.subject)
    return f"{_capital(part or 'a part')} belongs to another model: {failure.text}."


def _wrong_file(failure: SdFailure) -> str:
    return (
        f"{_file(failure)} is no model that this build of sd-server knows ({failure.text}). "
        "It may be broken, of another kind, or need a newer build."
    )


def _out_of_memory(failure: SdFailure) -> str:
    needed = f" It asked for {format_gib(failure.size_bytes)} in one piece." if failure.size_bytes else ""
    return f"{TITLE} ran out of memory.{needed} A smaller model, or one with smaller weights (Q8_0, Q4_0), needs less."


def _crash(failure: SdFailure) -> str:
    return f"{TITLE} gave up: {failure.text}. While it loads, a broken file is the likeliest reason."


def _missing_part(failure: SdFailure) -> str:
    if failure.text.startswith(NO_TEXT_ENCODER):
        return (
            "The model has no text encoder, so it cannot render. Name the files of its text encoders (clip_l, t5xxl, "
            f"llm): {_part_option('t5xxl')}."
        )
    return f"The part {failure.subject} could not be read: {failure.text}. Get it again, or name another file."


def _missing_tensor(failure: SdFailure) -> str:
    part, role = _part(failure.subject)
    which = f": {part} is missing or incomplete" if part else ""
    remedy = f"Name the file that has it: {_part_option(role)}" if role else "Get the model again, or name another file"
    return f"The model's files lack the tensor {failure.subject}{which}. {remedy}."


def _load_failed(failure: SdFailure) -> str:
    return f"{TITLE} could not load the model: {failure.text}. Its log says more."


_MESSAGES: Mapping[FailureKind, Callable[[SdFailure], str]] = {
    FailureKind.WRONG_ARGUMENT: _wrong_argument,
    FailureKind.MISSING_FILE: _missing_file,
    FailureKind.TRUNCATED_FILE: _truncated_file,
    FailureKind.WRONG_SHAPE: _wrong_shape,
    FailureKind.WRONG_FILE: _wrong_file,
    FailureKind.OUT_OF_MEMORY: _out_of_memory,
    FailureKind.CRASH: _crash,
    FailureKind.MISSING_PART: _missing_part,
    FailureKind.MISSING_TENSOR: _missing_tensor,
    FailureKind.UNREADABLE_SOURCE: _load_failed,
    FailureKind.RENDER_FAILED: _load_failed,
    FailureKind.LOAD_FAILED: _load_failed,
}

_CAUSES: Mapping[FailureKind, ExitCause] = {
    FailureKind.OUT_OF_MEMORY: ExitCause.OUT_OF_MEMORY,
    FailureKind.CRASH: ExitCause.CRASHED,
}


def _file(failure: SdFailure) -> str:
    return Path(failure.subject).name or "A file"


def _part(tensor: str) -> tuple[str, str]:
    """The part that a tensor belongs to, for people, and its role; empty where they are not known."""
    return next(((part, role) for prefix, part, role in _PARTS_BY_TENSOR if tensor.startswith(prefix)), ("", ""))


def _part_option(role: str) -> str:
    """How a part is named to the command; a program names it in ``SdOptions.parts``."""
    return f"--set parts={role}=FILE"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

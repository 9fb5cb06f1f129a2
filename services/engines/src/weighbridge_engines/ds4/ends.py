"""Why a ds4-server ended: from its output and its exit to a cause, a sentence and what to do.

It leaves with 1 whatever is wrong with a model, its memory or its address, and with 2 for a flag as for the machine's
lock. What it printed tells them apart.
"""

import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from weighbridge_engines.ds4.events import Ds4Failure, FailureKind
from weighbridge_engines.ds4.output import OutputReader
from weighbridge_engines.supervisor import exits
from weighbridge_engines.supervisor.exits import ExitCause, ExitExplanation, ExitFacts

TITLE = "The ds4 engine"

EXIT_MEANINGS = {
    0: "it was asked to end from outside (SIGTERM or SIGINT)",
    2: "it takes no such command line, or another ds4 runs",
    130: "it was asked to end twice from outside",
}

_MOST_TELLING_FIRST = (
    FailureKind.LOCK_HELD,
    FailureKind.LOCK_UNUSABLE,
    FailureKind.WRONG_ARGUMENT,
    FailureKind.NOT_TOGETHER,
    FailureKind.CACHE_TOO_SMALL,
    FailureKind.NO_FOLDER,
    FailureKind.MISSING_FILE,
    FailureKind.TRUNCATED_FILE,
    FailureKind.WRONG_FILE,
    FailureKind.PORT_TAKEN,
    FailureKind.CANNOT_LISTEN,
    FailureKind.SHADERS_MISSING,
    FailureKind.DEVICE_FAULT,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.BACKEND_MISSING,
)
"""One fault makes several lines: without its shaders the backend is unavailable too, and where memory is short it tries
another way and says so before it gives up. ds4 reports one model fault at a time."""

LAST_WORDS_CHARS = 300


def explain_end(facts: ExitFacts, output: OutputReader, platform: str = sys.platform) -> ExitExplanation:
    """Why the process ended.

    ``metadata["failure"]`` is the kind of failure where the output tells more than the exit; for LOCK_HELD
    ``metadata["pid"]`` is the process that has the lock.

    Args:
        platform: as :data:`sys.platform`.
    """
    if facts.asked or facts.guard_lost or facts.start_errno is not None:
        return exits.explain(facts, TITLE)
    if facts.signal_number == signal.SIGKILL:
        return _killed(facts, platform)
    failure = _what_ended_it(output)
    if failure is not None:
        cause = _CAUSES.get(failure.kind, ExitCause.EXITED if facts.signal_number is None else ExitCause.CRASHED)
        extra = {"failure": failure.kind.value}
        if failure.kind is FailureKind.LOCK_HELD and failure.subject:
            extra["pid"] = failure.subject
        return _explanation(facts, cause, _MESSAGES[failure.kind](failure), extra)
    if facts.exit_code == 1 and not output.is_listening and output.last_words:
        said = output.last_words[:LAST_WORDS_CHARS]
        return _explanation(facts, ExitCause.EXITED, f"{TITLE} gave up while it loaded. Its last words: {said}", {})
    return exits.explain(facts, TITLE, EXIT_MEANINGS)


def lock_held(pid: str) -> str:
    """What people are told where another ds4 has the machine's lock."""
    which = f"process {pid}" if pid else "a process that it could not name"
    return (
        f"Another ds4 runs on this machine outside the suite ({which}), and one machine runs one ds4. End that one, or "
        "set WEIGHBRIDGE_ENGINES_DS4_LOCK_FILE if both are meant to run."
    )


def _what_ended_it(output: OutputReader) -> Ds4Failure | None:
    """Of a load every failure counts; of a loaded model only what came after it was."""
    return _most_telling(failure for failure in output.failures if failure.while_loaded is output.is_listening)


def _most_telling(failures: Iterable[Ds4Failure]) -> Ds4Failure | None:
    return min(failures, key=lambda failure: _MOST_TELLING_FIRST.index(failure.kind), default=None)


def _killed(facts: ExitFacts, platform: str) -> ExitExplanation:
    """Its builds for cards ask the Linux kernel to take them first when memory runs out (since July 2026)."""
    if platform != "linux" or facts.oom_kills is not None:
        return exits.explain(facts, TITLE)
    message = (
        f"{TITLE} was killed (SIGKILL), most likely by the kernel for want of memory: ds4 offers itself first when "
        "memory runs out. A smaller context or expert cache needs less."
    )
    return _explanation(facts, ExitCause.OUT_OF_MEMORY, message, {"certainty": "probable"})


def _explanation(facts: ExitFacts, cause: ExitCause, message: str, extra: Mapping[str, str]) -> ExitExplanation:
    return ExitExplanation(cause, message, {**exits.explain(facts, TITLE).metadata, "cause": cause.value, **extra})


def _said(failure: Ds4Failure) -> str:
    return failure.text.rstrip(".")


def _argument(failure: Ds4Failure) -> str:
    which = f" ({failure.subject})" if failure.subject else ""
    return f"This build of ds4-server does not take a flag that it was given{which}: {_said(failure)}. Another may."


_MESSAGES: Mapping[FailureKind, Callable[[Ds4Failure], str]] = {
    FailureKind.LOCK_HELD: lambda failure: lock_held(failure.subject),
    FailureKind.LOCK_UNUSABLE: lambda failure: (
        f"ds4's lock file cannot be used: {_said(failure)}. Another user may have made it. "
        "WEIGHBRIDGE_ENGINES_DS4_LOCK_FILE names another one."
    ),
    FailureKind.WRONG_ARGUMENT: _argument,
    FailureKind.NOT_TOGETHER: lambda failure: (
        f"This build of ds4-server does not do that with this model: {_said(failure)}. Other options may."
    ),
    FailureKind.CACHE_TOO_SMALL: lambda failure: (
        f"The expert cache is too small for this model: {_said(failure)}. Ask for more with expert_cache_gib."
    ),
    FailureKind.NO_FOLDER: lambda failure: f"ds4 cannot use the folder that it is to work in: {_said(failure)}.",
    FailureKind.MISSING_FILE: lambda failure: (
        f"{_file(failure)} cannot be opened: {_said(failure)}. Get the model again, or allow this user to read it."
    ),
    FailureKind.TRUNCATED_FILE: lambda failure: (
        "A model file is cut off: it ends before its tensors do. Get the model again, with its drafter or companion."
    ),
    FailureKind.WRONG_FILE: lambda failure: (
        f"A file is no model that this build of ds4-server knows: {_said(failure)}. It may be broken, of another "
        "model, or need a newer build."
    ),
    FailureKind.PORT_TAKEN: lambda failure: (
        "Another program took the ds4 engine's port while the model was loading. Load the model again; it is given "
        "another port."
    ),
    FailureKind.CANNOT_LISTEN: lambda failure: f"{TITLE} cannot listen on this machine: {_said(failure)}.",
    FailureKind.SHADERS_MISSING: lambda failure: (
        f"ds4 cannot use the sources of its Metal kernels: {_said(failure)}. The folder `metal` of the ds4 that it was "
        "built from must be beside the program."
    ),
    FailureKind.DEVICE_FAULT: lambda failure: (
        f"The device failed: {_said(failure)}. If it happens again, its driver or this build of ds4-server is at fault."
    ),
    FailureKind.OUT_OF_MEMORY: lambda failure: (
        f"{TITLE} ran out of memory: {_said(failure)}. The same plan will not fit next time: a smaller context or "
        "expert cache, or experts streamed from disk, need less."
    ),
    FailureKind.BACKEND_MISSING: lambda failure: (
        f"This build of ds4-server cannot compute here: {_said(failure)}. It needs a device that it was built for, and "
        "its driver."
    ),
}

_CAUSES: Mapping[FailureKind, ExitCause] = {
    FailureKind.LOCK_HELD: ExitCause.LOCK_HELD,
    FailureKind.OUT_OF_MEMORY: ExitCause.OUT_OF_MEMORY,
    FailureKind.DEVICE_FAULT: ExitCause.CRASHED,
}


def _file(failure: Ds4Failure) -> str:
    return Path(failure.subject).name or "A model file"

"""Why an engine ended: from what was seen to a cause, a sentence and figures."""

import errno
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

ASKS_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which people and systems end a program; no program fails by one."""


class ExitCause(StrEnum):
    """What ended an engine."""

    STOPPED = "STOPPED"
    """It was asked to."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """The kernel killed it for want of memory, or it said so itself."""
    ILLEGAL_INSTRUCTION = "ILLEGAL_INSTRUCTION"
    """It was built for another processor."""
    KILLED = "KILLED"
    """Somebody else ended it by a signal, or the kernel killed it where that cannot be told."""
    CRASHED = "CRASHED"
    """It ended by a signal of its own making, or printed that it must."""
    EXITED = "EXITED"
    """It ended by itself with an exit code."""
    CANNOT_START = "CANNOT_START"
    """The program could not be executed at all."""
    LOCK_HELD = "LOCK_HELD"
    """Another program of its kind, outside the suite, has the machine to itself."""
    GUARD_LOST = "GUARD_LOST"
    """Its guard was killed, and it was ended with it."""


@dataclass(frozen=True)
class FatalLine:
    """A line of an engine's output by which it cannot go on.

    Attributes:
        cause: what the line means.
        text: the line.
        specific: whether it names the cause (CUDA out of memory) or only that something went wrong (assertion).
    """

    cause: ExitCause
    text: str
    specific: bool = True


@dataclass(frozen=True)
class ExitFacts:
    """What was seen of an end.

    Attributes:
        exit_code: the exit code; None if it ended by a signal.
        signal_number: the signal; None if it exited.
        asked: whether this service ended it (by SIGTERM, SIGKILL or by closing the lifeline).
        guard_lost: whether the guard died before it could tell.
        start_errno: why the program could not be executed; None if it was.
        oom_kills: processes that the kernel killed for memory in the control group meanwhile; None: cannot be told.
        fatal: the most telling line that it printed.
        was_ready: whether it had become ready.
        uptime_s: from the gate to the end.
    """

    exit_code: int | None = None
    signal_number: int | None = None
    asked: bool = False
    guard_lost: bool = False
    start_errno: int | None = None
    oom_kills: int | None = None
    fatal: FatalLine | None = None
    was_ready: bool = False
    uptime_s: float = 0.0

    @property
    def killed_for_memory(self) -> bool:
        """Whether the kernel killed it, or its guard, for want of memory.

        The kernel kills by SIGKILL. The engines of a suite share a control group: where one of them ended in another
        way, the kernel killed another program.
        """
        return bool(self.oom_kills) and (self.guard_lost or self.signal_number == signal.SIGKILL)


@dataclass(frozen=True)
class ExitExplanation:
    """Why it ended.

    Attributes:
        cause: for programs.
        message: a sentence for people.
        metadata: figures: exit_code, signal, uptime_seconds, was_ready.
    """

    cause: ExitCause
    message: str
    metadata: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def explain(
    facts: ExitFacts, name: str = "The engine", meanings: Mapping[int, str] = MappingProxyType({})
) -> ExitExplanation:
    """Why ``name`` ended.

    Args:
        meanings: what the engine means by its exit codes.

    A line that names the cause outranks the signal (an engine that runs out of memory often aborts); a SIGILL counts as
    an illegal instruction only where nothing tells better, because some runtimes abort by one.
    """
    cause, message = _cause(facts, name, meanings)
    metadata = {
        "cause": cause.value,
        "uptime_seconds": f"{facts.uptime_s:.1f}",
        "was_ready": str(facts.was_ready).lower(),
    }
    if facts.exit_code is not None:
        metadata["exit_code"] = str(facts.exit_code)
    if facts.signal_number is not None:
        metadata["signal"] = signal_name(facts.signal_number)
    return ExitExplanation(cause, message, metadata)


def signal_name(number: int) -> str:
    """SIGKILL for 9; the number where it has no name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _cause(facts: ExitFacts, name: str, meanings: Mapping[int, str]) -> tuple[ExitCause, str]:
    if facts.start_errno is not None:
        why = os.strerror(facts.start_errno)
        hint = " Is it installed?" if facts.start_errno == errno.ENOENT else ""
        return ExitCause.CANNOT_START, f"{name} cannot be started: {why}.{hint}"
    if facts.asked:
        return ExitCause.STOPPED, f"{name} was stopped."
    if facts.fatal is not None and facts.fatal.specific:
        return facts.fatal.cause, f"{name} ended: {facts.fatal.text}"
    if facts.killed_for_memory:
        return (
            ExitCause.OUT_OF_MEMORY,
            f"The kernel killed {_lower(name)} for want of memory. A smaller context or model needs less.",
        )
    if facts.guard_lost:
        return ExitCause.GUARD_LOST, f"The guard of {_lower(name)} was killed, and the engine was ended with it."
    number = facts.signal_number
    if number == signal.SIGKILL:
        unsure = " or by the kernel for want of memory" if facts.oom_kills is None else ""
        return ExitCause.KILLED, f"{name} was killed (SIGKILL) from outside{unsure}."
    if facts.fatal is not None:
        return facts.fatal.cause, f"{name} ended: {facts.fatal.text}"
    if number in ASKS_TO_END:
        return ExitCause.KILLED, f"{name} was ended by somebody else's signal ({signal_name(number)})."
    if number == signal.SIGILL:
        return (
            ExitCause.ILLEGAL_INSTRUCTION,
            f"{name} used an instruction that this processor does not have: its build is for another one.",
        )
    if number is not None:
        return ExitCause.CRASHED, f"{name} crashed ({signal_name(number)})."
    meaning = meanings.get(facts.exit_code or 0)
    what = f"exit code {facts.exit_code}" + (f": {meaning}" if meaning else "")
    return ExitCause.EXITED, f"{name} ended by itself with {what}."


def _lower(name: str) -> str:
    return name[:1].lower() + name[1:] if name.startswith("The ") else name

"""What was looked at on this machine, how it was found, and what to do next."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How a thing was found."""

    OK = "ok"
    ABSENT = "absent"
    """Not there, and nothing needs it as things stand."""
    BROKEN = "broken"
    """Something needs it, and it is missing or wrong."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: the thing.
        state: how it was found.
        detail: what was seen, in a few words.
        next_step: what to do about it; empty: nothing.
    """

    name: str
    state: State
    detail: str
    next_step: str = ""


def next_step(checks: Sequence[Check]) -> str:
    """The one thing to do next: about what is broken, in order; else about what is absent; else nothing."""
    for state in (State.BROKEN, State.ABSENT):
        for check in checks:
            if check.state is state and check.next_step:
                return check.next_step
    return ""

"""What the decisions of this package look like."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """A load may start. `notes` say what is not as it should be."""

    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """A load may not start yet. `reason` is a stable UPPER_SNAKE word, `message` a sentence for people, `look_again_s`
    when the answer can be another one, in seconds from now."""

    reason: str
    message: str
    look_again_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """A load has waited long enough."""

    reason: str
    message: str


Decision = Start | Wait | Refuse


def strictest(*decisions: Decision) -> Decision:
    """One decision of several: a refusal, else the longest wait, else a start with all notes."""
    for decision in decisions:
        if isinstance(decision, Refuse):
            return decision
    waits = [decision for decision in decisions if isinstance(decision, Wait)]
    if waits:
        return max(waits, key=lambda wait: wait.look_again_s)
    return Start(tuple(note for decision in decisions if isinstance(decision, Start) for note in decision.notes))

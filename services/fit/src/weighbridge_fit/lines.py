"""The lines of a requirement and their sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Source(Enum):
    """How a figure was come by."""

    MEASURED = "MEASURED"
    DERIVED = "DERIVED"
    ASSUMED = "ASSUMED"


class Phase(Enum):
    """When a line's bytes are held. Resident lines are held together; of the others the largest phase counts on top."""

    RESIDENT = "resident"
    LOAD = "load"
    TEXT_ENCODE = "text_encode"
    IMAGE_ENCODE = "image_encode"
    DENOISE = "denoise"
    IMAGE_DECODE = "image_decode"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes with their uncertainty: low <= expected <= high."""

    low: int
    expected: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.expected <= self.high:
            raise ValueError(f"not an ordered range: {self.low}, {self.expected}, {self.high}")

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.expected + other.expected, self.high + other.high)

    def cover(self, other: "Range") -> "Range":
        """The larger of the two at each bound."""
        return Range(max(self.low, other.low), max(self.expected, other.expected), max(self.high, other.high))

    @classmethod
    def exactly(cls, size: int) -> "Range":
        """A figure without uncertainty."""
        return cls(size, size, size)


NOTHING = Range(0, 0, 0)

# What the contract's signed 64 bits hold: a plan that needs more is a model whose sizes are wrong.
MAX_BYTES = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that costs memory. `on_device` is False for host memory, which is all memory on a unified machine.

    `buffer` is the largest single allocation behind the line, zero where it is no single one.
    """

    component: str
    phase: Phase
    bytes: Range
    source: Source
    basis: str
    buffer: Range = NOTHING
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class OwnBudget:
    """What an engine allows itself of a card, however much the card has: `need` has to fit into `bytes`, or the engine
    does not start. `what` names the budget in a sentence."""

    need: Range
    bytes: int
    what: str


@dataclass(frozen=True, slots=True)
class Requirement:
    """A plan's memory: its lines and their sums. `host` is what host memory holds at its own peak, `device` what a card
    holds while the model is loaded, `device_peak` what it holds at most. `own_budget`: None where the engine sets
    itself no limit."""

    lines: tuple[Line, ...]
    total: Range
    host: Range
    device: Range
    device_peak: Range
    largest_buffer: Range
    peak_phase: Phase
    own_budget: OwnBudget | None = None


def requirement(lines: tuple[Line, ...], own_budget: OwnBudget | None = None) -> Requirement:
    """Adds lines up: the peak is what is resident plus the largest phase, never the sum of phases."""
    ordered = tuple(sorted(lines, key=lambda line: line.phase is not Phase.RESIDENT))
    largest_buffer = NOTHING
    for line in ordered:
        largest_buffer = largest_buffer.cover(line.buffer)
    phases = [phase for phase in Phase if phase is not Phase.RESIDENT]
    on_device = tuple(line for line in ordered if line.on_device)
    on_host = tuple(line for line in ordered if not line.on_device)
    return Requirement(
        lines=ordered,
        total=_peak(ordered, phases),
        host=_peak(on_host, phases),
        device=_sum(on_device, Phase.RESIDENT),
        device_peak=_peak(on_device, phases),
        largest_buffer=largest_buffer,
        peak_phase=max(phases, key=lambda phase: _sum(ordered, phase).expected),
        own_budget=own_budget,
    )


def _peak(lines: tuple[Line, ...], phases: Sequence[Phase]) -> Range:
    on_top = NOTHING
    for phase in phases:
        on_top = on_top.cover(_sum(lines, phase))
    return _sum(lines, Phase.RESIDENT) + on_top


def _sum(lines: tuple[Line, ...], phase: Phase) -> Range:
    total = NOTHING
    for line in lines:
        if line.phase is phase:
            total = total + line.bytes
    return total

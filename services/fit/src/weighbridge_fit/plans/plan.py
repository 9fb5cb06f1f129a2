"""What every engine family's plan comes down to: lines of memory, a shape with a canonical text, notes and a launch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from weighbridge_fit.lines import Requirement


class Engine(Enum):
    """A runtime, or GENERIC: priced by the laws of other runtimes, never launched."""

    SD = "sd"
    DS4 = "ds4"
    MLX = "mlx"
    GENERIC = "generic"


@dataclass(frozen=True, slots=True)
class Note:
    """Something that should be known about a plan: a choice it made, a wish it could not meet. Figures are in
    `metadata`."""

    code: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)


class Shape(Protocol):
    """A workload and options as planned, every default filled in. Each family has its own."""

    def text(self) -> str:
        """Canonical text: launches with the same text cost the same."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one engine would load one model on one machine, and what that costs.

    `weight_bytes` are the tensor bytes that load (for progress), `process_bytes` what the process holds beside the
    model, `arguments` the engine's flags in order (sd and ds4; other engines are told their shape), `cpu_only` that it
    computes on the processor, whatever else the machine has.
    """

    engine: Engine
    shape: Shape
    requirement: Requirement
    weight_bytes: int
    process_bytes: int = 0
    notes: tuple[Note, ...] = ()
    arguments: tuple[str, ...] = ()
    cpu_only: bool = False

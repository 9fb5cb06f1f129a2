"""Weight facts: what a weight file holds, learned from its header alone. Plain values, no disk in here."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from weighbridge_fit.geometry import ModelGeometry

# Elements of one tensor. ggml and safetensors both count in 63 bits; Python's own integers never wrap.
MAX_ELEMENTS = 2**63 - 1


class WeightFormat(Enum):
    """The container a file uses, by its content and not by its name."""

    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    TORCH_CHECKPOINT = "torch_checkpoint"
    DIFFUSERS = "diffusers"
    MIXED = "mixed"
    UNKNOWN = ""


class TensorFact(NamedTuple):
    """One tensor. `dtype` is the file's own word for it; `bytes` is what the file stores, which is not always what the
    shape suggests (packed and padded types)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PrecisionTotal:
    """All tensors that are stored in one precision."""

    dtype: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class FileFacts:
    """One weight file. `name` is relative to the model; `component` is the top-level folder, "" for the root.

    `arrays` gives the lengths of metadata arrays, also of those too long to be in `metadata`. Tensors are made when
    first asked for: totals come from the header's columns.
    """

    name: str
    component: str
    format: WeightFormat
    file_bytes: int
    header_bytes: int
    tensor_count: int
    precisions: tuple[PrecisionTotal, ...]
    metadata: Mapping[str, Any]
    make_tensors: Callable[[], tuple[TensorFact, ...]]
    arrays: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> tuple[TensorFact, ...]:
        """The tensors in file order."""
        return self.make_tensors()


def precision_totals(kinds: Iterable[tuple[str, int, int, int]]) -> tuple[PrecisionTotal, ...]:
    """Adds up (dtype, number of tensors, elements of each, bytes of each) per dtype, most bytes first."""
    sums: dict[str, list[int]] = {}
    for dtype, tensors, elements, size in kinds:
        entry = sums.setdefault(dtype, [0, 0, 0])
        entry[0] += tensors
        entry[1] += tensors * elements
        entry[2] += tensors * size
    totals = [PrecisionTotal(dtype, *entry) for dtype, entry in sums.items()]
    return tuple(sorted(totals, key=lambda total: (-total.bytes, total.dtype)))


@dataclass(frozen=True, slots=True)
class ComponentTotal:
    """All tensors of one component, in all files."""

    component: str
    tensors: int
    bytes: int
    precisions: tuple[PrecisionTotal, ...]


@dataclass(frozen=True, slots=True)
class FileSummary:
    """One file that loads, without its tensors."""

    name: str
    file_bytes: int
    header_bytes: int
    format: WeightFormat
    tensors: int


class Role(Enum):
    """What a file is for, where it is no model of its own."""

    MODEL = ""
    ADAPTER = "adapter"
    DRAFTER = "drafter"
    PROJECTOR = "projector"


Labelled = tuple[str, TensorFact]
"""A tensor with the component it belongs to."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class WeightFacts:
    """What a model's weight files hold: the values that travel, and all that a plan is made from.

    `model_digest` is "" when the facts were given without tensors and nobody computed it. `tensors` are all tensors
    with their components, sorted by component and name; empty where the facts were given without them. `made_for` is
    the model that an adapter or drafter belongs to, as its configuration says.
    """

    name: str
    format: WeightFormat
    file_bytes: int
    tensor_bytes: int
    tensor_count: int
    element_count: int
    largest_tensor_bytes: int
    precisions: tuple[PrecisionTotal, ...]
    components: tuple[ComponentTotal, ...]
    files: tuple[FileSummary, ...] = ()
    architecture: str = ""
    quantization: str = ""
    model_digest: str = ""
    geometry: ModelGeometry | None = None
    notes: tuple[str, ...] = ()
    tensors: tuple[Labelled, ...] = ()
    role: Role = Role.MODEL
    made_for: str = ""

    def component_bytes(self, component: str) -> int:
        """Tensor bytes of one component, 0 when there is none."""
        return sum(total.bytes for total in self.components if total.component == component)

    def component_tensors(self, component: str) -> list[TensorFact]:
        """The tensors of one component; none where the facts came without tensors."""
        return [tensor for part, tensor in self.tensors if part == component]

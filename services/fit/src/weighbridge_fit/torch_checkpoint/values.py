"""What a pickle's objects become here: plain values that can do nothing, whatever the file calls them."""

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from weighbridge_fit.torch_checkpoint.dtypes import ElementType


class Global(NamedTuple):
    """A name that the file asks for. It is compared with the names known here and never looked up."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """Module and name, as Python would write them."""
        return f"{self.module}.{self.name}"


class Storage(NamedTuple):
    """A run of elements in the archive: its record's key, the type the file gives it, and the bytes of its record."""

    key: str
    type: ElementType
    elements: int
    record_bytes: int


class Tensor(NamedTuple):
    """A view of a storage (None: a tensor that stores nothing). `begin` and `end` are bytes in the storage, the first
    and the one after the last that the view reaches."""

    dtype: str
    shape: tuple[int, ...]
    elements: int
    storage: Storage | None
    begin: int
    end: int


class Pairs:
    """A dict as its pairs in file order. Nothing is hashed, so no choice of keys can make it slow."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[tuple[Any, Any]] = []


@dataclass(slots=True)
class Opaque:
    """An object of a class that is not known here: its class's name and what the file would have given it."""

    path: str
    arguments: Any = ()
    state: Any = None
    members: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)


class Skipped:
    """A string or number too long to be kept: nothing that a reader of weights needs is."""

    __slots__ = ()


SKIPPED: Final = Skipped()

"""What was worked out from large frozen facts, for as long as those facts are in use.

One request plans a model up to some fifty times, with other sizes and options, and each plan asks the same of its
tensors. What is kept goes with the object that it was made from, so that facts given in a request leave nothing behind.
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")

MOST_KEYS = 64
"""Values of one object: a caller who retypes a model in ever new ways must not fill the memory."""


class Remembered(Generic[Value]):
    """Values by an object's identity and a key: comparing thousands of tensors costs more than making a value again.

    A value must not refer to its object, which would then never end. Safe to be asked from several threads; two that
    ask at the same time may both make a value.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[object], dict[Hashable, Value]]] = {}

    def get(self, owner: object, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of an object under a key, made where it is not known yet."""
        kept = self._kept.get(id(owner))
        if kept is None or kept[0]() is not owner:
            number = id(owner)
            kept = weakref.ref(owner, lambda _: self._kept.pop(number, None)), {}
            self._kept[number] = kept
        values = kept[1]
        if key in values:
            return values[key]
        made = make()
        if len(values) >= MOST_KEYS:
            values.clear()
        values[key] = made
        return made

    def __len__(self) -> int:
        """How many objects anything is kept of."""
        return len(self._kept)

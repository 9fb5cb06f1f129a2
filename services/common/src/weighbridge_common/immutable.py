"""Dataclasses whose fields nobody changes, and that are quick to make."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def immutable(cls: type[T]) -> type[T]:
    """A dataclass with slots, compared and hashed by its fields, which nobody changes.

    The type checker sees to that, as it does for ``dataclass(frozen=True)``; nothing does while the program runs. There
    a frozen class writes each field through ``object.__setattr__``, since its own refuses, and every admission makes
    some twenty such objects, in the way of somebody who waits for it.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)

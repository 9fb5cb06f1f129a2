"""Typed access to a config: it is as untrusted as a weight file, and a layer count of a billion or a head count of "8"
must become a sentence, not a hang or a wrong price."""

from collections.abc import Mapping
from typing import Any

from weighbridge_fit.errors import WeightError, WeightReason

CONFIG_NAME = "config.json"
# No published model comes near these; they bound loops and arithmetic.
MAX_LAYERS = 4096
MAX_SIZE = 1 << 31
# Names of architectures and methods are short words.
MAX_WORD = 128


class Unsaid(Exception):  # noqa: N818 - not an error: the model does not say, and nobody guesses
    """A size that a geometry needs is not in the config."""


class Fields:
    """One section of a config. `defaults` are what the architecture's own class fills in for absent fields."""

    def __init__(self, section: Any, name: str, defaults: Mapping[str, Any] | None = None) -> None:
        if not isinstance(section, Mapping):
            raise invalid(name, "must be an object", section)
        self._section = section
        self._defaults = defaults or {}

    def _value(self, name: str) -> Any:
        value = self._section.get(name)
        return self._defaults.get(name) if value is None else value

    def has(self, name: str) -> bool:
        """Whether the field is there, or has the architecture's default."""
        return self._value(name) is not None

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 to 2^31 (from 0 with a default); `default` when the field is absent or null.

        Raises CONFIG_INVALID, naming the field.
        """
        value = self._value(name)
        if value is None:
            if default is None:
                raise invalid(name, "is missing", None)
            return default
        if type(value) is not int or not (1 if default is None else 0) <= value <= MAX_SIZE:
            raise invalid(name, "must be a whole positive number", value)
        return value

    def first(self, *names: str) -> int:
        """The first of several names for one size. Raises Unsaid when all are absent, or CONFIG_INVALID."""
        for name in names:
            if self._value(name) is not None:
                return self.size(name)
        raise Unsaid

    def optional(self, *names: str) -> int:
        """The first of several names for one size, 0 when all are absent. Raises CONFIG_INVALID."""
        return next((self.size(name, 0) for name in names if self._value(name) is not None), 0)

    def lenient(self, *names: str) -> int:
        """The first of several names for a size that no cache depends on: 0 where none is a whole number; the largest
        of a list, where layers differ."""
        for name in names:
            value = self._value(name)
            sizes = value if isinstance(value, list) else [value]
            if sizes and all(type(size) is int and 0 <= size <= MAX_SIZE for size in sizes):
                return int(max(sizes))
        return 0

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false. Raises CONFIG_INVALID."""
        value = self._value(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise invalid(name, "must be true or false", value)
        return value

    def text(self, name: str) -> str:
        """A string, "" when absent."""
        value = self._value(name)
        return value if isinstance(value, str) else ""

    def names(self, name: str) -> list[str] | None:
        """A list of strings, None when absent. Raises CONFIG_INVALID."""
        value = self._value(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise invalid(name, "must be a list of names", value)
        return value

    def sizes(self, name: str) -> list[int] | None:
        """A list of whole numbers from 0 to 2^31, None when absent. Raises CONFIG_INVALID."""
        value = self._value(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= MAX_SIZE for item in value):
            raise invalid(name, "must be a list of whole numbers", value)
        return value

    def section(self, name: str) -> "Fields":
        """A section within this one. Raises CONFIG_INVALID when it is absent or no object."""
        return Fields(self._value(name), name)

    def layer_count(self, *names: str) -> int:
        """The number of layers, bounded. Raises Unsaid or CONFIG_INVALID."""
        for name in names or ("num_hidden_layers",):
            if self._value(name) is not None:
                count = self.size(name)
                if count > MAX_LAYERS:
                    raise invalid(name, f"must be at most {MAX_LAYERS}", count)
                return count
        raise Unsaid


def word(value: Any) -> str:
    """A short text; "" for anything else."""
    return value if isinstance(value, str) and len(value) <= MAX_WORD else ""


def invalid(field: str, rule: str, value: Any) -> WeightError:
    """CONFIG_INVALID, naming a field and what is wrong with it."""
    shown = "" if value is None else f", not {str(value)[:60]!r}"
    return WeightError(WeightReason.CONFIG_INVALID, f"the field {field} {rule}{shown}", file=CONFIG_NAME)

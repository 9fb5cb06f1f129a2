"""Typed access to GGUF metadata. A key of the wrong type is treated as absent (CVE-2024-8063 was a block count that was
not a number)."""

from collections.abc import Mapping
from typing import Any

from weighbridge_fit.config.fields import MAX_LAYERS, MAX_SIZE


class Metadata:
    """The keys of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._prefix = f"{architecture}."

    def value(self, key: str) -> Any:
        """A key as it is, None when absent."""
        return self._metadata.get(self._prefix + key)

    def size(self, key: str, default: int = 0) -> int:
        """A whole number from 1 to 2^31; the largest of an array; `default` for anything else."""
        sizes = self.sizes(key)
        return max(sizes, default=0) or default

    def sizes(self, key: str) -> tuple[int, ...]:
        """An array of whole numbers from 0 to 2^31, a single number as an array of one; empty for anything else."""
        value = self.value(key)
        values = value if isinstance(value, list) else [value]
        if not values or not all(type(item) is int and 0 <= item <= MAX_SIZE for item in values):
            return ()
        return tuple(values)

    def per_layer(self, key: str, layers: int) -> tuple[int, ...]:
        """A size for each layer: an array at least as long as there are layers, or one number for all. Empty when it is
        neither."""
        sizes = self.sizes(key)
        if len(sizes) == 1 and not isinstance(self.value(key), list):
            return sizes * layers
        return sizes[:layers] if len(sizes) >= layers else ()

    def flags(self, key: str, layers: int) -> tuple[bool, ...]:
        """A flag for each layer; empty when the key is anything else. Writers use booleans or the numbers 0 and 1."""
        value = self.value(key)
        if not isinstance(value, list) or len(value) < layers:
            return ()
        if not all(type(item) is bool or (type(item) is int and item in (0, 1)) for item in value):
            return ()
        return tuple(bool(item) for item in value[:layers])

    def layer_count(self) -> int:
        """Blocks, 0 when the file does not say or says more than any model has."""
        count = self.value("block_count")
        return count if type(count) is int and 0 < count <= MAX_LAYERS else 0

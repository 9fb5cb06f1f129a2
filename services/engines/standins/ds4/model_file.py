"""The header of a GGUF file, read as ds4 reads it: whatever is wrong with it ends the process with code 1."""

import mmap
import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from weighbridge_common.ds4_layout import TYPES, Tensor

from services.engines.standins.ds4 import log

_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_KEPT_ITEMS = 4096
"""Longer arrays are vocabularies: where they lie is kept, not what they hold."""
_NAMES = {number: name for name, (number, _, _) in TYPES.items()}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Words:
    """A long array of strings: how many, and where in the header."""

    count: int
    start: int
    end: int


@dataclass(frozen=True)
class ModelFile:
    """What a GGUF file says of itself. ``words`` are the bytes of the vocabulary's array."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    data_start: int
    file_bytes: int
    words: bytes

    @property
    def architecture(self) -> str:
        named = self.metadata.get("general.architecture")
        return named if isinstance(named, str) else ""

    @property
    def routed_bytes(self) -> int:
        """Bytes of the experts that are chosen token by token."""
        return sum(tensor.bytes for name, tensor in self.tensors.items() if "_exps." in name)

    @property
    def table_bytes(self) -> int:
        """Bytes of the Engram tables of V4.1, which stay on disk."""
        return sum(tensor.bytes for name, tensor in self.tensors.items() if "engram_embd" in name)

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())

    def has_word(self, word: str) -> bool:
        """Whether the vocabulary has it."""
        encoded = word.encode()
        return _LENGTH.pack(len(encoded)) + encoded in self.words


def die(text: str) -> NoReturn:
    """End as ds4 does where a model cannot be loaded."""
    log.engine(text)
    sys.exit(1)


def read(path: str) -> ModelFile:
    """Ends the process for a file that is not there, is no GGUF of version 3, or is cut short."""
    try:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 32:
                die("model file is too small to be GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data).whole(size)
    except OSError as error:
        die(f"cannot open model '{path}': {error.strerror}")
    except (struct.error, IndexError):
        die("truncated GGUF file")


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        self._words = b""

    def whole(self, size: int) -> ModelFile:
        if self._take(4) != b"GGUF":
            die("model is not a GGUF file")
        (version,) = self._numbers("<I")
        count, pairs = self._numbers("<QQ")
        if version != 3:
            die("only GGUF v3 is supported")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            (kind,) = self._numbers("<I")
            metadata[key] = self._value(kind)
            words = metadata[key]
            if key == "tokenizer.ggml.tokens" and isinstance(words, Words):
                self._words = self._data[words.start : words.end]
        found = [self._tensor() for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        for tensor, offset in found:
            if start + offset + tensor.bytes > size:
                die("tensor points outside GGUF file")
        tensors = {tensor.name: tensor for tensor, _ in found}
        return ModelFile(metadata, tensors, start, size, self._words)

    def _tensor(self) -> tuple[Tensor, int]:
        name = self._string()
        (dimensions,) = self._numbers("<I")
        if not 1 <= dimensions <= 8:
            die("tensor has an unsupported number of dimensions")
        shape = self._numbers(f"<{dimensions}Q")
        kind, offset = self._numbers("<IQ")
        if kind not in _NAMES:
            log.engine(f"warning: tensor {name} has unsupported GGUF type {kind}")
            return Tensor(name, "I8", (0,)), offset
        return Tensor(name, _NAMES[kind], shape), offset

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._numbers(_NUMBERS[kind])[0]
        of, count = self._numbers("<IQ")
        if of != _STRING:
            form = _NUMBERS[of]
            if count <= _KEPT_ITEMS:
                return list(self._numbers(f"<{count}{form[1]}"))
            self._at += count * struct.calcsize(form)
            return None
        if count <= _KEPT_ITEMS:
            return [self._string() for _ in range(count)]
        start, at, unpack, data = self._at, self._at, _LENGTH.unpack_from, self._data
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self._at = at
        return Words(count, start, at)

    def _string(self) -> str:
        (length,) = self._numbers("<Q")
        return self._take(length).decode("utf-8", "replace")

    def _take(self, length: int) -> bytes:
        self._at += length
        if self._at > len(self._data):
            raise IndexError
        return self._data[self._at - length : self._at]

    def _numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

"""The GGUF header, from bytes to metadata and tensors.

Nothing is allocated or looped over on the word of a count: each one is first held against the bytes that are left. Big
arrays (vocabularies) are walked, not stored: that they are well-formed is all a header reader needs of them. Arrays
with a value per layer are kept whole, however many layers there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from struct import Struct, unpack_from
from types import MappingProxyType
from typing import Any

from weighbridge_fit.errors import WeightError, WeightReason, shown
from weighbridge_fit.facts import MAX_ELEMENTS, TensorFact
from weighbridge_fit.gguf import types
from weighbridge_fit.gguf.window import Window

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# ggml accepts powers of two; the upper bound is this reader's, after ggml issue 1516 (an alignment chosen to overflow).
MAX_ALIGNMENT = 1 << 20
# GGML_MAX_DIMS.
MAX_DIMENSIONS = 4
# The longest key or tensor name the format allows (2^16 - 1 bytes, GGUF specification).
MAX_NAME_BYTES = (1 << 16) - 1
# Longer strings (chat templates, licences) and longer arrays (vocabularies) are checked and skipped, not kept.
MAX_KEPT_STRING_BYTES = 4096
MAX_KEPT_ARRAY = 4096
MAX_ARRAY_DEPTH = 4
# All kept values together, in bytes of the file: as Python objects they take about eight times as much.
MAX_KEPT_BYTES = 1 << 20
# Real files have below 100 pairs and 2,000 tensors (experts are stacked); these keep a hostile header's objects small.
MAX_PAIRS = 1 << 14
MAX_TENSORS = 1 << 17
# The least a key-value pair (key length, value type, one byte of value) and a tensor description can take.
MIN_PAIR_BYTES = 8 + 4 + 1
MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
# How many strings are walked between two looks at the clock.
STRINGS_PER_TICK = 1 << 15

_PREAMBLE = Struct("<4sIQQ")
_LENGTH = Struct("<Q")
_KIND = Struct("<I")
_ARRAY_HEAD = Struct("<IQ")
# A tensor's description after its name, by its number of dimensions.
_REST = tuple(Struct(f"<I{dimensions}QIQ") for dimensions in range(MAX_DIMENSIONS + 1))


@dataclass(frozen=True)
class Header:
    """A checked header. `arrays` gives the length of every array, also of those that are too long to be in
    `metadata`."""

    version: int
    metadata: Mapping[str, Any]
    arrays: Mapping[str, int]
    tensors: tuple[TensorFact, ...]
    header_bytes: int
    alignment: int


def parse(window: Window) -> Header:
    """Checks and decodes the header at the start of a file. Raises `WeightError` for everything that is not
    well-formed."""
    start = window.at(0, _PREAMBLE.size, "the preamble")
    magic, version, tensor_count, pair_count = _PREAMBLE.unpack_from(window.data, start)
    if magic != MAGIC:
        raise WeightError(WeightReason.BAD_MAGIC, "the file does not start as a GGUF file does", offset=0)
    if version not in SUPPORTED_VERSIONS:
        raise WeightError(WeightReason.UNSUPPORTED_VERSION, _why_not(version), offset=4)
    position = _PREAMBLE.size
    _check_count(pair_count, MIN_PAIR_BYTES, position, window.size, "key-value pairs", 16)
    _check_count(tensor_count, MIN_TENSOR_BYTES, position, window.size, "tensors", 8)
    if pair_count > MAX_PAIRS or tensor_count > MAX_TENSORS:
        message = f"the file describes {tensor_count} tensors with {pair_count} keys, more than are read"
        raise WeightError(WeightReason.HEADER_TOO_LARGE, message, offset=8)
    reader = _PairReader(window, position)
    for _ in range(pair_count):
        reader.read_pair()
    alignment = _alignment(reader.metadata)
    position, described = _read_descriptions(window, reader.position, tensor_count)
    data_start = -(-position // alignment) * alignment
    tensors = _placed(described, data_start, window.size, alignment)
    return Header(
        version, MappingProxyType(reader.metadata), MappingProxyType(reader.arrays), tensors, data_start, alignment
    )


def _why_not(version: int) -> str:
    """Why a file of this version is not read, and what helps."""
    if version and version & 0xFFFF == 0:
        return (
            "this is a big-endian GGUF file, which no engine on this machine loads: convert it with llama.cpp's "
            "gguf_convert_endian"
        )
    if version == 1:
        return "GGUF version 1 was given up in 2023 and no engine loads it: convert the model again"
    return f"GGUF version {version} is not read: versions 2 and 3 are"


class _PairReader:
    """Reads key-value pairs one after another; keeps what is short, walks what is long."""

    def __init__(self, window: Window, position: int) -> None:
        self._window = window
        self.position = position
        self.metadata: dict[str, Any] = {}
        self.arrays: dict[str, int] = {}
        self._seen: set[str] = set()
        self._kept_bytes = 0

    def read_pair(self) -> None:
        start = self.position
        key, self.position = _name(self._window, start, "a key")
        self._window.tick(start)
        if key in self._seen:
            raise WeightError(WeightReason.DUPLICATE_KEY, f"the key {shown(key)} appears twice", offset=start)
        self._seen.add(key)
        name = shown(key)
        kind = self._unpack(_KIND, f"the type of {name}")[0]
        if kind == types.ARRAY:
            count, values = self._array(name, 1)
            self.arrays[key] = count
            if values is not None:
                self.metadata[key] = values
        elif kind == types.STRING:
            text = self._string(name)
            if text is not None:
                self.metadata[key] = text
        else:
            self.metadata[key] = self._scalar(kind, name)

    def _keeps(self, size: int) -> bool:
        """Whether a value of `size` bytes may still be kept; counts it if so."""
        if self._kept_bytes + size > MAX_KEPT_BYTES:
            return False
        self._kept_bytes += size
        return True

    def _unpack(self, form: Struct, what: str) -> tuple[Any, ...]:
        index = self._window.at(self.position, form.size, what)
        self.position += form.size
        return form.unpack_from(self._window.data, index)

    def _scalar(self, kind: int, key: str) -> Any:
        code = types.SCALAR_CODES.get(kind)
        if code is None:
            message = f"the key {key} has the unknown value type {kind}"
            raise WeightError(WeightReason.BAD_VALUE_TYPE, message, offset=self.position - _KIND.size)
        return self._unpack(Struct("<" + code), f"the value of {key}")[0]

    def _string(self, key: str) -> str | None:
        """A string value; None for one too long to keep."""
        start = self.position
        length = self._unpack(_LENGTH, f"the length of {key}")[0]
        _check_count(length, 1, self.position, self._window.size, f"bytes in the string {key}", start)
        start = self.position
        self.position += length
        if length > MAX_KEPT_STRING_BYTES or not self._keeps(length):
            self._window.reach(self.position, f"the string {key}")
            return None
        index = self._window.at(start, length, f"the string {key}")
        # Metadata is for people: a broken character in a licence must not hide what the tensors are.
        return self._window.data[index : index + length].decode("utf-8", "replace")

    def _array(self, key: str, depth: int) -> tuple[int, list[Any] | None]:
        """Length and values of an array; None instead of values when they are not kept."""
        start = self.position
        kind, count = self._unpack(_ARRAY_HEAD, f"the array {key}")
        if kind == types.STRING:
            _check_count(count, _LENGTH.size, self.position, self._window.size, f"strings in {key}", start + 4)
            return count, self._strings(key, count)
        if kind == types.ARRAY:
            if depth >= MAX_ARRAY_DEPTH:
                message = f"the array {key} is nested more than {MAX_ARRAY_DEPTH} levels deep"
                raise WeightError(WeightReason.TOO_DEEP, message, offset=start)
            _check_count(count, _ARRAY_HEAD.size, self.position, self._window.size, f"arrays in {key}", start + 4)
            return count, self._arrays(key, count, depth)
        width = types.SCALAR_BYTES.get(kind)
        if width is None:
            message = f"the array {key} has the unknown element type {kind}"
            raise WeightError(WeightReason.BAD_VALUE_TYPE, message, offset=start)
        _check_count(count, width, self.position, self._window.size, f"elements in {key}", start + 4)
        start = self.position
        self.position += count * width
        if count > MAX_KEPT_ARRAY or not self._keeps(count * width):
            self._window.reach(self.position, f"the array {key}")
            return count, None
        index = self._window.at(start, count * width, f"the array {key}")
        return count, list(unpack_from(f"<{count}{types.SCALAR_CODES[kind]}", self._window.data, index))

    def _arrays(self, key: str, count: int, depth: int) -> list[Any] | None:
        """An array of arrays."""
        kept: list[Any] | None = [] if count <= MAX_KEPT_ARRAY else None
        for _ in range(count):
            self._window.tick(self.position)
            _, values = self._array(key, depth + 1)
            if kept is not None and values is not None and self._keeps(_ARRAY_HEAD.size):
                kept.append(values)
            else:
                kept = None  # Half of a value is none.
        return kept

    def _strings(self, key: str, count: int) -> list[Any] | None:
        """Walks an array of strings: the one loop that a large vocabulary makes long."""
        if count <= MAX_KEPT_ARRAY:
            return self._short_strings(key, count)
        window, unpack, position = self._window, _LENGTH.unpack_from, self.position
        left = count
        while left:
            window.tick(position)
            index = window.at(position, _LENGTH.size, f"the strings of {key}")
            data = window.data
            held = len(data) - _LENGTH.size
            batch = min(left, STRINGS_PER_TICK)
            for done in range(batch):
                if index > held:
                    batch = done
                    break
                index += 8 + unpack(data, index)[0]
            left -= batch
            position = window.base + index
        window.reach(position, f"the strings of {key}")
        self.position = position
        return None

    def _short_strings(self, key: str, count: int) -> list[Any] | None:
        """An array of few strings, kept as far as they are short."""
        kept: list[Any] | None = []
        for _ in range(count):
            text = self._string(key)
            if kept is not None and text is not None and self._keeps(_LENGTH.size):
                kept.append(text)
            else:
                kept = None
        return kept


@dataclass(slots=True)
class _Description:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    at: int


def _read_descriptions(window: Window, position: int, count: int) -> tuple[int, list[_Description]]:
    _check_count(count, MIN_TENSOR_BYTES, position, window.size, "tensors", 8)
    described: list[_Description] = []
    seen: set[str] = set()
    for index in range(count):
        if index % 1024 == 0:
            window.tick(position)
        at = position
        name, position = _name(window, position, "a tensor name")
        if name in seen:
            raise WeightError(WeightReason.DUPLICATE_KEY, f"the tensor {shown(name)} is described twice", offset=at)
        seen.add(name)
        start = window.at(position, _KIND.size, "a tensor description")
        dimensions = _KIND.unpack_from(window.data, start)[0]
        if dimensions > MAX_DIMENSIONS:
            message = f"the tensor {shown(name)} has {dimensions} dimensions, ggml knows {MAX_DIMENSIONS}"
            raise WeightError(WeightReason.BAD_SHAPE, message, offset=position)
        form = _REST[dimensions]
        start = window.at(position, form.size, "a tensor description")
        _, *shape, kind, offset = form.unpack_from(window.data, start)
        position += form.size
        described.append(_Description(name, tuple(shape), kind, offset, at))
    return position, described


def _placed(described: list[_Description], data_start: int, file_size: int, alignment: int) -> tuple[TensorFact, ...]:
    """Sizes the tensors and checks that each lies inside the file, aligned and alone."""
    data_bytes = file_size - data_start
    if described and data_bytes < 0:
        raise WeightError(WeightReason.TRUNCATED, "the file ends before its tensor data begins", offset=file_size)
    order = sorted(range(len(described)), key=lambda index: described[index].offset)
    facts: list[TensorFact | None] = [None] * len(described)
    free_from = 0
    for rank, index in enumerate(order):
        tensor = described[index]
        if tensor.offset % alignment:
            message = f"the tensor {shown(tensor.name)} is not aligned to {alignment} bytes"
            raise WeightError(WeightReason.BAD_OFFSETS, message, offset=tensor.at)
        following = described[order[rank + 1]].offset if rank + 1 < len(order) else data_bytes
        fact = _sized(tensor, max(0, min(following, data_bytes) - tensor.offset))
        if tensor.offset < free_from:
            message = f"the tensor {shown(tensor.name)} overlaps another"
            raise WeightError(WeightReason.BAD_OFFSETS, message, offset=tensor.at)
        if tensor.offset + fact.bytes > data_bytes:
            message = f"the tensor {shown(tensor.name)} reaches beyond the end of the file"
            raise WeightError(WeightReason.TRUNCATED, message, offset=tensor.at)
        free_from = tensor.offset + fact.bytes
        facts[index] = fact
    return tuple(fact for fact in facts if fact is not None)


def _sized(tensor: _Description, room: int) -> TensorFact:
    """A tensor with its bytes. One of an unknown type is as large as the room up to the next tensor."""
    elements = prod(tensor.shape)
    if elements > MAX_ELEMENTS or max(tensor.shape, default=0) > MAX_ELEMENTS:
        message = f"the shape of tensor {shown(tensor.name)} multiplies to more elements than any file can hold"
        raise WeightError(WeightReason.BAD_SHAPE, message, offset=tensor.at)
    known = types.TENSOR_TYPES.get(tensor.kind)
    if known is None:
        name = types.FORMER_TYPES.get(tensor.kind, f"TYPE_{tensor.kind}")
        return TensorFact(tensor.name, name, tensor.shape, elements, room)
    row = tensor.shape[0] if tensor.shape else 1
    if row % known.block_elements:
        message = f"a row of the {known.name} tensor {shown(tensor.name)} is not a whole number of blocks"
        raise WeightError(WeightReason.BAD_SHAPE, message, offset=tensor.at)
    size = elements // known.block_elements * known.block_bytes
    return TensorFact(tensor.name, known.name, tensor.shape, elements, size)


def _name(window: Window, position: int, what: str) -> tuple[str, int]:
    """The name at a position, and where it ends."""
    index = window.at(position, _LENGTH.size, what)
    length = _LENGTH.unpack_from(window.data, index)[0]
    if length > MAX_NAME_BYTES:
        message = f"{what} claims {length} bytes, the format allows {MAX_NAME_BYTES}"
        raise WeightError(WeightReason.COUNT_EXCEEDS_FILE, message, offset=position)
    start = position + _LENGTH.size
    index = window.at(start, length, what)
    try:
        return window.data[index : index + length].decode("utf-8"), start + length
    except UnicodeDecodeError as error:
        raise WeightError(WeightReason.HEADER_INVALID, f"{what} is not UTF-8", offset=start + error.start) from error


def _check_count(count: int, least_bytes: int, position: int, file_size: int, what: str, offset: int) -> None:
    """Refuses a count that the rest of the file cannot hold, before anything is done with it."""
    if count * least_bytes > file_size - position:
        message = (
            f"the file claims {count} {what}, which its remaining {max(0, file_size - position)} bytes cannot hold"
        )
        raise WeightError(WeightReason.COUNT_EXCEEDS_FILE, message, offset=offset)


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        message = f"general.alignment must be a power of two from 1 to {MAX_ALIGNMENT}, not {shown(str(value))}"
        raise WeightError(WeightReason.BAD_ALIGNMENT, message)
    return value

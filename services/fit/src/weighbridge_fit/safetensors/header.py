"""The safetensors header, from bytes to tensors.

Two paths with one meaning. Writers emit one of a few canonical layouts (fields in the order of the Rust library, sorted
as MLX writes them, or with the spaces of Python's json), which a regular expression walks in C; anything else that is
valid JSON takes the strict path. The fast path accepts only what it has covered to the last byte, so that it can never
read a header differently from the strict one.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from operator import sub
from typing import Any, NamedTuple

from weighbridge_fit.bounded_json import JsonObject, loads_pairs
from weighbridge_fit.errors import WeightError, WeightReason, shown
from weighbridge_fit.facts import MAX_ELEMENTS, PrecisionTotal, TensorFact, precision_totals
from weighbridge_fit.safetensors.dtypes import BYTES_PER_ELEMENT

# The length prefix.
PREFIX_BYTES = 8
METADATA_KEY = "__metadata__"
# Metadata values longer than this (workflows, licences) are not facts about the weights.
MAX_METADATA_VALUE = 4096
# numpy's limit, and far above any real tensor.
MAX_DIMENSIONS = 64
_DTYPE = re.compile(r"[A-Za-z0-9_]{1,32}")


class _Writer(NamedTuple):
    """How a program lays out an entry: the pattern of one, the groups in it that are name, layout (dtype and shape as
    text) and offsets, and how many bytes of an entry are in none of them."""

    entry: re.Pattern[bytes]
    groups: tuple[int, int, int]
    comma: bytes
    overhead: int


def _writer(order: str, colon: bytes, comma: bytes) -> _Writer:
    # Groups end at the next byte that cannot be part of one, which is the fastest a pattern can be; what they hold is
    # looked at afterwards, all names or layouts at once.
    layout = rb'("dtype"' + colon + rb'"[^\]]++\])'
    offsets = rb'"data_offsets"' + colon + rb"\[([0-9]++" + comma + rb"[0-9]++)\]"
    fields = (layout, offsets) if order == "rust" else (offsets, layout)
    # Another entry follows, or the object closes at the very end.
    pattern = rb'"([^"]++)"' + colon + rb"\{" + fields[0] + comma + fields[1] + rb"\}(?:" + comma + rb"|\}\Z)"
    plain = b'""' + colon + b"{" + comma + b'"data_offsets"' + colon + b"[]}" + comma
    return _Writer(re.compile(pattern), (0, 1, 2) if order == "rust" else (0, 2, 1), comma, len(plain))


_WRITERS = (_writer("rust", b":", b","), _writer("sorted", b":", b","), _writer("rust", b": ", b", "))
# What JSON allows in a text only as an escape, which the fast path leaves to the strict one.
_ESCAPED = bytes(range(0x20)) + b"\\"
_SIZE = rb"(?:0|[1-9][0-9]{0,18}+)"
_SHAPE = rb"(?:" + _SIZE + rb"(?:, ?" + _SIZE + rb"){0,63}+)?"
_LAYOUT_PARTS = re.compile(rb'"dtype": ?"([A-Za-z0-9_]{1,32}+)", ?"shape": ?\[(' + _SHAPE + rb")\]")

_TEXT = rb'"[^"\\\x00-\x1f]*+"'
_PAIR = _TEXT + rb": ?" + _TEXT
_METADATA = re.compile(rb'"__metadata__": ?(\{(?:' + _PAIR + rb"(?:, ?" + _PAIR + rb")*+)?\}), ?")


# dtype, shape, elements, bytes
Layout = tuple[str, tuple[int, ...], int, int]


class Entries(NamedTuple):
    """Checked entries: columns of equal length, and the few kinds that tensors are of."""

    raw_names: list[bytes]
    begins: list[int]
    ends: list[int]
    sizes: list[int]
    kinds: list[Any]
    counts: Counter[Any]
    layouts: dict[Any, Layout]
    metadata: dict[str, str]

    def tensors(self) -> tuple[TensorFact, ...]:
        """The tensors in file order. Names are decoded here: totals do without."""
        columns = zip(*map(self.layouts.__getitem__, self.kinds), strict=True)
        names = [name.decode("utf-8") for name in self.raw_names]
        return tuple(map(TensorFact._make, zip(names, *columns, strict=True)))

    def totals(self) -> Iterator[tuple[str, int, int, int]]:
        """Kinds of tensors: dtype, how many there are, elements and bytes of each."""
        for kind, count in self.counts.items():
            dtype, _, elements, size = self.layouts[kind]
            yield dtype, count, elements, size


@dataclass(frozen=True)
class Header:
    """A checked header of a file."""

    header_bytes: int
    entries: Entries

    @property
    def tensor_count(self) -> int:
        """How many tensors it describes."""
        return len(self.entries.raw_names)

    @property
    def metadata(self) -> dict[str, str]:
        """The short ones of the metadata's values."""
        return self.entries.metadata

    def tensors(self) -> tuple[TensorFact, ...]:
        """The tensors in file order."""
        return self.entries.tensors()

    def precisions(self) -> tuple[PrecisionTotal, ...]:
        """Totals per dtype, from the kinds of tensors rather than from each tensor."""
        return precision_totals(self.entries.totals())


def parse(header: bytes, data_bytes: int) -> Header:
    """Checks and decodes a header whose data section has `data_bytes` bytes.

    Raises HEADER_INVALID, DUPLICATE_KEY, BAD_SHAPE, BAD_OFFSETS, SIZE_MISMATCH, TOO_DEEP or PARSE_BUDGET; offsets in
    errors are file offsets.
    """
    try:
        return Header(len(header), entries_of(header, data_bytes))
    except WeightError as error:
        offset = None if error.offset is None else error.offset + PREFIX_BYTES
        raise WeightError(error.reason, error.message, offset=offset) from error


def entries_of(header: bytes, data_bytes: int | None = None) -> Entries:
    """The entries of a whole header, or without `data_bytes` of a part of one that is a JSON object itself: whether
    their data is apart and covers the file is then not looked at. Offsets in errors count from the header's start."""
    fast = _fast_columns(header)
    if fast is not None:
        try:
            return _entries(header, fast, data_bytes)
        except WeightError:
            pass  # What is wrong is for the strict path to say: both must say the same.
    return _entries(header, _strict_columns(header), data_bytes)


def _entries(header: bytes, columns: "Columns", data_bytes: int | None) -> Entries:
    names, layouts, begins, ends, metadata = columns
    if len(set(names)) != len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise WeightError(WeightReason.DUPLICATE_KEY, f"the header names the tensor {shown(twice)} twice")
    sizes = list(map(sub, ends, begins))
    if data_bytes is not None:
        _check_tiling(names, begins, ends, sizes, data_bytes, len(header))
    elif sizes and min(sizes) < 0:
        raise WeightError(WeightReason.BAD_OFFSETS, "a tensor ends before it begins")
    kinds, counts, checked = _kinds(layouts, sizes)
    return Entries(names, begins, ends, sizes, kinds, counts, checked, metadata)


def _kinds(layouts: list[Any], sizes: list[int]) -> tuple[list[Any], Counter[Any], dict[Any, Layout]]:
    """The kind of each tensor, how many there are of each, and what each is. Thousands of tensors are of a dozen kinds;
    each kind is checked once."""
    counts = Counter(layouts)
    found = {layout: _parsed(layout) for layout in counts}
    expected = {layout: kind[3] for layout, kind in found.items()}
    if list(map(expected.__getitem__, layouts)) == sizes:
        return layouts, counts, found
    # A dtype without a known width: its tensors of one shape may differ in bytes.
    kinds = list(zip(layouts, sizes, strict=True))
    checked = {(layout, size): _checked_size(found[layout], size) for layout, size in dict.fromkeys(kinds)}
    return kinds, Counter(kinds), checked


# names (valid UTF-8), layouts (dtype and shape, or canonical JSON of them), begins, ends, metadata
Columns = tuple[list[bytes], list[Any], list[int], list[int], dict[str, str]]


def _fast_columns(header: bytes) -> Columns | None:
    """The columns of a header in a canonical layout, or None when any byte of it is not covered by that layout."""
    body = header.rstrip(b" ")
    if not (body.startswith(b'{"') and body.endswith(b"}}")):
        return None
    position = 1
    metadata: dict[str, str] = {}
    if found := _METADATA.match(body, position):
        position = found.end()
        try:
            metadata = _checked_metadata(loads_pairs(found.group(1)))
        except WeightError:  # The strict path knows the place in the whole header.
            return None
    writer = next((known for known in _WRITERS if known.entry.match(body, position)), None)
    if writer is None:
        return None
    groups = tuple(zip(*writer.entry.findall(body, position), strict=True))
    names, layouts, offsets = (groups[group] for group in writer.groups)
    # Nothing was skipped when the entries found are exactly as long as the text they were found in.
    joined_names, joined_offsets = b'"'.join(names), b",".join(offsets)
    covered = len(joined_names) + len(joined_offsets) + len(b"".join(layouts)) + writer.overhead * len(names)
    # The last entry's comma is the object's bracket; a comma of two bytes is one too many for it.
    surplus = 2 * (len(names) - 1) + len(writer.comma) - 1
    if position + covered - surplus != len(body):
        return None
    try:
        numbers = json.loads(b"[" + joined_offsets + b"]")
        if not joined_names.isascii():
            joined_names.decode("utf-8")
    except ValueError:  # Leading zeros, absurdly long numbers, broken UTF-8: the strict path has the words for it.
        return None
    if len(joined_names.translate(None, _ESCAPED)) != len(joined_names):
        return None
    if METADATA_KEY.encode() in names:
        return None
    return list(names), list(layouts), numbers[0::2], numbers[1::2], metadata


def _strict_columns(header: bytes) -> Columns:
    if not header.startswith(b"{"):
        raise WeightError(WeightReason.HEADER_INVALID, "the header does not start with a JSON object", offset=0)
    # The format pads with spaces and nothing else.
    document = loads_pairs(header.rstrip(b" "))
    if not isinstance(document, JsonObject):
        raise WeightError(WeightReason.HEADER_INVALID, "the header is not a JSON object", offset=0)
    names: list[bytes] = []
    layouts: list[Any] = []
    begins: list[int] = []
    ends: list[int] = []
    metadata: dict[str, str] | None = None
    for name, entry in document:
        if name == METADATA_KEY:
            if metadata is not None:
                raise WeightError(WeightReason.DUPLICATE_KEY, "the header has two metadata sections")
            metadata = _checked_metadata(entry)
            continue
        fields = _unique_fields(name, entry)
        begin, end = _checked_offsets(name, fields.get("data_offsets"))
        try:
            names.append(name.encode("utf-8"))
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, UTF-8 cannot.
            raise WeightError(WeightReason.HEADER_INVALID, "a tensor's name is not Unicode text") from error
        layouts.append(_checked_layout(name, fields))
        begins.append(begin)
        ends.append(end)
    return names, layouts, begins, ends, metadata or {}


def _checked_metadata(pairs: Any) -> dict[str, str]:
    if pairs is None:  # What MLX writes where it was given none, as in every adapter; the official reader takes it.
        return {}
    if not isinstance(pairs, JsonObject) or not all(isinstance(value, str) for _, value in pairs):
        raise WeightError(WeightReason.HEADER_INVALID, "the metadata section is not a map of strings")
    metadata = dict(pairs)
    if len(metadata) != len(pairs):
        raise WeightError(WeightReason.DUPLICATE_KEY, "the metadata section names a key twice")
    return {key: value for key, value in metadata.items() if len(value) <= MAX_METADATA_VALUE}


def _unique_fields(name: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, JsonObject):
        raise WeightError(WeightReason.HEADER_INVALID, f"the entry of tensor {shown(name)} is not an object")
    fields = dict(entry)
    if len(fields) != len(entry):
        raise WeightError(WeightReason.DUPLICATE_KEY, f"the entry of tensor {shown(name)} names a field twice")
    return fields


def _checked_layout(name: str, fields: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    dtype, shape = fields.get("dtype"), fields.get("shape")
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise WeightError(WeightReason.HEADER_INVALID, f"tensor {shown(name)} has no dtype")
    if type(shape) is not list or not all(map(_is_count, shape)):
        raise WeightError(WeightReason.BAD_SHAPE, f"the shape of tensor {shown(name)} is not a list of sizes")
    if len(shape) > MAX_DIMENSIONS:
        message = f"tensor {shown(name)} has more than {MAX_DIMENSIONS} dimensions"
        raise WeightError(WeightReason.BAD_SHAPE, message)
    return dtype, tuple(shape)


def _checked_offsets(name: str, offsets: Any) -> tuple[int, int]:
    if type(offsets) is not list or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise WeightError(WeightReason.BAD_OFFSETS, f"tensor {shown(name)} has no begin and end offset")
    return offsets[0], offsets[1]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_tiling(
    names: list[bytes], begins: list[int], ends: list[int], sizes: list[int], data_bytes: int, data_start: int
) -> None:
    """The tensors must cover the data section once each: a gap hides bytes, an overlap counts them twice."""
    starts = set(begins)
    if (
        len(starts) == len(names) > 0
        and starts.difference(ends) == {0}
        and data_bytes not in starts
        and data_bytes in ends
        and min(sizes) > 0
    ):
        return  # Every tensor has bytes, and each begin but the first is exactly one other's end.
    position = 0
    for begin, end, name in sorted(zip(begins, ends, names, strict=True)):
        if begin != position:
            kind = "a gap before" if begin > position else "an overlap with"
            message = f"there is {kind} tensor {shown(name)}"
            raise WeightError(WeightReason.BAD_OFFSETS, message, offset=data_start + min(begin, position))
        if end < begin:
            message = f"tensor {shown(name)} ends before it begins"
            raise WeightError(WeightReason.BAD_OFFSETS, message, offset=data_start + position)
        position = end
    if position != data_bytes:
        reason = WeightReason.TRUNCATED if position > data_bytes else WeightReason.BAD_OFFSETS
        message = f"the tensors need {position} bytes of data, the file has {data_bytes}"
        raise WeightError(reason, message, offset=data_start + min(position, data_bytes))


def _parsed(layout: Any) -> Layout:
    """dtype, shape, elements and bytes of a layout; -1 bytes when its dtype does not say how many."""
    dtype, shape = _layout_from_text(layout) if isinstance(layout, bytes) else layout
    elements = prod(shape)
    if elements > MAX_ELEMENTS:
        raise WeightError(WeightReason.BAD_SHAPE, "a tensor's shape multiplies to more elements than any file can hold")
    width = BYTES_PER_ELEMENT.get(dtype)
    return dtype, shape, elements, -1 if width is None else elements * width


def _checked_size(layout: Layout, size: int) -> Layout:
    """The layout with the bytes that one of its tensors stores."""
    dtype, shape, elements, expected = layout
    if expected not in (-1, size):
        message = f"a {dtype} tensor of shape {list(shape)} stores {size} bytes where {expected} belong"
        raise WeightError(WeightReason.SIZE_MISMATCH, message)
    return dtype, shape, elements, size


def _layout_from_text(text: bytes) -> tuple[str, tuple[int, ...]]:
    """dtype and shape from the canonical text of the fast path. Raises HEADER_INVALID for almost canonical text."""
    found = _LAYOUT_PARTS.fullmatch(text)
    if found is None:
        raise WeightError(WeightReason.HEADER_INVALID, "the dtype and shape are not in canonical form")
    dtype, sizes = found.groups()
    return dtype.decode("ascii"), tuple(map(int, sizes.split(b","))) if sizes else ()

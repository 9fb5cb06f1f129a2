"""Headers too long to be decoded at once: read, checked and forgotten piece by piece.

A header is one JSON object of entries. It is cut between two of them every MiB or so, and each piece is parsed as a
header of its own by the reader of small ones. That a cut is right needs no trust: a piece that is valid JSON ends where
it began, outside of any text and at the same depth; one that is not valid is looked at again. What must hold for the
header as a whole (no name twice, no gap, no overlap) is checked on columns of numbers.
"""

import codecs
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from weighbridge_fit.bounded_json import loads_pairs
from weighbridge_fit.budget import ParseBudget
from weighbridge_fit.errors import WeightError, WeightReason, shown
from weighbridge_fit.facts import PrecisionTotal, TensorFact
from weighbridge_fit.files import RegularFile
from weighbridge_fit.safetensors.header import (
    MAX_METADATA_VALUE,
    PREFIX_BYTES,
    Entries,
    entries_of,
)

PIECE_BYTES = 1 << 20
# The largest published checkpoint has 91,991 tensors; a model's files may have as many as this together.
MAX_TENSORS = 1 << 19
MAX_DTYPES = 1 << 10
MAX_METADATA_KEYS = 1 << 12
# One metadata value (a workflow, tag counts) is passed over in a window that doubles up to this.
MAX_WINDOW_BYTES = 32 << 20
# Places in one window that look like a cut and are none: real headers have not one.
MAX_DOUBTS = 16

_SPACE = rb"[ \t\n\r]*+"
_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
# The end of an entry where another one begins.
_CUT = re.compile(rb"\}" + _SPACE + rb"," + _SPACE + rb'(?="[^"\\]*+"' + _SPACE + rb":" + _SPACE + rb"\{)")
_METADATA_BEGINS = re.compile(_SPACE + rb'"__metadata__"' + _SPACE + rb":" + _SPACE + rb"\{" + _SPACE)
_PAIR = re.compile(
    rb"(" + _STRING + rb")" + _SPACE + rb":" + _SPACE + rb"(" + _STRING + rb")" + _SPACE + rb"(,|\})" + _SPACE
)
_TEXT = re.compile(_STRING)
_SEPARATOR = re.compile(_SPACE + rb"(,|\})" + _SPACE)
_METADATA_NAME = rb'"__metadata__"'


@dataclass(frozen=True)
class LargeHeader:
    """A checked header. Its tensors are made from its text when somebody asks for them."""

    header_bytes: int
    tensor_count: int
    metadata: dict[str, str]
    totals: tuple[PrecisionTotal, ...]
    pieces: tuple[bytes, ...]

    def precisions(self) -> tuple[PrecisionTotal, ...]:
        """Totals per dtype."""
        return self.totals

    def tensors(self) -> tuple[TensorFact, ...]:
        """The tensors in file order."""
        return tuple(fact for piece in self.pieces for fact in entries_of(piece).tensors())


def parse_large(file: RegularFile, length: int, budget: ParseBudget) -> LargeHeader:
    """Checks the header of `length` bytes that follows the prefix. Raises what `header.parse` raises, and
    HEADER_TOO_LARGE for one that cannot be read in pieces within the memory a reader has."""
    budget.announce(length)
    pieces = _Pieces(file, length, budget)
    table = _Table(file.size - PREFIX_BYTES - length)
    kept: list[bytes] = []
    for piece in pieces:
        try:
            entries = entries_of(piece)
        except WeightError as error:
            if not pieces.at_end and _is_uneven(piece):
                raise _too_large("entries of the header hold objects of their own, so that it has no pieces") from error
            offset = None if error.offset is None else pieces.offset + max(0, error.offset - 1)
            raise WeightError(error.reason, error.message, offset=offset) from error
        table.add(entries)
        if entries.metadata:
            pieces.take_metadata(entries.metadata)
        kept.append(piece)
    table.check(kept)
    return LargeHeader(length, len(table), pieces.metadata, table.totals(), tuple(kept))


class _Pieces:
    """The header as pieces, each the text of a JSON object; the metadata is taken out on the way."""

    def __init__(self, file: RegularFile, length: int, budget: ParseBudget) -> None:
        self._file = file
        self._budget = budget
        self._read = 0
        self._length = length
        self._window = b""
        # Where in the file the window, and the piece just given, begin.
        self.offset = PREFIX_BYTES
        self.metadata: dict[str, str] = {}
        self._metadata_seen = False
        self.at_end = False
        """Whether the piece just given is the last one, which was cut by nobody."""

    def __iter__(self) -> Iterator[bytes]:
        self._more(PIECE_BYTES)
        if not self._window.startswith(b"{"):
            raise WeightError(
                WeightReason.HEADER_INVALID, "the header does not start with a JSON object", offset=self.offset
            )
        self._drop(1)
        closed = False
        while not closed:
            self._budget.check(self.offset)
            if _METADATA_BEGINS.match(self._window):
                closed = self._skip_metadata()
                continue
            end = self._cut()
            if end is None and not self._exhausted:
                self._more(PIECE_BYTES)
                if len(self._window) > 2 * PIECE_BYTES:
                    raise _too_large("one entry of the header is larger than any tensor's")
                continue
            if end is None:
                self.at_end = True
                yield b"{" + self._window  # The last piece brings its own closing bracket.
                return
            yield b"{" + self._window[:end] + b"}"
            self._drop(end)
            separator = _SEPARATOR.match(self._window)
            assert separator is not None, "a cut is in front of a comma"
            self._drop(separator.end())
        if self._window.strip(b" ") or not self._exhausted:
            self._refuse_rest()

    @property
    def _exhausted(self) -> bool:
        return self._read == self._length

    def _more(self, size: int) -> None:
        size = min(size, self._length - self._read)
        self._budget.grow(self._read + size)
        self._budget.check(self.offset)
        self._window += self._file.read_exactly(PREFIX_BYTES + self._read, size)
        self._read += size

    def _drop(self, size: int) -> None:
        self._window = self._window[size:]
        self.offset += size
        if len(self._window) < PIECE_BYTES and not self._exhausted:
            self._more(PIECE_BYTES)

    def _cut(self) -> int | None:
        """Where the last entry in the window ends that another one follows; in front of the metadata at the latest."""
        limit = self._window.find(_METADATA_NAME)
        limit = len(self._window) if limit < 0 else limit
        at = self._window.rfind(b"}", 0, limit)
        doubts = 0
        while at >= 0 and doubts < MAX_DOUBTS:
            if _CUT.match(self._window, at):
                # An entry may hold objects of its own, which the format ignores: inside of one more is open than
                # closed. Names may hold braces, so texts are left out where the plain count does not come out even.
                before = self._window[: at + 1]
                if before.count(b"{") == before.count(b"}") or not _is_uneven(before):
                    return at + 1
                doubts += 1
            at = self._window.rfind(b"}", 0, at)
        return None

    def take_metadata(self, metadata: dict[str, str]) -> None:
        """The metadata of a piece, where its name is spelt so that it was not seen before."""
        self._see_metadata()
        self.metadata.update(metadata)

    def _see_metadata(self) -> None:
        if self._metadata_seen:
            raise WeightError(WeightReason.DUPLICATE_KEY, "the header has two metadata sections", offset=self.offset)
        self._metadata_seen = True

    def _skip_metadata(self) -> bool:
        """Passes over the metadata, keeping what is short. True when nothing but its object's end follows."""
        self._see_metadata()
        begins = _METADATA_BEGINS.match(self._window)
        assert begins is not None, "the caller has seen it"
        self._drop(begins.end())
        keys: set[str] = set()
        position = 0
        more = not self._window.startswith(b"}")
        if not more:
            position = 1
        while more:
            self._budget.check(self.offset + position)
            if position > PIECE_BYTES:  # Not at each pair: dropping copies what is left.
                self._drop(position)
                position = 0
            pair = self._pair(position)
            key, value, separator = pair.groups()
            if len(key) > MAX_METADATA_VALUE or len(keys) >= MAX_METADATA_KEYS:
                raise _too_large("the header's metadata has more or longer keys than are read")
            name = str(loads_pairs(key))
            if name in keys:
                message = "the metadata section names a key twice"
                raise WeightError(WeightReason.DUPLICATE_KEY, message, offset=self.offset)
            keys.add(name)
            self._keep(name, value)
            more = separator == b","
            position = pair.end()
        self._drop(position)
        separator_found = _SEPARATOR.match(self._window)
        if separator_found is None:
            self._refuse_rest()
            return True
        self._drop(separator_found.end())
        return separator_found.group(1) == b"}"

    def _pair(self, position: int) -> re.Match[bytes]:
        while True:
            pair = _PAIR.match(self._window, position)
            if pair is not None:
                return pair
            if self._exhausted:
                message = "the metadata section is not a map of strings"
                raise WeightError(WeightReason.HEADER_INVALID, message, offset=self.offset)
            if len(self._window) > MAX_WINDOW_BYTES:
                raise _too_large("the header's metadata is larger than is read")
            self._more(len(self._window))  # doubled, so that looking again stays linear

    def _keep(self, name: str, value: bytes) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for start in range(0, len(value), PIECE_BYTES):
                decoder.decode(value[start : start + PIECE_BYTES], start + PIECE_BYTES >= len(value))
        except UnicodeDecodeError as error:
            raise WeightError(WeightReason.HEADER_INVALID, "the JSON is not UTF-8", offset=self.offset) from error
        # An escape is at most six times as long as what it stands for.
        if len(value) <= 6 * MAX_METADATA_VALUE:
            text = loads_pairs(value)
            if len(text) <= MAX_METADATA_VALUE:
                self.metadata[name] = text

    def _refuse_rest(self) -> None:
        message = "the header goes on after its JSON object"
        raise WeightError(WeightReason.HEADER_INVALID, message, offset=self.offset)


class _Table:
    """Columns of all tensors, eight bytes a number."""

    def __init__(self, data_bytes: int) -> None:
        self._data_bytes = data_bytes
        self._hashes = array("q")
        self._begins = array("Q")
        self._ends = array("Q")
        # Where tensors without bytes lie.
        self._empty = array("Q")
        self._precisions: dict[str, list[int]] = {}

    def add(self, entries: Entries) -> None:
        """The tensors of one piece."""
        if len(self) + len(entries.raw_names) > MAX_TENSORS:
            raise _too_large(f"the header describes more than {MAX_TENSORS} tensors")
        if entries.ends and max(entries.ends) > self._data_bytes:
            message = f"the tensors need more than the {self._data_bytes} bytes of data that the file has"
            raise WeightError(WeightReason.TRUNCATED, message)
        self._hashes.extend(map(hash, entries.raw_names))
        for begin, end in zip(entries.begins, entries.ends, strict=True):
            if begin == end:
                self._empty.append(begin)
            else:
                self._begins.append(begin)
                self._ends.append(end)
        for dtype, count, elements, size in entries.totals():
            total = self._precisions.setdefault(dtype, [0, 0, 0])
            total[0] += count
            total[1] += count * elements
            total[2] += count * size
        if len(self._precisions) > MAX_DTYPES:
            raise _too_large(f"the header names more than {MAX_DTYPES} dtypes")

    def __len__(self) -> int:
        return len(self._hashes)

    def totals(self) -> tuple[PrecisionTotal, ...]:
        """Totals per dtype, most bytes first."""
        totals = [PrecisionTotal(dtype, *total) for dtype, total in self._precisions.items()]
        return tuple(sorted(totals, key=lambda total: (-total.bytes, total.dtype)))

    def check(self, pieces: list[bytes]) -> None:
        """What holds for all entries together. Raises DUPLICATE_KEY or BAD_OFFSETS."""
        self._check_names(pieces)
        # One at a time: as a list of numbers a column takes five times as much as here.
        begins = array("Q", sorted(self._begins))
        ends = array("Q", sorted(self._ends))
        # With every begin but the first equal to the end before it, each byte has exactly one tensor.
        covered = (
            begins[0] == 0 and ends[-1] == self._data_bytes and begins[1:] == ends[:-1]
            if begins
            else self._data_bytes == 0
        )
        if not covered:
            message = "the tensors leave gaps in the data or overlap"
            raise WeightError(WeightReason.BAD_OFFSETS, message)
        for position in self._empty:
            place = bisect_left(begins, position)
            if position != self._data_bytes and (place == len(begins) or begins[place] != position):
                raise WeightError(WeightReason.BAD_OFFSETS, "a tensor without bytes lies inside another")

    def _check_names(self, pieces: list[bytes]) -> None:
        hashes = array("q", sorted(self._hashes))
        suspects = {first for first, second in pairwise(hashes) if first == second}
        if not suspects:
            return
        # Two names may share a hash: only the names themselves can tell.
        seen: set[bytes] = set()
        for piece in pieces:
            for name in entries_of(piece).raw_names:
                if hash(name) in suspects:
                    if name in seen:
                        message = f"the header names the tensor {shown(name)} twice"
                        raise WeightError(WeightReason.DUPLICATE_KEY, message)
                    seen.add(name)


def _is_uneven(text: bytes) -> bool:
    """Whether more objects begin than end, or the other way round: braces within texts do not count."""
    bare = _TEXT.sub(b"", text)
    return bare.count(b"{") != bare.count(b"}")


def _too_large(message: str) -> WeightError:
    return WeightError(WeightReason.HEADER_TOO_LARGE, message, offset=0)

"""A record's bytes as a pickle machine takes them: in small pieces, with a bound on what is held at once."""

import zlib
from typing import Protocol

from weighbridge_fit.budget import MAX_HEADER_BYTES, MIB, ParseBudget
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.files import RegularFile
from weighbridge_fit.torch_checkpoint.archive import DEFLATED, STORED, Archive, data_offset

CHUNK_BYTES = 256 << 10


class Source(Protocol):
    """Gives a record's bytes one piece after another."""

    def read(self, length: int) -> bytes:
        """At most `length` further bytes; fewer than one at the end only."""

    def skip(self, length: int) -> None:
        """Passes over `length` bytes, which must be there."""


class StoredSource:
    """A record that lies in the archive as it is."""

    def __init__(self, file: RegularFile, offset: int, size: int) -> None:
        self._file = file
        self._offset = offset
        self._left = size

    def read(self, length: int) -> bytes:
        """See Source."""
        data = self._file.read_exactly(self._offset, min(length, self._left))
        self._offset += len(data)
        self._left -= len(data)
        return data

    def skip(self, length: int) -> None:
        """See Source."""
        if length > self._left:
            raise WeightError(WeightReason.TRUNCATED, "the pickle ends inside a value", offset=self._offset)
        self._offset += length
        self._left -= length


class DeflatedSource:
    """A packed record, unpacked as it is asked for: never further, so that a bomb is paid for in time alone."""

    def __init__(self, packed: StoredSource, size: int, budget: ParseBudget) -> None:
        self._packed = packed
        self._left = size
        self._budget = budget
        self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        self._waiting = b""

    def read(self, length: int) -> bytes:
        """See Source."""
        wanted = min(length, self._left)
        pieces: list[bytes] = []
        while wanted:
            self._budget.check()
            if not self._waiting:
                self._waiting = self._packed.read(CHUNK_BYTES)
            try:
                piece = self._inflate.decompress(self._waiting, wanted)
            except zlib.error as error:
                message = "a packed record of the archive cannot be unpacked"
                raise WeightError(WeightReason.ARCHIVE_INVALID, message) from error
            exhausted = not self._waiting
            self._waiting = self._inflate.unconsumed_tail
            if not piece and (exhausted or self._inflate.eof):
                break
            pieces.append(piece)
            wanted -= len(piece)
            self._left -= len(piece)
        return b"".join(pieces)

    def skip(self, length: int) -> None:
        """See Source."""
        while length:
            passed = len(self.read(min(length, CHUNK_BYTES)))
            if not passed:
                raise WeightError(WeightReason.TRUNCATED, "the pickle ends inside a value")
            length -= passed


class PickleStream:
    """The bytes of one pickle, in order."""

    def __init__(self, source: Source, budget: ParseBudget) -> None:
        self._source = source
        self._budget = budget
        # What is held and how far it has been taken: the machine looks at both for its opcodes.
        self.data = b""
        self.at = 0
        self._before = 0
        self._read = 0

    @property
    def offset(self) -> int:
        """How many bytes have been taken."""
        return self._before + self.at

    def byte(self) -> int:
        """The next byte."""
        if self.at >= len(self.data):
            self._fill(1)
        value = self.data[self.at]
        self.at += 1
        return value

    def take(self, length: int) -> bytes:
        """The next `length` bytes; the caller has bounded the length."""
        end = self.at + length
        if end > len(self.data):
            self._fill(length)
            end = self.at + length
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def line(self, longest: int) -> bytes:
        """The next bytes up to a line feed, without it. Raises PICKLE_INVALID when none comes in time."""
        end = self.data.find(b"\n", self.at, self.at + longest)
        if end < 0:
            self._fill(longest, partly=True)
            end = self.data.find(b"\n", self.at, self.at + longest)
            if end < 0:
                raise WeightError(WeightReason.PICKLE_INVALID, "a name in the pickle never ends", offset=self.offset)
        piece = self.data[self.at : end]
        self.at = end + 1
        return piece

    def skip(self, length: int) -> None:
        """Passes over `length` bytes without holding them."""
        held = len(self.data) - self.at
        if length <= held:
            self.at += length
            return
        self._source.skip(length - held)
        self._before += self.at + length
        self.data, self.at = b"", 0
        self._budget.check(self.offset)

    def _fill(self, length: int, partly: bool = False) -> None:
        """Makes `length` bytes available. Raises TRUNCATED when the record has fewer, unless `partly`."""
        held = self.data[self.at :]
        self._before += self.at
        pieces = [held]
        have = len(held)
        while have < length:
            piece = self._source.read(max(CHUNK_BYTES, length - have))
            if not piece:
                break
            pieces.append(piece)
            have += len(piece)
        self.data, self.at = b"".join(pieces), 0
        self._read += have - len(held)
        # Only what was really read buys time; what is skipped does not.
        self._budget.grow(self._read)
        self._budget.check(self.offset)
        if have < length and not partly:
            raise WeightError(WeightReason.TRUNCATED, "the pickle ends inside a value", offset=self.offset)


def open_pickle(file: RegularFile, archive: Archive, name: bytes, budget: ParseBudget) -> PickleStream:
    """The stream of a pickle record. Raises HEADER_TOO_LARGE or ARCHIVE_INVALID."""
    record = archive.records[name]
    if record.size > MAX_HEADER_BYTES or record.packed_bytes > MAX_HEADER_BYTES:
        message = f"the checkpoint's pickle is larger than the {MAX_HEADER_BYTES // MIB} MiB that are read"
        raise WeightError(WeightReason.HEADER_TOO_LARGE, message, offset=record.offset)
    budget.announce(record.size)
    stored = StoredSource(file, data_offset(file, archive, name), record.packed_bytes)
    if record.method == STORED:
        return PickleStream(stored, budget)
    if record.method == DEFLATED:
        return PickleStream(DeflatedSource(stored, record.size, budget), budget)
    message = f"the checkpoint's pickle is packed by method {record.method}, which torch does not write"
    raise WeightError(WeightReason.ARCHIVE_INVALID, message, offset=record.offset)

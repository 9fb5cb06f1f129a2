"""A view of a file's beginning that moves on as it is parsed: a GGUF header says nowhere how long it is, and most of it
(vocabularies) is only walked over."""

from weighbridge_fit.budget import MAX_HEADER_BYTES, MIB, ParseBudget
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.files import RegularFile

# Real headers lie between a few KiB (no vocabulary) and about 15 MiB.
FIRST_READ_BYTES = 256 << 10
READ_BYTES = MIB


class Window:
    """`data` holds the file from `base` on. `at` moves it forward; what lies before a position that was asked for is
    forgotten."""

    def __init__(self, file: RegularFile, budget: ParseBudget) -> None:
        self._file = file
        self._budget = budget
        self._read = 0
        self.size = file.size
        self.base = 0
        self.data = b""
        self._load(0, min(FIRST_READ_BYTES, file.size))

    def at(self, position: int, length: int, what: str) -> int:
        """The index in `data` of the byte at `position`, with `length` bytes there. Positions never go back.

        Raises TRUNCATED or HEADER_TOO_LARGE, without reading, when the bytes are not there or not to be read.
        """
        index = position - self.base
        if index + length <= len(self.data):
            return index
        self.reach(position + length, what)
        self._load(position, min(max(length, READ_BYTES), min(self.size, MAX_HEADER_BYTES) - position))
        return 0

    def reach(self, end: int, what: str) -> None:
        """Makes sure that the header may be as long as `end` bytes. Raises TRUNCATED or HEADER_TOO_LARGE."""
        if end > self.size:
            raise WeightError(WeightReason.TRUNCATED, f"the file ends inside {what}", offset=self.size)
        if end > MAX_HEADER_BYTES:
            message = f"the header is larger than the {MAX_HEADER_BYTES // MIB} MiB that are read"
            raise WeightError(WeightReason.HEADER_TOO_LARGE, message, offset=MAX_HEADER_BYTES)

    def tick(self, offset: int) -> None:
        """Checks the time budget, having parsed up to `offset`."""
        self._budget.check(offset)

    def _load(self, position: int, length: int) -> None:
        self._read += length
        self._budget.grow(self._read)
        self._budget.check(position)
        self.data = self._file.read_exactly(position, length)
        self.base = position

"""A growing view of a file's beginning: a GGUF header says nowhere how long it is, so it is read as far as it is
parsed."""

from weighbridge_fit.budget import MAX_HEADER_BYTES, MIB, ParseBudget
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.files import RegularFile

# First read; real headers lie between a few KiB (no vocabulary) and about 15 MiB.
FIRST_READ_BYTES = 2 * MIB


class Window:
    """`data` holds the file from its start; `need` makes it longer, doubling, never beyond the file or the header
    limit."""

    def __init__(self, file: RegularFile, budget: ParseBudget) -> None:
        self._file = file
        self._budget = budget
        self.size = file.size
        self.data = bytearray(file.read_exactly(0, min(FIRST_READ_BYTES, file.size)))

    def need(self, end: int, what: str) -> None:
        """Makes the first `end` bytes available. Raises TRUNCATED or HEADER_TOO_LARGE without reading when they
        are not."""
        held = len(self.data)
        if end <= held:
            return
        if end > self.size:
            message = f"the file ends inside {what}"
            raise WeightError(WeightReason.TRUNCATED, message, offset=self.size)
        if end > MAX_HEADER_BYTES:
            message = f"the header is larger than the {MAX_HEADER_BYTES // MIB} MiB that are read"
            raise WeightError(WeightReason.HEADER_TOO_LARGE, message, offset=MAX_HEADER_BYTES)
        self._budget.grow(end)
        self._budget.check(held)
        # Double, so that copying stays linear in the header's size; never above the limit or the file.
        target = min(max(end, 2 * held), self.size, MAX_HEADER_BYTES)
        self.data += self._file.read_exactly(held, target - held)

    def tick(self, offset: int) -> None:
        """Checks the time budget, having parsed up to `offset`."""
        self._budget.check(offset)

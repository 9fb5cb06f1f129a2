"""The time a header may take, so that a hostile file costs a bounded amount of work.

Memory needs no meter here: readers allocate in proportion to header bytes that they have really read, and read what is
large in pieces; where a small file can ask for large values (pickles), its reader counts them.
"""

import time
from collections.abc import Callable

from weighbridge_fit.errors import WeightError, WeightReason

MIB = 1 << 20

# Headers up to 8 MiB are read in at most 2 s; each further MiB may take 0.1 s (design, section "fit").
BASE_HEADER_BYTES = 8 * MIB
BASE_SECONDS = 2.0
SECONDS_PER_EXTRA_MIB = 0.1

# safetensors' own limit (MAX_HEADER_SIZE, 100 MB); the same bound serves GGUF, whose format names none.
MAX_HEADER_BYTES = 100 * MIB


class ParseBudget:
    """A deadline that moves out as more header bytes are really read. `clock` returns seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._allowed = BASE_SECONDS
        self._large = False

    def announce(self, header_bytes: int) -> None:
        """Says how long the header claims to be, which buys nothing, but tells a large one from one that is at
        fault."""
        self._large |= header_bytes > BASE_HEADER_BYTES

    def grow(self, header_bytes: int) -> None:
        """Says how many header bytes are in hand, which buys time for the ones above the base."""
        self.announce(header_bytes)
        extra = max(0, header_bytes - BASE_HEADER_BYTES)
        self._allowed = BASE_SECONDS + SECONDS_PER_EXTRA_MIB * (extra / MIB)

    def check(self, offset: int | None = None) -> None:
        """Raises once the time is spent: PARSE_BUDGET, or HEADER_TOO_LARGE for a large header, which may be honest.

        Call it every few thousand steps, not at each.
        """
        if self._clock() - self._start <= self._allowed:
            return
        if self._large:
            message = "the header is too large to be read in the time that it may take"
            raise WeightError(WeightReason.HEADER_TOO_LARGE, message, offset=offset)
        message = "the header took longer to read than any honest header does"
        raise WeightError(WeightReason.PARSE_BUDGET, message, offset=offset)

"""What an engine prints: lines, the last of them kept, and followers told of new ones."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MAX_LINE_CHARS = 4096
"""Longer lines are kept in pieces: one that never ends must not grow without bound."""

RING_BYTES = 64 * 1024
"""How much of an engine's output is kept: a few hundred lines, enough to see why it ended."""


ERASE_TO_END = b"\x1b[K"
"""What a terminal is told to erase the rest of a line with."""


class LineSplitter:
    """Cuts a byte stream into lines at LF, CR and CRLF, wherever the stream was split into chunks.

    A lone CR ends a line because progress bars repaint themselves with it, and so does ESC [ K, which such bars print
    behind each repaint: the CR comes only with the next one, half a minute later where a step takes that long.
    """

    def __init__(self) -> None:
        self._carry = b""
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that ``chunk`` completes. Empty lines are left out."""
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the second half of a CRLF
        self._after_cr = chunk.endswith(b"\r")
        text = (self._carry + chunk).replace(ERASE_TO_END, b"\n").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *complete, self._carry = text.split(b"\n")
        # Only whole multiples are let go, so that a character is not cut in two more often than must be.
        while len(self._carry) > MAX_LINE_CHARS:
            complete.append(self._carry[:MAX_LINE_CHARS])
            self._carry = self._carry[MAX_LINE_CHARS:]
        return [text for line in complete for text in _texts(line)]

    def end(self) -> list[str]:
        """What is left when the stream has ended."""
        carry, self._carry = self._carry, b""
        return _texts(carry)


def _texts(line: bytes) -> list[str]:
    text = line.decode("utf-8", "replace").rstrip()
    return [text[at : at + MAX_LINE_CHARS] for at in range(0, len(text), MAX_LINE_CHARS)]


@dataclass(frozen=True)
class LogLine:
    """One line that an engine printed.

    Attributes:
        number: counts all lines ever kept, from 1.
        text: the line without its end.
        from_stderr: whether it came from standard error.
        time_s: when it was read, seconds since the epoch.
    """

    number: int
    text: str
    from_stderr: bool
    time_s: float


class RingLog:
    """The last :data:`RING_BYTES` of an engine's output."""

    def __init__(self, capacity_bytes: int = RING_BYTES, now: Callable[[], float] = time.time) -> None:
        self._capacity = capacity_bytes
        self._now = now
        self._lines: deque[LogLine] = deque()
        self._bytes = 0
        self._count = 0
        self._changed = asyncio.Event()

    @property
    def last_number(self) -> int:
        """Number of the newest line; 0 before the first."""
        return self._count

    def append(self, text: str, from_stderr: bool) -> None:
        """Keep a line, and let go of the oldest ones that no longer fit."""
        self._count += 1
        self._lines.append(LogLine(self._count, text, from_stderr, self._now()))
        self._bytes += len(text)
        while self._bytes > self._capacity and len(self._lines) > 1:
            self._bytes -= len(self._lines.popleft().text)
        self._changed.set()
        self._changed = asyncio.Event()

    def tail(self, count: int) -> list[LogLine]:
        """The last ``count`` lines, oldest first."""
        return list(self._lines)[-count:] if count > 0 else []

    def after(self, number: int) -> list[LogLine]:
        """The lines kept that are newer than line ``number``."""
        return [line for line in self._lines if line.number > number]

    @property
    def next_change(self) -> asyncio.Event:
        """Set when the next line is appended; another one stands for the line after that."""
        return self._changed

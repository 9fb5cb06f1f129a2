"""Server-sent events, from bytes that come in any pieces.

The rules are those of the HTML standard, "Server-sent events", section "Interpreting an event stream" (November 2026):
lines end at LF, CR or CRLF, an empty line ends an event, several ``data`` lines are one text, a line that begins with a
colon is a comment, and what the end of the stream cuts off is no event.
"""

from dataclasses import dataclass

MAX_EVENT_BYTES = 8 * 2**20
"""Longest event. ds4 sends a token or two in each, some 200 bytes; what it took for a tool call and returns as text
comes as one, and its longest answer, 393,216 tokens of about 4 bytes, is 1.5 MiB, escaped twice that (May 2026)."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseError(Exception):
    """The bytes are no event stream that is read here. The text says why and quotes none of them."""


@dataclass(frozen=True)
class Comment:
    """A line for nobody: it shows that the other side lives."""


@dataclass(frozen=True)
class ServerEvent:
    """One event.

    Attributes:
        name: its ``event`` field; empty where it has none.
        data: its ``data`` lines.
    """

    name: str
    data: str


class SseParser:
    """See the module. Bytes that are no UTF-8 become U+FFFD: a model may end in the middle of a character."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()
        self._after_cr = False
        self._at_start = True
        self._name = ""
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> list[Comment | ServerEvent]:
        """What ``chunk`` completes, in order.

        Raises:
            SseError: an event is too long. Nothing can be read after it.
        """
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk.startswith(b"\n"):  # the second half of a CRLF
                chunk = chunk[1:]
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        *complete, rest = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        found: list[Comment | ServerEvent] = []
        for part in complete:
            self._add(part)
            line, self._line = bytes(self._line), bytearray()
            event = self._take(line)
            if event is not None:
                found.append(event)
        self._add(rest)
        return found

    def _add(self, part: bytes) -> None:
        self._line += part
        if self._data_bytes + len(self._line) > self._max_event_bytes:
            raise SseError(f"an event is longer than {self._max_event_bytes >> 20} MiB")

    def _take(self, line: bytes) -> Comment | ServerEvent | None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            return self._end_event()
        if line.startswith(b":"):
            return Comment()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._data_bytes += len(value) + 1
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        return None  # id and retry are for clients that connect again

    def _end_event(self) -> ServerEvent | None:
        name, data = self._name, self._data
        self._name, self._data, self._data_bytes = "", [], 0
        return ServerEvent(name, b"\n".join(data).decode("utf-8", "replace")) if data else None

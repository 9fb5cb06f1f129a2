"""What one ds4-server process printed, as it comes: kept up by the supervisor, read by whoever talks to it."""

import asyncio
import contextlib
from collections.abc import Iterator

from weighbridge_engines.ds4.events import (
    BackendReady,
    Decoding,
    LoadProgress,
    PromptDone,
    PromptProgress,
    PromptStarted,
    RequestEnded,
    RequestEvent,
    Warmed,
    Warming,
)
from weighbridge_engines.ds4.output import OutputReader


class OutputFeed:
    """See the module.

    Attributes:
        reader: all that was read so far.
        load: the last line that told how far the load is; None before the first.
    """

    def __init__(self) -> None:
        self.reader = OutputReader()
        self.load: LoadProgress | Warming | Warmed | BackendReady | None = None
        self._listeners: set[asyncio.Queue[RequestEvent]] = set()

    def take(self, line: str, from_stderr: bool) -> None:
        """One line. No line says that the process cannot go on: after such a one it ends by itself, at once."""
        if not from_stderr:
            return
        match self.reader.read(line):
            case LoadProgress() | Warming() | Warmed() | BackendReady() as step:
                self.load = step
            case PromptStarted() | PromptProgress() | PromptDone() | Decoding() | RequestEnded() as event:
                for listener in self._listeners:
                    listener.put_nowait(event)
            case _:
                pass

    @contextlib.contextmanager
    def requests(self) -> Iterator[asyncio.Queue[RequestEvent]]:
        """What is printed about requests from now on. Lines do not say whose request they are about."""
        listener: asyncio.Queue[RequestEvent] = asyncio.Queue()
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)

"""What one ds4-server process printed, as it comes: kept up by the supervisor, read by whoever talks to it."""

from collections.abc import Callable

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
        tell: called with what each line says about requests, in order. Lines do not say whose request they are about.
    """

    def __init__(self) -> None:
        self.reader = OutputReader()
        self.load: LoadProgress | Warming | Warmed | BackendReady | None = None
        self.tell: Callable[[RequestEvent], None] | None = None

    def take(self, line: str, from_stderr: bool) -> None:
        """One line. No line says that the process cannot go on: after such a one it ends by itself, at once."""
        if not from_stderr:
            return
        match self.reader.read(line):
            case LoadProgress() | Warming() | Warmed() | BackendReady() as step:
                self.load = step
            case PromptStarted() | PromptProgress() | PromptDone() | Decoding() | RequestEnded() as event:
                if self.tell is not None:
                    self.tell(event)
            case _:
                pass

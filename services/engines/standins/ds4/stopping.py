"""How ds4-server hears that it is to end: the first signal asks, the second ends it at once with code 130."""

import os
import signal
from collections.abc import Callable
from types import FrameType

SECOND_SIGNAL_CODE = 130


class Stopping:
    """Whether it was asked to end."""

    def __init__(self, *, deaf: bool) -> None:
        self.asked = False
        self._told: Callable[[], object] = lambda: None
        signal.signal(signal.SIGINT, self._hear)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else self._hear)

    def tell(self, told: Callable[[], object]) -> None:
        """Call this as soon as it is asked; at once when it was."""
        self._told = told
        if self.asked:
            told()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(SECOND_SIGNAL_CODE)
        self.asked = True
        self._told()

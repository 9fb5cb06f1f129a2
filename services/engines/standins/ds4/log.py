"""Lines as ds4 prints them, all on standard error: the server's with a stamp, the engine's without."""

import sys
import time


def server(text: str) -> None:
    """A line of the server: month and day, and the time of day."""
    raw(f"{time.strftime('%m%d %H:%M:%S')} ds4-server: {text}\n")


def engine(text: str) -> None:
    """A line of the engine."""
    raw(f"ds4: {text}\n")


def repaint(text: str) -> None:
    """A line of the engine that the next one is painted over."""
    raw(f"ds4: {text}\r")


def raw(text: str) -> None:
    """Text as it is."""
    sys.stderr.write(text)
    sys.stderr.flush()

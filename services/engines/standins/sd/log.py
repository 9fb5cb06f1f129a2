"""Lines and bars as sd-server prints them: errors on standard error, the rest on standard output, each at once."""

import sys
import threading

_lock = threading.Lock()
_BAR_WIDTH = 50


def raw(text: str) -> None:
    """Text as it is, on standard output."""
    with _lock:
        sys.stdout.write(text)
        sys.stdout.flush()


def info(where: str, text: str) -> None:
    """``where`` is file:line."""
    raw(_line("INFO", where, text))


def warn(where: str, text: str) -> None:
    """See :func:`info`."""
    raw(_line("WARN", where, text))


def error(where: str, text: str) -> None:
    """See :func:`info`."""
    unended(_line("ERROR", where, text))


def unended(text: str) -> None:
    """Text as it is, on standard error."""
    with _lock:
        sys.stderr.write(text)
        sys.stderr.flush()


def bar(done: int, total: int, speed: str) -> None:
    """A bar that repaints itself; its line ends only when all is done."""
    at = done * _BAR_WIDTH // total
    painted = "".join(
        "=" if place < at or place == at == _BAR_WIDTH - 1 else ">" if place == at else " "
        for place in range(_BAR_WIDTH)
    )
    raw(f"\r  |{painted}| {done}/{total} - {speed}\x1b[K" + ("\n" if done == total else ""))


def pace(seconds: float) -> str:
    """The speed behind a sampling or tile bar."""
    return f"{1 / seconds:.2f}it/s" if 0 < seconds < 1 else f"{seconds:.2f}s/it"


def _line(level: str, where: str, text: str) -> str:
    file, _, number = where.partition(":")
    return f"[{level:<5}] {file}:{number:<4} - {text}\n"

"""What Ctrl-C does at which moment. Imports next to nothing: it is there before the rest of the command."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def end_the_process() -> None:
    """From here on Ctrl-C ends the process at once and in silence, as it ends a program in C.

    Right while nothing is held: as modules load, as arguments are read, and when everything is done. Python's own way,
    an exception in the middle of whatever runs, ends in a traceback there.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def raised() -> Iterator[None]:
    """While open, Ctrl-C raises KeyboardInterrupt again, so that what is held can be let go of."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a command to end. A hang-up that is ignored (nohup) stays ignored."""
    asked = (signal.SIGINT, signal.SIGTERM)
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*asked, signal.SIGHUP)

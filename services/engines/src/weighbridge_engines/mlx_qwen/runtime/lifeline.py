"""Ends this process when the host that started it is gone."""

import os
import stat
import threading
from collections.abc import Callable

STDIN = 0


def is_lifeline(descriptor: int) -> bool:
    """Whether a descriptor can be a lifeline: a pipe or a socket, whose other end closes when its holder dies.

    A terminal, a file or /dev/null is none: with those the process was started by hand and has nobody to outlive.
    """
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def watch(descriptor: int, on_gone: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread that calls on_gone once descriptor's other end is closed; it discards what it reads."""

    def wait_for_end() -> None:
        while True:
            try:
                if not os.read(descriptor, 4096):
                    break
            except OSError:
                break
        on_gone()

    watcher = threading.Thread(target=wait_for_end, name="lifeline", daemon=True)
    watcher.start()
    return watcher

"""Cuts a connection whose next step takes too long.

The timeouts of sockets are for one read each: a host that sends a byte before each of them runs out, or one interim
response after another, would keep a download waiting for good.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Watchdog:
    """Watches one connection at a time. `limit_s`: how long a step may take; `clock` never goes back.

    Attributes:
        barked: whether the step at hand, or the last one, was cut for its length.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self._deadline: float | None = None
        self._thread: threading.Thread | None = None
        self._over = False
        self._closed = False
        self.barked = False

    def watch(self, connection: socket.socket) -> None:
        """From here on it is this connection, until the next."""
        # A second handle: encryption takes the first one over, and closing that must not make this one another's.
        handle = connection.dup()
        with self._changed:
            old, self._connection = self._connection, handle
            if self.barked or self._over:
                # The step's time went by while a name was looked up, or a connection made.
                self._cut()
        if old is not None:
            old.close()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step: the head of a response, or the next piece of its body."""
        with self._changed:
            self._deadline, self.barked = self._clock() + self._limit_s, False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pull-watchdog", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._deadline = None

    def cut(self) -> None:
        """Ends the connection now, and each one that comes: whoever waits for it hears that it broke."""
        with self._changed:
            self._over = True
            self._cut()

    def close(self) -> None:
        """Watches nothing any more."""
        with self._changed:
            self._closed = True
            old, self._connection = self._connection, None
            self._changed.notify()
        if old is not None:
            old.close()

    def _cut(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # closed by the other side already
                self._connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                if self._deadline is not None and self._clock() > self._deadline:
                    self.barked, self._deadline = True, None
                    self._cut()
                self._changed.wait(min(1.0, self._limit_s / 4))

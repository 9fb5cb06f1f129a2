"""Requests that wait for an engine: in order, bounded."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from weighbridge_engines.host.failures import too_many_requests

DEFAULT_REQUEST_S = 2.0
"""Guess for how long a request takes, before one has been seen: for RetryInfo only."""


class RequestQueue:
    """Lets so many requests through at once, the others in order.

    Args:
        slots: at once.
        limit: how many may wait.
    """

    def __init__(self, slots: int, limit: int) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._limit = limit
        self._waiting = 0
        self._typical_s = DEFAULT_REQUEST_S

    @property
    def waiting(self) -> int:
        """How many wait."""
        return self._waiting

    def note_duration(self, seconds: float) -> None:
        """A request took this long; recent ones count more."""
        self._typical_s += 0.3 * (seconds - self._typical_s)

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a turn and hold it.

        Raises:
            RequestError: RESOURCE_EXHAUSTED TOO_MANY_REQUESTS.
        """
        if self._slots.locked() and self._waiting >= self._limit:
            raise too_many_requests(self._waiting, max(0.1, self._typical_s))
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

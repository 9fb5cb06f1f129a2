"""Requests that wait for an engine: in order, bounded."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from weighbridge_engines.host.failures import too_many_requests

DEFAULT_REQUEST_S = 2.0
"""Guess for how long a request takes, before one has been seen: for RetryInfo only."""


@dataclass(eq=False)
class _Place:
    """One request that waits."""

    turn: "asyncio.Future[None]"
    tell: Callable[[int], object]


class RequestQueue:
    """Lets so many requests through at once, the others in order.

    Args:
        slots: at once.
        limit: how many may wait.
    """

    def __init__(self, slots: int, limit: int) -> None:
        self._free = slots
        self._limit = limit
        self._line: list[_Place] = []
        self._typical_s = DEFAULT_REQUEST_S

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._line)

    def note_duration(self, seconds: float) -> None:
        """A request took this long; recent ones count more."""
        self._typical_s += 0.3 * (seconds - self._typical_s)

    @contextlib.asynccontextmanager
    async def slot(self, tell: Callable[[int], object] = lambda position: None) -> AsyncIterator[None]:
        """Wait for a turn and hold it.

        Args:
            tell: hears the place in the queue, from 1, at first and whenever it changes.

        Raises:
            RequestError: RESOURCE_EXHAUSTED TOO_MANY_REQUESTS.
        """
        if self._free:
            self._free -= 1
        elif len(self._line) >= self._limit:
            raise too_many_requests(len(self._line), max(0.1, self._typical_s))
        else:
            await self._wait(tell)
        try:
            yield
        finally:
            self._next()

    async def _wait(self, tell: Callable[[int], object]) -> None:
        place = _Place(asyncio.get_running_loop().create_future(), tell)
        self._line.append(place)
        tell(len(self._line))
        try:
            await place.turn
        except asyncio.CancelledError:
            if not place.turn.cancelled():
                self._next()  # its turn had just come
            elif place in self._line:
                self._line.remove(place)
                self._tell_places()
            raise

    def _next(self) -> None:
        """A turn is over: the first in line has the next."""
        while self._line:
            place = self._line.pop(0)
            if not place.turn.done():
                place.turn.set_result(None)
                self._tell_places()
                return
        self._free += 1

    def _tell_places(self) -> None:
        for position, place in enumerate(self._line, start=1):
            place.tell(position)

"""Requests that wait for an engine: in order, bounded; and warm-ups behind them all."""

import asyncio
import bisect
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from weighbridge_engines.host.failures import too_many_requests, warm_up_gives_way

DEFAULT_REQUEST_S = 2.0
"""Guess for how long a request takes, before one has been seen: for RetryInfo only."""


@dataclass(eq=False)
class _Place:
    """One request that waits."""

    turn: "asyncio.Future[None]"
    tell: Callable[[int], object]
    number: float
    is_warm_up: bool

    @property
    def rank(self) -> tuple[bool, float]:
        """Places of lower rank come first."""
        return self.is_warm_up, self.number


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
        self._has_warm_up = False

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._line)

    def note_duration(self, seconds: float) -> None:
        """A request took this long; recent ones count more."""
        self._typical_s += 0.3 * (seconds - self._typical_s)

    @contextlib.asynccontextmanager
    async def slot(
        self,
        tell: Callable[[int], object] = lambda position: None,
        number: float = math.inf,
        is_warm_up: bool = False,
    ) -> AsyncIterator[None]:
        """Wait for a turn and hold it.

        Args:
            tell: hears the place in the queue, from 1, at first and whenever it changes.
            number: of those who wait, lower numbers come first: who was in the queue of an engine that had to be
                started again keeps the place before those who came later.
            is_warm_up: comes after all others, however long they come; there is one at a time. Where the queue is full
                it gives its place to a request.

        Raises:
            RequestError: RESOURCE_EXHAUSTED TOO_MANY_REQUESTS.
        """
        with self._one_warm_up() if is_warm_up else contextlib.nullcontext():
            if self._free:
                self._free -= 1
            else:
                self._make_room(is_warm_up)
                await self._wait(_Place(asyncio.get_running_loop().create_future(), tell, number, is_warm_up))
            try:
                yield
            finally:
                self._next()

    @contextlib.contextmanager
    def _one_warm_up(self) -> Iterator[None]:
        if self._has_warm_up:
            raise warm_up_gives_way("another one waits or runs already")
        self._has_warm_up = True
        try:
            yield
        finally:
            self._has_warm_up = False

    def _make_room(self, for_warm_up: bool) -> None:
        """Refuse one more in a full queue; a request takes the place of a warm-up there."""
        if len(self._line) < self._limit:
            return
        if for_warm_up:
            raise warm_up_gives_way("the engine has enough to do")
        if not self._line or not self._line[-1].is_warm_up:
            raise too_many_requests(len(self._line), max(0.1, self._typical_s))
        warm_up = self._line.pop()
        if not warm_up.turn.done():  # else it has just been cancelled
            warm_up.turn.set_exception(warm_up_gives_way("requests came that need its place"))

    async def _wait(self, place: _Place) -> None:
        bisect.insort_right(self._line, place, key=lambda waiting: waiting.rank)
        self._tell_places(self._line.index(place))
        try:
            await place.turn
        except asyncio.CancelledError:
            if not place.turn.cancelled():
                if place.turn.exception() is None:
                    self._next()  # its turn had just come
            elif place in self._line:
                index = self._line.index(place)
                del self._line[index]
                self._tell_places(index)
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

    def _tell_places(self, changed_from: int = 0) -> None:
        for index in range(changed_from, len(self._line)):
            self._line[index].tell(index + 1)

"""Work that takes longer than an event loop may stand still: on a thread, a bounded number at once, and no longer than
somebody waits for it."""

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


class AbandonedError(Exception):
    """Nobody waits for this work any more."""


_abandoned: ContextVar[Callable[[], bool] | None] = ContextVar("abandoned", default=None)


def is_abandoned() -> bool:
    """Whether nobody waits any more for the work that asks; False outside of `Threads`."""
    abandoned = _abandoned.get()
    return abandoned is not None and abandoned()


def stop_if_abandoned() -> None:
    """Ends work that nobody waits for any more: what takes many steps asks between two of them.

    Raises AbandonedError.
    """
    if is_abandoned():
        raise AbandonedError


class Threads:
    """Turns on threads. Whoever finds none free waits for one, in order."""

    def __init__(self, most_at_once: int) -> None:
        self._turns = asyncio.Semaphore(most_at_once)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of some work, or what it raises. Cancelled, the work ends where it next asks
        `stop_if_abandoned`."""
        gone = threading.Event()

        def stoppable() -> T:
            _abandoned.set(gone.is_set)
            return work()

        async with self._turns:
            # to_thread runs in a copy of this context, so that what is set there is seen there alone.
            working = asyncio.ensure_future(asyncio.to_thread(stoppable))
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                gone.set()
                # The turn ends with the thread: else callers who give up soon would fill every thread there is.
                await asyncio.gather(working, return_exceptions=True)
                raise

"""Hands results from the owner thread to one coroutine, without making the owner thread wait."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """A one-way queue from one thread to one reader on an event loop.

    The thread never waits: put() appends and, only if the reader has not been woken already, wakes it. A reader that
    was busy therefore finds several items at once and can send them as one message; an idle one gets each item at
    once. The queue is unbounded, which is safe here because a request bounds what it can produce (its output tokens).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[T] = deque()
        self._ready = asyncio.Event()
        self._woken = False
        self._closed = False
        self._error: BaseException | None = None

    def put(self, item: T) -> None:
        """Adds an item. Owner thread only."""
        self._items.append(item)
        self._wake()

    def close(self, error: BaseException | None = None) -> None:
        """Ends the reader's iteration after the queued items, with error if there is one. Owner thread only."""
        self._error = error
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        # Appending happens before this test, and the reader resets the mark before it empties the queue: an item is
        # either seen by a reader that is already on its way or causes a new wake-up; at worst one wake-up finds
        # nothing.
        if self._woken:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:
            # The loop has been closed: the process is ending and nobody reads any more.
            self._closed = True

    async def batches(self) -> AsyncIterator[list[T]]:
        """All items queued so far, each time there are any. Raises the error given to close() after the last items."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            self._woken = False
            closed = self._closed
            items = []
            while self._items:
                items.append(self._items.popleft())
            if items:
                yield items
            if closed:
                if self._error is not None:
                    raise self._error
                return

"""Reads headers off the event loop, a bounded number at once, and stops when nobody waits any more."""

import asyncio
import threading
from pathlib import Path

from weighbridge_fit.describe import describe, describe_unread
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.models_root import ModelsRoot


class HeaderReader:
    """Describes models under one root."""

    def __init__(self, root: ModelsRoot, max_concurrent: int) -> None:
        self._root = root
        self._turns = asyncio.Semaphore(max_concurrent)

    async def resolve(self, reference: str) -> Path:
        """The real path of a reference. Raises ModelNotFoundError."""
        return await asyncio.to_thread(self._root.resolve, reference)

    async def read(self, path: Path) -> WeightFacts:
        """The facts of a resolved path. Raises `WeightError`. Cancelled, it stops reading at the next file."""
        gone = threading.Event()
        async with self._turns:
            reading = asyncio.ensure_future(asyncio.to_thread(describe, path, self._root.contains, gone.is_set))
            try:
                return await asyncio.shield(reading)
            except asyncio.CancelledError:
                gone.set()
                # The turn ends with the thread: else callers who give up soon would fill every thread there is.
                await asyncio.gather(reading, return_exceptions=True)
                raise

    async def size(self, path: Path) -> WeightFacts:
        """Name and size alone, of a resolved path whose headers are too large. Raises `WeightError`."""
        async with self._turns:
            return await asyncio.to_thread(describe_unread, path, self._root.contains)

"""Reads headers off the event loop, a bounded number at once, and stops when nobody waits any more."""

import asyncio
from pathlib import Path

from weighbridge_fit.describe import describe, describe_unread
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.models_root import ModelsRoot
from weighbridge_fit.off_loop import Threads, is_abandoned


class HeaderReader:
    """Describes models under one root."""

    def __init__(self, root: ModelsRoot, max_concurrent: int) -> None:
        self._root = root
        self._threads = Threads(max_concurrent)

    async def resolve(self, reference: str) -> Path:
        """The real path of a reference. Raises ModelNotFoundError."""
        return await asyncio.to_thread(self._root.resolve, reference)

    async def read(self, path: Path) -> WeightFacts:
        """The facts of a resolved path. Raises `WeightError`. Cancelled, it stops reading at the next file."""
        return await self._threads.run(lambda: describe(path, self._root.contains, is_abandoned))

    async def size(self, path: Path) -> WeightFacts:
        """Name and size alone, of a resolved path whose headers are too large. Raises `WeightError`."""
        return await self._threads.run(lambda: describe_unread(path, self._root.contains))

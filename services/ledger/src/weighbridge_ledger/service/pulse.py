"""Does the ledger get on? What health checks are told.

A server that answers is not yet one that works: one router's queue stood still for good while its health check said
that all was well (llama.cpp 28829). So this looks at the work itself: deaths are looked for, decisions reach the disk,
and no claim waits beyond its own deadline. An event loop that stands still needs no look: it answers no health check.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from weighbridge_ledger.service.keeper import Keeper

LOOK_PERIOD_S = 2.5
"""Ten sweeps, and far more than a disk takes for a sync."""

STALLED_LOOKS = 4
"""So many looks in a row without any progress, 10 s, are a standstill. Looks are counted, not seconds: a process that
was stopped and continued, or a laptop that slept, has looked once meanwhile."""

_log = structlog.get_logger(__name__)

SetServing = Callable[[bool], Awaitable[None]]


class Pulse:
    """Looks again and again, and tells health checks.

    Args:
        keeper: whose work is looked at.
        set_serving: tells health checks.
    """

    def __init__(self, keeper: Keeper, set_serving: SetServing) -> None:
        self._keeper = keeper
        self._set_serving = set_serving
        self._seen: dict[str, int] = {}
        self._without: dict[str, int] = {}
        """Looks in a row at which each thing had not moved."""
        self.stalled: tuple[str, ...] = ()
        """What stands still."""

    async def look(self) -> None:
        """Look once, and tell health checks if the answer is another one than before."""
        committer = self._keeper.committer
        self._note("sweep", self._keeper.sweeps, at_rest=False)
        self._note("disk", committer.batches, at_rest=committer.at_rest)
        self._note("queue", 0, at_rest=self._keeper.book.overdue_wait_s(self._keeper.clock()) <= 0)
        stalled = tuple(part for part, looks in self._without.items() if looks >= STALLED_LOOKS)
        if stalled == self.stalled:
            return
        was, self.stalled = self.stalled, stalled
        if stalled:
            _log.error("ledger_stalled", parts=stalled)
        else:
            _log.info("ledger_gets_on_again", parts=was)
        await self._set_serving(not stalled)

    async def look_for_ever(self) -> None:
        """Look, again and again."""
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            await self.look()

    def _note(self, part: str, count: int, *, at_rest: bool) -> None:
        """`count` rises with the work of one part; one that has nothing to do stands still rightly."""
        moved = at_rest or count != self._seen.get(part, count - 1)
        self._seen[part] = count
        self._without[part] = 0 if moved else self._without.get(part, 0) + 1

"""Who uses a loaded model, and when it has been left alone for long enough."""

import asyncio
from typing import Any

from weighbridge_engines.host.clock import Clock
from weighbridge_engines.host.waiting import first_of


class Occupancy:
    """The calls that use a model or are about to.

    Attributes:
        stakes: one for each call.
        draining: those of calls that were given up, and that the engine still works on.
        pinned, idle_timeout_s: whether and when the model ends for idleness (None: never).
        last_use_wall_s: when the last call let go, seconds since the epoch; before, when use could begin.
    """

    def __init__(self, clock: Clock) -> None:
        self.stakes: set[object] = set()
        self.draining: set[object] = set()
        self._beginning: set[object] = set()
        self.pinned = False
        self.idle_timeout_s: float | None = None
        self.last_use_wall_s = 0.0
        self._clock = clock
        self._last_use_s = 0.0
        self._freed = asyncio.Event()
        self._begun = asyncio.Event()
        self._terms_changed = asyncio.Event()

    def open(self) -> None:
        """Idleness counts from now on."""
        self._last_use_s, self.last_use_wall_s = self._clock.monotonic(), self._clock.wall()

    def take(self, stake: object) -> None:
        """A call is going to use the model; its process does not end until that call lets go."""
        if stake not in self.stakes:
            self.stakes.add(stake)
            self._beginning.add(stake)
        self._freed.clear()

    def begun(self, stake: object) -> None:
        """That call uses it now, by the ledger's leave."""
        self._beginning.discard(stake)
        self._begun.set()

    def give_up(self, stake: object) -> None:
        """Nobody waits for that call any more, and the engine cannot stop at once: in use until it is dropped."""
        self.take(stake)
        self.begun(stake)
        self.draining.add(stake)

    def drop(self, stake: object) -> None:
        """That call is through."""
        if stake not in self.stakes:
            return
        self.stakes.discard(stake)
        self.draining.discard(stake)
        self.begun(stake)
        if not self.stakes:
            self.open()
            self._freed.set()

    def change_idle_terms(self, pinned: bool, idle_timeout_s: float | None) -> None:
        """Whether and when the model ends for idleness, from now on."""
        self.pinned, self.idle_timeout_s = pinned, idle_timeout_s
        self._terms_changed.set()

    @property
    def idle_unload_wall_s(self) -> float | None:
        """When the model ends for idleness, seconds since the epoch; None: while used, pinned, or without limit."""
        if self.pinned or self.idle_timeout_s is None or self.stakes:
            return None
        return self.last_use_wall_s + self.idle_timeout_s

    async def until_free(self, unless: "asyncio.Future[Any]") -> None:
        """Return when nobody uses the model, or when ``unless`` is done."""
        if not self.stakes:
            return
        freed = asyncio.ensure_future(self._freed.wait())
        try:
            await first_of(freed, unless)
        finally:
            freed.cancel()

    async def until_begun(self) -> None:
        """Return when each call that is going to use the model now has begun to, or let go. Later ones do not count.

        A load of another model waits for this before it claims memory in the place of this one: else two models that
        are wanted by turns could each be taken away before the call it was loaded for, and a switch would cut into a
        batch.
        """
        before = set(self._beginning)
        while before & self._beginning:
            self._begun.clear()
            await self._begun.wait()

    async def until_idle(self) -> None:
        """Return at the moment at which the model has been idle for long enough; no call comes in between."""
        while True:
            self._terms_changed.clear()
            if self.stakes:
                await self._freed.wait()
                continue
            if self.pinned or self.idle_timeout_s is None:
                await self._terms_changed.wait()
                continue
            left_s = self._last_use_s + self.idle_timeout_s - self._clock.monotonic()
            if left_s <= 0:
                return
            pause = asyncio.ensure_future(self._clock.sleep(left_s))
            changed = asyncio.ensure_future(self._terms_changed.wait())
            try:
                await first_of(pause, changed)
            finally:
                pause.cancel()
                changed.cancel()

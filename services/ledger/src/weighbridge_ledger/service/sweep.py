"""Deaths and deadlines: a lease whose processes have died gives its bytes back within a second (rules 10, 12)."""

import asyncio
from collections.abc import Callable, Iterable

from weighbridge_common import processes
from weighbridge_common.processes import ProcessIdentity

from weighbridge_ledger.service.keeper import Keeper

SWEEP_PERIOD_S = 0.25
"""How often deaths are looked for: a quarter of the second within which they must have freed their bytes. Also how
often time acts on the book, well below half of the shortest term (2.5 s), beyond which it takes itself for stopped."""

IsAlive = Callable[[ProcessIdentity], bool | None]


async def sweep(keeper: Keeper, is_alive: IsAlive = processes.is_alive) -> None:
    """Look once."""
    watched = keeper.book.processes_to_watch()
    # Death is final, so it does not matter that the book may move while another thread looks.
    dead = await asyncio.to_thread(_dead_among, watched, is_alive) if watched else frozenset()
    keeper.run(lambda book, now: book.processes_died(dead, now))
    keeper.committer.retry()


async def sweep_for_ever(keeper: Keeper, is_alive: IsAlive = processes.is_alive) -> None:
    """Look again and again."""
    while True:
        await sweep(keeper, is_alive)
        await asyncio.sleep(SWEEP_PERIOD_S)


def _dead_among(watched: Iterable[ProcessIdentity], is_alive: IsAlive) -> frozenset[ProcessIdentity]:
    return frozenset(process for process in watched if is_alive(process) is False)

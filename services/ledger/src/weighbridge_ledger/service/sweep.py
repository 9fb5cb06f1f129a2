"""Deaths and deadlines: a lease whose processes have died gives its bytes back within a second (rules 10, 12)."""

import asyncio
from collections.abc import Callable, Iterable

import structlog
from weighbridge_common import processes
from weighbridge_common.logs import describe_error
from weighbridge_common.processes import ProcessIdentity

from weighbridge_ledger.service.keeper import Keeper

SWEEP_PERIOD_S = 0.25
"""How often deaths are looked for: a quarter of the second within which they must have freed their bytes. Also how
often time acts on the book, well below half of the shortest term (2.5 s), beyond which it takes itself for stopped."""

RETRY_PERIOD_S = 1.0
"""After a look that failed, so that a lasting fault does not fill the log."""

_log = structlog.get_logger(__name__)

IsAlive = Callable[[ProcessIdentity], bool | None]


async def sweep(keeper: Keeper, is_alive: IsAlive = processes.is_alive) -> None:
    """Look once."""
    watched = keeper.book.processes_to_watch()
    # Death is final, so it does not matter that the book may move while another thread looks.
    dead = await asyncio.to_thread(dead_among, watched, is_alive) if watched else frozenset()
    keeper.run(lambda book, now: book.processes_died(dead, now))
    keeper.committer.retry()
    keeper.sweeps += 1


async def sweep_for_ever(keeper: Keeper, is_alive: IsAlive = processes.is_alive) -> None:
    """Look again and again, whatever one look runs into: without it no time passes in the book."""
    while True:
        try:
            await sweep(keeper, is_alive)
        except Exception as error:
            _log.error("sweep_failed", **describe_error(error))
            await asyncio.sleep(RETRY_PERIOD_S)
        await asyncio.sleep(SWEEP_PERIOD_S)


def dead_among(watched: Iterable[ProcessIdentity], is_alive: IsAlive) -> frozenset[ProcessIdentity]:
    return frozenset(process for process in watched if _proven_dead(process, is_alive))


def _proven_dead(process: ProcessIdentity, is_alive: IsAlive) -> bool:
    try:
        return is_alive(process) is False
    except OSError:  # no file descriptor left, or the system hides it from us: that is no proof
        return False

"""Why nothing comes for a while: the engine still works on what somebody gave up."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from weighbridge.cli.tables import draining_words
from weighbridge.engine_client import Engine
from weighbridge.failures import CallError

SILENCE_S = 2.0
"""How long nothing may come before the engine is asked, and until it is asked again."""


@asynccontextmanager
async def word_of_draining(engine: Engine, tell: Callable[[str], None]) -> AsyncIterator[Callable[[], object]]:
    """While open, tell people once if ``engine`` is busy with requests that were given up.

    It gives a function to call when the answer has begun: then nothing is to be told any more.

    Args:
        engine: which engine was asked for something.
        tell: prints a line.
    """
    asking = asyncio.create_task(_ask(engine, tell))
    try:
        yield asking.cancel
    finally:
        asking.cancel()
        await asyncio.wait({asking})


async def _ask(engine: Engine, tell: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(SILENCE_S)
        try:
            given_up = (await engine.describe()).engine.requests_draining
        except CallError:
            continue  # the request itself fails then, and says why
        if given_up:
            tell(f"WAITING   for {draining_words(given_up)}: the engine cannot break off")
            return

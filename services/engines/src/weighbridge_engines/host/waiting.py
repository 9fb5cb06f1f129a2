"""Waiting for whichever comes first."""

import asyncio
from collections.abc import Awaitable
from typing import Any


async def first_of(*futures: "asyncio.Future[Any]", timeout_s: float | None = None) -> None:
    """Return when one of ``futures`` is done, or when ``timeout_s`` is over. Cancels none of them."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def first_of_two(one: Awaitable[object], other: Awaitable[object]) -> None:
    """Return when one of them is done; the other is cancelled."""
    tasks = [asyncio.ensure_future(each) for each in (one, other)]
    try:
        await first_of(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

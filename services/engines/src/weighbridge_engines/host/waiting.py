"""Waiting for whichever comes first."""

import asyncio
from typing import Any


async def first_of(*futures: "asyncio.Future[Any]", timeout_s: float | None = None) -> None:
    """Return when one of ``futures`` is done, or when ``timeout_s`` is over. Cancels none of them."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

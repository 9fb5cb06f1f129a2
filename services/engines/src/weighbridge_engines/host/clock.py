"""Time, as it is passed in: so that tests decide what time it is."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """Reads and waits.

    Attributes:
        monotonic: seconds that never go back, for durations.
        wall: seconds since the epoch, for timestamps that people see.
        sleep: waits for seconds of ``monotonic``.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

"""The clocks of the machine, as the book takes them."""

import time
from collections.abc import Callable

from weighbridge_ledger.book.states import Moment

Clock = Callable[[], Moment]


def system_clock() -> Moment:
    """Now."""
    return Moment(time.monotonic(), time.time())


def wall_of(monotonic: float, now: Moment) -> float:
    """A moment of the monotonic clock in seconds since the epoch."""
    return now.wall + monotonic - now.monotonic

"""Rest after the GPU's driver brought the system down. Pure."""

import math
from dataclasses import dataclass

from weighbridge_ledger.book.states import Hold, Moment
from weighbridge_ledger.health.policy import HealthPolicy


@dataclass(frozen=True, slots=True)
class Panic:
    """A panic that a report tells of."""

    at: float
    """When it was, in seconds since the epoch: the only clock that outlives the boot that follows."""
    seen_at: float
    """When the report was first seen, on the monotonic clock."""


def rest_left_s(panic: Panic, now: Moment, policy: HealthPolicy) -> float:
    """For how many more seconds nothing is loaded; 0: no longer.

    A model that brought the system down would do so again as soon as its engine is started after the boot. The rest
    runs on the wall clock from the panic on, and no longer than its length from when the report was seen: a clock that
    was set back since must not hold a machine for days.
    """
    by_wall = panic.at + policy.panic_rest_s - now.wall
    by_sight = panic.seen_at + policy.panic_rest_s - now.monotonic
    return max(0.0, min(by_wall, by_sight))


def panic_hold(panic: Panic, now: Moment, policy: HealthPolicy) -> Hold | None:
    """What holds every load after a panic, and no use: engines that run are left alone. Told in whole minutes, so that
    waiters are not told anew all the time."""
    left_s = rest_left_s(panic, now, policy)
    if left_s == 0:
        return None
    ago, left = math.floor(max(0.0, now.wall - panic.at) / 60), math.ceil(left_s / 60)
    return Hold(
        "GPU_PANIC",
        f"The GPU's driver brought this machine down {ago} min ago; loads start again in {left} min.",
        retry_after_s=left * 60.0,
    )

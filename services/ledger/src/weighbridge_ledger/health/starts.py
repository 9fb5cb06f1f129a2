"""Loads one at a time where the platform needs it. Pure; times are seconds of a monotonic clock.

Two models that are mapped for Metal at once can make the count of a kernel object go wrong, which panics macOS. Only
loads exclude each other; loaded engines run side by side.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from weighbridge_ledger.health.decision import Decision, Start, Wait
from weighbridge_ledger.health.policy import HealthPolicy


@dataclass(frozen=True, slots=True)
class Load:
    """A load that is under way."""

    workload: str
    since: float


def one_at_a_time(platform: str) -> bool:
    """Whether loads exclude each other on a platform such as darwin/arm64."""
    return platform.partition("/")[0] == "darwin"


def may_start(platform: str, loads: Iterable[Load], now: float, policy: HealthPolicy) -> Decision:
    """Whether a load may start beside those under way.

    A load whose engine dies is to be left out by the caller. One that takes longer than any load does is not waited
    for: a load that nobody ends must not hold all others for ever.
    """
    if not one_at_a_time(platform):
        return Start()
    under_way = [load for load in loads if now - load.since < policy.longest_load_s]
    if not under_way:
        return Start()
    last = max(under_way, key=lambda load: load.since)
    return Wait(
        "LOADS_ONE_AT_A_TIME",
        f"{last.workload} is being loaded, and this platform loads one model at a time.",
        last.since + policy.longest_load_s - now,
    )

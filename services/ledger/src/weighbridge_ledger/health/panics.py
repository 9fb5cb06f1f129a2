"""Rest after the GPU's driver brought the system down. Pure; times are seconds since the epoch: they survive a boot."""

from weighbridge_ledger.health.decision import Decision, Start, Wait
from weighbridge_ledger.health.policy import HealthPolicy


def may_start(panicked_at: float | None, now: float, policy: HealthPolicy) -> Decision:
    """Whether a load may start: not within the rest after a panic.

    A model that panicked the system would do so again as soon as its engine is restarted, and again after the boot.
    Engines that run are left alone.

    Args:
        panicked_at: when the GPU's driver last brought the system down; None: it has not. A moment in the future (a
            clock that was set back) rests no longer than one of now.
        now: the wall clock.
        policy: the rest.
    """
    if panicked_at is None:
        return Start()
    left = min(panicked_at + policy.panic_rest_s - now, policy.panic_rest_s)
    if left <= 0:
        return Start()
    return Wait(
        "GPU_PANIC",
        f"The GPU's driver brought this machine down {max(0.0, now - panicked_at) / 60:.0f} min ago; loads start again "
        f"in {left / 60:.0f} min.",
        left,
    )

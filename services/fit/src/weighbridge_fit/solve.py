"""The largest workload that still runs, by bisection over the same plan and verdict that answer PlanModel."""

from collections.abc import Callable

# Caches grow in slabs of this many tokens, so a finer answer would promise nothing more.
CONTEXT_STEP = 256


def largest_context(runs: Callable[[int], bool], longest: int, step: int = CONTEXT_STEP) -> int:
    """The largest context up to `longest` tokens for which `runs` is true, 0 if there is none.

    `runs` must be monotone: true up to some context and false from there on. The answer is `longest` or a multiple of
    `step`; the next larger multiple does not run. Below one step, single tokens are not tried.
    """
    if longest < 1:
        return 0
    if runs(longest):
        return longest
    low, high = 0, -(-longest // step)  # low steps run (nothing asked), high steps do not
    while high - low > 1:
        middle = (low + high) // 2
        if runs(middle * step):
            low = middle
        else:
            high = middle
    return low * step

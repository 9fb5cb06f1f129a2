"""The largest workload that still runs, found with the same plan and verdict that answer PlanModel."""

from collections.abc import Callable, Sequence

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


def picture_sizes(aspect: tuple[int, int], step: int, sides: tuple[int, int]) -> list[tuple[int, int]]:
    """Widths and heights at an aspect, smallest first: the longer side in every multiple of `step`, the shorter one
    rounded up to a multiple, both within `sides` (smallest and largest, in pixels)."""
    long, short = max(aspect), min(aspect)
    if step < 1 or short < 1:
        return []
    sizes = []
    for longer in range(step, sides[1] + 1, step):
        shorter = -(-longer * short // (long * step)) * step
        if shorter >= sides[0]:
            sizes.append((longer, shorter) if aspect[0] >= aspect[1] else (shorter, longer))
    return sizes


def largest_picture(runs: Callable[[int, int], bool], sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The last of some sizes, smallest first, for which `runs` is true; (0, 0) if it is for none.

    It is tried from the largest down and never halved: a larger picture may run where a smaller one does not, because
    some numbers of tokens cost a mask that others do not.
    """
    return next((size for size in reversed(sizes) if runs(*size)), (0, 0))

"""A projection shared with a second device: that device's copy of its share of the rows.

The share is a multiple of 64 rows, and both devices have at least 64; projections of fewer than 128 rows are not
shared. The second device's weights are float16 copies with buffers for a bucket of 512 to 2,048 rows of input and
output; layers run one after the other, so one copy serves all projections of one shape. Source: the split of mlx-bun
(September 2026), with shares of 0.375 and 0.55.
"""

from dataclasses import dataclass

STEP = 64
SMALLEST = 2 * STEP
BUCKET = 512
LARGEST_BUCKET = 2048
HALF_BYTES = 2


@dataclass(frozen=True, slots=True, order=True)
class SharedShape:
    """One shape of projections that are shared. `matrices` 3 for a whole MLP, whose intermediate channels are divided:
    `outputs` are those, and the result is as wide as the input."""

    inputs: int
    outputs: int
    matrices: int = 1


def share(rows: int, fraction: float) -> int:
    """Rows that the second device takes, 0 where the projection is not shared."""
    if rows < SMALLEST:
        return 0
    return min(max(round(fraction * rows / STEP) * STEP, STEP), rows - STEP)


def copy_bytes(shape: SharedShape, fraction: float, prefill_step: int) -> int:
    """The second device's weights and buffers for one shape."""
    rows = share(shape.outputs, fraction)
    bucket = min(-(-prefill_step // BUCKET) * BUCKET, LARGEST_BUCKET)
    result = shape.inputs if shape.matrices > 1 else rows
    return HALF_BYTES * (shape.matrices * rows * shape.inputs + bucket * (shape.inputs + result)) if rows else 0

"""Trellis-quantised projections: codes walked along a trellis instead of groups with a zero point.

A matrix of `rows` x `coded` elements is stored as 32-bit words, k bits per element in blocks of 256 along `coded`, and
one float16 scale for each stored row: [rows, coded x k / 32], or for k = 3 interleaved as [coded / 512, rows, 48].
Gate and up projections are coded along their input, down projections are stored transposed and coded along their
output, so that `coded` is the hidden size in all three. Source: the trellis format of mlx-bun (September 2026): state
of 12 bits, k 2, 3 or 4.

While a prompt is read one matrix at a time is expanded to the activation type; a few rows are multiplied without that,
with partial sums from 128 parts of the input in float32.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from weighbridge_fit.facts import TensorFact

BITS = frozenset({2, 3, 4})
BLOCK = 256
INTERLEAVED_BLOCKS = 2 * BLOCK
INTERLEAVED_WORDS = 48
WORD_BITS = 32
# More rows than this are multiplied by the expanded matrix.
MOST_SCATTERED_ROWS = 8
SCATTER_PARTS = 128
FLOAT32_BYTES = 4

_PROJECTIONS = (".gate_proj", ".up_proj", ".down_proj")


@dataclass(frozen=True, slots=True)
class TrellisMatrix:
    """One trellis-coded matrix. `bits` 0: stored in a way that is not known."""

    path: str
    rows: int
    coded: int
    bits: int

    @property
    def elements(self) -> int:
        """Elements once expanded."""
        return self.rows * self.coded


def matrices(tensors: Iterable[TensorFact], hidden_size: int) -> list[TrellisMatrix]:
    """The trellis-coded projections among a model's tensors: 32-bit words with a single row of float16 scales (affine
    quantisation has a scale for each group)."""
    by_name = {tensor.name: tensor for tensor in tensors}
    found = []
    for name, scales in by_name.items():
        path = name.removesuffix(".scales")
        words = by_name.get(f"{path}.weight")
        if path == name or len(scales.shape) != 1 or scales.dtype != "F16" or words is None or words.dtype != "U32":
            continue
        rows = scales.shape[0]
        bits = _bits(words.shape, rows, hidden_size) if path.endswith(_PROJECTIONS) else 0
        found.append(TrellisMatrix(path, rows, hidden_size, bits))
    return found


def scatter_bytes(rows: int, outputs: int) -> int:
    """Partial sums of a product of few rows with a transposed matrix."""
    return min(rows, MOST_SCATTERED_ROWS) * SCATTER_PARTS * outputs * FLOAT32_BYTES


def _bits(shape: tuple[int, ...], rows: int, coded: int) -> int:
    """Bits of one element, 0 for a shape that the format does not have."""
    if len(shape) == 3:
        interleaved = shape == (coded // INTERLEAVED_BLOCKS, rows, INTERLEAVED_WORDS)
        return 3 if interleaved and coded % INTERLEAVED_BLOCKS == 0 else 0
    if len(shape) != 2 or shape[0] != rows or not coded or coded % BLOCK:
        return 0
    bits, rest = divmod(shape[1] * WORD_BITS, coded)
    return bits if not rest and bits in BITS else 0

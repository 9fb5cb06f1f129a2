"""Context buffers of ds4 for DeepSeek V4: what its start line "context buffers X MiB" counts, and what it leaves out.

ds4 allocates a whole context when it starts. Every layer keeps a ring of raw rows; a layer with compression ratio r
keeps one row for r tokens besides, and a layer of ratio 4 an indexer key with each of those. Source: the allocator of
antirez/ds4 8d57664 (2026-05-21) and 7e3dbef (2026-07-23); equal to the public logs of both to 0.01 MiB (ds4 issues
554, 563, 812).
"""

from dataclasses import dataclass

FLOAT32_BYTES = 4
HALF_BYTES = 2
RAW_ROW_STEP = 256
MAX_RAW_ROWS = 8192
# Each compressed cache is made with this many rows more than the context fills.
SPARE_ROWS = 2
# The ratio whose layers have an indexer and compress over two windows that overlap.
INDEXED_RATIO = 4


@dataclass(frozen=True, slots=True)
class ContextLayers:
    """The measures that decide a context's size: a compression ratio for each layer (0: none), elements of one row and
    of one indexer key, and the sliding window in tokens."""

    ratios: tuple[int, ...]
    row_size: int
    indexer_size: int
    window_tokens: int

    @property
    def finest_ratio(self) -> int:
        """The smallest ratio: its layers have the most rows. 1 where nothing is compressed."""
        return min((ratio for ratio in self.ratios if ratio), default=1)


@dataclass(frozen=True, slots=True)
class ContextBuffers:
    """What one session's context takes. `scratch_buffer_bytes` is the larger half of the scratch: one allocation."""

    raw_rows: int
    compressed_rows: int
    raw_bytes: int
    compressed_bytes: int
    scratch_bytes: int
    scratch_buffer_bytes: int

    @property
    def cache_bytes(self) -> int:
        """Keys and values: raw and compressed rows."""
        return self.raw_bytes + self.compressed_bytes

    @property
    def total_bytes(self) -> int:
        """What ds4 prints as context buffers."""
        return self.cache_bytes + self.scratch_bytes


def gpu_context(
    layers: ContextLayers, context_tokens: int, chunk_tokens: int, *, row_element_bytes: int, staging: bool
) -> ContextBuffers:
    """One session's buffers on Metal or CUDA.

    Raw rows and indexer keys are float32; compressed rows have `row_element_bytes` (4, or 2 on Metal since July 2026).
    `staging` adds the rows that builds since July 2026 compress a chunk into.
    """
    chunk = min(context_tokens, chunk_tokens)
    window = min(layers.window_tokens, context_tokens)
    ring = -(-min(window + chunk, context_tokens) // RAW_ROW_STEP) * RAW_ROW_STEP
    raw_rows = max(min(ring, MAX_RAW_ROWS), window)
    finest = layers.finest_ratio
    rows = context_tokens // finest + SPARE_ROWS
    score_bytes = rows * chunk * FLOAT32_BYTES
    staged = (chunk // finest + SPARE_ROWS) * layers.row_size * FLOAT32_BYTES if staging else 0
    return ContextBuffers(
        raw_rows=raw_rows,
        compressed_rows=rows,
        raw_bytes=len(layers.ratios) * raw_rows * layers.row_size * FLOAT32_BYTES,
        compressed_bytes=_compressed_bytes(layers, context_tokens, row_element_bytes),
        scratch_bytes=2 * score_bytes + staged,
        scratch_buffer_bytes=score_bytes,
    )


def cpu_context(layers: ContextLayers, context_tokens: int) -> ContextBuffers:
    """One session's buffers on the processor: a raw ring of one window, everything in float32, one token at a time."""
    raw_rows = min(layers.window_tokens, context_tokens)
    rows = context_tokens // layers.finest_ratio + SPARE_ROWS
    scores = (raw_rows + rows) * FLOAT32_BYTES
    return ContextBuffers(
        raw_rows=raw_rows,
        compressed_rows=rows,
        raw_bytes=len(layers.ratios) * raw_rows * layers.row_size * FLOAT32_BYTES,
        compressed_bytes=_compressed_bytes(layers, context_tokens, FLOAT32_BYTES),
        scratch_bytes=scores + rows * FLOAT32_BYTES + rows,
        scratch_buffer_bytes=scores,
    )


def compressor_state_bytes(layers: ContextLayers) -> int:
    """The unfinished windows of every compressing layer, which the printed figure leaves out: values and scores of one
    window (of two that overlap, in double width, at ratio 4), and the indexer's beside them."""
    total = 0
    for ratio in filter(None, layers.ratios):
        overlap = 2 if ratio == INDEXED_RATIO else 1
        elements = layers.row_size + (layers.indexer_size if ratio == INDEXED_RATIO else 0)
        total += 2 * overlap * ratio * overlap * elements * FLOAT32_BYTES
    return total


def checkpoint_bytes(layers: ContextLayers, tokens: int, vocab_size: int) -> int:
    """One saved conversation on disk: one raw window, the rows and the states in float32 whatever the live cache is,
    and one row of logits. Equal to published sizes within 0.2 MiB (ds4 issue 157: 291.80 MiB at 20,480 tokens)."""
    window = len(layers.ratios) * min(layers.window_tokens, tokens) * layers.row_size * FLOAT32_BYTES
    logits = vocab_size * FLOAT32_BYTES
    return window + _compressed_bytes(layers, tokens, FLOAT32_BYTES) + compressor_state_bytes(layers) + logits


def _compressed_bytes(layers: ContextLayers, context_tokens: int, row_element_bytes: int) -> int:
    total = 0
    for ratio in filter(None, layers.ratios):
        rows = context_tokens // ratio + SPARE_ROWS
        total += rows * layers.row_size * row_element_bytes
        if ratio == INDEXED_RATIO:
            total += rows * layers.indexer_size * FLOAT32_BYTES
    return total

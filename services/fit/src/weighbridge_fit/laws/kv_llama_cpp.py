"""llama.cpp's caches: everything is allocated at load, in cells of one token, for all sequences together.

Full-attention layers hold the whole context, rounded up to 256 cells. Sliding layers hold the windows of all sequences
and one physical batch more, rounded up likewise and never above the full size. Latent layers hold keys alone: values
are read out of them. Recurrent layers hold one state for each sequence in float32, whatever type keys and values have.

Sources: `llama_kv_cache`, `llama_kv_cache_iswa` (padding since issue 17037), `llama_kv_cache_dsa`,
`llama_memory_recurrent`, `llama_hparams::n_embd_r/n_embd_s` of llama.cpp, read in November 2026; cell counts and sizes
as logged in issues 23792 and 27680 and for gemma3n.
"""

from collections.abc import Sequence

from weighbridge_fit.laws.kv_layers import LayerRow
from weighbridge_fit.laws.kv_sum import CacheBytes
from weighbridge_fit.laws.kv_types import KvType

PADDING_CELLS = 256
# --ubatch-size
DEFAULT_MICRO_BATCH = 512
STATE_BYTES = 4


def padded(cells: int) -> int:
    """Cells rounded up as the cache rounds them."""
    return -(-cells // PADDING_CELLS) * PADDING_CELLS


def full_cells(context_tokens: int, sequences: int) -> int:
    """Cells of a full-attention layer."""
    return padded(context_tokens * sequences)


def window_cells(window_tokens: int, context_tokens: int, sequences: int, micro_batch: int) -> int:
    """Cells of a sliding layer."""
    return padded(min(full_cells(context_tokens, sequences), window_tokens * sequences + micro_batch))


def cache_bytes(
    rows: Sequence[LayerRow],
    context_tokens: int,
    sequences: int,
    kv_type: KvType,
    micro_batch: int = DEFAULT_MICRO_BATCH,
) -> CacheBytes:
    """All layers' caches in one buffer shared by the sequences (--kv-unified, the server's default)."""
    total = CacheBytes()
    full = full_cells(context_tokens, sequences)
    for row in rows:
        cells = full
        if row.window_tokens:
            cells = window_cells(row.window_tokens, context_tokens, sequences, micro_batch)
        pair = cells * (kv_type.row_bytes(row.key) + kv_type.row_bytes(row.value))
        latent = full * (kv_type.row_bytes(row.latent) + kv_type.row_bytes(row.indexer))
        state = sequences * STATE_BYTES * (row.state + row.convolution)
        total = total + CacheBytes(0 if row.window_tokens else pair, pair if row.window_tokens else 0, latent, state)
    return total

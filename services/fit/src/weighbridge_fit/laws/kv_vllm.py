"""vLLM's paged cache: one pool of equal pages, taken by sequences in blocks of tokens.

Every attention layer, sliding ones too, is charged for the whole context: all layers of one model share one page size,
and the pool's capacity is told in tokens that all of them hold. Where layers keep a state instead, the block grows
until a page of attention holds one, and each sequence takes one page for each such layer.

Sources: `kv_cache_utils` and `HybridAttentionMambaModelConfig` of vLLM, read in November 2026; its own log lines for
gpt-oss-120b (hf-mem issue 60), for blocks of 784, 1,056 and 672 tokens (Qwen3.5 27B and 35B-A3B, vllm issue 24280), and
the H100 runs of llm-d-planner issue 205.
"""

from weighbridge_fit.geometry import ModelGeometry
from weighbridge_fit.laws.kv_layers import LayerRow, layer_rows
from weighbridge_fit.laws.kv_sum import CacheBytes
from weighbridge_fit.laws.kv_types import KvType

BLOCK_TOKENS = 16
# The indexer's key is float8 with one float32 scale for each 128 elements, whatever type the rest has.
INDEXER_SCALE_ELEMENTS = 128
INDEXER_SCALE_BYTES = 4
FLOAT32_BYTES = 4
# Models whose config asks for states in float32 (mamba_ssm_dtype); those of all others are in the activation type.
FLOAT32_STATES = frozenset({"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen35", "qwen35moe"})


def state_width(geometry: ModelGeometry) -> int:
    """Bytes of one element of a state."""
    return FLOAT32_BYTES if geometry.model_type in FLOAT32_STATES else activation_width(geometry)


def activation_width(geometry: ModelGeometry) -> int:
    """Bytes of one activation element: float32 models are loaded in half precision."""
    return min(geometry.activation_bytes or 2, 2)


def indexer_bytes(elements: int) -> int:
    """One token's indexer key of one layer."""
    return elements + -(-elements // INDEXER_SCALE_ELEMENTS) * INDEXER_SCALE_BYTES


def block_tokens(geometry: ModelGeometry, kv_type: KvType, state_bytes: int = 0) -> int:
    """Tokens of one block: 16, or as many more as a page needs to hold one layer's state. `state_bytes` of one element,
    0: as the model's config asks."""
    rows, widths = layer_rows(geometry), (state_bytes or state_width(geometry), activation_width(geometry))
    state = max((_state_bytes(row, *widths) for row in rows), default=0)
    page = max((_token_bytes(row, kv_type) for row in rows), default=0)
    if not state or not page:
        return BLOCK_TOKENS
    return -(-state // (page * BLOCK_TOKENS)) * BLOCK_TOKENS


def cache_bytes(
    geometry: ModelGeometry, context_tokens: int, sequences: int, kv_type: KvType, state_bytes: int = 0
) -> CacheBytes:
    """What `sequences` full contexts take of the pool. `state_bytes` of one element of a state, 0: as the model's
    config asks."""
    rows, widths = layer_rows(geometry), (state_bytes or state_width(geometry), activation_width(geometry))
    block = block_tokens(geometry, kv_type, state_bytes)
    held = -(-context_tokens // block) * block
    page = block * max((_token_bytes(row, kv_type) for row in rows), default=0)
    total = CacheBytes()
    for row in rows:
        state = _state_bytes(row, *widths)
        pair = held * (kv_type.row_bytes(row.key) + kv_type.row_bytes(row.value))
        total = total + CacheBytes(
            growing=0 if row.window_tokens else pair,
            windowed=pair if row.window_tokens else 0,
            latent=held * (kv_type.row_bytes(row.latent) + (indexer_bytes(row.indexer) if row.indexer else 0)),
            state=(max(state, page) if state else 0) + row.cross * kv_type.row_bytes(1),
        )
    return total.times(sequences)


def pool_bytes(card_bytes: int, share: float, weight_bytes: int, activation_bytes: int, other_bytes: int) -> int:
    """What is left for the pool of the share that vLLM takes of a card: all but weights, the activations of its largest
    step, and what CUDA holds outside torch. 0 where nothing is left: vLLM refuses to start then."""
    return max(0, int(card_bytes * share) - weight_bytes - activation_bytes - other_bytes)


def pool_tokens(pool_bytes: int, bytes_per_token: int) -> int:
    """Tokens that a pool holds: whole blocks, as vLLM logs its cache size."""
    return pool_bytes // (bytes_per_token * BLOCK_TOKENS) * BLOCK_TOKENS


def _token_bytes(row: LayerRow, kv_type: KvType) -> int:
    return kv_type.row_bytes(row.key) + kv_type.row_bytes(row.value) + kv_type.row_bytes(row.latent)


def _state_bytes(row: LayerRow, width: int, activation_bytes: int) -> int:
    return row.state * width + row.convolution * activation_bytes

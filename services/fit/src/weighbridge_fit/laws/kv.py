"""The one place where keys, values and states are priced: what layers keep (`kv_layers`), in which type (`kv_types`),
under which engine's law (`kv_mlx`, `kv_llama_cpp`, `kv_vllm`).

The size of a cache is a property of a model and an engine, not of a model: gpt-oss-20b with 32 contexts of 8,192 tokens
takes 6.09 GiB by its windows, and 12.00 GiB of vLLM's pool.
"""

from enum import Enum

from weighbridge_fit.geometry import ModelGeometry
from weighbridge_fit.laws import kv_llama_cpp, kv_mlx, kv_vllm
from weighbridge_fit.laws.kv_layers import layer_row, layer_rows
from weighbridge_fit.laws.kv_sum import CacheBytes
from weighbridge_fit.laws.kv_types import KvType, plain

MLX_PREFILL_STEP = 2048


class KvLaw(Enum):
    """Whose way of storing keys and values."""

    MLX = "mlx"
    LLAMA_CPP = "llama_cpp"
    VLLM = "vllm"


def unquantised(geometry: ModelGeometry) -> KvType:
    """Keys and values in the activation type; two bytes where the model does not say."""
    return plain(geometry.activation_bytes or 2)


def layer_bytes_per_token(geometry: ModelGeometry, layer_index: int, kv_type: KvType | None = None) -> int:
    """Bytes of one more token in one layer: key, value, latent row, indexer key. `kv_type` None: not quantised."""
    stored = kv_type or unquantised(geometry)
    row = layer_row(geometry, layer_index)
    return sum(stored.row_bytes(elements) for elements in (row.key, row.value, row.latent, row.indexer))


def cache_bytes(
    geometry: ModelGeometry,
    law: KvLaw,
    context_tokens: int,
    sequences: int = 1,
    kv_type: KvType | None = None,
    micro_batch: int = 0,
) -> CacheBytes:
    """Bytes of all layers' caches by kind, for `sequences` contexts of `context_tokens` each.

    `micro_batch`: tokens computed at once (MLX: the prefill step); 0 is the engine's default. Exact where the engine
    allocates at load (llama.cpp, vLLM); for MLX what is held once the context is full.
    """
    stored = kv_type or unquantised(geometry)
    if law is KvLaw.LLAMA_CPP:
        batch = micro_batch or kv_llama_cpp.DEFAULT_MICRO_BATCH
        return kv_llama_cpp.cache_bytes(layer_rows(geometry), context_tokens, sequences, stored, batch)
    if law is KvLaw.VLLM:
        return kv_vllm.cache_bytes(geometry, context_tokens, sequences, stored)
    return kv_mlx.cache_bytes(geometry, context_tokens, sequences, stored, micro_batch or MLX_PREFILL_STEP)

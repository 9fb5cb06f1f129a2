"""What reading a prompt takes beside the caches it fills, for engines that are priced by law alone.

MLX holds, for each token of the context, the prompt's embedding and, where no fused kernel exists for the head size,
one layer's scores of the chunk against it. Source: the peaks of mlx-lm 0.31.3 on an M5 Max from 32k to 192k tokens
(mlx-lm issue 1480), which this reproduces within 2 %.

llama.cpp reserves its compute buffer at load, for one physical batch: the logits of all its tokens and its activations,
in float32; and on the host the attention mask. Source: the buffers it logs, of Llama 3 8B (258.50 MiB), Qwen2.5 7B and
GLM-4 9B (304.00 MiB), to the byte.
"""

from weighbridge_fit.geometry import ModelGeometry

FLOAT32_BYTES = 4


def mlx_embedding_bytes(geometry: ModelGeometry, context_tokens: int) -> int:
    """The prompt's embeddings."""
    return context_tokens * geometry.hidden_size * (geometry.activation_bytes or 2)


def mlx_score_bytes(geometry: ModelGeometry, chunk: int, context_tokens: int) -> int:
    """Scores of one layer: heads x chunk x context."""
    return geometry.attention_heads * chunk * context_tokens * (geometry.activation_bytes or 2)


def llama_cpp_compute_bytes(geometry: ModelGeometry, micro_batch: int) -> int:
    """Logits and embeddings of a physical batch."""
    return micro_batch * (geometry.vocab_size + geometry.hidden_size) * FLOAT32_BYTES


def llama_cpp_host_compute_bytes(geometry: ModelGeometry, micro_batch: int, cells: int) -> int:
    """The attention mask of a physical batch over all cells, and its input embeddings."""
    return micro_batch * (cells + geometry.hidden_size) * FLOAT32_BYTES


def llama_cpp_score_bytes(geometry: ModelGeometry, micro_batch: int, cells: int) -> int:
    """Scores of one layer without flash attention, in float32."""
    return geometry.attention_heads * micro_batch * cells * FLOAT32_BYTES

"""In which types engines store keys and values, and what a row of elements costs in each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvType:
    """`block_elements` elements are stored in `block_bytes` bytes. Rows are whole blocks."""

    name: str
    block_elements: int
    block_bytes: int

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row, its last block filled up."""
        return -(-elements // self.block_elements) * self.block_bytes

    def divides(self, elements: int) -> bool:
        """Whether a row of so many elements is whole blocks."""
        return elements % self.block_elements == 0


def plain(element_bytes: int) -> KvType:
    """Unquantised, in the activation type."""
    return KvType({1: "f8", 2: "f16", 4: "f32", 8: "f64"}.get(element_bytes, str(element_bytes)), 1, element_bytes)


def mlx_quantised(bits: int, group_size: int, activation_bytes: int) -> KvType:
    """A group in `bits` bits each, and its scale and zero point in the activation type.

    Source: `QuantizedKVCache` of mlx-lm 0.32.2, equal to the real objects' `nbytes`.
    """
    return KvType(f"{bits}/{group_size}", group_size, group_size * bits // 8 + 2 * activation_bytes)


LLAMA_CPP_TYPES = {
    kind.name: kind
    for kind in (
        KvType("f32", 1, 4),
        KvType("f16", 1, 2),
        KvType("bf16", 1, 2),
        KvType("q8_0", 32, 34),
        KvType("q4_0", 32, 18),
        KvType("q4_1", 32, 20),
        KvType("iq4_nl", 32, 18),
        KvType("q5_0", 32, 22),
        KvType("q5_1", 32, 24),
    )
}
"""What --cache-type-k takes, with the block sizes of ggml (gguf-py 0.19)."""

VLLM_TYPES = {
    kind.name: kind
    for kind in (
        KvType("bfloat16", 1, 2),
        KvType("float16", 1, 2),
        KvType("fp8", 1, 1),
        KvType("fp8_e4m3", 1, 1),
        KvType("fp8_e5m2", 1, 1),
    )
}
"""What --kv-cache-dtype takes beside auto, which is the activation type."""

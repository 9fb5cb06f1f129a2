"""LoRA and DoRA adapters that are mounted, not merged: mlx-lm keeps their matrices beside the base's.

A LoRA target computes `y + scale x (x A) B`, A and B usually in float32, which makes x and the product float32 for a
moment. A DoRA target computes with the whole matrix: it dequantises the base's, adds the product of its factors in
float32, and takes the norm of each row, at every call. Source: `LoRALinear` and `DoRALinear` of mlx-lm 0.32.2.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from weighbridge_fit.facts import TensorFact

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """One projection that an adapter changes. `magnitudes`: a DoRA target's row norms are there."""

    path: str
    inputs: int
    outputs: int
    rank: int
    magnitudes: bool


def targets(tensors: Iterable[TensorFact]) -> list[AdapterTarget]:
    """The projections that an adapter's tensors are for; empty for what is no adapter of mlx-lm. Raises ValueError with
    a sentence for pairs that do not belong together."""
    by_name = {tensor.name: tensor for tensor in tensors}
    found = []
    for name, first in by_name.items():
        path = name.removesuffix(".lora_a")
        if path == name:
            continue
        second = by_name.get(f"{path}.lora_b")
        if second is None:
            raise ValueError(f"{path} has a lora_a and no lora_b")
        if len(first.shape) != 2 or len(second.shape) not in (2, 3):
            raise ValueError(f"{path} has factors that are no matrices")
        if len(second.shape) == 3:
            # Stacked experts: A of all experts below each other, [experts x rank, in], and B [experts, out, rank].
            inputs, rank = first.shape[1], first.shape[0] // max(second.shape[0], 1)
            outputs, inner = second.shape[1], second.shape[2]
        else:
            (inputs, rank), (inner, outputs) = first.shape, second.shape
        if rank != inner:
            raise ValueError(f"{path} has factors of ranks {rank} and {inner}")
        found.append(AdapterTarget(path, inputs, outputs, rank, f"{path}.m" in by_name))
    return found


def delta_bytes(target: AdapterTarget, rows: int, copies: float) -> float:
    """What one target's residual holds for a chunk: input and product in float32, `copies` of them."""
    return rows * (target.inputs + target.outputs) * FLOAT32_BYTES * copies


def matrix_bytes(target: AdapterTarget, copies: float) -> float:
    """What one DoRA target holds at every call: its matrix in float32, `copies` of it."""
    return target.inputs * target.outputs * FLOAT32_BYTES * copies if target.magnitudes else 0.0

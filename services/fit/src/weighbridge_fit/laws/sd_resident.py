"""What stable-diffusion.cpp keeps of each weight: the conversions that it makes while it loads, tensor by tensor.

Source: the engine's own constructors (Linear, Embedding, Conv2d, norms) and its table of unused tensors, in the tree
that stable-diffusion-cpp-python 0.4.7 carries; compared in November 2026 with the sizes that this build allocates,
equal to the byte for every architecture, file type and retyping in the calibration rows.
"""

import re
from dataclasses import dataclass
from enum import Enum
from math import prod

from weighbridge_fit.facts import TensorFact

CPU_ALIGNMENT = 32
"""Bytes that each tensor is padded to in host memory (ggml's TENSOR_ALIGNMENT), on the CPU and on Metal."""
CARD_ALIGNMENT = 128
"""The same on CUDA."""
WIDEST_ALIGNMENT = 256
"""The widest that a Vulkan driver asks for (minStorageBufferOffsetAlignment is at most 256 by its specification)."""

BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "I32": (1, 4),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ3_XXS": (256, 98),
    "IQ1_S": (256, 50),
    "IQ4_NL": (32, 18),
    "IQ3_S": (256, 110),
    "IQ2_S": (256, 82),
    "IQ4_XS": (256, 136),
    "IQ1_M": (256, 56),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
}
"""Elements and bytes of one block of each type that the engine computes with (ggml's type traits)."""

_WIDENED = {
    "F64": "F32",
    "F8_E4M3": "F16",
    "F8_E5M2": "F16",
    "I64": "I32",
}
"""Types that the engine converts on reading, whatever the tensor is for."""

_INTEGERS = frozenset({"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"})

_ROWS_READ = frozenset({"F16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"})
"""Types that a lookup table is kept in; any other becomes F32."""

_LOOKUP = re.compile(
    r"(?:token_embedding|embed_tokens|token_embd|\bshared|relative_attention_bias|attn_rel_b)\.weight$"
)
_ALWAYS_FLOAT = re.compile(
    r"(?:position_embedding\.weight|position_embd\.weight|text_projection|positional_embedding|_pad_token)$"
)
_SD3_FLOAT = re.compile(r"(?:\bpos_embed\b|\bcontext_embedder\.|\b[ty]_embedder\.mlp\.|\bfinal_layer\.linear\.)")
_ZIMAGE_FLOAT = re.compile(r"(?:\bt_embedder\.mlp\.|\bfinal_layer\.linear\.)")
_WAN_FLOAT = re.compile(r"\bmodulation$")

_KEPT = (
    "img_in.",
    "txt_in.",
    "time_in.",
    "vector_in.",
    "guidance_in.",
    "final_layer.",
    "x_embedder.",
    "t_embedder.",
    "y_embedder.",
    "pos_embed",
    "context_embedder.",
    "time_embed.",
    "label_emb.",
    "embedding",
)
"""Tensors whose names contain one of these are never retyped."""

_UNUSED = re.compile(
    r"""(?x)^(?:
      betas | alphas_cumprod | sqrt_ | log_one_minus | posterior_ | logvar$ | model_ema\. | embedding_manager
      | denoiser\.sigmas | ztsnr | edm_vpred\. | v_pred$ | cond_stage_model\.model\.logit_scale
      | conditioner\.embedders\.[01]\.model\.logit_scale | (?:model\.diffusion_model|unet)\.time_embedding\.cond_proj\.
      | text_encoders\.t5xxl\.transformer\.encoder\.embed_tokens\. | text_encoders\.llm\.(?:output\.weight|lm_head\.)
      | first_stage_model\.bn\.
    )| (?:position_ids|logit_scale|rope_freqs\.weight|num_batches_tracked|spiece_model)$"""
)


class Family(Enum):
    """Architectures that keep some weights in F32 whatever the file says; names are those of the diffusion model."""

    OTHER = "other"
    SD3 = "sd3"
    ZIMAGE = "zimage"
    WAN = "wan"


_FLOAT = {Family.SD3: _SD3_FLOAT, Family.ZIMAGE: _ZIMAGE_FLOAT, Family.WAN: _WAN_FLOAT}


def family_of(architecture: str) -> Family:
    """The family whose exceptions hold for an architecture."""
    return next(
        (family for family in (Family.SD3, Family.ZIMAGE, Family.WAN) if architecture.startswith(family.value)),
        Family.SD3 if architecture.startswith("sd35") else Family.OTHER,
    )


@dataclass(frozen=True, slots=True)
class Retyping:
    """Types that weights are converted to while they load: one for all, and by pattern (the first that is found in the
    engine's name decides)."""

    to: str = ""
    rules: tuple[tuple[re.Pattern[str], str], ...] = ()

    def type_for(self, name: str) -> str:
        """What a tensor of this name is to become, "" for what it is."""
        return next((to for pattern, to in self.rules if pattern.search(name)), self.to)


AS_STORED = Retyping()


def is_loaded(name: str) -> bool:
    """Whether the engine opens a tensor of this name (the engine's) at all."""
    return _UNUSED.search(name) is None


def resident_type(name: str, dtype: str, shape: tuple[int, ...], row: int, family: Family, retyping: Retyping) -> str:
    """The type that a tensor is held in.

    Args:
        name: as the engine calls it, prefix of its component included.
        dtype: the file's word for the stored type.
        shape: its dimensions, in either order.
        row: its fastest dimension, in elements: what the engine quantises along.
        family: whose exceptions hold.
        retyping: conversions that are asked for.
    """
    if len(shape) <= 1 or name.endswith(".bias"):
        return "F32"
    if len(shape) >= 4:
        return "F16"
    forced = _FLOAT.get(family)
    if _ALWAYS_FLOAT.search(name) or (forced is not None and forced.search(name)):
        return "F32"
    kept = _converted(name, _WIDENED.get(dtype, dtype), row, retyping)
    if _LOOKUP.search(name) and kept not in _ROWS_READ:
        return "F32"
    elements, _ = BLOCKS.get(kept, (0, 0))
    return kept if elements and row % elements == 0 else "F32"


def resident_bytes(
    tensor: TensorFact,
    name: str,
    row: int,
    family: Family = Family.OTHER,
    retyping: Retyping = AS_STORED,
    alignment: int = CPU_ALIGNMENT,
) -> int:
    """Bytes that one tensor holds in memory, padding included; 0 for one that is not opened. `name`, `row`: see
    `resident_type`."""
    # Scalars and integers are indexes, counters and switches; the engine has no tensor for them.
    if not is_loaded(name) or not tensor.shape or tensor.dtype in _INTEGERS:
        return 0
    elements, size = BLOCKS[resident_type(name, tensor.dtype, tensor.shape, row, family, retyping)]
    return _padded(-(-prod(tensor.shape) // elements) * size, alignment)


def _converted(name: str, kept: str, row: int, retyping: Retyping) -> str:
    """The type after `--type` and `--tensor-type-rules`: what does not divide into blocks stays as it is."""
    to = retyping.type_for(name)
    if not to or row % BLOCKS[to][0] or name.endswith((".bias", ".scale")) or any(part in name for part in _KEPT):
        return kept
    return to


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment

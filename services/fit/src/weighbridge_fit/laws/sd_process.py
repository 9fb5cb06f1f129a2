"""What an sd-server process holds beside weights and working buffers, on the CPU: scratch, base, loading.

Measured on the unmodified server; see `docs/pricing/stable-diffusion-buffers.md`.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from types import MappingProxyType

from weighbridge_fit.calibration.sd import stable_diffusion
from weighbridge_fit.laws.sd_shapes import (
    ARCHITECTURES,
    BufferOptions,
    RenderShape,
    TextRule,
    attention_tokens,
    context_tokens,
    encoder_tokens,
    image_tokens,
)
from weighbridge_fit.lines import NOTHING, Range

WORK_ELEMENT_BYTES: Mapping[str, float] = MappingProxyType(
    {"F32": 0.0, "F16": 2.0, "BF16": 2.0, "F8_E4M3": 2.0, "F8_E5M2": 2.0}
)
"""Bytes per input element of a product with weights of a type: the type that ggml-cpu converts the input to."""
BLOCK_ELEMENT_BYTES, SUPERBLOCK_ELEMENT_BYTES = 34 / 32, 292 / 256
"""Inputs of products with Q4_0 to Q8_0 become Q8_0 (34 bytes for 32), of those with K-quants Q8_K (292 for 256)."""
WORK_HEADER_BYTES = 128
DIRECT_CONVOLUTION_BYTES = 16 * 1024 * 1024
"""Patches that a direct convolution gathers at once (`GGML_IM2COL_WORK_SIZE`)."""


def cpu_work_bytes(
    architecture: str, weight_type: str, shape: RenderShape, options: BufferOptions | None = None
) -> Range:
    """ggml-cpu's scratch: it is kept once it has grown, and no log line names it. Nothing on a card.

    `weight_type` is the type of the linear weights in memory, as GGUF names it. KeyError for an unknown architecture;
    an unknown type is priced as half precision, the most that any type needs.
    """
    options = options or BufferOptions()
    law, figures = stable_diffusion().work[architecture], stable_diffusion().figures
    least = figures["work_flash" if options.flash_attention else "work_plain"]
    per_element = _element_bytes(weight_type)
    if not per_element and not options.diffusion_conv_direct and not options.vae_conv_direct:
        return least
    images, context = image_tokens(architecture, shape), context_tokens(architecture, shape, options.vision)
    tokens = attention_tokens(architecture, images, context) if law.joint else images
    if ARCHITECTURES[architecture].text is TextRule.CLIP_AND_T5:
        tokens = max(images, context)
    elements = max(
        law.row_elements * tokens,
        law.encoder_row_elements * encoder_tokens(architecture, shape, options.vision),
    )
    size = ceil(per_element * elements) + WORK_HEADER_BYTES
    if options.diffusion_conv_direct or options.vae_conv_direct:
        # Models without a two-dimensional convolution have nothing to gather.
        direct = max(size, DIRECT_CONVOLUTION_BYTES + WORK_HEADER_BYTES)
        return Range(size, direct, direct).cover(least)
    return Range.exactly(size).cover(least)


def _element_bytes(weight_type: str) -> float:
    name = weight_type.upper()
    if name in WORK_ELEMENT_BYTES:
        return WORK_ELEMENT_BYTES[name]
    if name.startswith(("Q", "IQ")):
        return SUPERBLOCK_ELEMENT_BYTES if "_K" in name or name.startswith("IQ") else BLOCK_ELEMENT_BYTES
    return WORK_ELEMENT_BYTES["F16"]


def process_base_bytes(architecture: str, retyped: bool = False) -> Range:
    """The process after loading, less its weights: code, libraries, the tokenizer's tables.

    Qwen's and Mistral's byte-pair tables are twice those of CLIP and T5. `retyped`: `--type` leaves the conversion
    buffers of its threads behind.
    """
    figures = stable_diffusion().figures
    large = ARCHITECTURES[architecture].text in (TextRule.PADDED_LLM, TextRule.LLM, TextRule.BLOCKED_LLM)
    base = figures["base_language_model" if large else "base_clip_t5"]
    return base + figures["retyping_left"] if retyped else base


def render_overhead_bytes() -> Range:
    """What a first render leaves in the heap beside its buffers and scratch: pixels, latents, the answer.

    Holds for a server that is started with MALLOC_ARENA_MAX=1 and MALLOC_MMAP_THRESHOLD_=1048576, and for a first
    render of any. Without both further renders leave more: see `heap_growth_bytes`.
    """
    return stable_diffusion().figures["render"]


def heap_growth_bytes(text: Range) -> Range:
    """What further renders add where malloc is left to itself (glibc): up to eight times the text encoder's buffer, if
    it is small enough to come from a heap at all. It stays in a heap of each thread, or between holes of the one that
    they share: glibc takes from a heap what is smaller than blocks that were freed before, unless a threshold is set.
    """
    limit = 32 * 1024 * 1024
    if text.expected >= limit:
        return NOTHING
    return Range(0, 0, 8 * (text.high + 2 * 1024 * 1024))


def load_transient_bytes(converted: Sequence[int], threads: int) -> Range:
    """What loading holds on top of the finished weights: a buffer per thread, as large as the largest tensor whose type
    changes on its way into memory. `converted` are those tensors' sizes in the file, as read.

    Whether the threads meet at their largest tensors is chance: at best one does, at worst all do.
    """
    largest = sorted(converted, reverse=True)[: max(1, threads)]
    if not largest:
        return NOTHING
    return Range(0, largest[0], sum(largest))

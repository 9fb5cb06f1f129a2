"""DeepSeek V4 Flash and V4.1 Flash as ds4's own files lay them out: every tensor's name, type and shape.

V4 Flash is what ds4 demands when it binds tensors (antirez/ds4 8d57664, 2026-05-21), and with a header of 5,335,588
bytes it reproduces the published files to the byte. Of V4.1 the totals are public and its layout is not (September
2026): its experts, its tables and the sums are exact, how the rest is cut into tensors is ours.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

Mix = Literal["q2", "q4", "mxfp4"]

TYPES: dict[str, tuple[int, int, int]] = {
    # Type number in GGUF, then elements and bytes of one block.
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q4_K": (12, 256, 144),
    "IQ2_XXS": (16, 256, 66),
    "I8": (24, 1, 1),
    "I32": (26, 1, 4),
    "MXFP4": (39, 32, 17),
}

ALIGNMENT = 32
"""Of tensors in a GGUF file that says nothing of it."""

LAYERS, HIDDEN, VOCABULARY = 43, 4096, 129_280
HEADS, HEAD_SIZE = 64, 512
QUERY_RANK, OUTPUT_RANK, OUTPUT_GROUPS = 1024, 1024, 8
EXPERTS, USED_EXPERTS, EXPERT_SIZE = 256, 6, 2048
INDEXER_HEADS, INDEXER_SIZE = 64, 128
STREAMS = 4
"""Hyper-connections: parallel residual streams."""
HASH_LAYERS = 3
"""Leading layers whose experts are looked up by token."""
RATIOS = tuple(0 if layer < 2 else 4 if layer % 2 == 0 else 128 for layer in range(LAYERS))
"""Tokens that one compressed row of each layer stands for; 0: none are compressed."""
MIXES: dict[Mix, tuple[str, str]] = {"q2": ("IQ2_XXS", "Q2_K"), "q4": ("Q4_K", "Q4_K"), "mxfp4": ("MXFP4", "MXFP4")}
"""Types of the experts: gate and up, and down."""

DSPARK_RANK, DSPARK_TARGETS = 64, 3
"""Of our drafters' Markov head, and how many layers of the model they look at. Files name their own."""

V41_LAYERS, V41_HIDDEN, V41_EXPERTS, V41_EXPERT_SIZE = 40, 5120, 384, 2304
V41_TABLE_BYTES = 202_778_032_400
"""Engram tables of V4.1: on disk only, never in memory."""
V41_TABLE_LAYERS = 24
V41_TENSORS = 1046
ENGRAM_ROW_BYTES = 264


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a GGUF file; ``shape`` has the fastest dimension first."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        _, elements, size = TYPES[self.type]
        return -(-prod(self.shape) // elements) * size


def flash(mix: Mix = "q2", q4_layers: Collection[int] = ()) -> list[Tensor]:
    """All 1328 tensors of V4 Flash. Layers in ``q4_layers`` have Q4_K experts, whatever ``mix`` is."""
    streams = STREAMS * HIDDEN
    found = [
        Tensor("token_embd.weight", "F16", (HIDDEN, VOCABULARY)),
        Tensor("output_hc_base.weight", "F32", (STREAMS,)),
        Tensor("output_hc_fn.weight", "F16", (streams, STREAMS)),
        Tensor("output_hc_scale.weight", "F32", (1,)),
        Tensor("output_norm.weight", "F32", (HIDDEN,)),
        Tensor("output.weight", "Q8_0", (HIDDEN, VOCABULARY)),
    ]
    for layer in range(LAYERS):
        for name, type_, shape in _flash_layer(layer, "q4" if layer in q4_layers else mix):
            found.append(Tensor(f"blk.{layer}.{name}", type_, shape))
    return found


def _flash_layer(layer: int, mix: Mix) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield from _attention()
    if ratio := RATIOS[layer]:
        width = HEAD_SIZE * (2 if ratio == 4 else 1)  # ratio 4 compresses over two windows that overlap
        yield "attn_compressor_ape.weight", "F16", (width, ratio)
        yield "attn_compressor_kv.weight", "F16", (HIDDEN, width)
        yield "attn_compressor_gate.weight", "F16", (HIDDEN, width)
        yield "attn_compressor_norm.weight", "F32", (HEAD_SIZE,)
    if ratio == 4:
        yield "indexer.attn_q_b.weight", "F16", (QUERY_RANK, INDEXER_HEADS * INDEXER_SIZE)
        yield "indexer.proj.weight", "F16", (HIDDEN, INDEXER_HEADS)
        yield "indexer_compressor_ape.weight", "F16", (2 * INDEXER_SIZE, ratio)
        yield "indexer_compressor_kv.weight", "F16", (HIDDEN, 2 * INDEXER_SIZE)
        yield "indexer_compressor_gate.weight", "F16", (HIDDEN, 2 * INDEXER_SIZE)
        yield "indexer_compressor_norm.weight", "F32", (INDEXER_SIZE,)
    yield from _feed_forward(mix)
    if layer < HASH_LAYERS:
        yield "ffn_gate_tid2eid.weight", "I32", (USED_EXPERTS, VOCABULARY)
    else:
        yield "exp_probs_b.bias", "F32", (EXPERTS,)


def _attention() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield from _mixer("attn")
    yield "attn_norm.weight", "F32", (HIDDEN,)
    yield "attn_q_a.weight", "Q8_0", (HIDDEN, QUERY_RANK)
    yield "attn_q_a_norm.weight", "F32", (QUERY_RANK,)
    yield "attn_q_b.weight", "Q8_0", (QUERY_RANK, HEADS * HEAD_SIZE)
    yield "attn_kv.weight", "Q8_0", (HIDDEN, HEAD_SIZE)
    yield "attn_kv_a_norm.weight", "F32", (HEAD_SIZE,)
    yield "attn_sinks.weight", "F32", (HEADS,)
    yield "attn_output_a.weight", "Q8_0", (HEAD_SIZE * HEADS // OUTPUT_GROUPS, OUTPUT_GROUPS * OUTPUT_RANK)
    yield "attn_output_b.weight", "Q8_0", (OUTPUT_GROUPS * OUTPUT_RANK, HIDDEN)


def _feed_forward(mix: Mix) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    gate, down = MIXES[mix]
    yield from _mixer("ffn")
    yield "ffn_norm.weight", "F32", (HIDDEN,)
    yield "ffn_gate_inp.weight", "F16", (HIDDEN, EXPERTS)
    yield "ffn_gate_exps.weight", gate, (HIDDEN, EXPERT_SIZE, EXPERTS)
    yield "ffn_up_exps.weight", gate, (HIDDEN, EXPERT_SIZE, EXPERTS)
    yield "ffn_down_exps.weight", down, (EXPERT_SIZE, HIDDEN, EXPERTS)
    yield "ffn_gate_shexp.weight", "Q8_0", (HIDDEN, EXPERT_SIZE)
    yield "ffn_up_shexp.weight", "Q8_0", (HIDDEN, EXPERT_SIZE)
    yield "ffn_down_shexp.weight", "Q8_0", (EXPERT_SIZE, HIDDEN)


def _mixer(what: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """How the parallel streams are mixed before and after a block."""
    mixing = 2 * STREAMS + STREAMS * STREAMS
    yield f"hc_{what}_fn.weight", "F16", (STREAMS * HIDDEN, mixing)
    yield f"hc_{what}_scale.weight", "F32", (3,)
    yield f"hc_{what}_base.weight", "F32", (mixing,)


def legacy_head() -> list[Tensor]:
    """The one-stage draft head of V4 Flash (May 2026): 32 tensors, 3,807,600,108 bytes."""
    hidden = HIDDEN
    found = [
        ("hc_head_base.weight", "F32", (STREAMS,)),
        ("hc_head_fn.weight", "F32", (STREAMS * hidden, STREAMS)),
        ("hc_head_scale.weight", "F32", (1,)),
        ("e_proj.weight", "Q8_0", (hidden, hidden)),
        ("h_proj.weight", "Q8_0", (hidden, hidden)),
        ("enorm.weight", "F32", (hidden,)),
        ("hnorm.weight", "F32", (hidden,)),
        ("norm.weight", "F32", (hidden,)),
        *_attention(),
        *_feed_forward("q4"),
        ("exp_probs_b.bias", "F32", (EXPERTS,)),
    ]
    single = {"hc_attn_fn.weight", "hc_ffn_fn.weight", "ffn_gate_inp.weight"}  # stored in full precision there
    return [Tensor(f"mtp.0.{name}", "F32" if name in single else type_, shape) for name, type_, shape in found]


def dspark_drafter(size_bytes: int, *, v41: bool = False) -> list[Tensor]:
    """A DSpark drafter by the tensors that ds4 knows it by, and one tensor for the rest of ``size_bytes``.

    Names and shapes are those of V4 Flash (antirez/ds4 7e3dbef, 2026-07-23); what V4.1's is cut into is not public.
    """
    hidden = V41_HIDDEN if v41 else HIDDEN
    found = [
        Tensor("mtp.0.main_proj.weight", "Q8_0", (DSPARK_TARGETS * hidden, hidden)),
        Tensor("mtp.0.main_norm.weight", "F32", (hidden,)),
        Tensor("mtp.2.markov_head.markov_w1.weight", "Q8_0", (DSPARK_RANK, VOCABULARY)),
        Tensor("mtp.2.markov_head.markov_w2.weight", "Q8_0", (DSPARK_RANK, VOCABULARY)),
        Tensor("mtp.2.confidence_head.proj.weight", "Q8_0", (hidden + DSPARK_RANK, 1)),
    ]
    rest = size_bytes - sum(-(-tensor.bytes // ALIGNMENT) * ALIGNMENT for tensor in found)
    return [*found, Tensor("mtp.1.rest.weight", "I8", (rest,))]


def flash41(mix: Mix, non_routed_bytes: int) -> list[Tensor]:
    """V4.1 Flash in its 1046 tensors: its experts and tables, and ``non_routed_bytes`` of everything else.

    Its embedding, router and Engram projections have their real types; what is left of the sum is spread over the
    tensors that are left of the count.
    """
    gate, down = MIXES[mix]
    found = [
        Tensor("token_embd.weight", "F16", (V41_HIDDEN, VOCABULARY)),
        Tensor("output_norm.weight", "F32", (V41_HIDDEN,)),
        Tensor("output.weight", "Q8_0", (V41_HIDDEN, VOCABULARY)),
    ]
    routed: list[Tensor] = []
    tables = [Tensor("engram_embd_rest.weight", "I8", (V41_TABLE_BYTES % ENGRAM_ROW_BYTES,))]
    rows = V41_TABLE_BYTES // ENGRAM_ROW_BYTES
    for layer in range(V41_LAYERS):
        block = f"blk.{layer}."
        found.append(Tensor(f"{block}ffn_gate_inp.weight", "F32", (V41_HIDDEN, V41_EXPERTS)))
        if layer < V41_TABLE_LAYERS:
            found.append(Tensor(f"{block}engram_kv.weight", "F16", (512, V41_HIDDEN)))
            share = rows // V41_TABLE_LAYERS + (rows % V41_TABLE_LAYERS if layer == 0 else 0)
            tables.append(Tensor(f"{block}engram_embd.weight", "I8", (ENGRAM_ROW_BYTES, share)))
        routed += [
            Tensor(f"{block}ffn_gate_exps.weight", gate, (V41_HIDDEN, V41_EXPERT_SIZE, V41_EXPERTS)),
            Tensor(f"{block}ffn_up_exps.weight", gate, (V41_HIDDEN, V41_EXPERT_SIZE, V41_EXPERTS)),
            Tensor(f"{block}ffn_down_exps.weight", down, (V41_EXPERT_SIZE, V41_HIDDEN, V41_EXPERTS)),
        ]
    parts = V41_TENSORS - len(found) - len(tables) - len(routed)
    left = non_routed_bytes - sum(tensor.bytes for tensor in found)
    for part in range(parts):
        share = left // parts + (left % parts if part == 0 else 0)
        found.append(Tensor(f"blk.{part % V41_LAYERS}.part_{part // V41_LAYERS}.weight", "I8", (share,)))
    return [*found, *tables, *routed]

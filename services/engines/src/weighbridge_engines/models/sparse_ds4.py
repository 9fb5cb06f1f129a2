"""Writes DeepSeek V4 models for ds4 without their weights: sparse files as long as the published ones, all zeros.

The header is whole: metadata, vocabulary and every tensor. A real ds4-server starts with the V4 file and finds nothing
wrong with it (CPU build of antirez/ds4 8d57664, 2026-05-21); what it says is noise. On disk a file takes its header
alone, some 5 MB, as long as nobody copies it without holes.

Run it with ``python -m weighbridge_engines.models.sparse_ds4 OUT_DIR``.
"""

import argparse
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from weighbridge_common.ds4_layout import (
    ALIGNMENT,
    DSPARK_RANK,
    EXPERT_SIZE,
    EXPERTS,
    HASH_LAYERS,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    INDEXER_HEADS,
    INDEXER_SIZE,
    LAYERS,
    OUTPUT_GROUPS,
    OUTPUT_RANK,
    QUERY_RANK,
    RATIOS,
    STREAMS,
    TYPES,
    USED_EXPERTS,
    V41_EXPERT_SIZE,
    V41_EXPERTS,
    V41_HIDDEN,
    V41_LAYERS,
    VOCABULARY,
    Tensor,
    dspark_drafter,
    flash,
    flash41,
    legacy_head,
)

Kind = Literal["q2", "q2q4", "q4", "mxfp4", "v41-q2", "v41-q4"]

FILE_BYTES: dict[Kind, int] = {
    # Sizes of the published files (antirez/deepseek-v4-gguf, antirez/deepseek-v4.1-flash-gguf; September 2026).
    "q2": 86_720_111_488,
    "q2q4": 97_591_747_456,
    "q4": 164_633_502_592,
    "mxfp4": 155_976_458_848,
    "v41-q2": 365_713_686_528,
    "v41-q4": 518_596_067_328,
}
DRAFTER_BYTES = 5_991_479_378
"""The DSpark drafter of V4 Flash 0731: 5.58 GiB (ds4 issue 724)."""
V41_DRAFTER_BYTES = 8_632_884_265
"""The DSpark drafter of V4.1 Flash: 8.04 GiB."""
VISION_BYTES = 934_155_387
"""The vision companion of V4 Flash: 0.87 GiB (ds4 issue 928)."""
CONTEXT_TOKENS = 1_048_576

SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>",
    "</think>", "｜DSML｜",
)  # fmt: skip
"""Tokens that ds4 looks up by name, in the order in which it does."""

_Q4_LAYERS = range(37, 43)
_V41_ALIGNMENT = 16384
_V41_HEADER_BYTES = 327 * _V41_ALIGNMENT
_U32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 4, 6, 7, 8, 9, 10

Value = int | float | bool | str | list[int] | list[float] | list[str]
"""Integers are written as 32-bit, or as 64-bit where they are more than a context is long or a key asks for it."""
_LONG_KEYS = ("context_length", "original_context_length")


def write(path: Path, kind: Kind = "q2", *, without: Collection[str] = (), changed: Mapping[str, Value] = {}) -> Path:
    """Write a model file, exactly as long as the published one.

    Args:
        kind: which of the published files.
        without: metadata keys and tensors that are left out; it is shorter by a tensor's bytes then.
        changed: metadata that differs from what the model has.
    """
    v41 = kind.startswith("v41")
    alignment = _V41_ALIGNMENT if v41 else ALIGNMENT
    tensors = _tensors(kind)
    header_bytes = FILE_BYTES[kind] - _data_bytes(tensors, alignment)
    metadata = (_v41_metadata() if v41 else _flash_metadata()) | dict(changed)
    return write_gguf(
        path,
        {key: value for key, value in metadata.items() if key not in without},
        [tensor for tensor in tensors if tensor.name not in without],
        header_bytes=0 if without or changed else header_bytes,
        alignment=alignment,
    )


def write_drafter(path: Path, *, v41: bool = False) -> Path:
    """A DSpark drafter: what it says of itself, what it is known by, and its size."""
    size = V41_DRAFTER_BYTES if v41 else DRAFTER_BYTES
    prefix = "deepseek41.dspark" if v41 else "dspark"
    layers = V41_LAYERS if v41 else LAYERS
    metadata: dict[str, Value] = {
        "general.architecture": "deepseek41" if v41 else "deepseek4",
        "general.name": "DSpark drafter without weights",
        f"{prefix}.block_size": 5,
        f"{prefix}.markov_rank": DSPARK_RANK,
        f"{prefix}.noise_token_id": 0,
        f"{prefix}.target_layer_ids": [layers // 4, layers // 2, layers - 1],
    }
    return write_gguf(path, metadata, dspark_drafter(size - 4096, v41=v41), header_bytes=4096)


def write_legacy_head(path: Path) -> Path:
    """The one-stage draft head of May 2026."""
    metadata: dict[str, Value] = {
        "general.architecture": "deepseek4_mtp_support",
        "general.name": "MTP without weights",
    }
    return write_gguf(path, metadata, legacy_head())


def write_vision(path: Path) -> Path:
    """A vision companion."""
    metadata: dict[str, Value] = {"general.architecture": "clip", "general.type": "mmproj"}
    return write_gguf(path, metadata, [Tensor("v.weight", "I8", (VISION_BYTES - 4096,))], header_bytes=4096)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Sequence[Tensor],
    *,
    header_bytes: int = 0,
    alignment: int = ALIGNMENT,
) -> Path:
    """Write a GGUF file of version 3 whose tensors are holes.

    Args:
        header_bytes: how long everything before the tensors' data is; the vocabulary's words, or else the file's
            description, are drawn out to it. 0: as short as it is.

    Raises ValueError when the header cannot be as short as ``header_bytes``.
    """
    infos, offset, end = [], 0, 0
    for tensor in tensors:
        number = TYPES[tensor.type][0]
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        infos.append(_text(tensor.name) + shape + struct.pack("<IQ", number, offset))
        end = offset + tensor.bytes
        offset = _aligned(end, alignment)
    whole = {"general.alignment": alignment, **metadata}
    head = _header(whole, infos)
    if header_bytes:
        spare = header_bytes - len(head)
        if spare < 0:
            raise ValueError(f"the header takes {len(head)} bytes, {-spare} more than it should")
        head = _header(_drawn_out(whole, spare), infos)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(_aligned(len(head), alignment) + end)
    return path


def _drawn_out(metadata: Mapping[str, Value], spare: int) -> dict[str, Value]:
    words = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(words, list):
        spare -= len(_pair("general.description", ""))
        return {**metadata, "general.description": "." * spare}
    plain = len(words) - 256 - len(SPECIAL_TOKENS)
    each, more = divmod(spare, plain)
    longer = [str(word) for word in words]
    for number in range(plain):
        longer[-1 - number] += "." * (each + (number < more))
    return {**metadata, "tokenizer.ggml.tokens": longer}


def _tensors(kind: Kind) -> list[Tensor]:
    match kind:
        case "q2" | "q4" | "mxfp4":
            return flash(kind)
        case "q2q4":
            return flash("q2", _Q4_LAYERS)
        case "v41-q2" | "v41-q4":
            mix: Literal["q2", "q4"] = "q4" if kind == "v41-q4" else "q2"
            # What the published size leaves beside tables, experts, a header and the gaps between tensors.
            guess = flash41(mix, 2**33)
            excess = FILE_BYTES[kind] - _V41_HEADER_BYTES - _data_bytes(guess, _V41_ALIGNMENT)
            return flash41(mix, 2**33 + excess)


def _data_bytes(tensors: Sequence[Tensor], alignment: int) -> int:
    """From the first tensor's first byte to the last one's last."""
    return sum(_aligned(tensor.bytes, alignment) for tensor in tensors[:-1]) + tensors[-1].bytes


def _flash_metadata() -> dict[str, Value]:
    return _metadata("deepseek4", LAYERS, HIDDEN, EXPERTS, EXPERT_SIZE) | {
        "deepseek4.attention.compress_ratios": list(RATIOS),
        "deepseek4.attention.output_lora_rank": OUTPUT_RANK,
        "deepseek4.attention.output_group_count": OUTPUT_GROUPS,
    }


def _v41_metadata() -> dict[str, Value]:
    own = _metadata("deepseek41", V41_LAYERS, V41_HIDDEN, V41_EXPERTS, V41_EXPERT_SIZE)
    return own | {"deepseek41.attention.q_lora_rank": 1280, "deepseek41.attention.indexer.head_count": 32}


def _metadata(architecture: str, layers: int, hidden: int, experts: int, expert_size: int) -> dict[str, Value]:
    model: dict[str, Value] = {
        "block_count": layers,
        "context_length": CONTEXT_TOKENS,
        "embedding_length": hidden,
        "vocab_size": VOCABULARY,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "attention.key_length": HEAD_SIZE,
        "attention.value_length": HEAD_SIZE,
        "attention.q_lora_rank": QUERY_RANK,
        "attention.sliding_window": 128,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.compress_rope_freq_base": 160_000.0,
        "attention.indexer.head_count": INDEXER_HEADS,
        "attention.indexer.key_length": INDEXER_SIZE,
        "attention.indexer.top_k": 512,
        "rope.dimension_count": 64,
        "rope.freq_base": 10_000.0,
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 65_536,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "expert_count": experts,
        "expert_used_count": USED_EXPERTS,
        "expert_feed_forward_length": expert_size,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "hash_layer_count": HASH_LAYERS,
        "hyper_connection.count": STREAMS,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "swiglu_clamp_exp": [10.0] * layers,
    }
    general: dict[str, Value] = {"general.architecture": architecture, "general.name": "DeepSeek without weights"}
    words = [*_byte_words(), *SPECIAL_TOKENS]
    words += [f"w{number}" for number in range(len(words), VOCABULARY)]
    return (
        general
        | {f"{architecture}.{key}": value for key, value in model.items()}
        | {"tokenizer.ggml.tokens": words, "tokenizer.ggml.merges": ["a b"]}
    )


def _byte_words() -> list[str]:
    """How a byte-level vocabulary writes the 256 bytes (GPT-2): printable ones as themselves, others from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _header(metadata: Mapping[str, Value], infos: Sequence[bytes]) -> bytes:
    start = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(metadata))
    return start + b"".join(_pair(key, value) for key, value in metadata.items()) + b"".join(infos)


def _pair(key: str, value: Value) -> bytes:
    if isinstance(value, list):
        kind, packed = _values(value)
        return _text(key) + struct.pack("<IIQ", _ARRAY, kind, len(value)) + packed
    kind, packed = _values([value])
    if kind == _U32 and key.endswith(_LONG_KEYS):
        kind, packed = _U64, struct.pack("<Q", value)
    return _text(key) + struct.pack("<I", kind) + packed


def _values(values: Sequence[int | float | bool | str]) -> tuple[int, bytes]:
    """The type of some values, and their bytes."""
    first = values[0]
    if isinstance(first, str):
        return _STRING, b"".join(_text(str(value)) for value in values)
    if isinstance(first, bool):
        return _BOOL, struct.pack(f"<{len(values)}?", *values)
    if isinstance(first, float):
        return _F32, struct.pack(f"<{len(values)}f", *values)
    return _U32, struct.pack(f"<{len(values)}I", *values)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a model with its companions, and print where they are."""
    parser = argparse.ArgumentParser(
        prog="python -m weighbridge_engines.models.sparse_ds4",
        description="Make DeepSeek V4 model files without weights, for tests of ds4 and its stand-in.",
    )
    parser.add_argument("out_dir", type=Path, help="the folder of its files")
    parser.add_argument("--kind", choices=FILE_BYTES, default="q2", help="which published file (default: q2)")
    wanted = parser.parse_args(arguments)
    wanted.out_dir.mkdir(parents=True, exist_ok=True)
    v41 = wanted.kind.startswith("v41")
    print(write(wanted.out_dir / f"deepseek-{wanted.kind}.gguf", wanted.kind))
    print(write_drafter(wanted.out_dir / "drafter.gguf", v41=v41))
    print(write_vision(wanted.out_dir / "vision.gguf"))
    if not v41:
        print(write_legacy_head(wanted.out_dir / "mtp.gguf"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

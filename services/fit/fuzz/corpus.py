"""Small valid files of each format, made byte by byte: the seeds that fuzzing starts from, and what tests build on.

No library that writes these formats is used: what a test says about bytes must not depend on one.
"""

import io
import json
import struct
import zipfile
from collections.abc import Mapping, Sequence

# GGUF value types and tensor types, by their numbers in the file.
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
F32_TENSOR, F16_TENSOR, Q4_0_TENSOR, Q8_0_TENSOR = 0, 1, 2, 8


# safetensors


def safetensors_file(header: bytes | Mapping[str, object], data: bytes = b"") -> bytes:
    """A file of this header, given as text or as what its JSON says."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + data


def safetensors_entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, object]:
    """A tensor's entry in the order of the Rust library."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


# GGUF


def gguf_text(value: str | bytes) -> bytes:
    """A string with its length."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def gguf_pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A key-value pair."""
    return gguf_text(key) + struct.pack("<I", kind) + value


def gguf_array(kind: int, count: int, payload: bytes = b"") -> bytes:
    """The value of an array: element type, length, elements."""
    return struct.pack("<IQ", kind, count) + payload


def gguf_tensor(name: str | bytes, shape: Sequence[int], kind: int = F32_TENSOR, offset: int = 0) -> bytes:
    """A tensor's description."""
    return gguf_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_file(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: int = 0,
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A file of these pairs and descriptions with `data` bytes of tensors behind them."""
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    body = struct.pack("<4sIQQ", b"GGUF", version, tensor_count, pair_count) + b"".join(pairs) + b"".join(tensors)
    if tensors:
        body += bytes(-len(body) % alignment)
    return body + bytes(data)


# torch checkpoints: pickles


def p_text(value: str) -> bytes:
    """A string."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def p_int(value: int) -> bytes:
    """An integer, as Python's pickler writes it."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def p_global(module: str, name: str) -> bytes:
    """A name that Python would import."""
    return f"c{module}\n{name}\n".encode()


def p_tuple(*values: bytes) -> bytes:
    """A tuple of pickled values."""
    return b"(" + b"".join(values) + b"t"


def p_ints(values: Sequence[int]) -> bytes:
    """A tuple of integers."""
    return p_tuple(*map(p_int, values))


def p_dict(entries: Mapping[str, bytes]) -> bytes:
    """A dict with text for keys."""
    return b"}(" + b"".join(p_text(key) + value for key, value in entries.items()) + b"u"


def p_call(module: str, name: str, *arguments: bytes) -> bytes:
    """What Python would call."""
    return p_global(module, name) + p_tuple(*arguments) + b"R"


def p_storage(key: str, kind: str, elements: int, module: str = "torch") -> bytes:
    """A storage."""
    return p_tuple(p_text("storage"), p_global(module, kind), p_text(key), p_text("cpu"), p_int(elements)) + b"Q"


def p_tensor(storage: bytes, shape: Sequence[int], at: int = 0, strides: Sequence[int] | None = None) -> bytes:
    """A tensor; dense when no strides are given."""
    if strides is None:
        strides, step = [], 1
        for size in reversed(shape):
            strides = [step, *strides]
            step *= size
    hooks = p_global("collections", "OrderedDict") + b")R"
    return p_call(
        "torch._utils", "_rebuild_tensor_v2", storage, p_int(at), p_ints(shape), p_ints(strides), b"\x89", hooks
    )


def pickled(value: bytes, protocol: int = 2) -> bytes:
    """A whole pickle."""
    return b"\x80" + bytes([protocol]) + value + b"."


# torch checkpoints: archives


def archive(records: Mapping[str, bytes], folder: str = "archive", packed: Sequence[str] = ()) -> bytes:
    """A zip archive with these records in its folder; those named in `packed` are deflated."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as target:
        for name, content in records.items():
            info = zipfile.ZipInfo(f"{folder}/{name}")
            info.compress_type = zipfile.ZIP_DEFLATED if name in packed else zipfile.ZIP_STORED
            target.writestr(info, content)
    return file.getvalue()


def checkpoint(root: bytes, storages: Mapping[str, int], **options: object) -> bytes:
    """A checkpoint whose data.pkl holds `root`, with a record of so many bytes for each storage."""
    records = {"data.pkl": pickled(root), "byteorder": b"little"}
    records.update({f"data/{key}": bytes(size) for key, size in storages.items()})
    return archive({**records, "version": b"3\n"}, **options)  # type: ignore[arg-type]


# The seeds


def safetensors_seeds() -> list[bytes]:
    """Both writers' layouts, metadata, an empty file, odd types, padding."""
    entry = safetensors_entry
    rust = {"__metadata__": {"format": "pt"}, "a": entry("F32", [2, 2], 0, 16), "b.w": entry("BF16", [3], 16, 22)}
    mlx = {name: {key: fields[key] for key in sorted(fields)} for name, fields in list(rust.items())[1:]}  # type: ignore[index,attr-defined]
    odd = {"w": entry("F4", [3, 7], 0, 11), "s": entry("F8_E8M0", [], 11, 12), "e": entry("I64", [0, 4], 12, 12)}
    return [
        safetensors_file(rust, bytes(22)),
        safetensors_file(mlx, bytes(22)),
        safetensors_file(odd, bytes(12)),
        safetensors_file(b"{}"),
        safetensors_file(json.dumps(rust).encode() + b"    ", bytes(22)),
    ]


def gguf_seeds() -> list[bytes]:
    """Every value type, nested arrays, per-layer arrays, blocks, a split's first part, alignment."""
    scalars = [
        gguf_pair(f"k.{kind}", kind, struct.pack("<" + code, 1))
        for kind, code in {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q",
                           I64: "q", F64: "d"}.items()
    ]  # fmt: skip
    name = gguf_pair("general.architecture", STRING, gguf_text("llama"))
    tokens = gguf_array(STRING, 3, gguf_text("a") + gguf_text("bc") + gguf_text(""))
    nested = gguf_array(ARRAY, 2, gguf_array(U16, 2, bytes(4)) + gguf_array(STRING, 1, gguf_text("x")))
    layers = gguf_array(U32, 4, struct.pack("<4I", 8, 4, 8, 4))
    split = [
        gguf_pair("split.no", U16, struct.pack("<H", 0)),
        gguf_pair("split.count", U16, struct.pack("<H", 1)),
        gguf_pair("split.tensors.count", I32, struct.pack("<i", 1)),
    ]
    align = gguf_pair("general.alignment", U32, struct.pack("<I", 64))
    two = [gguf_tensor("a", (8, 2)), gguf_tensor("q", (32, 2), Q4_0_TENSOR, 64)]
    return [
        gguf_file([name, *scalars, gguf_pair("tokenizer.ggml.tokens", ARRAY, tokens)], two, 128),
        gguf_file([name, gguf_pair("n", ARRAY, nested), gguf_pair("llama.attention.head_count_kv", ARRAY, layers)]),
        gguf_file([*split, align], [gguf_tensor("w", (4, 2, 2, 2), F16_TENSOR)], 64, alignment=64),
        gguf_file([name], [gguf_tensor("x", (10,), 99), gguf_tensor("y", (8,), F32_TENSOR, 64)], 96, version=2),
    ]


def checkpoint_pickles() -> list[bytes]:
    """Nested state dicts, a tied and a sliced storage, parameters, an unknown class, a memo, protocol 4."""
    weight = p_storage("0", "FloatStorage", 12)
    state = p_dict({"a.weight": p_tensor(weight, [4, 3]), "b.weight": p_tensor(weight, [2, 3], 6)})
    half = p_tensor(p_storage("1", "HalfStorage", 5), [5])
    hooks = p_global("collections", "OrderedDict") + b")R"
    parameter = p_call("torch._utils", "_rebuild_parameter", half, b"\x88", hooks)
    unknown = p_global("lightning.callbacks", "Checkpoint") + b")\x81" + p_dict({"best": p_text("x")}) + b"b"
    memo = b"}q\x00(" + p_text("w") + b"q\x01" + half + b"q\x02" + p_text("tied") + b"h\x02u"
    young = b"\x95" + struct.pack("<Q", 20) + b"}\x94(\x8c\x01w\x94" + half + b"\x94u"
    return [
        pickled(p_dict({"state_dict": state, "epoch": p_int(3)})),
        pickled(p_dict({"w": parameter, "callbacks": unknown, "list": b"](" + half + b"e"})),
        pickled(memo),
        pickled(young, 4),
    ]


def checkpoint_seeds() -> list[bytes]:
    """An archive of each pickle; one is packed, one has its own folder's name."""
    storages = {"data/0": bytes(48), "data/1": bytes(10)}
    frame = {"byteorder": b"little", **storages, "version": b"3\n"}
    nested, unknown, memo, young = ({"data.pkl": content, **frame} for content in checkpoint_pickles())
    return [archive(nested), archive(unknown), archive(memo, folder="x", packed=["data.pkl"]), archive(young)]

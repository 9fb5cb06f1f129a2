"""The GGUF reader: well-formed files as the official library sees them, malformed ones as errors and nothing else."""

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st
from weighbridge_fit.budget import ParseBudget
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.facts import FileFacts, WeightFormat
from weighbridge_fit.gguf import types
from weighbridge_fit.gguf.architecture import geometry_from_metadata
from weighbridge_fit.gguf.header import Header, parse
from weighbridge_fit.gguf.reader import read_gguf
from weighbridge_fit.gguf.split import check_splits
from weighbridge_fit.gguf.window import Window

U32, STRING, ARRAY, F32_TYPE, Q4_0_TYPE = 4, 8, 9, 0, 2


class Bytes:
    """An open file that lies in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)
        self.read = 0

    def read_exactly(self, offset: int, length: int) -> bytes:
        assert 0 <= length <= 128 << 20, "a reader must not ask for more than a header"
        assert offset + length <= self.size, "a reader must not read beyond the file"
        self.read += length
        return self._data[offset : offset + length]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = F32_TYPE, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: int = 0,
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    pairs, tensors = pairs or [], tensors or []
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    body = struct.pack("<4sIQQ", b"GGUF", version, tensor_count, pair_count) + b"".join(pairs) + b"".join(tensors)
    if tensors:
        body += bytes(-len(body) % alignment)
    return body + bytes(data)


def reading(content: bytes) -> Header:
    return parse(Window(Bytes(content), ParseBudget()))  # type: ignore[arg-type]


def array(kind: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def test_agrees_with_the_official_reader(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(2)
    writer.add_custom_alignment(64)
    writer.add_array("tokenizer.ggml.tokens", [f"t{index}" for index in range(5000)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 5000)
    writer.add_array("small", [1, 2, 3])
    writer.add_bool("flag", True)
    writer.add_float64("wide", 0.25)
    writer.add_int64("signed", -7)
    writer.add_tensor("a", np.zeros((3, 64), np.float32))
    writer.add_tensor("b", np.zeros((8,), np.float16))
    writer.add_tensor("q", np.zeros((4, 36), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    facts = read_gguf(path)
    official = gguf.GGUFReader(path)
    expected = [
        (t.name, t.tensor_type.name, tuple(map(int, t.shape)), int(t.n_elements), int(t.n_bytes))
        for t in official.tensors
    ]
    assert [tuple(fact) for fact in facts.tensors] == expected
    assert facts.header_bytes == official.data_offset
    for key, field in official.fields.items():
        if not key.startswith(("GGUF.", "tokenizer.")):
            assert facts.metadata[key] == field.contents(), key
    assert facts.arrays["tokenizer.ggml.tokens"] == facts.arrays["tokenizer.ggml.scores"] == 5000
    assert "tokenizer.ggml.tokens" not in facts.metadata, "vocabularies are walked, not kept"


def test_every_known_tensor_type_has_the_official_block_size() -> None:
    official = {kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    assert {number: tuple(kind) for number, kind in types.TENSOR_TYPES.items()} == official


def test_versions_two_and_three_are_read() -> None:
    for version in (2, 3):
        assert reading(file_of(tensors=[tensor("w", (8,))], data=32, version=version)).tensors[0].bytes == 32


def test_an_unknown_type_is_as_large_as_the_room_it_has() -> None:
    content = file_of(tensors=[tensor("x", (10,), 99), tensor("y", (8,), F32_TYPE, 64)], data=96)
    facts = {fact.name: fact for fact in reading(content).tensors}
    assert (facts["x"].dtype, facts["x"].elements, facts["x"].bytes) == ("TYPE_99", 10, 64)
    assert facts["y"].bytes == 32


def test_per_layer_arrays_are_kept_in_full() -> None:
    heads = array(U32, 3, struct.pack("<3I", 8, 4, 8))
    names = array(STRING, 2, text("a") + text("bc"))
    header = reading(file_of([pair("llama.attention.head_count_kv", ARRAY, heads), pair("general.tags", ARRAY, names)]))
    assert header.metadata == {"llama.attention.head_count_kv": [8, 4, 8], "general.tags": ["a", "bc"]}


@pytest.mark.parametrize("layers", [65, 88, 1024])
@pytest.mark.parametrize("key", ["attention.head_count_kv", "attention.compress_ratios", "feed_forward_length"])
def test_a_value_per_layer_is_kept_for_every_layer(layers: int, key: str) -> None:
    # Some tools keep the first 64 items of an array, or read only the first: layers beyond then cost nothing.
    values = [index % 7 for index in range(layers)]
    content = file_of([pair(f"llama.{key}", ARRAY, array(U32, layers, struct.pack(f"<{layers}I", *values)))])
    assert reading(content).metadata == {f"llama.{key}": values}


ELEMENTS: list[tuple[int, str, list[Any]]] = [
    (0, "B", [0, 255]), (1, "b", [-128, 127]), (2, "H", [0, 65535]), (3, "h", [-32768, 7]), (4, "I", [0, 2**32 - 1]),
    (5, "i", [-(2**31), 3]), (6, "f", [0.5, -2.0]), (7, "?", [True, False]), (10, "Q", [0, 2**64 - 1]),
    (11, "q", [-(2**63), 5]), (12, "d", [0.1, 1e300]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "code", "values"), ELEMENTS)
def test_arrays_of_every_element_type_are_kept_as_they_are(kind: int, code: str, values: list[Any]) -> None:
    payload = struct.pack(f"<{len(values)}{code}", *values)
    inner = array(kind, len(values), payload)
    header = reading(file_of([pair("k", ARRAY, inner), pair("nested", ARRAY, array(ARRAY, 2, inner + inner))]))
    assert header.metadata == {"k": values, "nested": [values, values]}
    assert header.arrays == {"k": len(values), "nested": 2}


def test_arrays_may_be_nested_and_of_different_types_inside() -> None:
    words = array(STRING, 2, text("a") + text("\u00fc"))
    deep = array(ARRAY, 2, array(ARRAY, 1, words) + array(U32, 0))
    assert reading(file_of([pair("k", ARRAY, deep)])).metadata == {"k": [[["a", "\u00fc"]], []]}


def test_half_of_an_array_is_not_kept() -> None:
    long = array(U32, 5000, bytes(20_000))
    header = reading(file_of([pair("k", ARRAY, array(ARRAY, 2, long + array(U32, 1, bytes(4))))]))
    assert header.metadata == {}
    assert header.arrays == {"k": 2}


def test_a_long_array_of_numbers_is_not_read_at_all() -> None:
    held = Bytes(file_of([pair("k", ARRAY, array(U32, 3_000_000, bytes(12_000_000))), pair("z", U32, bytes(4))]))
    header = parse(Window(held, ParseBudget()))  # type: ignore[arg-type]
    assert header.metadata == {"z": 0}
    assert held.read < 1 << 20


@pytest.mark.parametrize("kind", sorted(types.TENSOR_TYPES))
def test_every_type_of_the_official_library_is_sized_as_it_sizes_it(kind: int, tmp_path: Path) -> None:
    official = gguf.GGMLQuantizationType(kind)
    block, size = GGML_QUANT_SIZES[official]
    content = file_of(tensors=[tensor("w", (2 * block, 3), kind)], data=6 * size)
    assert tuple(reading(content).tensors[0]) == ("w", official.name, (2 * block, 3), 6 * block, 6 * size)
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with contextlib.suppress(ValueError):  # it cannot view some types as arrays
        assert int(gguf.GGUFReader(path).tensors[0].n_bytes) == 6 * size


def test_types_that_were_given_up_keep_their_names() -> None:
    for kind, name in types.FORMER_TYPES.items():
        assert kind not in types.TENSOR_TYPES
        fact = reading(file_of(tensors=[tensor("w", (32,), kind)], data=32)).tensors[0]
        assert (fact.dtype, fact.bytes) == (name, 32)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (0, "version 0"),
        (1, "convert the model again"),
        (3 << 24, "big-endian"),
        (2 << 24, "big-endian"),
        (4, "versions 2 and 3"),
    ],
)
def test_a_version_that_is_not_read_says_what_helps(version: int, words: str) -> None:
    with pytest.raises(WeightError) as caught:
        reading(file_of(version=version))
    assert caught.value.reason is WeightReason.UNSUPPORTED_VERSION
    assert words in caught.value.message


# Splits


def part(
    number: int, count: int, names: str, *, tensors: int = 4, file: str = "", keys: tuple[str, ...] = ("no", "count")
) -> FileFacts:
    """The facts of one part that holds a tensor for each letter of `names`."""
    values = {"no": (2, struct.pack("<H", number)), "count": (2, struct.pack("<H", count))}
    pairs = [pair(f"split.{key}", *values[key]) for key in keys]
    pairs.append(pair("split.tensors.count", 5, struct.pack("<i", tensors)))
    content = file_of(pairs, [tensor(name, (8,), 0, 32 * at) for at, name in enumerate(names)], 32 * len(names))
    header = reading(content)
    return FileFacts(
        name=file or f"model-{number + 1:05d}-of-{count:05d}.gguf", component="", format=WeightFormat.GGUF,
        file_bytes=len(content), header_bytes=header.header_bytes, tensor_count=len(names), precisions=(),
        metadata=header.metadata, make_tensors=lambda: header.tensors,
    )  # fmt: skip


def test_a_whole_split_and_models_that_are_none_pass() -> None:
    check_splits([part(0, 2, "ab"), part(1, 2, "cd")])
    check_splits([part(1, 2, "cd"), part(0, 2, "ab")])
    check_splits([part(0, 3, "", tensors=2), part(1, 3, "a", tensors=2), part(2, 3, "b", tensors=2)])
    check_splits([part(0, 1, "abcd", file="model.gguf")])
    check_splits([part(0, 1, "a", file="model.gguf"), part(0, 1, "a", file="mmproj.gguf")])
    check_splits([])


OTHER = "model-00002-of-00002.gguf"
BROKEN_SPLITS: list[tuple[str, list[FileFacts], str, str]] = [
    ("a part is missing", [part(0, 3, "ab"), part(2, 3, "cd")], "model-00001-of-00003.gguf", "missing: 2"),
    ("one part alone, renamed", [part(1, 3, "cd", file="model.gguf")], "model.gguf", "missing: 1, 3"),
    ("a part copied over another", [part(0, 2, "ab"), part(0, 2, "ab", file=OTHER)], OTHER, "both part 1 of 2"),
    ("of another split", [part(0, 2, "ab"), part(1, 3, "cd", file=OTHER)], OTHER, "split into 3"),
    ("of another model", [part(0, 2, "ab"), part(1, 2, "cd", tensors=9, file=OTHER)], OTHER, "another model"),
    ("no part at all", [part(0, 2, "ab"), part(0, 2, "cd", file=OTHER, keys=())], OTHER, "split into 0"),
    ("a number beyond", [part(0, 2, "ab"), part(7, 2, "cd", file=OTHER)], OTHER, "number 7 of 2"),
    ("no number", [part(0, 2, "ab"), part(0, 2, "cd", file=OTHER, keys=("count",))], OTHER, "number -1 of 2"),
    ("a tensor twice", [part(0, 2, "ab"), part(1, 2, "bc")], OTHER, "'b'"),
    ("too few tensors", [part(0, 2, "ab"), part(1, 2, "c")], "model-00001-of-00002.gguf", "3 tensors together"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "file", "words"), [row[1:] for row in BROKEN_SPLITS], ids=[r[0] for r in BROKEN_SPLITS]
)
def test_a_split_that_does_not_belong_together_is_refused_by_the_file(
    parts: list[FileFacts], file: str, words: str
) -> None:
    with pytest.raises(WeightError) as caught:
        check_splits(parts)
    assert caught.value.reason is WeightReason.SPLIT_INCOMPLETE
    assert caught.value.file == file
    assert words in caught.value.message


def test_a_vocabulary_longer_than_the_first_read_is_walked_in_growing_reads() -> None:
    words = b"".join(text("x" * (index % 50)) for index in range(120_000))
    content = file_of(
        [pair("tokenizer.ggml.tokens", ARRAY, array(STRING, 120_000, words))], [tensor("w", (8,))], 4 << 20
    )
    held = Bytes(content)
    header = parse(Window(held, ParseBudget()))  # type: ignore[arg-type]
    assert header.arrays["tokenizer.ggml.tokens"] == 120_000
    assert header.tensors[0].bytes == 32
    assert held.read <= 2 * (len(words) + 4096), "the data section is not read"


HUGE = 0xFFFF_FFFF_FFFF_FFFF
SPLIT_ROW = [tensor("w", (33,), Q4_0_TYPE)]
MALFORMED: list[tuple[str, bytes, WeightReason]] = [
    ("CVE-2024-39720 four bytes", b"GGUF", WeightReason.TRUNCATED),
    ("empty file", b"", WeightReason.TRUNCATED),
    ("another file", b"NOPE" + bytes(60), WeightReason.BAD_MAGIC),
    ("version 1", file_of(version=1), WeightReason.UNSUPPORTED_VERSION),
    ("version 4", file_of(version=4), WeightReason.UNSUPPORTED_VERSION),
    ("big endian", file_of(version=3 << 24), WeightReason.UNSUPPORTED_VERSION),
    ("CVE-2025-0315 counts all ones", file_of(counts=(HUGE, HUGE), data=25), WeightReason.COUNT_EXCEEDS_FILE),
    ("a billion tensors", file_of(counts=(0x4000_0000, 0), data=64), WeightReason.COUNT_EXCEEDS_FILE),
    ("a billion pairs", file_of(counts=(0, 0x4000_0000), data=64), WeightReason.COUNT_EXCEEDS_FILE),
    ("key length all ones", file_of([struct.pack("<Q", HUGE) + bytes(40)]), WeightReason.COUNT_EXCEEDS_FILE),
    ("key beyond the end", file_of([struct.pack("<Q", 65_000) + bytes(40)]), WeightReason.TRUNCATED),
    ("string of 2^63 bytes", file_of([pair("k", STRING, struct.pack("<Q", 2**63))]), WeightReason.COUNT_EXCEEDS_FILE),
    ("gguf-py 43-byte array of 2^63", file_of([pair("k", ARRAY, array(0, 2**63))]), WeightReason.COUNT_EXCEEDS_FILE),
    ("array of 2^60 strings", file_of([pair("k", ARRAY, array(STRING, 2**60))]), WeightReason.COUNT_EXCEEDS_FILE),
    ("array of 2^60 arrays", file_of([pair("k", ARRAY, array(ARRAY, 2**60))]), WeightReason.COUNT_EXCEEDS_FILE),
    (
        "string in an array too long",
        file_of([pair("k", ARRAY, array(STRING, 2, struct.pack("<Q", HUGE) + bytes(16)))]),
        WeightReason.COUNT_EXCEEDS_FILE,
    ),
    (
        "string in a long array too long",
        file_of([pair("k", ARRAY, array(STRING, 5000, struct.pack("<Q", HUGE) + bytes(8 * 5000)))]),
        WeightReason.TRUNCATED,
    ),
    ("unknown value type", file_of([pair("k", 77, bytes(8))]), WeightReason.BAD_VALUE_TYPE),
    ("unknown element type", file_of([pair("k", ARRAY, array(13, 1, bytes(8)))]), WeightReason.BAD_VALUE_TYPE),
    (
        "nested without end",
        file_of([pair("k", ARRAY, array(ARRAY, 1) * 50 + array(U32, 0))]),
        WeightReason.TOO_DEEP,
    ),
    ("key twice", file_of([pair("k", U32, bytes(4))] * 2), WeightReason.DUPLICATE_KEY),
    ("key not UTF-8", file_of([text(b"\xff\xfe") + struct.pack("<I", U32) + bytes(4)]), WeightReason.HEADER_INVALID),
    (
        "tensor twice",
        file_of(tensors=[tensor("w", (8,)), tensor("w", (8,), 0, 32)], data=64),
        WeightReason.DUPLICATE_KEY,
    ),
    ("five dimensions", file_of(tensors=[tensor("w", (1,) * 5)], data=32), WeightReason.BAD_SHAPE),
    (
        "2^32 - 1 dimensions",
        file_of(tensors=[text("w") + struct.pack("<I", 0xFFFFFFFF)], data=64),
        WeightReason.BAD_SHAPE,
    ),
    (
        "llama.cpp PR 26690 dim 2^42+1 wraps",
        file_of(tensors=[tensor("w", (2**42 + 1, 2**22))], data=32),
        WeightReason.BAD_SHAPE,
    ),
    ("dim 2^63", file_of(tensors=[tensor("w", (2**63,))], data=32), WeightReason.BAD_SHAPE),
    ("row not whole blocks", file_of(tensors=SPLIT_ROW, data=64), WeightReason.BAD_SHAPE),
    ("CVE-2026-7482 size beyond the file", file_of(tensors=[tensor("w", (9,))], data=32), WeightReason.TRUNCATED),
    ("offset beyond the file", file_of(tensors=[tensor("w", (8,), 0, 64)], data=64), WeightReason.TRUNCATED),
    ("offset 2^64 - 32", file_of(tensors=[tensor("w", (8,), 0, 2**64 - 32)], data=64), WeightReason.TRUNCATED),
    ("overlap", file_of(tensors=[tensor("a", (16,)), tensor("b", (8,), 0, 32)], data=64), WeightReason.BAD_OFFSETS),
    ("same place", file_of(tensors=[tensor("a", (8,)), tensor("b", (8,))], data=32), WeightReason.BAD_OFFSETS),
    ("misaligned", file_of(tensors=[tensor("w", (8,), 0, 8)], data=64), WeightReason.BAD_OFFSETS),
    ("descriptions cut", file_of(tensors=[tensor("w", (8,))])[:60], WeightReason.TRUNCATED),
    ("no data section", file_of(tensors=[tensor("w", (8,))])[:-5], WeightReason.TRUNCATED),
]


@pytest.mark.parametrize(("content", "reason"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_malformed_files_are_errors_with_a_reason(content: bytes, reason: WeightReason) -> None:
    with pytest.raises(WeightError) as caught:
        reading(content)
    assert caught.value.reason is reason
    assert caught.value.offset is not None


@pytest.mark.parametrize("alignment", [0, 3, 24, 2**21, 2**31])
def test_an_alignment_that_is_no_power_of_two_up_to_2_20_is_refused(alignment: int) -> None:
    # CVE-2025-0317 (zero: division by zero), ggml 1516 (huge: overflow).
    content = file_of([pair("general.alignment", U32, struct.pack("<I", alignment))], [tensor("w", (8,))], 64)
    with pytest.raises(WeightError) as caught:
        reading(content)
    assert caught.value.reason is WeightReason.BAD_ALIGNMENT


def test_an_alignment_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(WeightError) as caught:
        reading(file_of([pair("general.alignment", STRING, text("32"))]))
    assert caught.value.reason is WeightReason.BAD_ALIGNMENT


def test_the_time_budget_ends_a_walk_that_takes_too_long() -> None:
    words = text("") * 100_000
    content = file_of([pair("k", ARRAY, array(STRING, 100_000, words))])
    ticks = iter(range(10_000))
    with pytest.raises(WeightError) as caught:
        parse(Window(Bytes(content), ParseBudget(clock=lambda: next(ticks))))  # type: ignore[arg-type]
    assert caught.value.reason is WeightReason.PARSE_BUDGET


LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
}


def test_geometry_from_known_architectures() -> None:
    geometry = geometry_from_metadata(LLAMA, {"tokenizer.ggml.tokens": 49152}, tied=True)
    assert geometry is not None
    assert (len(geometry.layers), geometry.kv_heads, geometry.head_size, geometry.vocab_size) == (30, 3, 64, 49152)


@pytest.mark.parametrize("value", ["30", 0, -1, 2.0, [30], True, 2**40])
def test_a_block_count_of_the_wrong_type_counts_as_absent(value: Any) -> None:
    # CVE-2024-8063: a block count of another type became a division by zero.
    assert geometry_from_metadata({**LLAMA, "llama.block_count": value}, {}, tied=True) is None


VALID = file_of(
    [
        pair("general.architecture", STRING, text("llama")),
        pair("general.alignment", U32, struct.pack("<I", 32)),
        pair("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, text("a") + text("bc") + text(""))),
        pair("heads", ARRAY, array(U32, 2, struct.pack("<2I", 4, 8))),
    ],
    [tensor("a", (8, 2)), tensor("q", (32, 2), Q4_0_TYPE, 64)],
    data=128,
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    content = bytearray(VALID)
    for _ in range(draw(st.integers(1, 4))):
        if len(content) < 9:
            break
        at = draw(st.integers(0, len(content) - 8))
        match draw(st.sampled_from(["flip", "cut", "insert", "length", "end"])):
            case "flip":
                content[at] = draw(st.integers(0, 255))
            case "cut":
                del content[at : at + draw(st.integers(1, 40))]
            case "insert":
                content[at:at] = draw(st.binary(min_size=1, max_size=16))
            case "length":
                value = draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]))
                content[at : at + 8] = struct.pack("<Q", value)
            case "end":
                del content[at:]
    return bytes(content)


@settings(max_examples=600, deadline=None)
@given(mutated())
def test_fuzz_mutated_files_give_facts_or_our_error(content: bytes) -> None:
    try:
        header = reading(content)
    except WeightError:
        return
    assert header.header_bytes + sum(fact.bytes for fact in header.tensors) <= max(len(content), header.header_bytes)
    assert len({fact.name for fact in header.tensors}) == len(header.tensors)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_fuzz_arbitrary_bytes_after_the_magic(content: bytes) -> None:
    with contextlib.suppress(WeightError):
        reading(b"GGUF\x03\0\0\0" + content)


def test_what_is_kept_of_metadata_is_bounded_as_a_whole() -> None:
    block = array(6, 4096, bytes(4 * 4096))  # 16 KiB of floats, short enough to be kept alone
    header = reading(file_of([pair(f"k{index}", ARRAY, block) for index in range(100)]))
    assert len(header.metadata) == (1 << 20) // (16 << 10)
    assert len(header.arrays) == 100, "the others are checked and counted"


@pytest.mark.parametrize("counts", [(0, 20_000), (140_000, 0)])
def test_more_keys_or_tensors_than_any_model_has_are_refused_before_they_are_read(counts: tuple[int, int]) -> None:
    with pytest.raises(WeightError) as caught:
        reading(file_of(counts=counts, data=8 << 20))
    assert caught.value.reason is WeightReason.HEADER_TOO_LARGE

"""The safetensors reader: well-formed files as the official library sees them, malformed ones as errors."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.facts import PrecisionTotal
from weighbridge_fit.safetensors import header as headers
from weighbridge_fit.safetensors.reader import read_header, read_safetensors

F32_4 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


class Bytes:
    """An open file that lies in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read_exactly(self, offset: int, length: int) -> bytes:
        assert 0 <= length <= 128 << 20, "a reader must not ask for more than a header"
        if offset + length > self.size:
            raise WeightError(WeightReason.TRUNCATED, "short", offset=self.size)
        return self._data[offset : offset + length]


def file_of(header: bytes | dict[str, Any], data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + data


def reading(content: bytes) -> headers.Header:
    return read_header(Bytes(content))  # type: ignore[arg-type]


def test_agrees_with_the_official_reader_on_every_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {
        "a": np.zeros((3, 5), np.float32),
        "layers.0.w": np.zeros((4, 4), np.float16),
        "scalar": np.zeros((), np.int64),
        "empty": np.zeros((0, 7), np.float32),
        "flags": np.zeros((9,), np.bool_),
        "ünï": np.zeros((2,), np.uint8),
    }
    save_file(tensors, path, {"format": "np"})
    facts = read_safetensors(path)
    with safe_open(path, "np") as official:
        expected = {
            name: (official.get_slice(name).get_dtype(), tuple(official.get_slice(name).get_shape()))
            for name in official.keys()  # noqa: SIM118 - not a mapping
        }
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in facts.tensors} == expected
    assert {tensor.name: tensor.bytes for tensor in facts.tensors} == {name: a.nbytes for name, a in tensors.items()}
    assert facts.file_bytes == path.stat().st_size
    assert facts.header_bytes + sum(array.nbytes for array in tensors.values()) == facts.file_bytes
    assert facts.metadata == {"format": "np"}


def test_totals_per_precision_count_tensors_elements_and_bytes() -> None:
    header = reading(
        file_of(
            {
                "a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]},
                "b": {"dtype": "F16", "shape": [4], "data_offsets": [12, 20]},
                "c": {"dtype": "U8", "shape": [5], "data_offsets": [20, 25]},
            },
            bytes(25),
        )
    )
    assert header.precisions() == (PrecisionTotal("F16", 2, 10, 20), PrecisionTotal("U8", 1, 5, 5))


@pytest.mark.parametrize("dtype", ["F4", "F8_E9M9", "MXFP4_E2M1"])
def test_unknown_dtypes_are_counted_by_their_bytes_under_their_own_name(dtype: str) -> None:
    # FP4 shapes are logical and may have an odd last dimension: the offsets alone say what is stored.
    header = reading(file_of({"w": {"dtype": dtype, "shape": [3, 7], "data_offsets": [0, 11]}}, bytes(11)))
    assert header.precisions() == (PrecisionTotal(dtype, 1, 21, 11),)


def test_an_empty_header_and_padding_are_well_formed() -> None:
    assert reading(file_of(b"{}")).tensors() == ()
    assert reading(file_of(json.dumps({"w": F32_4}).encode() + b"   ", bytes(16))).tensor_count == 1


MALFORMED: list[tuple[str, bytes, WeightReason]] = [
    ("four bytes", b"\0\0\0\0", WeightReason.TRUNCATED),
    ("empty file", b"", WeightReason.TRUNCATED),
    ("length zero", bytes(8), WeightReason.HEADER_LENGTH_INVALID),
    ("length all ones", b"\xff" * 8 + b"{}", WeightReason.HEADER_LENGTH_INVALID),
    ("length above 100 MiB", ((100 << 20) + 1).to_bytes(8, "little") + b"{}", WeightReason.HEADER_LENGTH_INVALID),
    ("length beyond the file", (64).to_bytes(8, "little") + b"{}", WeightReason.TRUNCATED),
    ("not JSON", file_of(b"{abc"), WeightReason.HEADER_INVALID),
    ("JSON array", file_of(b"[]"), WeightReason.HEADER_INVALID),
    ("leading space", file_of(b' {"w":1}'), WeightReason.HEADER_INVALID),
    ("not UTF-8", file_of(b'{"\xff":' + json.dumps(F32_4).encode() + b"}", bytes(16)), WeightReason.HEADER_INVALID),
    ("entry is a number", file_of({"w": 7}), WeightReason.HEADER_INVALID),
    ("NaN", file_of(b'{"w":NaN}'), WeightReason.HEADER_INVALID),
    ("metadata not strings", file_of({"__metadata__": {"a": 1}}), WeightReason.HEADER_INVALID),
    ("a gap", file_of({"w": F32_4, "v": {**F32_4, "data_offsets": [20, 36]}}, bytes(36)), WeightReason.BAD_OFFSETS),
    ("an overlap", file_of({"w": F32_4, "v": {**F32_4, "data_offsets": [8, 24]}}, bytes(24)), WeightReason.BAD_OFFSETS),
    ("the same bytes twice", file_of({"w": F32_4, "v": F32_4}, bytes(16)), WeightReason.BAD_OFFSETS),
    ("trailing bytes", file_of({"w": F32_4}, bytes(17)), WeightReason.BAD_OFFSETS),
    ("bytes but no tensors", file_of({}, bytes(1)), WeightReason.BAD_OFFSETS),
    ("ends before it begins", file_of({"w": {**F32_4, "data_offsets": [16, 0]}}, bytes(16)), WeightReason.BAD_OFFSETS),
    ("data cut", file_of({"w": F32_4}, bytes(15)), WeightReason.TRUNCATED),
    ("negative offset", file_of({"w": {**F32_4, "data_offsets": [-16, 0]}}, b""), WeightReason.BAD_OFFSETS),
    ("boolean offset", file_of({"w": {**F32_4, "data_offsets": [False, 16]}}, bytes(16)), WeightReason.BAD_OFFSETS),
    ("offset 2^64 twice", file_of({"w": {**F32_4, "data_offsets": [2**64, 2**64]}}), WeightReason.BAD_OFFSETS),
    ("shape not of its size", file_of({"w": {**F32_4, "shape": [5]}}, bytes(16)), WeightReason.SIZE_MISMATCH),
    ("shape wraps 64 bits", file_of({"w": {**F32_4, "shape": [2**62 + 1, 4]}}, bytes(16)), WeightReason.BAD_SHAPE),
    ("negative size", file_of({"w": {**F32_4, "shape": [-4]}}, bytes(16)), WeightReason.BAD_SHAPE),
    ("fractional size", file_of({"w": {**F32_4, "shape": [4.0]}}, bytes(16)), WeightReason.BAD_SHAPE),
    ("shape is a map", file_of({"w": {**F32_4, "shape": {}}}, bytes(16)), WeightReason.BAD_SHAPE),
    ("65 dimensions", file_of({"w": {**F32_4, "shape": [1] * 64 + [4]}}, bytes(16)), WeightReason.BAD_SHAPE),
    ("dtype a number", file_of({"w": {**F32_4, "dtype": 1}}, bytes(16)), WeightReason.HEADER_INVALID),
    ("no dtype", file_of({"w": {"shape": [4], "data_offsets": [0, 16]}}, bytes(16)), WeightReason.HEADER_INVALID),
    ("nested without end", file_of(b'{"a":' + b"[" * 100_000), WeightReason.TOO_DEEP),
    ("half a million values", file_of(b'{"a":[' + b"0," * 500_001 + b"0]}"), WeightReason.PARSE_BUDGET),
    (
        "half a surrogate pair",
        file_of(b'{"\\ud800":' + json.dumps(F32_4).encode() + b"}", bytes(16)),
        WeightReason.HEADER_INVALID,
    ),
    ("a number of 5000 digits", file_of(b'{"a":' + b"9" * 5000 + b"}"), WeightReason.HEADER_INVALID),
]


@pytest.mark.parametrize(("content", "reason"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_malformed_files_are_errors_with_a_reason(content: bytes, reason: WeightReason) -> None:
    with pytest.raises(WeightError) as caught:
        reading(content)
    assert caught.value.reason is reason
    assert caught.value.message


ENTRY = b'"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'


@pytest.mark.parametrize(
    "header",
    [
        b"{" + ENTRY + b"," + ENTRY.replace(b"0,16", b"16,32") + b"}",
        b'{ "w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},' + ENTRY.replace(b"0,16", b"16,32") + b"}",
        b'{"w":{"dtype":"F32","dtype":"F32","shape":[4],"data_offsets":[0,32]}}',
        b'{"__metadata__":{"a":"1","a":"2"},' + ENTRY.replace(b"0,16", b"0,32") + b"}",
    ],
    ids=["canonical", "with a space", "field", "metadata"],
)
def test_duplicate_keys_are_refused_on_both_paths(header: bytes) -> None:
    with pytest.raises(WeightError) as caught:
        reading(file_of(header, bytes(32)))
    assert caught.value.reason is WeightReason.DUPLICATE_KEY


def test_an_error_names_the_byte_in_the_file() -> None:
    header = {"w": F32_4, "v": {**F32_4, "data_offsets": [20, 36]}}
    content = file_of(header, bytes(36))
    with pytest.raises(WeightError) as caught:
        reading(content)
    assert caught.value.offset == len(content) - 36 + 16  # where the gap begins


def test_a_header_above_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.write((9 << 20).to_bytes(8, "little") + b"{")
        file.truncate(10 << 20)
    with pytest.raises(WeightError) as caught:
        read_safetensors(path)
    assert caught.value.reason is WeightReason.HEADER_TOO_LARGE
    assert caught.value.file == "big.safetensors"


def canonical(order: tuple[str, ...], count: int) -> bytes:
    """A header as one of the two writers lays it out."""
    entries = {}
    for index in range(count):
        fields = {"dtype": "BF16", "shape": [index % 3 + 1, 2], "data_offsets": [0, 0]}
        entries[f"layer.{index}.w"] = {name: fields[name] for name in order}
    position = 0
    for entry in entries.values():
        size = entry["shape"][0] * 4
        entry["data_offsets"] = [position, position + size]
        position += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    return file_of(text, bytes(position))


RUST, SORTED = ("dtype", "shape", "data_offsets"), ("data_offsets", "dtype", "shape")


@pytest.mark.parametrize("order", [RUST, SORTED])
def test_the_fast_path_reads_what_the_strict_path_reads(order: tuple[str, ...]) -> None:
    content = canonical(order, 40)
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length]
    known = [text, json.dumps(json.loads(text)).encode()] if order is RUST else [text]
    indented = json.dumps(json.loads(text), indent=1).encode()
    assert headers._fast_columns(indented) is None
    data = len(content) - 8 - length
    for layout in known:
        assert headers._fast_columns(layout) is not None, "the layout of a known writer must take the fast path"
        assert headers.parse(layout, data).tensors() == headers.parse(indented, data).tensors()
        assert headers.parse(layout, data).precisions() == headers.parse(indented, data).precisions()


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid file with bytes changed, cut, doubled or inserted."""
    content = bytearray(canonical(draw(st.sampled_from([RUST, SORTED])), draw(st.integers(1, 6))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content) - 1))
        match draw(st.sampled_from(["flip", "cut", "insert", "double", "swap"])):
            case "flip":
                content[at] = draw(st.integers(0, 255))
            case "cut":
                del content[at : at + draw(st.integers(1, 40))]
            case "insert":
                content[at:at] = draw(
                    st.sampled_from([b'"', b"}", b"}}", b",", b"0", b"[", b"\\", b'{"a":', b" ", b"\xff"])
                )
            case "double":
                content[at:at] = content[at : at + draw(st.integers(1, 80))]
            case "swap":
                other = draw(st.integers(0, len(content) - 1))
                content[at], content[other] = content[other], content[at]
        if not content:
            break
    if draw(st.booleans()) and len(content) > 8:  # keep the prefix true, so that the JSON is reached
        content[:8] = max(1, len(content) - 8 - draw(st.integers(0, 64))).to_bytes(8, "little")
    return bytes(content)


@settings(max_examples=400, deadline=None)
@given(mutated())
def test_fuzz_mutated_files_give_facts_or_our_error(content: bytes) -> None:
    try:
        header = reading(content)
    except WeightError:
        return
    tensors = header.tensors()
    assert sum(tensor.bytes for tensor in tensors) + header.header_bytes + 8 == len(content)
    assert len({tensor.name for tensor in tensors}) == len(tensors)


def outcome(header: bytes, data_bytes: int) -> Any:
    """Everything that `parse` says about a header: its tensors and metadata, or reason, message and offset."""
    try:
        parsed = headers.parse(header, data_bytes)
        return parsed.tensors(), parsed.precisions(), parsed.metadata
    except WeightError as error:
        return error.reason, error.message, error.offset


def both_outcomes(header: bytes, data_bytes: int) -> tuple[Any, Any]:
    """What `parse` says, and what it says without its fast path."""
    quick = outcome(header, data_bytes)
    fast_path = headers._fast_columns
    headers._fast_columns = lambda _: None  # type: ignore[assignment]
    try:
        return quick, outcome(header, data_bytes)
    finally:
        headers._fast_columns = fast_path


@settings(max_examples=400, deadline=None)
@given(mutated())
def test_fuzz_both_paths_agree(content: bytes) -> None:
    length = int.from_bytes(content[:8], "little")
    quick, strict = both_outcomes(content[8 : 8 + length], max(0, len(content) - 8 - length))
    assert quick == strict


# Pieces of a header as a writer lays them out, and as one almost does: the fast path must take none of them otherwise
# than the strict one.
NAMES = st.sampled_from(
    ["w", "v", "a.b", "", "__metadata__", "\u00fc", "\\u0077", "\\n", "}}", "],", '\\"', "dtype", "\x7f", ",", "\t",
     "\ud800"]
)  # fmt: skip
DTYPES = st.sampled_from(
    ["F32", "BF16", "U8", "F4", "X_9", "f32", "F\u00e4", "", "A" * 32, "A" * 33, "F 32", "\\u0046"]
)
SHAPES = st.sampled_from(
    ["1", "2,2", "", "0", "1,", ",1", "01", "1,,1", "-1", "1.0", "1e0", "9" * 19, "9" * 5000, "1, 1", "true", "[1]",
     ",".join(["1"] * 64), ",".join(["1"] * 65), "4294967296,4294967296"]
)  # fmt: skip
NUMBERS = st.sampled_from(["0", "1", "4", "8", "16", "00", "04", "-0", "1.0", "4 ", "9" * 20, "9" * 5000, "", "null"])


@st.composite
def near_canonical(draw: st.DrawFn) -> tuple[bytes, int]:
    """A header whose parts are mostly right, and the size of the data behind it."""
    entries = []
    position = 0
    gap = draw(st.sampled_from(["", "", " "]))
    for index in range(draw(st.integers(1, 4))):
        odd = draw(st.integers(0, 3)) == 0
        name = draw(NAMES) if odd else f"layer.{index}"
        dtype = draw(DTYPES) if odd and draw(st.booleans()) else "F32"
        size = draw(st.integers(0, 3))
        shape = draw(SHAPES) if odd and draw(st.booleans()) else str(size)
        begin, end = str(position), str(position + 4 * size)
        position += 4 * size
        if odd and draw(st.booleans()):
            begin, end = draw(NUMBERS), draw(NUMBERS)
        fields = [f'"dtype":{gap}"{dtype}"', f'"shape":{gap}[{shape}]', f'"data_offsets":{gap}[{begin},{gap}{end}]']
        order = draw(st.sampled_from([(0, 1, 2), (2, 0, 1)])) if index else (0, 1, 2)
        if odd and draw(st.booleans()):
            order = draw(st.sampled_from([(1, 0, 2), (0, 2, 1), (0, 1, 2, 2), (0, 0, 1, 2), (0, 1), (0, 1, 2, 0)]))
        entries.append(f'"{name}":{gap}{{{f",{gap}".join(fields[field] for field in order)}}}')
    metadata = draw(
        st.sampled_from([
            None, None, "{}", '{"format":"pt"}', '{"a":"1","a":"2"}', '{"a":1}', "[]", "7", '{"a":"\\"}"}', '{"a":"}"}',
            '{"a":"\x01"}', '{"a":"' + "x" * 5000 + '"}', '{"a" :"1"}', '{"a":"\ud800"}', '{"a":{"b":"c"}}',
            '{"a":"b",}',
        ])
    )  # fmt: skip
    if metadata is not None:
        entries.insert(draw(st.sampled_from([0, 0, 0, len(entries)])), f'"__metadata__":{metadata}')
    text = draw(
        st.sampled_from(
            ["{%s}"] * 8 + ["{%s},", "{%s}}", "{%s,}", " {%s}", "{ %s}", "{%s }", "{%s}\n", "[%s]", "{,%s}"]
        )
    )
    text = text.replace("%s", draw(st.sampled_from([f",{gap}"] * 8 + [", ", ",", ",,", "", " ,"])).join(entries))
    header = text.encode("utf-8", "surrogatepass") + b" " * draw(st.integers(0, 3))
    return header, position + draw(st.sampled_from([0, 0, 0, 0, 1, -1]))


@settings(max_examples=1500, deadline=None)
@given(near_canonical())
def test_fuzz_both_paths_agree_on_headers_that_are_almost_canonical(case: tuple[bytes, int]) -> None:
    header, data_bytes = case
    quick, strict = both_outcomes(header, max(0, data_bytes))
    assert quick == strict


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_fuzz_arbitrary_bytes(content: bytes) -> None:
    with contextlib.suppress(WeightError):
        reading(content)


def test_official_reader_refuses_nothing_that_we_accept(tmp_path: Path) -> None:
    """Random small files: whatever we read without complaint, the official library opens with the same tensors."""
    chance = random.Random(20261130)
    accepted = 0
    for number in range(300):
        content = bytearray(canonical(chance.choice([RUST, SORTED]), chance.randint(1, 4)))
        for _ in range(chance.randint(0, 2)):
            content[chance.randrange(8, len(content))] = chance.choice(b'"{}[]:,0123456789 aF')
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(content)
        try:
            ours = read_safetensors(path)
        except WeightError:
            continue
        if any(tensor.dtype != "BF16" for tensor in ours.tensors):
            continue  # dtypes unknown to the official library are counted here and refused there
        accepted += 1
        with safe_open(path, "np") as official:
            assert {tensor.name for tensor in ours.tensors} == set(official.keys())
    assert accepted > 30

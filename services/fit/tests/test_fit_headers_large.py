"""Headers of 8 to 100 MiB: the same facts as from small ones, within 64 MiB above the header and its time budget."""

import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from weighbridge_fit.budget import ParseBudget
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.gguf import header as gguf_header
from weighbridge_fit.gguf.window import Window
from weighbridge_fit.safetensors import header as headers
from weighbridge_fit.safetensors import large
from weighbridge_fit.safetensors.reader import read_header, read_safetensors

from services.fit.fuzz.corpus import ARRAY, F32, STRING, gguf_array, gguf_file, gguf_pair, gguf_tensor, gguf_text

MIB = 1 << 20


class Bytes:
    """An open file that lies in memory, and whose data section is not there at all."""

    def __init__(self, start: bytes, size: int) -> None:
        self._start = start
        self.size = size
        self.read = 0

    def read_exactly(self, offset: int, length: int) -> bytes:
        assert offset + length <= self.size, "a reader must not read beyond the file"
        self.read += length
        return self._start[offset : offset + length].ljust(length, b"\0")


def entries(count: int, size: int = 4) -> dict[str, dict[str, Any]]:
    return {
        f"model.layers.{index % 61}.mlp.experts.{index}.down_proj.weight_scale_inv": {
            "dtype": "BF16", "shape": [size // 2], "data_offsets": [index * size, (index + 1) * size],
        }
        for index in range(count)
    }  # fmt: skip


def file_of(text: bytes, data_bytes: int) -> Bytes:
    return Bytes(len(text).to_bytes(8, "little") + text, 8 + len(text) + data_bytes)


def reading(text: bytes, data_bytes: int) -> large.LargeHeader:
    """As a large header, whatever its length."""
    return large.parse_large(file_of(text, data_bytes), len(text), ParseBudget())  # type: ignore[arg-type]


def compact(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


LAYOUTS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "as Rust writes it": compact,
    "as MLX writes it": lambda document: compact(
        {name: {key: fields[key] for key in sorted(fields)} for name, fields in document.items()}
    ),
    "as Python writes it": lambda document: json.dumps(document).encode(),
    "indented": lambda document: json.dumps(document, indent=1).encode(),
    "in no order": lambda document: compact(dict(random.Random(7).sample(list(document.items()), len(document)))),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_header_has_the_facts_of_a_small_one(layout: str) -> None:
    text = LAYOUTS[layout](entries(16_000))
    ours = reading(text, 64_000)
    assert len(ours.pieces) > 1, "it must be cut"
    expected = headers.parse(text, 64_000)
    assert ours.tensors() == expected.tensors()
    assert ours.precisions() == expected.precisions()
    assert ours.tensor_count == 16_000


def test_the_official_reader_opens_it_with_the_same_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = compact({"__metadata__": {"format": "pt", "workflow": "w" * (5 * MIB)}, **entries(40_000)})
    assert len(text) > 8 * MIB
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 160_000)
    facts = read_safetensors(path)
    with safe_open(path, "np") as official:
        assert {tensor.name for tensor in facts.tensors} == set(official.keys())
    assert facts.metadata == {"format": "pt"}, "long values are passed over"
    assert facts.header_bytes == 8 + len(text)
    assert sum(total.bytes for total in facts.precisions) == 160_000


def test_memory_stays_within_64_mib_above_the_header() -> None:
    count = 70_000
    text = compact(entries(count))
    file = file_of(text, count * 4)
    del text
    tracemalloc.start()
    try:
        # The clock stands still: what is measured is memory, and measuring makes everything slow.
        header = read_header(file, ParseBudget(clock=lambda: 0.0))  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert header.tensor_count == count
    assert header.header_bytes > 8 * MIB
    assert peak <= header.header_bytes + 64 * MIB


def test_a_header_of_half_a_million_tensors_stays_within_it_too(tmp_path: Path) -> None:
    """The most that is read, in a process of its own: the system's count of its memory is what an operator sees."""
    path = tmp_path / "model.safetensors"
    entry = '"model.layers.%d.mlp.experts.%d.down_proj.weight_scale_inv_of_some_group_of_experts.%d":'
    layout = '{"dtype":"F8_E4M3","shape":[4],"data_offsets":[%d,%d]}'
    count = 500_000
    body = ",".join((entry % (n % 61, n, n)) + layout % (4 * n, 4 * n + 4) for n in range(count))
    with path.open("wb") as file:
        file.write((len(body) + 2).to_bytes(8, "little") + b"{" + body.encode() + b"}")
        file.truncate(8 + len(body) + 2 + 4 * count)
    program = (
        "import resource, sys; from pathlib import Path;"
        "from weighbridge_fit.safetensors.reader import read_safetensors;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024);"
        "before = peak(); facts = read_safetensors(Path(sys.argv[1]));"
        "print(peak() - before, facts.tensor_count, facts.header_bytes)"
    )
    said = subprocess.run([sys.executable, "-c", program, str(path)], check=True, capture_output=True, text=True)
    peak, tensors, header_bytes = map(int, said.stdout.split())
    assert tensors == count
    assert 70 * MIB < header_bytes < 100 * MIB
    assert peak <= header_bytes + 64 * MIB


def test_a_metadata_value_of_20_mib_costs_no_more() -> None:
    text = compact({"__metadata__": {"a": "x" * (20 * MIB), "b": '{"q":"}"},"z":{"k":1}' * 50_000}, **entries(50_000)})
    file = file_of(text, 200_000)
    tracemalloc.start()
    try:
        header = read_header(file, ParseBudget(clock=lambda: 0.0))  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert header.tensor_count == 50_000
    assert peak <= len(text) + 64 * MIB


def test_time_runs_out_by_the_header_bytes_that_were_read() -> None:
    text = compact(entries(120_000))
    mib = len(text) / MIB
    allowed = 2.0 + 0.1 * (mib - 8)

    def took(seconds: float) -> None:
        """Reads it with a clock that says it took so long in all."""
        file = file_of(text, 480_000)

        def clock() -> float:
            return seconds * file.read / (8 + len(text))

        read_header(file, ParseBudget(clock=clock))  # type: ignore[arg-type]

    took(allowed * 0.95)
    with pytest.raises(WeightError) as caught:
        took(allowed * 3)
    # Not a fault of the file: who asks for a plan gets UNKNOWN, and a guess by its size.
    assert caught.value.reason is WeightReason.HEADER_TOO_LARGE


def test_what_is_no_header_is_refused_before_it_is_read_whole() -> None:
    text = b'{"w":{"dtype":' + b" " * (60 * MIB)
    file = file_of(text, 0)
    with pytest.raises(WeightError) as caught:
        read_header(file)  # type: ignore[arg-type]
    assert caught.value.reason is WeightReason.HEADER_TOO_LARGE
    assert file.read < 4 * MIB


def test_more_tensors_than_any_model_has_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "MAX_TENSORS", 15_000)
    with pytest.raises(WeightError) as caught:
        reading(compact(entries(16_000)), 64_000)
    assert caught.value.reason is WeightReason.HEADER_TOO_LARGE


def rows(changes: dict[int, dict[str, Any]], count: int = 16_000) -> dict[str, dict[str, Any]]:
    """Entries with some fields changed, by the entry's number."""
    found = entries(count)
    names = list(found)
    for number, fields in changes.items():
        found[names[number]] |= fields
    return found


W = b'{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}'
FIRST = compact(entries(1))[1 : compact(entries(1)).index(b":")]
EMPTY = {"shape": [0], "data_offsets": [4, 4]}
MANY = compact(entries(16_000))
WRONG: list[tuple[str, bytes, int, WeightReason]] = [
    ("a name twice, far apart", MANY[:-1] + b"," + FIRST + b":" + W.replace(b"0,4", b"64000,64004") + b"}", 64_004,
     WeightReason.DUPLICATE_KEY),
    ("a gap", compact(rows({9000: {"shape": [1], "data_offsets": [36_002, 36_004]}})), 64_000,
     WeightReason.BAD_OFFSETS),
    ("an overlap", compact(rows({9000: {"data_offsets": [36_002, 36_006]}})), 64_000, WeightReason.BAD_OFFSETS),
    ("two in one place", compact(rows({9000: {"data_offsets": [0, 4]}})), 64_000, WeightReason.BAD_OFFSETS),
    ("not from the start", compact(rows({0: {"data_offsets": [4, 8]}})), 64_000, WeightReason.BAD_OFFSETS),
    ("bytes nobody owns", MANY, 64_001, WeightReason.BAD_OFFSETS),
    ("data cut", MANY, 63_999, WeightReason.TRUNCATED),
    ("ends before it begins", compact(rows({9000: {"data_offsets": [36_004, 36_000]}})), 64_000,
     WeightReason.BAD_OFFSETS),
    ("an empty one inside another", compact(rows({9000: {"shape": [0], "data_offsets": [2, 2]}, 9001: {
        "shape": [4], "data_offsets": [36_000, 36_008]}})), 64_000, WeightReason.BAD_OFFSETS),
    ("a size that is not its shape's", compact(rows({9000: {"shape": [3]}})), 64_000, WeightReason.SIZE_MISMATCH),
    ("an offset above 64 bits", compact(rows({9000: {"data_offsets": [2**64, 2**64 + 4]}})), 64_000,
     WeightReason.TRUNCATED),
    ("a negative offset", compact(rows({9000: {"data_offsets": [-4, 0]}})), 64_000, WeightReason.BAD_OFFSETS),
    ("a field twice", MANY.replace(b'"dtype":"BF16"', b'"dtype":"BF16","dtype":"BF16"', 1), 64_000,
     WeightReason.DUPLICATE_KEY),
    ("cut in an entry", MANY[:-20], 64_000, WeightReason.HEADER_INVALID),
    ("no closing bracket", MANY[:-1], 64_000, WeightReason.HEADER_INVALID),
    ("a second object", MANY + b"{}", 64_000, WeightReason.HEADER_INVALID),
    ("an array", b"[" + MANY[1:-1] + b"]", 64_000, WeightReason.HEADER_INVALID),
    ("two metadata sections", compact({"__metadata__": {}, **entries(16_000)})[:-1] + b',"__metadata__":{}}', 64_000,
     WeightReason.DUPLICATE_KEY),
    ("a metadata key twice", b'{"__metadata__":{"a":"1","a":"2"},' + MANY[1:], 64_000, WeightReason.DUPLICATE_KEY),
    ("metadata of numbers", b'{"__metadata__":{"a":1},' + MANY[1:], 64_000, WeightReason.HEADER_INVALID),
    ("metadata not UTF-8", b'{"__metadata__":{"a":"\xff"},' + MANY[1:], 64_000, WeightReason.HEADER_INVALID),
    ("a name not UTF-8", MANY.replace(b"model.layers.7.", b"model.layers.\xff.", 1), 64_000,
     WeightReason.HEADER_INVALID),
    ("metadata and no tensors, then more", b'{"__metadata__":{"a":"1"}}x' + b" " * 100, 0, WeightReason.HEADER_INVALID),
]  # fmt: skip


@pytest.mark.parametrize(("text", "data", "reason"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_what_is_wrong_with_the_whole_is_found(text: bytes, data: int, reason: WeightReason) -> None:
    with pytest.raises(WeightError) as caught:
        reading(text, data)
    assert caught.value.reason is reason


def test_empty_tensors_between_others_and_at_the_end_are_well_formed() -> None:
    found = entries(16_000)
    for number, at in enumerate((0, 4, 64_000)):
        found[f"empty{number}"] = {"dtype": "F32", "shape": [0, 7], "data_offsets": [at, at]}
    assert reading(compact(found), 64_000).tensors() == headers.parse(compact(found), 64_000).tensors()


def test_metadata_may_come_anywhere_and_be_all_there_is() -> None:
    names = list(entries(16_000).items())
    text = compact(dict([*names[:9000], ("__metadata__", {"a": "1", "b": "\u00fc\n"}), *names[9000:]]))
    assert reading(text, 64_000).metadata == {"a": "1", "b": "\u00fc\n"}
    assert reading(compact({**entries(3), "__metadata__": {"a": "1"}}), 12).metadata == {"a": "1"}
    assert reading(b'{"__metadata__":{"a":"1"}}   ', 0).tensor_count == 0


def test_an_entry_with_objects_of_its_own_is_not_cut_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by fuzzing: what the format ignores looked like two entries, and the header was called malformed."""
    inner = '"x":{"a":{"dtype":"I8"},"b":{"dtype":"I8"}}'
    entry = f'"w%d":{{"dtype":"I8",{inner},"shape":[2],"data_offsets":[%d,%d]}}'
    text = "{" + ",".join(entry % (n, 2 * n, 2 * n + 2) for n in range(100)) + "}"
    monkeypatch.setattr(large, "PIECE_BYTES", 500)
    ours = reading(text.encode(), 200)
    assert [tensor.name for tensor in ours.tensors()] == [f"w{n}" for n in range(100)]


def test_two_names_of_one_hash_are_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "hash", lambda name: len(name), raising=False)
    assert reading(MANY, 64_000).tensor_count == 16_000


NAMES = st.sampled_from(["w", "v", "x},", '\\"},\\"a\\":{', "}", "__metadata__", "\u00fc", "a:{", "},{", "\\u0077"])


UNKNOWN_FIELDS = [
    '"x":{}',
    '"x":{"a":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]},"b":{"dtype":"BF16"}}',
    '"x":{"a":"}"},"y":{"b":"{"}',
    '"x":[{"a":{}},{"b":{}}]',
]


@st.composite
def documents(draw: st.DrawFn) -> tuple[bytes, int]:
    """A header that is mostly right, with names that look like cuts, and the size of its data."""
    found, position = [], 0
    colon, comma = draw(st.sampled_from([(":", ","), (": ", ", "), (" :\n", "\t, ")]))
    for index in range(draw(st.integers(0, 12))):
        name = draw(NAMES) + str(index) if draw(st.booleans()) else draw(NAMES)
        size = draw(st.integers(0, 3)) * 2
        begin = position if draw(st.integers(0, 9)) else draw(st.integers(0, 30))
        position += size
        shape, end = draw(st.sampled_from([size // 2] * 9 + [7])), begin + size
        fields = [f'"dtype"{colon}"BF16"', f'"shape"{colon}[{shape}]', f'"data_offsets"{colon}[{begin}{comma}{end}]']
        if not draw(st.integers(0, 5)):  # what nobody knows is ignored, also where it looks like entries
            fields.append(draw(st.sampled_from(UNKNOWN_FIELDS)))
        found.append(f'"{name}"{colon}{{{comma.join(draw(st.permutations(fields)))}}}')
    if draw(st.booleans()):
        value = draw(st.sampled_from(["{}", '{"a":"1"}', '{"a":"},\\"x\\":{"}', '{"a":"1","a":"1"}', '{"a":1}', "[]"]))
        found.insert(draw(st.integers(0, len(found))), f'"__metadata__"{colon}{value}')
    text = "{" + comma.join(found) + draw(st.sampled_from(["}"] * 8 + ["", "}}", "},", "} ", "}x"]))
    return text.encode(), position + draw(st.sampled_from([0] * 8 + [1, -1]))


@settings(max_examples=1200, deadline=None)
@given(documents(), st.sampled_from([1, 40, 90, 200]))
def test_fuzz_pieces_of_any_size_say_what_the_whole_says(case: tuple[bytes, int], piece_bytes: int) -> None:
    text, data_bytes = case[0], max(0, case[1])
    whole: Any
    try:
        parsed = headers.parse(text, data_bytes)
        whole = parsed.tensors(), parsed.precisions(), parsed.metadata
    except WeightError:
        whole = None
    before, large.PIECE_BYTES = large.PIECE_BYTES, piece_bytes
    try:
        ours = reading(text, data_bytes)
        found: Any = ours.tensors(), ours.precisions(), ours.metadata
    except WeightError as error:
        # A cut may not be found in so small a piece; what is found must be the same.
        found = whole if error.reason is WeightReason.HEADER_TOO_LARGE else None
    finally:
        large.PIECE_BYTES = before
    assert found == whole


# GGUF


def gguf_of(tensors: int, name_bytes: int, vocabulary: int) -> Bytes:
    words = b"".join(gguf_text(f"word{number}") for number in range(vocabulary))
    pairs = [
        gguf_pair("tokenizer.ggml.tokens", ARRAY, gguf_array(STRING, vocabulary, words)),
        gguf_pair("tokenizer.ggml.scores", ARRAY, gguf_array(F32, vocabulary, bytes(4 * vocabulary))),
        gguf_pair("general.architecture", STRING, gguf_text("llama")),
    ]
    names = (f"blk.{number}.".ljust(name_bytes, "x") for number in range(tensors))
    described = [gguf_tensor(name, (8,), 0, 32 * number) for number, name in enumerate(names)]
    start = gguf_file(pairs, described)
    return Bytes(start, len(start) + 32 * tensors)


@pytest.mark.parametrize(
    ("tensors", "name_bytes", "vocabulary"),
    [(10, 20, 1_500_000), (131_072, 40, 20_000), (30_000, 900, 5000)],
    ids=["a vocabulary of 1.5 million words", "131,072 tensors", "names of 900 bytes"],
)
def test_a_large_gguf_header_is_read_within_64_mib_above_it(tensors: int, name_bytes: int, vocabulary: int) -> None:
    file = gguf_of(tensors, name_bytes, vocabulary)
    tracemalloc.start()
    try:
        header = gguf_header.parse(Window(file, ParseBudget(clock=lambda: 0.0)))  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert header.header_bytes > 8 * MIB
    assert len(header.tensors) == tensors
    assert header.arrays["tokenizer.ggml.tokens"] == vocabulary
    assert header.metadata == {"general.architecture": "llama"}
    assert peak <= header.header_bytes + 64 * MIB


def test_a_gguf_header_beyond_100_mib_is_too_large() -> None:
    pairs = [gguf_pair("k", ARRAY, gguf_array(F32, 26 << 20, b""))]
    start = gguf_file(pairs)
    file = Bytes(start, len(start) + (104 << 20) + 8)
    with pytest.raises(WeightError) as caught:
        gguf_header.parse(Window(file, ParseBudget()))  # type: ignore[arg-type]
    assert caught.value.reason is WeightReason.HEADER_TOO_LARGE
    assert file.read < MIB

"""Files, folders and configs made to hang, exhaust, crash or mislead the reader: each is an answer or a clear error.

Nothing here is timed. What must not be slow is given a size at which the fault it guards against would take hours.
"""

import json
import os
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from weighbridge_fit import describe as describing
from weighbridge_fit import folder as folders
from weighbridge_fit import weight_names
from weighbridge_fit.bounded_json import loads_object, loads_pairs
from weighbridge_fit.describe import describe
from weighbridge_fit.errors import MAX_SHOWN, WeightError, WeightReason, shown
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.models_root import ModelNotFoundError, ModelsRoot

MIB = 1 << 20
TIB = 1 << 40
NOBODY = 65534

QWEN: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    (folder / "m").mkdir(parents=True)
    return folder


def weights(path: Path) -> Path:
    save_file({"w": np.zeros((2, 2), np.float16)}, path)
    return path


def facts_of(root: Path, name: str = "m") -> WeightFacts:
    models = ModelsRoot(root)
    return describe(models.resolve(name), models.contains)


def refusal(root: Path, name: str = "m") -> WeightError:
    with pytest.raises(WeightError) as caught:
        facts_of(root, name)
    caught.value.sentence().encode("utf-8")  # it must be able to travel
    return caught.value


def header_only(header: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def text(value: str) -> bytes:
    return u64(len(value)) + value.encode()


def gguf(tensors: int, pairs: int, body: bytes) -> bytes:
    return b"GGUF" + (3).to_bytes(4, "little") + u64(tensors) + u64(pairs) + body


# JSON


@pytest.mark.parametrize("opening", [b'{"', b'{"a":"', b'[["', b'"'])
def test_escaped_quotes_in_a_string_that_never_ends_are_read_once(opening: bytes) -> None:
    # Tried again from each quote this would be 10^13 steps, and no other thread would run meanwhile.
    with pytest.raises(WeightError) as caught:
        loads_pairs(opening + b'\\"' * (4 * MIB))
    assert caught.value.reason is WeightReason.HEADER_INVALID


def test_brackets_in_strings_are_no_nesting() -> None:
    assert loads_object(b'{"a":"' + b"[" * 1000 + b'\\"' + b"{" * 1000 + b'"}') == {"a": "[" * 1000 + '"' + "{" * 1000}


def nesting(document: bytes) -> int:
    """The deepest nesting, character by character: brackets within strings are none."""
    depth = deepest = 0
    inside = escaped = False
    for character in document.decode():
        if escaped:
            escaped = False
        elif inside:
            inside, escaped = character != '"', character == "\\"
        elif character == '"':
            inside = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


JSON_TEXTS = st.recursive(
    st.none() | st.text('[]{}"\\\n,:a', max_size=8) | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[]{}"\\a', max_size=4), inner, max_size=3),
    max_leaves=30,
)


@given(JSON_TEXTS, st.integers(0, 8), st.sampled_from([None, (",", ":")]))
def test_documents_are_refused_exactly_where_they_are_too_deep(
    value: Any, most: int, separators: tuple[str, str] | None
) -> None:
    document = json.dumps(value, separators=separators).encode()
    if nesting(document) <= most:
        loads_pairs(document, max_depth=most)
        return
    with pytest.raises(WeightError) as caught:
        loads_pairs(document, max_depth=most)
    assert caught.value.reason is WeightReason.TOO_DEEP
    assert caught.value.offset is not None
    # At that bracket the text is one level too deep, and before it was not.
    assert nesting(document[: caught.value.offset]) == most < nesting(document[: caught.value.offset + 1])


@pytest.mark.parametrize(
    "document",
    [
        b"]" * (8 * MIB),
        b'{"a":1}' + b"}" * (8 * MIB),
        b"[]" * 400_000,
        b'\\"' + b"[" * 40,
        b'"' + b"[" * 40,
        b"[}" * 40,
        b"[" * 32 + b"}" * 32,
    ],
)
def test_brackets_that_do_not_belong_together_are_no_json(document: bytes) -> None:
    with pytest.raises(WeightError) as caught:
        loads_pairs(document)
    assert caught.value.reason in (WeightReason.HEADER_INVALID, WeightReason.TOO_DEEP)


@pytest.mark.parametrize("document", [b'{"a":"\\ud800"}', b'{"\\uDFFF":1}', b'{"a":[{"b":["\\udc00\\ud800"]}]}'])
def test_half_a_surrogate_pair_is_no_text(document: bytes) -> None:
    with pytest.raises(WeightError) as caught:
        loads_object(document)
    assert caught.value.reason is WeightReason.HEADER_INVALID


def test_a_whole_surrogate_pair_is_text() -> None:
    assert loads_object(b'{"a":"\\ud83d\\ude00"}') == {"a": "\U0001f600"}


@pytest.mark.parametrize(
    "header",
    [
        b"[" * (8 * MIB),
        b'{"a":' * MIB,
        b'{"w":{"dtype":"' + b"A" * (7 * MIB) + b'"}}',
        b'{"w":' + b"9" * (7 * MIB) + b"}",
        b'{"w":0.' + b"9" * (7 * MIB) + b"}",
        b"{" + b'"w":{"dtype":"F32","shape":[],"data_offsets":[0,0]},' * 140_000 + b'"x":1}',
        b"{" + b",".join(b'"%06x":{}' % index for index in range(300_000)) + b"}",
        b"{" + b"," * (8 * MIB - 2) + b"}",
    ],
    ids=["brackets", "objects", "dtype", "digits", "fraction", "140,000 entries", "empty entries", "commas"],
)
def test_headers_of_the_largest_size_stay_within_the_memory_budget(root: Path, header: bytes) -> None:
    (root / "m/model.safetensors").write_bytes(header_only(header))
    tracemalloc.start()
    try:
        refusal(root)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 96 * MIB


# Folders


def test_links_that_lead_to_themselves_are_absent(root: Path) -> None:
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(ModelNotFoundError):
        ModelsRoot(root).resolve("loop")
    (root / "m/model.safetensors").symlink_to("model.safetensors")
    assert refusal(root).reason is WeightReason.UNREADABLE
    (root / "m/model.safetensors").unlink()
    weights(root / "m/model.safetensors")
    (root / "m/again").symlink_to(root / "m")  # a folder within itself
    assert facts_of(root).tensor_bytes == 8


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "config.json", "model.safetensors.index.json"])
def test_a_pipe_in_the_folder_does_not_hang(root: Path, name: str) -> None:
    if name.endswith(".json"):
        weights(root / "m/model.safetensors")
    os.mkfifo(root / "m" / name)
    if "index" in name:  # a broken index is ignored
        assert facts_of(root).tensor_bytes == 8
    else:
        assert refusal(root).reason is WeightReason.NOT_A_REGULAR_FILE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device files")
@pytest.mark.parametrize("minor", [5, 8])  # zero, random: endless
def test_a_device_in_the_folder_is_not_opened(root: Path, minor: int) -> None:
    try:
        os.mknod(root / "m/model.safetensors", 0o600 | 0o020000, os.makedev(1, minor))
    except PermissionError:
        pytest.skip("this container may not make device files")
    assert refusal(root).reason is WeightReason.NOT_A_REGULAR_FILE


def test_a_folder_of_too_many_entries_is_refused_without_listing_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MAX_ENTRIES", 10)
    weights(root / "m/model.safetensors")
    for number in range(40):
        (root / f"m/{number}").touch()
    taken = 0
    listing = os.scandir

    class Counted:
        def __init__(self, path: Any) -> None:
            self._entries = listing(path)

        def __enter__(self) -> "Counted":
            return self

        def __exit__(self, *_: object) -> None:
            self._entries.close()

        def __iter__(self) -> "Counted":
            return self

        def __next__(self) -> Any:
            nonlocal taken
            taken += 1
            return next(self._entries)

    monkeypatch.setattr(folders.os, "scandir", Counted)
    assert refusal(root).reason is WeightReason.PARSE_BUDGET
    assert taken <= 11


def test_a_folder_deeper_than_any_model_is_not_descended(root: Path) -> None:
    deep = root / "m"
    for _ in range(40):
        deep = deep / "d"
    deep.mkdir(parents=True)
    weights(deep / "model.safetensors")
    assert refusal(root).reason is WeightReason.NO_WEIGHTS


def test_names_that_are_not_text_still_make_facts_that_can_travel(root: Path) -> None:
    bad = os.fsdecode(b"\xff\xfe")
    (root / bad).mkdir()
    weights(root / bad / f"{bad}.safetensors")
    weights(root / f"{bad}.safetensors")
    for name in (bad, f"{bad}.safetensors"):
        facts = facts_of(root, name)
        for text in (facts.name, *facts.notes, *(file.name for file in facts.files)):
            text.encode("utf-8")
        assert facts.tensor_bytes == 8
    (root / "m" / f"{bad}.safetensors").write_bytes(b"\0")
    assert refusal(root).file == "\\udcff\\udcfe.safetensors"


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "a/b.safetensors",
        "\\ud800.safetensors",
        "a\\u0000.safetensors",
    ],
)
def test_an_index_that_reaches_elsewhere_is_ignored(root: Path, shard: str) -> None:
    weights(root / "secret.safetensors")
    weights(root / "m/model.safetensors")
    (root / "m/model.safetensors.index.json").write_text('{"weight_map": {"w": "' + shard + '"}}')
    facts = facts_of(root)
    assert [file.name for file in facts.files] == ["model.safetensors"]
    assert any("broken" in note for note in facts.notes)


def test_an_index_of_a_million_entries_is_ignored(root: Path) -> None:
    weights(root / "m/model.safetensors")
    entries = ",".join(f'"{number}":"s{number}.safetensors"' for number in range(1_000_000))
    (root / "m/model.safetensors.index.json").write_text('{"weight_map":{' + entries + "}}")
    tracemalloc.start()
    try:
        assert facts_of(root).tensor_bytes == 8
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 96 * MIB


def test_files_that_describe_more_than_a_model_has_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        weights(root / f"m/model-{number}.safetensors")
    monkeypatch.setattr(describing, "MAX_MODEL_TENSORS", 3)
    assert refusal(root).reason is WeightReason.PARSE_BUDGET
    monkeypatch.setattr(describing, "MAX_MODEL_TENSORS", 4)
    assert facts_of(root).tensor_count == 4
    monkeypatch.setattr(describing, "MAX_MODEL_HEADER_BYTES", 100)
    assert refusal(root).reason is WeightReason.PARSE_BUDGET


def test_a_split_gguf_in_a_folder_is_priced_whole_or_not_at_all(root: Path) -> None:
    for number in (1, 3):
        (root / f"m/model-0000{number}-of-00003.gguf").write_bytes(gguf(0, 0, b""))
    error = refusal(root)
    assert (error.reason, error.file) == (WeightReason.SPLIT_INCOMPLETE, "model-00002-of-00003.gguf")


def test_a_split_of_many_parts_is_looked_through_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = 200
    for number in range(1, parts + 1):
        (root / f"m/model-{number:05d}-of-{parts:05d}.gguf").touch()
    asked: list[str] = []
    named = weight_names.split_names
    monkeypatch.setattr(weight_names, "split_names", lambda name: asked.append(name) or named(name))
    assert refusal(root).reason is WeightReason.TRUNCATED
    # Once for each part it would be 16 million names of the 4,096 parts that a model may have.
    assert len(asked) == 1


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_a_description_whose_link_leads_nowhere_is_not_left_out_unnoticed(root: Path, name: str) -> None:
    weights(root / "m/adapters.safetensors")
    (root.parent / name).write_text("{}")
    for target in (name, f"../../{name}", "nowhere"):
        (root / "m" / name).symlink_to(target)
        error = refusal(root)
        assert (error.reason, error.file) == (WeightReason.UNREADABLE, name)
        (root / "m" / name).unlink()


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_an_empty_file_is_cut_short(root: Path, name: str) -> None:
    (root / "m" / name).touch()
    assert refusal(root).reason is WeightReason.TRUNCATED


@pytest.mark.parametrize(
    ("name", "start", "reason"),
    [
        ("model.safetensors", header_only(b"{", 100 * MIB), WeightReason.HEADER_TOO_LARGE),
        ("model.safetensors", header_only(b"{}"), WeightReason.BAD_OFFSETS),
        ("model.gguf", b"\0\0\0\0", WeightReason.BAD_MAGIC),
        ("model.gguf", gguf(TIB // 100, TIB // 100, b""), WeightReason.HEADER_TOO_LARGE),
        ("model.gguf", gguf(0, 1, text("k") + b"\x08\0\0\0" + u64(TIB // 2)), WeightReason.HEADER_TOO_LARGE),
        ("model.gguf", gguf(1, 0, text("w") + b"\x01\0\0\0" + u64(TIB) + bytes(12)), WeightReason.TRUNCATED),
    ],
    ids=["100 MiB of JSON", "data nobody owns", "zeros", "counts", "a string of 512 GiB", "a tensor of 4 TiB"],
)  # fmt: skip
def test_a_sparse_file_of_a_tebibyte_costs_its_header(
    root: Path, name: str, start: bytes, reason: WeightReason
) -> None:
    with (root / "m" / name).open("wb") as file:
        file.write(start)
        try:
            file.truncate(TIB)
        except OSError:
            pytest.skip("this file system has no files of that size")
    tracemalloc.start()
    try:
        assert refusal(root).reason is reason
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 16 * MIB


def test_a_file_that_shrinks_while_it_is_read_is_cut_short(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = weights(root / "m/model.safetensors")
    monkeypatch.setattr(os, "pread", lambda descriptor, length, offset: b"")
    assert refusal(root).reason is WeightReason.TRUNCATED
    monkeypatch.undo()
    real = os.pread

    def shrinking(descriptor: int, length: int, offset: int) -> bytes:
        os.truncate(path, 20)
        return real(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", shrinking)
    assert refusal(root).reason is WeightReason.TRUNCATED


def test_a_file_swapped_for_a_link_after_it_was_resolved_is_not_followed(root: Path) -> None:
    secret = weights(root.parent / "secret.safetensors")
    path = weights(root / "m/model.safetensors")

    def swapping(found: Path) -> Path | None:
        real = ModelsRoot(root).contains(found)
        if found == path:
            path.unlink()
            path.symlink_to(secret)
        return real

    with pytest.raises(WeightError) as caught:
        describe(root / "m", swapping)
    assert caught.value.reason is WeightReason.NOT_A_REGULAR_FILE


@pytest.fixture
def open_root() -> Iterator[Path]:
    """A models root that other users can reach: pytest's own folders are closed to them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "m").mkdir(mode=0o755)
        yield Path(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "."])
def test_what_may_not_be_read_is_an_error_that_names_it(open_root: Path, name: str) -> None:
    root = open_root
    weights(root / "m/model.safetensors")
    (root / "m/config.json").write_text("{}")
    (root / "m" / name).chmod(0)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(NOBODY)  # root may read everything
    try:
        error = refusal(root)
    finally:
        if was_root:
            os.seteuid(0)
        (root / "m" / name).chmod(0o755)
    assert error.reason is WeightReason.UNREADABLE
    assert error.file == ("" if name == "." else name)


@pytest.mark.parametrize("reference", ["a/../" * 1_000_000 + "m", "m/" * 5000, "x" * 100_000])
def test_a_reference_longer_than_a_path_is_not_looked_up(root: Path, reference: str) -> None:
    with pytest.raises(ModelNotFoundError):
        ModelsRoot(root).resolve(reference)


# Configs


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"hidden_size": 10**4000}, "hidden_size"),
        ({"hidden_size": 1e308}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": -(2**63)}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": [2]}, "num_key_value_heads"),
        ({"layer_types": ["full_attention"] * 100_000}, "layer_types"),
        ({"layer_types": {"full_attention": 2}}, "layer_types"),
        ({"layer_types": ["full_attention", "x" * 100_000]}, "layer_types"),
        ({"text_config": 7}, "text_config"),
        ({"quantization": {"bits": "4"}}, "bits"),
        ({"quantization": {"bits": -4}}, "bits"),
        ({"quantization": 4}, "quantization"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"hidden_size": float("nan")}, "hidden_size"),
        ({"num_hidden_layers": float("inf")}, "num_hidden_layers"),
    ],
)  # fmt: skip
def test_a_config_that_no_model_has_names_the_field(root: Path, changes: dict[str, Any], field: str) -> None:
    weights(root / "m/model.safetensors")
    (root / "m/config.json").write_text(json.dumps({**QWEN, **changes}))
    error = refusal(root)
    assert (error.reason, error.file) == (WeightReason.CONFIG_INVALID, "config.json")
    assert field in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (b'{"hidden_size":' + b"9" * 5000 + b"}", WeightReason.CONFIG_INVALID),
        (b'{"model_type":"\\ud800"}', WeightReason.CONFIG_INVALID),
        (b'{"a":' * 100 + b"1" + b"}" * 100, WeightReason.CONFIG_INVALID),
        (b"[]", WeightReason.CONFIG_INVALID),
        (b"", WeightReason.CONFIG_INVALID),
        (b'{"a":1,"a":2}', WeightReason.CONFIG_INVALID),
        (b'{"a":"' + b"x" * (5 * MIB) + b'"}', WeightReason.HEADER_TOO_LARGE),
    ],
)
def test_a_config_that_is_no_config_is_an_error(root: Path, config: bytes, reason: WeightReason) -> None:
    weights(root / "m/model.safetensors")
    (root / "m/config.json").write_bytes(config)
    error = refusal(root)
    assert (error.reason, error.file) == (reason, "config.json")


def test_an_infinity_that_no_size_depends_on_is_no_fault(root: Path) -> None:
    """Published configs of Mamba 2's line hold one: transformers wrote them as Python spells them."""
    weights(root / "m/model.safetensors")
    (root / "m/config.json").write_text(json.dumps(QWEN))
    without = facts_of(root).geometry
    config = json.dumps({**QWEN, "time_step_limit": [0.0, float("inf")], "scale": float("nan")})
    assert "[0.0, Infinity]" in config
    (root / "m/config.json").write_text(config)
    assert without is not None
    assert facts_of(root).geometry == without


@pytest.mark.parametrize("model_type", [7, None, ["qwen3"], "q" * 100_000])
def test_a_model_type_that_is_no_word_is_unknown(root: Path, model_type: Any) -> None:
    weights(root / "m/model.safetensors")
    (root / "m/config.json").write_text(json.dumps({**QWEN, "model_type": model_type}))
    facts = facts_of(root)
    assert (facts.architecture, facts.geometry) == ("", None)


# Messages


@pytest.mark.parametrize(
    "content",
    [
        gguf(0, 2, (text("k" * 60_000) + b"\x07\0\0\0\x01") * 2),
        gguf(0, 1, text("k" * 60_000) + b"\x63\0\0\0"),
        gguf(0, 1, text("k" * 60_000) + b"\x08\0\0\0" + b"\xff" * 8),
        gguf(0, 1, text("k" * 60_000) + b"\x09\0\0\0\x63\0\0\0" + bytes(8)),
        gguf(2, 0, (text("w" * 60_000) + bytes(4 + 4 + 8)) * 2),
        gguf(1, 0, text("w" * 60_000) + b"\x09\0\0\0" + bytes(100)),
        gguf(1, 1, text("general.alignment") + b"\x08\0\0\0" + text("9" * 4000) + bytes(64)),
    ],
)
def test_messages_stay_short_whatever_the_names(root: Path, content: bytes) -> None:
    (root / "m/model.gguf").write_bytes(content)
    assert len(refusal(root).message) <= 120 + MAX_SHOWN


# Faults that other readers of these files had, by the name under which each is known


def kv(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def described(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(shape)) + b"".join(map(u64, shape)) + u32(kind) + u64(offset)


def aligned(content: bytes, data: int) -> bytes:
    return content + bytes(-len(content) % 32 + data)


ALL_ONES = 2**64 - 1
STRING_KIND, ARRAY_KIND, U32_KIND = 8, 9, 4
LLAMA_KEYS = kv("general.architecture", STRING_KIND, text("llama")) + b"".join(
    kv(f"llama.{key}", U32_KIND, u32(value))
    for key, value in {"embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}.items()
)
ONE = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'

KNOWN_FAULTS: list[tuple[str, str, bytes, WeightReason]] = [
    ("CVE-2024-39720: a file of four bytes", "m.gguf", b"GGUF", WeightReason.TRUNCATED),
    ("CVE-2024-12055: a description beyond the end", "m.gguf", gguf(1, 0, text("w" * 20) + u32(2) + u64(4)),
     WeightReason.TRUNCATED),
    ("CVE-2024-12055: a string beyond the end", "m.gguf", gguf(0, 1, text("k") + u32(8) + u64(500) + bytes(20)),
     WeightReason.COUNT_EXCEEDS_FILE),
    ("CVE-2025-0317: alignment 0", "m.gguf",
     aligned(gguf(1, 1, kv("general.alignment", U32_KIND, u32(0)) + described("w", (8,))), 32),
     WeightReason.BAD_ALIGNMENT),
    ("CVE-2025-0315: counts of all ones in 49 bytes", "m.gguf", gguf(ALL_ONES, ALL_ONES, bytes(25)),
     WeightReason.COUNT_EXCEEDS_FILE),
    ("ollama 17042: a key of 2^64 - 1 bytes", "m.gguf", gguf(0, 1, u64(ALL_ONES) + bytes(40)),
     WeightReason.COUNT_EXCEEDS_FILE),
    ("ollama PR 16136: an array of 0x40000000 strings", "m.gguf",
     gguf(0, 1, kv("k", ARRAY_KIND, u32(STRING_KIND) + u64(0x40000000)) + bytes(64)), WeightReason.COUNT_EXCEEDS_FILE),
    ("ollama PR 16136: 0x40000000 tensors", "m.gguf", gguf(0x40000000, 0, bytes(64)), WeightReason.COUNT_EXCEEDS_FILE),
    ("CVE-2025-0312: a tensor of a type that is none", "m.gguf",
     aligned(gguf(1, 0, text("") + u32(0) + u32(0xFFFFFFFF) + u64(ALL_ONES)), 0), WeightReason.BAD_OFFSETS),
    ("CVE-2026-7482: a tensor larger than the file", "m.gguf", aligned(gguf(1, 0, described("w", (1 << 20,))), 32),
     WeightReason.TRUNCATED),
    ("CVE-2026-7482: a tensor behind the file", "m.gguf",
     aligned(gguf(1, 0, described("w", (8,), offset=1 << 40)), 32), WeightReason.TRUNCATED),
    ("CVE-2026-7482: two tensors in one place", "m.gguf",
     aligned(gguf(2, 0, described("v", (8,)) + described("w", (8,))), 32), WeightReason.BAD_OFFSETS),
    ("CVE-2025-49847: a word of 2^31 + 1 bytes", "m.gguf",
     gguf(0, 1, kv("tokenizer.ggml.tokens", ARRAY_KIND, u32(STRING_KIND) + u64(5000) + u64(2**31 + 1) + bytes(40_000))),
     WeightReason.TRUNCATED),
    ("GHSA-vgg9: a word of 2^64 - 1 bytes", "m.gguf",
     gguf(0, 1, kv("tokenizer.ggml.tokens", ARRAY_KIND, u32(STRING_KIND) + u64(1) + u64(ALL_ONES))),
     WeightReason.COUNT_EXCEEDS_FILE),
    ("llama.cpp PR 26690: an array of a type that is none", "m.gguf",
     gguf(0, 1, kv("tokenizer.ggml.tokens", ARRAY_KIND, u32(0x55) + u64(3) + bytes(1500))),
     WeightReason.BAD_VALUE_TYPE),
    ("llama.cpp 18674: a dimension of 2^42 + 1 that wraps", "m.gguf",
     aligned(gguf(1, 0, described("w", (2**42 + 1, 2**22))), 32), WeightReason.BAD_SHAPE),
    ("llama.cpp 25969: four dimensions of 2^16 - 1 and more", "m.gguf",
     aligned(gguf(1, 0, described("w", (2**16, 2**16, 2**16, 2**16 + 1))), 32), WeightReason.BAD_SHAPE),
    ("llama.cpp 25821: a negative dimension", "m.gguf", aligned(gguf(1, 0, described("w", (ALL_ONES,))), 32),
     WeightReason.BAD_SHAPE),
    ("llama.cpp 27188: 43 bytes, an array of 2^63", "m.gguf",
     gguf(0, 1, text("a") + u32(ARRAY_KIND) + bytes(1) + bytes(3) + u64(2**63)), WeightReason.COUNT_EXCEEDS_FILE),
    ("llama.cpp 25378: 2^32 - 1 dimensions", "m.gguf", gguf(1, 0, text("w") + u32(0xFFFFFFFF) + bytes(64)),
     WeightReason.BAD_SHAPE),
    ("ggml 709: a count of keys that overflows", "m.gguf", gguf(0, 2**61, bytes(200)), WeightReason.COUNT_EXCEEDS_FILE),
    ("ggml 709: a string whose length plus one is 0", "m.gguf",
     gguf(0, 1, text("k") + u32(8) + u64(ALL_ONES) + bytes(9)), WeightReason.COUNT_EXCEEDS_FILE),
    ("ggml 709: an array whose bytes overflow", "m.gguf",
     gguf(0, 1, kv("k", ARRAY_KIND, u32(10) + u64(2**61 + 1) + bytes(64))), WeightReason.COUNT_EXCEEDS_FILE),
    ("ggml 709: five dimensions", "m.gguf", aligned(gguf(1, 0, described("w", (1,) * 5)), 32), WeightReason.BAD_SHAPE),
    ("ggml 1516: an alignment of 2^31", "m.gguf",
     aligned(gguf(1, 1, kv("general.alignment", U32_KIND, u32(2**31)) + described("w", (8,))), 32),
     WeightReason.BAD_ALIGNMENT),
    ("gguf-parser-go PR 18: a string of 1 TiB", "m.gguf", gguf(0, 1, text("k") + u32(8) + u64(1 << 40) + bytes(99)),
     WeightReason.COUNT_EXCEEDS_FILE),
    ("safetensors: a header of more than 100 MiB", "m.safetensors", u64((100 << 20) + 1) + ONE,
     WeightReason.HEADER_LENGTH_INVALID),
    ("safetensors: a header of 2^64 - 1 bytes", "m.safetensors", b"\xff" * 8 + ONE, WeightReason.HEADER_LENGTH_INVALID),
    ("safetensors: a header beyond the file", "m.safetensors", u64(5000) + ONE, WeightReason.TRUNCATED),
    ("safetensors: 200,000 entries of nothing", "m.safetensors",
     header_only(b"{" + b",".join(b'"%06x":{}' % number for number in range(200_000)) + b"}"),
     WeightReason.BAD_OFFSETS),
    ("safetensors: a gap that hides bytes", "m.safetensors",
     header_only(ONE.replace(b"0,16", b"16,32")) + bytes(32), WeightReason.BAD_OFFSETS),
    ("safetensors: an overlap", "m.safetensors",
     header_only(ONE[:-1] + b"," + ONE[1:].replace(b'"w"', b'"v"').replace(b"0,16", b"8,24")) + bytes(24),
     WeightReason.BAD_OFFSETS),
    ("safetensors: a polyglot with a zip behind it", "m.safetensors",
     header_only(ONE) + bytes(16) + b"PK\x05\x06" + bytes(18), WeightReason.BAD_OFFSETS),
    ("safetensors: a polyglot with something in front", "m.safetensors",
     header_only(b"#!/bin/sh\n" + ONE) + bytes(16), WeightReason.HEADER_INVALID),
    ("safetensors: a name twice", "m.safetensors",
     header_only(ONE[:-1] + b"," + ONE[1:].replace(b"0,16", b"16,32")) + bytes(32), WeightReason.DUPLICATE_KEY),
    ("safetensors: nested without end", "m.safetensors", header_only(b'{"w":' * 100_000), WeightReason.TOO_DEEP),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "reason"), [row[1:] for row in KNOWN_FAULTS], ids=[row[0] for row in KNOWN_FAULTS]
)
def test_a_fault_of_another_reader_is_a_clear_error_here(
    root: Path, name: str, content: bytes, reason: WeightReason
) -> None:
    (root / name).write_bytes(content)
    tracemalloc.start()
    try:
        error = refusal(root, name)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (error.reason, error.file) == (reason, name)
    assert peak <= 96 * MIB


ANSWERED: list[tuple[str, str, bytes]] = [
    ("CVE-2024-8063: a block count that is a string", "m.gguf",
     aligned(gguf(1, 5, LLAMA_KEYS + kv("llama.block_count", STRING_KIND, text("32")) + described("w", (4,))), 16)),
    ("CVE-2024-8063: a block count of 0", "m.gguf",
     aligned(gguf(1, 5, LLAMA_KEYS + kv("llama.block_count", U32_KIND, u32(0)) + described("w", (4,))), 16)),
    ("llama.cpp 26051: a block count of an array", "m.gguf",
     aligned(gguf(1, 5, LLAMA_KEYS + kv("llama.block_count", ARRAY_KIND, u32(U32_KIND) + u64(1) + u32(2))
                  + described("w", (4,))), 16)),
    ("llama.cpp 26318: a block count of 2^32 - 1", "m.gguf",
     aligned(gguf(1, 5, LLAMA_KEYS + kv("llama.block_count", U32_KIND, u32(2**32 - 1)) + described("w", (4,))), 16)),
    ("LocalAI 11374, gpustack 1686: an architecture that is an array", "m.gguf",
     aligned(gguf(1, 1, kv("general.architecture", ARRAY_KIND, u32(STRING_KIND) + u64(1) + text("llama"))
                  + described("w", (4,))), 16)),
    ("CVE-2025-0312: no metadata at all", "m.gguf", aligned(gguf(1, 0, described("", (4,))), 16)),
    ("hf-mem 56: F8_E8M0", "m.safetensors",
     header_only(b'{"w":{"dtype":"F8_E8M0","shape":[16],"data_offsets":[0,16]}}') + bytes(16)),
    ("hf-mem 58: F4 with two values in a byte", "m.safetensors",
     header_only(b'{"w":{"dtype":"F4","shape":[4,8],"data_offsets":[0,16]}}') + bytes(16)),
    ("hf-mem 23: a dtype nobody knows", "m.safetensors",
     header_only(b'{"w":{"dtype":"Z99_NEW","shape":[3],"data_offsets":[0,16]}}') + bytes(16)),
    ("candle 2875: F6_E3M2, three bytes for four values", "m.safetensors",
     header_only(b'{"w":{"dtype":"F6_E3M2","shape":[21],"data_offsets":[0,16]}}') + bytes(16)),
    ("fastsafetensors 69: FP4 with an odd last dimension", "m.safetensors",
     header_only(b'{"w":{"dtype":"F4","shape":[3,11],"data_offsets":[0,16]}}') + bytes(16)),
    ("fastsafetensors 79: C64", "m.safetensors",
     header_only(b'{"w":{"dtype":"C64","shape":[2],"data_offsets":[0,16]}}') + bytes(16)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content"), [row[1:] for row in ANSWERED], ids=[row[0] for row in ANSWERED])
def test_what_made_another_reader_fail_is_answered_here(root: Path, name: str, content: bytes) -> None:
    (root / name).write_bytes(content)
    facts = facts_of(root, name)
    assert (facts.tensor_bytes, facts.tensor_count) == (16, 1)
    assert facts.geometry is None


@pytest.mark.parametrize(
    "reference",
    [
        "../secret.safetensors", "m/../../secret.safetensors", "/etc/passwd", "sha256:../../secret.safetensors",
        "link.safetensors", "absent.safetensors", "m\0/../x", "..",
    ],
)  # fmt: skip
def test_a_reference_outside_the_root_looks_like_one_to_nothing(root: Path, reference: str) -> None:
    """CVE-2024-37032 and CVE-2026-7020 (a digest that was a path), CVE-2024-39719 (an oracle for files)."""
    weights(root.parent / "secret.safetensors")
    (root / "link.safetensors").symlink_to(root.parent / "secret.safetensors")
    with pytest.raises(ModelNotFoundError) as caught:
        ModelsRoot(root).resolve(reference)
    with pytest.raises(ModelNotFoundError) as absent:
        ModelsRoot(root).resolve("nothing.safetensors")
    assert str(caught.value).replace(reference, "") == str(absent.value).replace("nothing.safetensors", "")


@pytest.mark.parametrize(
    "name", ["a" * 500, "\0" * 70, "\0" * 500, "\U0001f600" * 90, "\u202e" * 90, "'\"\\" * 40, b"\xff" * 300]
)
def test_a_name_is_short_in_a_message_however_it_is_escaped(name: str | bytes) -> None:
    """Each zero byte becomes four letters: 80 of them made a message that no call's trailers should carry."""
    assert len(shown(name)) <= MAX_SHOWN + 2
    assert shown("model.weight") == "'model.weight'"

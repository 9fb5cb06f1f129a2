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
from safetensors.numpy import save_file
from weighbridge_fit import describe as describing
from weighbridge_fit import folder as folders
from weighbridge_fit.bounded_json import loads_object, loads_pairs
from weighbridge_fit.describe import describe
from weighbridge_fit.errors import MAX_SHOWN, WeightError, WeightReason
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
        for shown in (facts.name, *facts.notes, *(file.name for file in facts.files)):
            shown.encode("utf-8")
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
        (b'{"hidden_size":NaN}', WeightReason.HEADER_INVALID),
        (b'{"hidden_size":Infinity}', WeightReason.HEADER_INVALID),
        (b'{"hidden_size":' + b"9" * 5000 + b"}", WeightReason.HEADER_INVALID),
        (b'{"model_type":"\\ud800"}', WeightReason.HEADER_INVALID),
        (b'{"a":' * 100 + b"1" + b"}" * 100, WeightReason.TOO_DEEP),
        (b"[]", WeightReason.HEADER_INVALID),
        (b"", WeightReason.HEADER_INVALID),
        (b'{"a":1,"a":2}', WeightReason.DUPLICATE_KEY),
        (b'{"a":"' + b"x" * (5 * MIB) + b'"}', WeightReason.HEADER_TOO_LARGE),
    ],
)
def test_a_config_that_is_no_config_is_an_error(root: Path, config: bytes, reason: WeightReason) -> None:
    weights(root / "m/model.safetensors")
    (root / "m/config.json").write_bytes(config)
    error = refusal(root)
    assert (error.reason, error.file) == (reason, "config.json")


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

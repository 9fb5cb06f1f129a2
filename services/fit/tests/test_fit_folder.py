"""Which files of a folder load, what a reference may reach, and what the facts of a whole model say."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from weighbridge_fit.bounded_json import loads_object
from weighbridge_fit.describe import ReadingStopped, describe
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.facts import WeightFacts, WeightFormat
from weighbridge_fit.folder import MAX_DEPTH, split_parts
from weighbridge_fit.models_root import ModelNotFoundError, ModelsRoot


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def weights(path: Path, **tensors: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.zeros(shape, np.float16) for name, shape in tensors.items()}, path)


def facts_of(path: Path, root: Path) -> WeightFacts:
    return describe(path, ModelsRoot(root).contains)


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_index_decides_which_shards_load(root: Path) -> None:
    weights(root / "m/model-00001-of-00002.safetensors", a=(2, 2))
    weights(root / "m/model-00002-of-00002.safetensors", b=(4,))
    weights(root / "m/model.safetensors", a=(2, 2), b=(4,))
    index(root / "m", {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    facts = facts_of(root / "m", root)
    assert facts.tensor_bytes == 16
    assert [file.name for file in facts.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert any("do not load" in note for note in facts.notes)


@pytest.mark.parametrize(
    "weight_map",
    [{}, [], "model.safetensors", {"a": 7}, {"a": "../other/model.safetensors"}, {"a": "/etc/passwd"}, None],
)
def test_a_broken_index_is_ignored_and_said_so(root: Path, weight_map: Any) -> None:
    weights(root / "m/model.safetensors", a=(2, 2))
    index(root / "m", weight_map)
    facts = facts_of(root / "m", root)
    assert facts.tensor_bytes == 8
    assert any("broken" in note for note in facts.notes)


def test_an_index_that_is_no_json_is_ignored(root: Path) -> None:
    weights(root / "m/model.safetensors", a=(2, 2))
    (root / "m/model.safetensors.index.json").write_text('{"weight_map": {"a": "model')
    assert facts_of(root / "m", root).tensor_bytes == 8


def test_a_shard_that_the_index_names_must_be_there(root: Path) -> None:
    weights(root / "m/model-1.safetensors", a=(2, 2))
    index(root / "m", {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    with pytest.raises(WeightError) as caught:
        facts_of(root / "m", root)
    assert (caught.value.reason, caught.value.file) == (WeightReason.UNREADABLE, "model-2.safetensors")


def test_a_malformed_shard_is_named(root: Path) -> None:
    weights(root / "m/model-1.safetensors", a=(2, 2))
    (root / "m/model-2.safetensors").write_bytes(b"\xff" * 4)
    with pytest.raises(WeightError) as caught:
        facts_of(root / "m", root)
    assert (caught.value.reason, caught.value.file) == (WeightReason.TRUNCATED, "model-2.safetensors")


def test_a_tree_is_walked_six_deep_and_components_are_its_top_folders(root: Path) -> None:
    weights(root / "t/vae/diffusion_pytorch_model.safetensors", v=(3,))
    weights(root / "t/unet/a/b/c/d/e/w.safetensors", u=(5,))
    weights(root / "t/unet/a/b/c/d/e/f/w.safetensors", lost=(7,))
    facts = facts_of(root / "t", root)
    assert MAX_DEPTH == 6
    assert {total.component: total.bytes for total in facts.components} == {"unet": 10, "vae": 6}
    assert facts.format is WeightFormat.DIFFUSERS


def test_subfolders_of_a_transformers_folder_do_not_load(root: Path) -> None:
    weights(root / "m/model.safetensors", a=(2, 2))
    weights(root / "m/original/consolidated.safetensors", a=(2, 2))
    (root / "m/config.json").write_text('{"model_type": "other"}')
    facts = facts_of(root / "m", root)
    assert (facts.tensor_bytes, facts.architecture, facts.geometry) == (8, "other", None)


def test_the_digest_depends_on_the_tensors_and_not_on_files_or_weights(root: Path) -> None:
    weights(root / "one/model.safetensors", a=(2, 2), b=(4,))
    weights(root / "two/model-1.safetensors", b=(4,))
    weights(root / "two/model-2.safetensors", a=(2, 2))
    save_file({"a": np.ones((2, 2), np.float16), "b": np.ones((4,), np.float16)}, root / "weights.safetensors")
    weights(root / "other/model.safetensors", a=(4,), b=(4,))
    digest = facts_of(root / "one", root).model_digest
    assert len(digest) == 64
    assert facts_of(root / "two", root).model_digest == digest
    assert facts_of(root / "weights.safetensors", root).model_digest == digest
    assert facts_of(root / "other", root).model_digest != digest


@pytest.mark.parametrize("reference", ["", "nothing", "../outside", "m/../../outside", "a\0b", "/etc/passwd", "~"])
def test_references_out_of_the_root_look_like_absent_ones(root: Path, reference: str) -> None:
    (root.parent / "outside").mkdir()
    with pytest.raises(ModelNotFoundError):
        ModelsRoot(root).resolve(reference)


def test_links_are_followed_inside_the_root_and_not_out_of_it(root: Path) -> None:
    weights(root / "blobs/model.safetensors", a=(2, 2))
    weights(root.parent / "secret/model.safetensors", s=(9,))
    (root / "m").mkdir()
    (root / "m/model.safetensors").symlink_to("../blobs/model.safetensors")
    assert facts_of(root / "m", root).tensor_bytes == 8
    (root / "m/model-2.safetensors").symlink_to(root.parent / "secret/model.safetensors")
    with pytest.raises(WeightError) as caught:
        facts_of(root / "m", root)
    assert caught.value.reason is WeightReason.UNREADABLE
    (root / "way").symlink_to(root.parent / "secret")
    with pytest.raises(ModelNotFoundError):
        ModelsRoot(root).resolve("way")


def test_a_root_may_be_a_link_itself_and_absolute_references_work(root: Path) -> None:
    (root / "m").mkdir()
    (root.parent / "alias").symlink_to(root)
    models = ModelsRoot(root.parent / "alias")
    assert models.resolve("m") == models.resolve(str(root / "m")) == root / "m"


def test_pipes_and_folders_are_no_weight_files(root: Path) -> None:
    os.mkfifo(root / "pipe.gguf")
    (root / "folder.safetensors").mkdir()
    with pytest.raises(WeightError) as caught:
        describe(root / "pipe.gguf", ModelsRoot(root).contains)
    assert caught.value.reason is WeightReason.NOT_A_REGULAR_FILE
    with pytest.raises(WeightError) as caught:
        describe(root / "folder.safetensors", ModelsRoot(root).contains)
    assert caught.value.reason is WeightReason.NO_WEIGHTS


def test_another_format_is_refused_by_name(root: Path) -> None:
    (root / "model.onnx").write_bytes(b"\x08\x08\x12\x07pytorch" + bytes(100))
    with pytest.raises(WeightError) as caught:
        facts_of(root / "model.onnx", root)
    assert caught.value.reason is WeightReason.UNKNOWN_FORMAT


def test_reading_stops_at_the_next_file_when_nobody_waits(root: Path) -> None:
    weights(root / "m/model-1.safetensors", a=(2, 2))
    with pytest.raises(ReadingStopped):
        describe(root / "m", ModelsRoot(root).contains, lambda: True)


def test_parts_of_a_split_file_are_found_by_its_name() -> None:
    names = [path.name for path in split_parts(Path("/x/m-00002-of-00003.gguf"))]
    assert names == ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]
    assert split_parts(Path("/x/m-00004-of-00003.gguf")) == [Path("/x/m-00004-of-00003.gguf")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 40 + b"]" * 40, WeightReason.TOO_DEEP),
        (b"[]", WeightReason.HEADER_INVALID),
        (b'{"a":1,"a":2}', WeightReason.DUPLICATE_KEY),
        (b'{"a":Infinity}', WeightReason.HEADER_INVALID),
        (b'"' + b"[" * 100 + b'"', WeightReason.HEADER_INVALID),
    ],
)
def test_bounded_json_refuses(text: bytes, reason: WeightReason) -> None:
    with pytest.raises(WeightError) as caught:
        loads_object(text)
    assert caught.value.reason is reason


def test_brackets_in_strings_are_no_depth() -> None:
    assert loads_object(b'{"a":"' + b"[" * 50 + b'"}') == {"a": "[" * 50}

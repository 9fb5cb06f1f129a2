"""Manifests that nobody vouches for: each fault is named with file and field, and none takes anything else with it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weighbridge_fit.catalog.entry import CatalogEntry
from weighbridge_fit.catalog.manifest import ManifestError, read_manifest
from weighbridge_fit.catalog.store import Catalogue
from weighbridge_fit.facts import TensorFact, WeightFormat
from weighbridge_fit.pinned import pin
from weighbridge_fit.tally import weight_facts

CHAT: dict[str, Any] = {
    "format": "weighbridge.model/1",
    "id": "mine",
    "version": "1.0.0",
    "name": "Mine",
    "use": "chat",
    "engine": "mlx",
    "license": "MIT",
    "repository": {"name": "me/mine"},
    "files": [{"path": "model.safetensors", "component": "model", "size_bytes": 1000}],
}
IMAGE: dict[str, Any] = {
    **{key: value for key, value in CHAT.items() if key != "repository"},
    "use": "image",
    "engine": "sd",
    "weights_kind": "checkpoint",
    "render": {"width_px": {"min": 64, "max": 1024}, "height_px": {"min": 64, "max": 1024}},
    "files": [
        {
            "path": "my model.safetensors",
            "component": "model",
            "size_bytes": 1000,
            "sha256": "a" * 64,
            "url": "https://example.org/files/my%20model.safetensors?download=1",
        }
    ],
}
OTHER = {"path": "other.safetensors", "url": "https://example.org/other.safetensors"}
VIDEO = {
    **CHAT,
    "use": "video",
    "engine": "generic",
    "render": {**IMAGE["render"], "frames": {"min": 9, "max": 257, "usual": 97}},
}


def read(document: Any, file: str = "mine.json") -> CatalogEntry:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return read_manifest(data, file)


def changed(document: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    """The document with one value changed (`...` removes it)."""
    copy = json.loads(json.dumps(document))
    node = copy
    for key in path[:-1]:
        node = node[key]
    if to is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = to
    return copy


SPLIT = {
    **CHAT,
    "engine": "ds4",
    "files": [{"path": f"m-{number:05}-of-00002.gguf", "component": "model", "size_bytes": 500} for number in (1, 2)],
}


@pytest.mark.parametrize("document", [CHAT, IMAGE, VIDEO, SPLIT])
def test_the_smallest_manifests_are_read(document: dict[str, Any]) -> None:
    found = read(document)
    assert (found.catalog_id, found.use.value, found.file_bytes) == ("mine", document["use"], 1000)
    assert not found.user_entry


BAD = [
    (changed(CHAT, "format", to="weighbridge.model/2"), "format"),
    (changed(CHAT, "format", to=...), "format"),
    (changed(CHAT, "id", to="Mine"), "id"),
    (changed(CHAT, "id", to="../mine"), "id"),
    (changed(CHAT, "id", to="other"), "id"),
    (changed(CHAT, "id", to="m" * 65), "id"),
    (changed(CHAT, "version", to="1"), "version"),
    (changed(CHAT, "name", to=""), "name"),
    (changed(CHAT, "use", to="speech"), "use"),
    (changed(CHAT, "engine", to="vllm"), "engine"),
    (changed(CHAT, "engine", to="sd"), "weights_kind"),
    (changed(CHAT, "license", to="see LICENSE"), "license"),
    (changed(CHAT, "commercial_use", to="yes"), "commercial_use"),
    (changed(CHAT, "unknown", to=1), "unknown"),
    (changed(CHAT, "ab" * 1000, to=1), repr("ab" * 38 + "a" + "...")),
    (changed(CHAT, "other_bytes", to=-1), "other_bytes"),
    (changed(CHAT, "figures", to={"kv bytes": 1}), "figures.'kv bytes'"),
    (changed(CHAT, "figures", to={"kv_bytes_per_token": -1}), "figures.kv_bytes_per_token"),
    (changed(CHAT, "figures", to={"kv_bytes_per_token": 1.5}), "figures.kv_bytes_per_token"),
    (changed(CHAT, "files", to=[]), "files"),
    (changed(CHAT, "files", 0, "component", to=""), "files"),
    (changed(CHAT, "files", 0, "size_bytes", to=0), "files.0.size_bytes"),
    (changed(CHAT, "files", 0, "size_bytes", to=True), "files.0.size_bytes"),
    (changed(CHAT, "files", 0, "size_bytes", to="1000"), "files.0.size_bytes"),
    (changed(CHAT, "files", 0, "size_bytes", to=1 << 70), "files.0.size_bytes"),
    (changed(CHAT, "files", 0, "sha256", to="A" * 64), "files.0.sha256"),
    (changed(CHAT, "files", 0, "sha256", to="ab"), "files.0.sha256"),
    (changed(CHAT, "files", 0, "path", to="../model.safetensors"), "files.0.path"),
    (changed(CHAT, "files", 0, "path", to="/model.safetensors"), "files.0.path"),
    (changed(CHAT, "files", 0, "path", to="a//model.safetensors"), "files.0.path"),
    (changed(CHAT, "files", 0, "path", to=".hidden.safetensors"), "files.0.path"),
    (changed(CHAT, "files", 0, "path", to="a\\model.safetensors"), "files.0.path"),
    (changed(CHAT, "files", 0, "path", to="a\nb.safetensors"), "files.0.path"),
    (changed(CHAT, "files", 0, "path", to="1/2/3/4/5/6/model.safetensors"), "files.0.path"),
    (changed(CHAT, "files", 0, "path", to="model.exe"), "files.0.path"),
    (changed(CHAT, "files", to=[CHAT["files"][0], {**CHAT["files"][0], "path": "MODEL.safetensors"}]), "files.1.path"),
    (changed(CHAT, "repository", to=...), "files.0.url"),
    (changed(CHAT, "repository", "name", to="mine"), "repository.name"),
    (changed(CHAT, "repository", "revision", to="a b"), "repository.revision"),
    (changed(CHAT, "render", to=IMAGE["render"]), "render"),
    (changed(CHAT, "notes", to=["n"] * 33), "notes"),
    (changed(CHAT, "facts", to={}), "facts.version"),
    (changed(CHAT, "facts", to={"version": 1, "facts": {"name": 1}}), "facts.facts"),
    (changed(IMAGE, "render", to=...), "render"),
    (changed(IMAGE, "render", "width_px", to={"min": 1024, "max": 64}), "render.width_px"),
    (changed(IMAGE, "render", "width_px", to={"min": 64, "max": 1024, "usual": 32}), "render.width_px"),
    (changed(IMAGE, "render", "steps", to=100_000), "render.steps"),
    (changed(IMAGE, "chat", to={}), "chat"),
    (changed(IMAGE, "weights_kind", to=...), "weights_kind"),
    (changed(IMAGE, "engine", to="mlx"), "weights_kind"),
    (changed(IMAGE, "files", 0, "url", to="file:///etc/passwd"), "files.0.url"),
    (changed(IMAGE, "files", 0, "component", to="vae"), "files"),
    (changed(IMAGE, "files", to=[IMAGE["files"][0], {**IMAGE["files"][0], **OTHER}]), "files.1.component"),
    (changed(IMAGE, "files", 0, "url", to="https://example.org/other.safetensors"), "files.0.path"),
    (changed(VIDEO, "render", "frames", to=...), "render.frames"),
]


@pytest.mark.parametrize(("document", "field"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_each_fault_is_named_with_its_field(document: dict[str, Any], field: str) -> None:
    with pytest.raises(ManifestError) as refused:
        read(document)
    assert (refused.value.file, refused.value.field) == ("mine.json", field)
    assert refused.value.message and "\n" not in refused.value.sentence()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"id": NaN}',
        b'{"id": "a", "id": "b"}',
        b'{"id": "\\ud800"}',
        b"[" * 100_000,
        b'{"a": ' * 100 + b"1" + b"}" * 100,
        b"1" * 10_000,
    ],
)
def test_what_is_no_json_object_is_named_as_a_whole(data: bytes) -> None:
    with pytest.raises(ManifestError) as refused:
        read(data)
    assert refused.value.file == "mine.json"
    assert refused.value.sentence().startswith("mine.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(IMAGE)), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([CHAT, IMAGE, VIDEO]), st.data())
def test_any_value_in_any_place_is_read_or_refused(document: dict[str, Any], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from([*sorted(document), "facts", "figures", "chat", "notes"]))
    try:
        read({**document, key: data.draw(JSON)})
    except ManifestError as error:
        assert error.file == "mine.json"


def write(folder: Path, document: dict[str, Any], **changes: Any) -> Path:
    document = {**document, **changes}
    path = folder / f"{document['id']}.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    folder = tmp_path / "ours"
    folder.mkdir()
    write(folder, CHAT, id="one", name="Ours")
    write(folder, CHAT, id="two")
    return folder


@pytest.fixture
def users(tmp_path: Path) -> Path:
    folder = tmp_path / "users"
    folder.mkdir()
    return folder


def test_the_users_manifests_stand_beside_ours_and_replace_them(ours: Path, users: Path) -> None:
    write(users, CHAT, id="three")
    write(users, CHAT, id="one", name="Mine")
    found = Catalogue(ours, users).snapshot()
    assert list(found.entries) == ["one", "three", "two"]
    assert {key: value.user_entry for key, value in found.entries.items()} == {"one": True, "three": True, "two": False}
    assert found.entries["one"].display_name == "Mine"
    assert "replaces" in " ".join(found.entries["one"].notes)
    assert found.problems == ()


def test_a_folder_that_is_not_there_is_an_empty_one(ours: Path, tmp_path: Path) -> None:
    found = Catalogue(ours, tmp_path / "absent").snapshot()
    assert (list(found.entries), found.problems) == (["one", "two"], ())


def test_broken_manifests_are_left_out_and_named(ours: Path, users: Path) -> None:
    write(users, CHAT, id="good")
    (users / "broken.json").write_text("{")
    (users / "wrong.json").write_text(json.dumps({**CHAT, "id": "wrong", "use": "speech"}))
    (users / "folder.json").mkdir()
    os.mkfifo(users / "pipe.json")
    (users / "gone.json").symlink_to(users / "nowhere")
    (users / ".hidden.json").write_text("{")
    (users / "notes.txt").write_text("{")
    with (users / "large.json").open("wb") as large:
        large.truncate(33 << 20)
    found = Catalogue(ours, users).snapshot()
    assert list(found.entries) == ["good", "one", "two"]
    named = sorted(problem.split(".json")[0] for problem in found.problems)
    assert named == ["broken", "folder", "gone", "large", "pipe", "wrong"]
    assert any(problem.startswith("wrong.json, use: ") for problem in found.problems)


def test_a_change_counts_without_a_restart(ours: Path, users: Path) -> None:
    catalogue = Catalogue(ours, users)
    first = catalogue.snapshot()
    assert catalogue.snapshot() is first, "nothing changed, nothing is read"
    path = write(users, CHAT, id="mine", name="Before")
    assert catalogue.snapshot().entries["mine"].display_name == "Before"
    path.write_text("{")
    broken = catalogue.snapshot()
    assert "mine" not in broken.entries
    assert len(broken.problems) == 1
    write(users, CHAT, id="mine", name="After, and longer")
    assert catalogue.snapshot().entries["mine"].display_name == "After, and longer"
    path.unlink()
    assert list(catalogue.snapshot().entries) == ["one", "two"]


def test_many_problems_are_counted_and_not_listed(ours: Path, users: Path) -> None:
    for number in range(30):
        (users / f"broken-{number:02}.json").write_text("{")
    found = Catalogue(ours, users).snapshot()
    assert len(found.problems) == 21
    assert found.problems[-1].startswith("10 more")


def test_pinned_facts_come_with_the_entry_and_wrong_ones_are_refused(users: Path) -> None:
    tensor = TensorFact("w", "F16", (4, 4), 16, 32)
    facts = weight_facts(
        "mine", WeightFormat.SAFETENSORS, [], [("model", tensor)], architecture="", quantization="", geometry=None
    )
    part = pin(facts)
    found = read({**CHAT, "facts": part, "files": [{**CHAT["files"][0], "facts": part}]})
    assert found.facts is not None and found.files[0].facts is not None
    assert found.facts.model_digest == found.files[0].facts.model_digest == facts.model_digest
    assert found.facts.tensors == (("model", tensor),)
    part["facts"]["model_digest"] = "0" * 64
    with pytest.raises(ManifestError) as refused:
        read({**CHAT, "files": [{**CHAT["files"][0], "facts": part}]})
    assert refused.value.field.startswith("files.0.facts.facts.model_digest")

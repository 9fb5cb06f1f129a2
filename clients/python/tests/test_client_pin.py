"""Facts written into a manifest price a model as its files do, and doctor notices files that are others."""

import hashlib
import json
import shutil
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from weighbridge.cli import main
from weighbridge.pinning import PinError, as_text, new_manifest, write_json
from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2

pytest.importorskip("weighbridge_fit")
pytest.importorskip("weighbridge_ledger")

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
MACHINE = ("--machine", "unified:16")


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]], padding: int = 0) -> Path:
    header, at = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode() + b" " * padding  # as the format pads its header
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def folders(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's catalogue, an empty folder of pulled models, and one model in a folder of its own."""
    (tmp_path / "catalog").mkdir()
    (tmp_path / "pulled").mkdir()
    monkeypatch.setenv("WEIGHBRIDGE_FIT_CATALOG_FOLDER", str(tmp_path / "catalog"))
    monkeypatch.setenv("WEIGHBRIDGE_FIT_PULL_FOLDER", str(tmp_path / "pulled"))
    monkeypatch.setenv("WEIGHBRIDGE_LEDGER_MACHINE", "unified:16")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    safetensors(
        model / "model.safetensors",
        {
            "model.embed_tokens.weight": ("BF16", [256, 64], 32_768),
            "model.layers.0.mlp.up_proj.weight": ("BF16", [128, 64], 16_384),
        },
    )
    return tmp_path


def pin(folders: Path, *more: str) -> Result:
    manifest = folders / "catalog" / "mine.json"
    return run("pin", str(folders / "model"), "--into", str(manifest), "--repository", "me/mine", *more)


def test_a_pinned_model_is_priced_like_its_files(folders: Path) -> None:
    result = pin(folders, "--license", "MIT")
    assert result.exit_code == 0, result.output
    assert "2 tensors" in result.stderr
    by_files = json.loads(run("fit", str(folders / "model"), *MACHINE, "--json").stdout)
    by_manifest = json.loads(run("fit", "mine", *MACHINE, "--json").stdout)
    for same in ("requirement", "assessment", "claim", "model_digest", "shape"):
        assert by_manifest[same] == by_files[same], same
    assert by_manifest["requirement"]["lines"][0]["expected_bytes"] == str(32_768 + 16_384)
    (fit,) = json.loads(run("fits", "mine", *MACHINE, "--json").stdout)["fits"]
    assert fit["priced_by_facts"] and not fit["on_disk"]


def test_digests_are_those_of_the_files(folders: Path) -> None:
    assert pin(folders, "--digests").exit_code == 0
    (file,) = json.loads((folders / "catalog" / "mine.json").read_text())["files"]
    assert file["sha256"] == hashlib.sha256((folders / "model" / "model.safetensors").read_bytes()).hexdigest()


def test_what_stands_in_a_manifest_stays(folders: Path) -> None:
    assert pin(folders).exit_code == 0
    path = folders / "catalog" / "mine.json"
    manifest = json.loads(path.read_text())
    manifest["notes"], manifest["name"] = ["A note."], "Mine"
    path.write_text(json.dumps(manifest))
    assert pin(folders).exit_code == 0
    again = json.loads(path.read_text())
    assert (again["notes"], again["name"]) == (["A note."], "Mine")
    assert len(path.read_text().splitlines()) > 20, "one tensor a line"
    assert not list(path.parent.glob(".*"))


def test_parts_of_an_image_model_are_pinned_one_by_one(folders: Path) -> None:
    folder = folders / "image"
    folder.mkdir()
    main_file = safetensors(folder / "flux.safetensors", {"double_blocks.0.img_attn.qkv.weight": ("BF16", [8, 8], 128)})
    vae = safetensors(folder / "ae.safetensors", {"decoder.conv_in.weight": ("F32", [4, 4, 3, 3], 576)})
    span = {"min": 512, "max": 1024}
    manifest = {
        "format": "weighbridge.model/1", "id": "picture", "version": "1.0.0", "name": "P", "use": "image",
        "engine": "sd", "license": "MIT", "weights_kind": "diffusion-model",
        "render": {"width_px": span, "height_px": span},
        "files": [
            {"path": file.name, "component": component, "size_bytes": file.stat().st_size, "url": f"https://x.example/{file.name}"}
            for file, component in ((main_file, "diffusion_model"), (vae, "vae"))
        ],
    }  # fmt: skip
    path = folders / "catalog" / "picture.json"
    path.write_text(json.dumps(manifest))
    result = run("pin", str(folder), "--into", str(path))
    assert result.exit_code == 0, result.output
    pinned = json.loads(path.read_text())
    assert [file["facts"]["facts"]["tensor_bytes"] for file in pinned["files"]] == ["128", "576"]
    assert "facts" not in pinned
    listed = json.loads(run("fits", "picture", *MACHINE, "--json").stdout)
    assert listed["fits"][0]["priced_by_facts"], listed


def test_facts_without_a_manifest_are_printed(folders: Path) -> None:
    printed = json.loads(run("pin", str(folders / "model")).stdout)
    assert printed["version"] == 1
    assert [tensor["bytes"] for tensor in printed["facts"]["tensors"]] == ["32768", "16384"]


def test_doctor_notices_files_that_are_others(folders: Path) -> None:
    assert pin(folders).exit_code == 0
    here = folders / "pulled" / "mine"
    shutil.copytree(folders / "model", here)

    def check() -> dict[str, str]:
        checks = json.loads(run("doctor", "--json").stdout)["checks"]
        return next(entry for entry in checks if entry["name"] == "model mine")

    assert (check()["state"], check()["detail"]) == ("ok", "here, as its manifest says")
    # As large as before, with another precision: one letter less.
    tensors = {
        "model.embed_tokens.weight": ("F16", [256, 64], 32_768),
        "model.layers.0.mlp.up_proj.weight": ("BF16", [128, 64], 16_384),
    }
    other = safetensors(here / "model.safetensors", tensors, padding=1)
    assert other.stat().st_size == (folders / "model" / "model.safetensors").stat().st_size
    assert check()["state"] == "broken"
    assert check()["next_step"] == "weighbridge pull mine"


def test_one_file_of_a_folder_of_many_is_pinned_by_itself(folders: Path) -> None:
    """What is pinned from it is what a pull of that one file leaves on disk."""
    folder = folders / "many"
    folder.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        safetensors(folder / name, {"model.layers.0.mlp.up_proj.weight": ("BF16", [128, 64], 16_384)})
    manifest = folders / "catalog" / "one.json"
    result = run("pin", str(folder / "b.safetensors"), "--into", str(manifest), "--repository", "me/one", "--digests")
    assert result.exit_code == 0, result.output
    pinned = json.loads(manifest.read_text())
    assert [file["path"] for file in pinned["files"]] == ["b.safetensors"]
    here = folders / "pulled" / "one"
    here.mkdir()
    shutil.copy(folder / "b.safetensors", here)
    checks = json.loads(run("doctor", "--json").stdout)["checks"]
    assert next(entry for entry in checks if entry["name"] == "model one")["detail"] == "here, as its manifest says"
    other = run("pin", str(folder / "a.safetensors"), "--into", str(manifest))
    assert other.exit_code == 1
    assert "not those of its files" in other.stderr


def test_companions_are_pinned_beside_their_files(folders: Path) -> None:
    """A drafter is a model of its own: its facts stand beside its file, the model's beside the model."""
    folder = folders / "pair"
    folder.mkdir()
    main_file = safetensors(folder / "main.safetensors", {"model.layers.0.mlp.up_proj.weight": ("BF16", [8, 8], 128)})
    drafter = safetensors(folder / "draft.safetensors", {"model.layers.0.mlp.up_proj.weight": ("F32", [8, 8], 256)})
    path = folders / "catalog" / "pair.json"
    files = [
        {"path": file.name, "component": component, "size_bytes": file.stat().st_size}
        for file, component in ((main_file, "model"), (drafter, "drafter"))
    ]
    notes = {"path": "notes.txt", "component": "", "size_bytes": 1}
    manifest = {
        "format": "weighbridge.model/1", "id": "pair", "version": "1.0.0", "name": "P", "use": "chat", "engine": "ds4",
        "license": "MIT", "repository": {"name": "me/pair"}, "files": [*files, notes],
    }  # fmt: skip
    path.write_text(json.dumps(manifest))
    result = run("pin", str(folder), "--into", str(path), "--digests")
    assert result.exit_code == 0, result.output
    pinned = json.loads(path.read_text())
    assert pinned["facts"]["facts"]["tensor_bytes"] == "128"
    assert [file.get("facts", {}).get("facts", {}).get("tensor_bytes") for file in pinned["files"]] == [
        None,
        "256",
        None,
    ]
    assert ["sha256" in file for file in pinned["files"]] == [True, True, False]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, "no weight files"),
        ({}, "no weight files"),
        ([7, {"component": ""}], "no weight files"),
        ([{"component": "model"}], '"path"'),
        ([{"component": "model", "path": 7}], '"path"'),
        ([{"component": "model", "path": "nowhere.safetensors"}], "is not there"),
        ([{"component": "model", "path": "model.safetensors", "size_bytes": "x"}], "not the same file"),
        ([{"component": "model", "path": "../model/model.safetensors", "size_bytes": 0}], "not the same file"),
    ],
)
def test_a_manifest_with_absurd_files_says_what_is_wrong(folders: Path, files: object, said: str) -> None:
    path = folders / "catalog" / "absurd.json"
    text = json.dumps({"format": "weighbridge.model/1", "files": files})
    path.write_text(text)
    result = run("pin", str(folders / "model"), "--into", str(path), "--digests")
    assert result.exit_code == 1
    assert said in result.stderr and "Traceback" not in result.stderr
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("My_Model.json", ("--repository", "a/b"), "is no id"),
        (f"{'x' * 65}.json", ("--repository", "a/b"), "is no id"),
        ("new.json", ("--repository", "a/b/c"), "--repository"),
        ("new.json", ("--repository", "a/b", "--license", "do what (you) want"), "SPDX"),
    ],
)
def test_a_manifest_that_the_catalogue_would_leave_out_is_not_made(
    folders: Path, name: str, arguments: tuple[str, ...], said: str
) -> None:
    result = run("pin", str(folders / "model"), "--into", str(folders / "catalog" / name), *arguments)
    assert result.exit_code == 1
    assert said in result.stderr
    assert not list((folders / "catalog").iterdir())


def test_a_link_to_a_manifest_stays_one_and_its_mode_too(folders: Path) -> None:
    assert pin(folders).exit_code == 0
    real, link = folders / "mine-in-git.json", folders / "catalog" / "mine.json"
    link.rename(real)
    real.chmod(0o640)
    link.symlink_to(real)
    assert pin(folders, "--digests").exit_code == 0
    assert link.is_symlink()
    assert json.loads(real.read_text())["files"][0]["sha256"]
    assert real.stat().st_mode & 0o777 == 0o640


def test_facts_that_no_catalogue_would_read_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weighbridge.pinning.MAX_MANIFEST_BYTES", 1 << 20)
    with pytest.raises(PinError, match="larger than 1 MiB"):
        write_json(tmp_path / "x.json", {"a": "b" * (1 << 20)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["{", "[" * 50_000, '{"format": "weighbridge.model/1"}', "\x00", ""])
def test_doctor_names_a_manifest_that_cannot_be_used(folders: Path, text: str) -> None:
    (folders / "catalog" / "bad.json").write_text(text)
    result = run("doctor", "--json")
    assert result.exit_code == 1
    printed = json.loads(result.stdout)
    (broken,) = [entry for entry in printed["checks"] if entry["state"] == "broken"]
    assert broken["name"] == "catalogue" and "bad.json" in broken["detail"]
    assert printed["next_step"] == "correct or remove the manifest"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--repository", "a/b"), "add --into"),
        (("--into", "catalog/x.txt", "--repository", "a/b"), "id and .json"),
        (("--into", "catalog/new.json"), "--repository"),
        (("--into", "catalog/broken.json"), "cannot be read"),
        (("--into", "catalog/other.json"), "is no manifest"),
    ],
)
def test_what_cannot_be_pinned_says_why(
    folders: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(folders)
    (folders / "catalog" / "broken.json").write_text("{")
    (folders / "catalog" / "other.json").write_text("{}")
    result = run("pin", "model", *arguments)
    assert result.exit_code in (1, 2)
    assert said in result.stderr
    assert not (folders / "catalog" / "new.json").exists()


def test_a_file_that_changed_is_not_pinned_into_an_old_manifest(folders: Path) -> None:
    assert pin(folders).exit_code == 0
    before = (folders / "catalog" / "mine.json").read_bytes()
    with (folders / "model" / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    result = pin(folders)
    assert result.exit_code == 1
    assert "not the same file" in result.stderr
    assert (folders / "catalog" / "mine.json").read_bytes() == before


def test_images_need_a_manifest_written_by_somebody() -> None:
    facts = weights_pb2.WeightFacts(name="x")
    with pytest.raises(PinError, match="Write it first"):
        new_manifest("x", facts, plan_pb2.ENGINE_KIND_SD, repository="a/b", revision="", license_name="MIT")


def test_a_document_survives_its_text(tmp_path: Path) -> None:
    document = {"a": [1, {"tensors": [{"name": 'q"\\0'}, {"name": "b"}]}], "tensors": {"c": 1}, "d": {"tensors": []}}
    assert json.loads(as_text(document)) == document
    write_json(tmp_path / "x.json", document)
    assert json.loads((tmp_path / "x.json").read_text()) == document


def test_doctor_notices_a_folder_that_is_not_whole(folders: Path) -> None:
    assert pin(folders).exit_code == 0
    here = folders / "pulled" / "mine"
    shutil.copytree(folders / "model", here)
    with (here / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    size = (here / "model.safetensors").stat().st_size
    checks = json.loads(run("doctor", "--json").stdout)["checks"]
    (check,) = [entry for entry in checks if entry["name"] == "model mine"]
    assert (check["state"], check["next_step"]) == ("broken", "weighbridge pull mine")
    assert f"{size:,} bytes instead of {size - 1:,}" in check["detail"]

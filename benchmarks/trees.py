"""Describing whole folders: a diffusers tree of 100 files, and how the cost follows file count and file size."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from weighbridge_fit.describe import describe

from benchmarks.measure import Comparison, alternate

FILES = 100
TENSORS_PER_FILE = 40
MIB = 1 << 20
COMPONENTS = ("transformer", "text_encoder", "text_encoder_2", "vae")


def make_tree(folder: Path, files: int, file_bytes: int) -> Path:
    """A diffusers tree of sharded components. Files are sparse: their size costs no disk."""
    (folder / "model_index.json").parent.mkdir(parents=True, exist_ok=True)
    index = {"_class_name": "WanPipeline", **{name: ["diffusers", "Model"] for name in COMPONENTS}}
    (folder / "model_index.json").write_text(json.dumps(index))
    for position, component in enumerate(COMPONENTS):
        shards = files // len(COMPONENTS) + (position < files % len(COMPONENTS))
        _component(folder / component, shards, file_bytes)
    return folder


def _component(folder: Path, shards: int, file_bytes: int) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    each = file_bytes // TENSORS_PER_FILE // 2 * 2
    weight_map = {}
    for shard in range(shards):
        name = f"diffusion_pytorch_model-{shard + 1:05}-of-{shards:05}.safetensors"
        header = {
            f"blocks.{shard}.layer.{number}.weight": {
                "dtype": "BF16",
                "shape": [each // 2],
                "data_offsets": [number * each, (number + 1) * each],
            }
            for number in range(TENSORS_PER_FILE)
        }
        weight_map |= dict.fromkeys(header, name)
        text = json.dumps(header, separators=(",", ":")).encode()  # as the official writer does
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + TENSORS_PER_FILE * each)
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def walk_official(folder: Path) -> int:
    """The official reader on every file, asking each tensor for its shape."""
    count = 0
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(str(path), framework="numpy") as opened:
            count += sum(len(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118 (no mapping)
    return count


def _describe(folder: Path) -> int:
    return describe(folder, lambda path: path).tensor_count


def run() -> Iterator[Comparison]:
    """One tree against the official reader, then twice the files, then 64 times the bytes."""
    with tempfile.TemporaryDirectory(prefix="wb-bench-") as name:
        base = Path(name)
        tree = make_tree(base / "tree", FILES, 16 * MIB)
        assert _describe(tree) == FILES * TENSORS_PER_FILE
        ours, official = alternate(lambda: _describe(tree), lambda: walk_official(tree), rounds=15)
        yield Comparison(
            f"facts of a diffusers tree of {FILES} files (index, components and digest included)", "ms", ours,
            "safetensors.safe_open walking every tensor of every file", official, "", None,
        )  # fmt: skip
        double = make_tree(base / "double", 2 * FILES, 16 * MIB)
        twice, once = alternate(lambda: _describe(double), lambda: _describe(tree), rounds=15)
        yield Comparison(
            "twice as many files", "ms", twice, f"the tree of {FILES} files", once,
            "about 2: linear", lambda ratio: ratio <= 2.4,
        )  # fmt: skip
        large = make_tree(base / "large", FILES, 1024 * MIB)
        heavy, light = alternate(lambda: _describe(large), lambda: _describe(tree), rounds=15)
        yield Comparison(
            f"the same {FILES} files, 64 times as large", "ms", heavy, "files of 16 MiB", light,
            "about 1: flat", lambda ratio: ratio <= 1.2,
        )  # fmt: skip

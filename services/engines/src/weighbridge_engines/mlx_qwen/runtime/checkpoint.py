"""Looks at a model's folder before anything is opened: can it be loaded, from which files, how many bytes."""

import glob
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weighbridge_common.sizes import format_gib

from weighbridge_engines.mlx_qwen.runtime import refusals

MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_text")
"""model_type values that can be loaded. Qwen2.5 is published as qwen2."""

# mlx-lm 0.32.2 does not know the text-only name of the same model; it does accept its flat configuration.
_RENAMED = {"qwen3_5_text": "qwen3_5"}

# The safetensors format's own bound on a header.
_HEADER_LIMIT = 100 * 1024 * 1024
_JSON_LIMIT = 32 * 1024 * 1024
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder that can be loaded."""

    folder: Path
    model_type: str
    weight_files: tuple[Path, ...]
    weight_bytes: int
    """Bytes of the tensors that load: vision towers and draft heads, which mlx-lm leaves out, do not count."""
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    end_tokens: int | list[int] | None = None
    """Tokens that end an answer, as the model's files give them; the tokenizer may add its own."""

    @contextmanager
    def as_mlx_lm_reads_it(self) -> Iterator[Path]:
        """A folder in which mlx-lm finds exactly these weight files.

        mlx-lm loads whatever matches ``model*.safetensors``, index or not, and takes brackets in the folder's name
        for a pattern. Where that would load something else, a folder of links stands in while the weights are opened.
        """
        pattern = os.fspath(self.folder / "model*.safetensors")
        if {Path(name) for name in glob.glob(pattern)} == set(self.weight_files):  # noqa: PTH207 # what mlx-lm does
            yield self.folder
            return
        with TemporaryDirectory(prefix="weighbridge-model-") as scratch:
            view = Path(scratch)
            for source in self.folder.iterdir():
                if source.suffix == ".json" and source.is_file():
                    (view / source.name).symlink_to(source.absolute())
            for number, source in enumerate(self.weight_files, start=1):
                (view / f"model-{number:05d}.safetensors").symlink_to(source.absolute())
            yield view


def inspect(folder: Path) -> Checkpoint:
    """Checks the folder. Raises RequestError MALFORMED_CONFIG, UNSUPPORTED_ARCHITECTURE, MALFORMED_WEIGHTS or
    TOKENIZER_MISSING. Reads configuration and headers only."""
    config = _read_config(folder)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise refusals.malformed_config(f"{folder.name}/config.json has no model_type.")
    if model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise refusals.unsupported_architecture(
            f"{folder.name} is a {model_type} model. The MLX engine runs {known}.", model_type
        )
    if config.get("model_file") is not None:
        raise refusals.unsupported_architecture(
            f"{folder.name} brings Python code of its own, which is never run. Use a conversion without it.", model_type
        )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise refusals.tokenizer_missing(
            f"{folder.name} has no tokenizer.json. Copy the model's tokenizer files into it."
        )
    files = _weight_files(folder)
    if not files:
        raise refusals.malformed_weights(f"{folder.name} has no .safetensors file.")
    generation_config = _read_json(folder / "generation_config.json") or {}
    return Checkpoint(
        folder=folder,
        model_type=model_type,
        weight_files=files,
        weight_bytes=sum(_loaded_bytes(path) for path in files),
        config_overrides={"model_type": _RENAMED[model_type]} if model_type in _RENAMED else {},
        generation_config=generation_config,
        end_tokens=generation_config.get("eos_token_id") or config.get("eos_token_id"),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise refusals.malformed_config(f"{folder.name} is not a folder that can be read.")
    if not (folder / "config.json").is_file():
        raise refusals.malformed_config(
            f"{folder.name} has no config.json: it is not an MLX or Hugging Face model folder."
        )
    config = _read_json(folder / "config.json")
    if config is None:
        raise refusals.malformed_config(f"{folder.name}/config.json is not a JSON object.")
    return config


def _read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is none, or it is no object, or it is absurdly large."""
    try:
        if path.stat().st_size > _JSON_LIMIT:
            return None
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that the index names; without a usable index model*.safetensors, else every .safetensors."""
    index = (_read_json(folder / "model.safetensors.index.json") or {}).get("weight_map")
    if isinstance(index, dict) and index and all(isinstance(name, str) for name in index.values()):
        names = sorted(set(index.values()))
        if all(name == Path(name).name and name.endswith(".safetensors") for name in names):
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise refusals.malformed_weights(
                    f"{folder.name} lacks {missing[0]}"
                    + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                    + " of the files that its index names. Download the model again."
                )
            return tuple(folder / name for name in names)
    everything = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors" and path.is_file())
    return tuple(path for path in everything if path.name.startswith("model")) or tuple(everything)


def _loaded_bytes(path: Path) -> int:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise refusals.malformed_weights(f"{path.name} is too short to be a safetensors file ({size} bytes).")
        (length,) = struct.unpack("<Q", prefix)
        if not 0 < length <= min(_HEADER_LIMIT, size - 8):
            raise refusals.malformed_weights(f"{path.name} is not a safetensors file, or is cut off within its header.")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        raise refusals.malformed_weights(f"{path.name} has a header that cannot be read.")
    held = size - 8 - length
    loaded = end_of_data = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(value) is int for value in offsets)):
            raise refusals.malformed_weights(f"{path.name} has a tensor without a place in the file.")
        begin, end = offsets
        if not 0 <= begin <= end:
            raise refusals.malformed_weights(f"{path.name} has a tensor that ends before it begins.")
        end_of_data = max(end_of_data, end)
        if not _left_out(name):
            loaded += end - begin
    if end_of_data > held:
        raise refusals.malformed_weights(
            f"{path.name} is cut off: its header describes {format_gib(end_of_data)} of tensors, and "
            f"{format_gib(held)} are there. Download it again."
        )
    return loaded


def _left_out(name: str) -> bool:
    """Whether mlx-lm drops the tensor when it loads (Qwen3.5's vision tower and multi-token-prediction head)."""
    return "mtp." in name or name.startswith(("vision_tower", "model.visual"))

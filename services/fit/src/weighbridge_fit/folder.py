"""Which files of a model folder load."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from weighbridge_fit.bounded_json import loads_object
from weighbridge_fit.errors import WeightError, WeightReason, as_text
from weighbridge_fit.files import open_regular

# Folders below the model's own: a diffusers tree needs one, a nested checkpoint two or three.
MAX_DEPTH = 6
MAX_ENTRIES = 20_000
MAX_WEIGHT_FILES = 4096
# The index of the largest published checkpoint (671 B parameters, 91,991 tensors) is 9 MiB.
MAX_INDEX_BYTES = 32 << 20
# Configs are a few KiB; those with a quantisation per layer reach a few hundred.
MAX_CONFIG_BYTES = 4 << 20
INDEX_SUFFIX = ".safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".gguf")
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)

Opener = Callable[[Path], Path | None]


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A weight file that loads: its real path, its name in the model, its top-level folder ("" for the root)."""

    path: Path
    name: str
    component: str


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """A JSON object of bounded size. Raises `WeightError` naming the file."""
    with open_regular(path) as file:
        try:
            if file.size > max_bytes:
                raise WeightError(WeightReason.HEADER_TOO_LARGE, "the file is too large to be what its name says")
            return loads_object(file.read_exactly(0, file.size))
        except WeightError as error:
            raise error.in_file(path.name) from error


def loaded_files(folder: Path, admit: Opener) -> tuple[list[LoadedFile], list[str]]:
    """The weight files of a folder that load, in order of their names, and what was left out, a sentence each.

    `admit` gives the real path of a file, or None when its links lead outside. Raises NO_WEIGHTS, PARSE_BUDGET.
    """
    notes: list[str] = []
    by_folder: dict[str, list[str]] = {}
    others: dict[str, set[str]] = {}
    for parent, name in _walk(folder):
        if name.endswith(WEIGHT_SUFFIXES):
            by_folder.setdefault(parent, []).append(name)
        else:
            others.setdefault(parent, set()).add(name)
    if by_folder.get("") and "config.json" in others.get("", ()) and len(by_folder) > 1:
        # A transformers or MLX folder loads from its own level; what lies below are other editions of the same weights.
        notes.append("Weights in subfolders are other editions and do not load.")
        by_folder = {"": by_folder[""]}
    files: list[LoadedFile] = []
    for parent in sorted(by_folder):
        _refuse_incomplete_splits(by_folder[parent])
        names = _that_load(folder / parent, sorted(by_folder[parent]), others.get(parent, set()), admit, notes)
        for name in names:
            path = admit(folder / parent / name)
            relative = f"{parent}/{name}" if parent else name
            if path is None:
                raise WeightError(WeightReason.UNREADABLE, "the file is missing or not readable", file=relative)
            files.append(LoadedFile(path, as_text(relative), as_text(parent.split("/")[0])))
            if len(files) > MAX_WEIGHT_FILES:
                message = f"the folder holds more than {MAX_WEIGHT_FILES} weight files"
                raise WeightError(WeightReason.PARSE_BUDGET, message)
    if not files:
        raise WeightError(WeightReason.NO_WEIGHTS, "the folder holds no safetensors or GGUF weights", file=folder.name)
    return files, notes


def split_parts(path: Path) -> list[Path]:
    """All parts of a split GGUF file, in order; the file alone when its name is not a split's."""
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count or count > MAX_WEIGHT_FILES:
        return [path]
    return [path.with_name(f"{found['stem']}-{number:05d}-of-{found['count']}.gguf") for number in range(1, count + 1)]


def _refuse_incomplete_splits(names: list[str]) -> None:
    """A split GGUF is priced whole or not at all."""
    present = set(names)
    for name in names:
        missing = [part.name for part in split_parts(Path(name)) if part.name not in present]
        if missing:
            raise WeightError(WeightReason.SPLIT_INCOMPLETE, "a part of the split file is missing", file=missing[0])


def _that_load(folder: Path, names: list[str], others: set[str], admit: Opener, notes: list[str]) -> list[str]:
    """The names among one folder's weight files that a loader opens."""
    safetensors = [name for name in names if name.endswith(".safetensors")]
    rest = [name for name in names if not name.endswith(".safetensors")]
    indexed = _indexed(folder, sorted(name for name in others if name.endswith(INDEX_SUFFIX)), admit, notes)
    if indexed:
        left_out = len(set(safetensors) - indexed)
        if left_out:
            notes.append(f"{left_out} safetensors file(s) beside the index do not load.")
        return sorted(indexed) + rest
    model_files = [name for name in safetensors if fnmatch(name, "model*.safetensors")]
    if model_files and len(model_files) < len(safetensors) and "config.json" in others:
        notes.append(
            f"{len(safetensors) - len(model_files)} safetensors file(s) beside model*.safetensors do not load."
        )
        return model_files + rest
    return safetensors + rest


def _indexed(folder: Path, indexes: list[str], admit: Opener, notes: list[str]) -> set[str]:
    """The shards that a folder's indexes list. A broken index is ignored, and said so."""
    shards: set[str] = set()
    for name in indexes:
        path = admit(folder / name)
        try:
            weight_map = read_json(path, MAX_INDEX_BYTES).get("weight_map") if path else None
        except WeightError:
            weight_map = None
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(shard, str) and _plain_name(shard) for shard in weight_map.values())
        ):
            notes.append(f"The index {as_text(name)} is broken and was ignored.")
            continue
        shards.update(weight_map.values())
    return shards


def _plain_name(name: str) -> bool:
    """A file name in the same folder: an index must not reach anywhere else."""
    return name.endswith(".safetensors") and "/" not in name and "\\" not in name and "\0" not in name


def _walk(folder: Path) -> Iterator[tuple[str, str]]:
    """(parent relative to the folder, name) of every file, hidden ones left out, links to folders not followed."""
    pending = [("", 0)]
    seen = 0
    while pending:
        parent, depth = pending.pop()
        try:
            with os.scandir(folder / parent) as listing:
                # One more than may be: the folder is never listed whole first.
                entries = sorted(islice(listing, MAX_ENTRIES + 1 - seen), key=lambda entry: entry.name)
        except OSError as error:
            message = f"the folder cannot be listed ({error.strerror})"
            raise WeightError(WeightReason.UNREADABLE, message, file=parent) from error
        seen += len(entries)
        if seen > MAX_ENTRIES:
            message = f"the folder holds more than {MAX_ENTRIES} entries"
            raise WeightError(WeightReason.PARSE_BUDGET, message, file=parent)
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                if depth < MAX_DEPTH:
                    pending.append((f"{parent}/{entry.name}" if parent else entry.name, depth + 1))
            else:
                yield parent, entry.name

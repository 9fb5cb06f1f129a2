"""What kind of model a folder is, and which of its files load."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from weighbridge_fit import weight_names
from weighbridge_fit.bounded_json import loads_object
from weighbridge_fit.errors import MAX_SHOWN, WeightError, WeightReason, as_text, shown
from weighbridge_fit.files import open_regular
from weighbridge_fit.shelf import CONFIG_NAME, PIPELINE_NAME, models_on_shelf

# Folders below the model's own: a diffusers tree needs one, a nested checkpoint two or three.
MAX_DEPTH = 6
MAX_ENTRIES = 20_000
MAX_WEIGHT_FILES = weight_names.MAX_PARTS
# The index of the largest published checkpoint (671 B parameters, 91,991 tensors) is 9 MiB.
MAX_INDEX_BYTES = 32 << 20
# Configs are a few KiB; those with a quantisation per layer reach a few hundred.
MAX_CONFIG_BYTES = 4 << 20
ADAPTER_CONFIG_NAME = "adapter_config.json"
# What PEFT and mlx-lm write beside their adapter_config.json; mlx-lm's numbered files are earlier states of training.
ADAPTER_NAMES = ("adapter_model.safetensors", "adapters.safetensors", "adapter_model.bin")
# An image model in parts has at most a diffusion model, its high-noise half and two encoders in GGUF.
MAX_GGUF_PARTS = 4
# Names given in a message: the rest is a number.
MAX_NAMED = 12
# Wan's own repositories keep the transformer in safetensors and the other parts as checkpoints beside it.
_WAN_PARTS = re.compile(r"(?:models_t5_|models_clip_|Wan[0-9.]+_VAE)[^/]*\.pth")

Opener = Callable[[Path], Path | None]


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A weight file that loads: its real path, its name in the model, its top-level folder ("" for the root).

    `group` names files that are one model together; two groups that hold the same tensors are editions of one model.
    "" where the folder itself says that the file belongs to its model.
    """

    path: Path
    name: str
    component: str
    group: str = ""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The files of a folder that load, what was left out (a sentence each), and what the folder says of itself: the
    objects of config.json, model_index.json and adapter_config.json, empty where there is none."""

    files: tuple[LoadedFile, ...]
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None


_UNREADABLE_JSON = (WeightReason.HEADER_INVALID, WeightReason.TOO_DEEP, WeightReason.DUPLICATE_KEY)


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """A JSON object of bounded size. Raises `WeightError` naming the file.

    Python writes infinities as they are, and transformers before 5 did so in configs: `"time_step_limit": [0.0,
    Infinity]` of Mamba 2 and the hybrids built on it.
    """
    with open_regular(path) as file:
        try:
            if file.size > max_bytes:
                raise WeightError(WeightReason.HEADER_TOO_LARGE, "the file is too large to be what its name says")
            return loads_object(file.read_exactly(0, file.size), constants=True)
        except WeightError as error:
            raise error.in_file(path.name) from error


def model_folder(folder: Path, admit: Opener) -> ModelFolder:
    """Looks through a folder at an already resolved path.

    `admit` gives the real path of a file, or None when it leads outside. Raises NO_WEIGHTS, SEVERAL_MODELS,
    SPLIT_INCOMPLETE, PARSE_BUDGET, UNREADABLE.
    """
    return _Scan(folder, admit).model()


def split_parts(path: Path) -> list[Path]:
    """All parts of a split GGUF file, in order; the file alone when its name is not a split's."""
    return [path.with_name(name) for name in weight_names.split_names(path.name)]


def several_models(names: list[str]) -> WeightError:
    """The refusal of a folder that holds more than one model, or another one's folder alone, with what can be named
    instead."""
    if len(names) == 1:
        message = f"the folder is no model itself, it holds one: name {_listed(names)} in it"
        return WeightError(WeightReason.SEVERAL_MODELS, message)
    message = f"the folder holds several models, or several editions of one; name one of them: {_listed(names)}"
    return WeightError(WeightReason.SEVERAL_MODELS, message)


def _listed(names: list[str]) -> str:
    """Names for a message: few, short and printable, whatever the folder holds."""
    texts = [as_text(name) for name in names[:MAX_NAMED]]
    plain = [text if text.isprintable() and len(text) <= MAX_SHOWN else shown(text) for text in texts]
    return ", ".join(plain) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")


class _Scan:
    """One look through one folder: every entry is seen once, and every file that is opened is resolved once."""

    def __init__(self, folder: Path, admit: Opener) -> None:
        self._folder = folder
        self._admit = admit
        self._notes: list[str] = []
        self._weights: dict[str, list[str]] = {}
        self._others: dict[str, set[str]] = {}
        for parent, name in _walk(folder):
            if weight_names.is_weight(name):
                self._weights.setdefault(parent, []).append(name)
            else:
                self._others.setdefault(parent, set()).add(name)

    def model(self) -> ModelFolder:
        adapter = self._adapter()
        if adapter is not None:
            return adapter
        pipeline = self._pipeline()
        config = self._json("", CONFIG_NAME)
        if self._weights.get("") and CONFIG_NAME in self._others.get("", ()) and len(self._weights) > 1:
            # A transformers or MLX folder loads from its own level; below are other editions of the same weights.
            self._notes.append("Weights in subfolders are other editions and do not load.")
            self._weights = {"": self._weights[""]}
        if not pipeline:
            self._refuse_several()
        files: list[LoadedFile] = []
        for parent in sorted(self._weights):
            files += self._files(parent, self._that_load(parent, config))
            if len(files) > MAX_WEIGHT_FILES:
                message = f"the folder holds more than {MAX_WEIGHT_FILES} weight files"
                raise WeightError(WeightReason.PARSE_BUDGET, message)
        if not files:
            message = "the folder holds no safetensors, GGUF or torch weights"
            raise WeightError(WeightReason.NO_WEIGHTS, message, file=self._folder.name)
        return ModelFolder(tuple(files), tuple(self._notes), config, pipeline)

    def _adapter(self) -> ModelFolder | None:
        """A folder of PEFT's or mlx-lm's."""
        here = self._weights.get("", [])
        names = [name for name in ADAPTER_NAMES if name in here]
        if not names or ADAPTER_CONFIG_NAME not in self._others.get("", ()):
            return None
        if len(here) > 1 and CONFIG_NAME in self._others[""]:
            return None
        if len(here) > 1:
            self._notes.append(f"{len(here) - 1} weight file(s) beside {names[0]} do not load.")
        files = self._files("", [(names[0], "")])
        return ModelFolder(tuple(files), tuple(self._notes), adapter=self._json("", ADAPTER_CONFIG_NAME))

    def _pipeline(self) -> Mapping[str, Any]:
        """The diffusers pipeline that the folder is, and its components as the only folders that load."""
        if PIPELINE_NAME not in self._others.get("", ()):
            return {}
        try:
            pipeline = self._json("", PIPELINE_NAME)
        except WeightError:
            self._notes.append(f"The {PIPELINE_NAME} is broken and was ignored.")
            return {}
        named = {name for name, value in pipeline.items() if isinstance(value, list) and any(value)}
        loading = {parent for parent in self._weights if parent.split("/")[0] in named}
        if not loading:
            return pipeline
        left_out = sorted({as_text(parent.split("/")[0]) for parent in self._weights if parent not in loading})
        if "" in left_out:
            self._notes.append("Weight files beside the components' folders do not load.")
        folders = [name for name in left_out if name]
        if folders:
            self._notes.append(f"No component of the pipeline, does not load: {_listed(folders)}.")
        self._weights = {
            parent: self._weights[parent] for parent in loading if not self._below_another(parent, loading)
        }
        return pipeline

    @staticmethod
    def _below_another(parent: str, parents: set[str]) -> bool:
        """Whether a folder further up holds weights: a component loads from its own level."""
        parts = parent.split("/")
        return any("/".join(parts[:depth]) in parents for depth in range(1, len(parts)))

    def _refuse_several(self) -> None:
        """Raises SEVERAL_MODELS for a folder of models: folders of models of their own, or more GGUF files than one
        model has parts."""
        shelved = models_on_shelf(self._weights, self._others)
        if shelved:
            raise several_models(shelved)
        groups = {
            f"{parent}/{group}" if parent else group
            for parent, names in self._weights.items()
            for group in map(weight_names.group_of, names)
            if group.endswith(weight_names.GGUF) and weight_names.PROJECTOR_NAME not in group.lower()
        }
        safe = any(name.endswith(weight_names.SAFETENSORS) for name in self._weights.get("", ()))
        if len(groups) > MAX_GGUF_PARTS and not (safe and CONFIG_NAME in self._others.get("", ())):
            raise several_models(sorted(groups))

    def _that_load(self, parent: str, config: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(name, group) of each file in one folder that a loader opens."""
        names = sorted(self._weights[parent])
        others = self._others.get(parent, set())
        notes = self._notes
        apart: list[str] = []
        if parent or CONFIG_NAME in others:
            if config.get("_class_name") == "WanModel":
                apart = [name for name in names if _WAN_PARTS.fullmatch(name)]
                names = [name for name in names if name not in apart] or apart
            names = weight_names.one_container(names, notes)
        else:
            names = _without_copies(names, notes)
        gguf = [name for name in names if name.endswith(weight_names.GGUF)]
        _refuse_incomplete_splits(gguf)
        grouped = [(name, weight_names.group_of(name)) for name in weight_names.without_projectors(gguf, notes)]
        rest = [name for name in names if not name.endswith(weight_names.GGUF)]
        return sorted(self._model_files(parent, rest, others) + grouped + [(name, "") for name in apart])

    def _model_files(self, parent: str, names: list[str], others: set[str]) -> list[tuple[str, str]]:
        """Safetensors or torch files: those of one variant, as an index lists them where there is one."""
        names, variant = weight_names.one_variant(names, self._notes)
        for suffix in (weight_names.SAFETENSORS, ".bin"):
            chosen = [name for name in names if name.endswith(suffix)]
            if suffix == ".bin" and not chosen:
                continue
            indexed = self._indexed(parent, weight_names.indexes_of(others, suffix, variant), suffix)
            if indexed:
                left_out = len(set(chosen) - indexed)
                if left_out:
                    self._notes.append(f"{left_out} {suffix[1:]} file(s) beside the index do not load.")
                return [(name, "") for name in sorted(indexed | (set(names) - set(chosen)))]
        names = weight_names.whole_before_shards(names, self._notes)
        if CONFIG_NAME in others:
            return [(name, "") for name in weight_names.plain_models(names, self._notes)]
        return [(name, "" if parent else weight_names.group_of(name)) for name in names]

    def _indexed(self, parent: str, indexes: list[str], suffix: str) -> set[str]:
        """The shards that a folder's indexes list. A broken index is ignored, and said so."""
        shards: set[str] = set()
        for name in indexes:
            path = self._admit(self._folder / parent / name)
            try:
                weight_map = read_json(path, MAX_INDEX_BYTES).get("weight_map") if path else None
            except WeightError:
                weight_map = None
            if (
                not isinstance(weight_map, dict)
                or not weight_map
                or not all(isinstance(shard, str) and _plain_name(shard, suffix) for shard in weight_map.values())
            ):
                self._notes.append(f"The index {as_text(name)} is broken and was ignored.")
                continue
            shards.update(weight_map.values())
        return shards

    def _files(self, parent: str, names: list[tuple[str, str]]) -> list[LoadedFile]:
        """Raises UNREADABLE for a file that is not there, or whose link leads outside."""
        found = []
        for name, group in names:
            path = self._admit(self._folder / parent / name)
            relative = f"{parent}/{name}" if parent else name
            if path is None:
                raise WeightError(WeightReason.UNREADABLE, "the file is missing or not readable", file=relative)
            inside = f"{parent}/{group}" if parent and group else group
            found.append(LoadedFile(path, as_text(relative), as_text(parent.split("/")[0]), as_text(inside)))
        return found

    def _json(self, parent: str, name: str) -> Mapping[str, Any]:
        """The object in a file of the folder, {} when there is no such file. Raises UNREADABLE where its link leads
        nowhere or outside: what it says would be left out unnoticed."""
        if name not in self._others.get(parent, ()):
            return {}
        path = self._admit(self._folder / parent / name)
        if path is None:
            raise WeightError(WeightReason.UNREADABLE, "the file is missing or not readable", file=name)
        try:
            return read_json(path, MAX_CONFIG_BYTES)
        except WeightError as error:
            if error.reason in _UNREADABLE_JSON:  # no weights, and nobody's header
                raise WeightError(
                    WeightReason.CONFIG_INVALID, error.message, offset=error.offset, file=error.file
                ) from error
            raise


def _without_copies(names: list[str], notes: list[str]) -> list[str]:
    """Parts of a model in one folder: all of them, but no torch file beside its safetensors edition."""
    safe = [name for name in names if name.endswith(weight_names.SAFETENSORS)]
    stems = {name.removesuffix(weight_names.SAFETENSORS) for name in safe}
    kept = [
        name
        for name in names
        if not weight_names.is_torch(name) or not (name.rpartition(".")[0] in stems or (safe and name.endswith(".bin")))
    ]
    if len(kept) < len(names):
        notes.append(f"{len(names) - len(kept)} torch file(s) are copies of safetensors and do not load.")
    return kept


def _refuse_incomplete_splits(names: list[str]) -> None:
    """A split GGUF is priced whole or not at all."""
    missing = weight_names.missing_part(names)
    if missing is not None:
        raise WeightError(WeightReason.SPLIT_INCOMPLETE, "a part of the split file is missing", file=missing)


def _plain_name(name: str, suffix: str) -> bool:
    """A file name in the same folder: an index must not reach anywhere else."""
    return name.endswith(suffix) and "/" not in name and "\\" not in name and "\0" not in name


def _walk(folder: Path) -> Iterator[tuple[str, str]]:
    """(parent relative to the folder, name) of every file; hidden ones are left out, links to folders not followed."""
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

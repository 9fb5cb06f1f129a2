"""Facts about weights, written into a catalogue's manifest: then the model is priced to the byte before it is here.

What a manifest may hold is described by the published schema; fit reads it strictly and verifies the facts.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2

PART_VERSION = 1
"""Of the form that facts are pinned in."""
MANIFEST_FORMAT = "weighbridge.model/1"
CHUNK_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 32 << 20

_ENGINES = {
    plan_pb2.ENGINE_KIND_MLX: ("chat", "mlx"),
    plan_pb2.ENGINE_KIND_DS4: ("chat", "ds4"),
    plan_pb2.ENGINE_KIND_GENERIC: ("chat", "generic"),
}

# As the published schema has them: what it refuses would be left out of the catalogue later, by then a riddle.
_ID = re.compile(r"[a-z0-9]([a-z0-9.-]{0,62}[a-z0-9])?")
_LICENSE = re.compile(r"[A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)

_MAIN = frozenset({"model", "diffusion_model"})
"""Components that are the model itself."""

Describe = Callable[[Path], Awaitable[weights_pb2.WeightFacts]]
"""The facts of a file or folder with every tensor."""


class PinError(Exception):
    """Facts that cannot be pinned; a sentence for the person who asked."""


def part_of(facts: weights_pb2.WeightFacts) -> dict[str, Any]:
    """Facts as a manifest holds them.

    Raises PinError for facts without tensors: nobody could check them.
    """
    if not facts.tensors:
        raise PinError(f"The facts of {facts.name} list no tensors, so nobody could check them.")
    return {"version": PART_VERSION, "facts": MessageToDict(facts, preserving_proto_field_name=True)}


async def pin_into(manifest: dict[str, Any], model: Path, describe: Describe) -> list[str]:
    """Puts the facts of the files in `model`, a folder or the one file meant in it, into a manifest; returns what was
    pinned, in words.

    A manifest of parts (sd-server's, or companions such as a drafter) has the facts of each part beside it, any other
    one those of all files together. Raises PinError.
    """
    folder = folder_of(model)
    parts, together = _to_pin(manifest)
    for file in [*parts, *together]:
        path = folder / file["path"]
        if not path.is_file():
            raise PinError(f"{path} is not there, and the manifest lists it.")
        if (size := path.stat().st_size) != file.get("size_bytes"):
            raise PinError(
                f"{path} has {size:,} bytes, the manifest says {file.get('size_bytes')!r}: not the same file."
            )
    pinned = []
    if together:
        listed = {file["path"] for file in together}
        # Beside companions a folder is no model by itself; the first file of several says where the others are.
        facts = await describe(folder / min(listed) if parts else model)
        described = {file.name for file in facts.files}
        if described != listed:
            raise PinError(
                f"{model} holds {_few(described)}, and the manifest lists {_few(listed)}: these facts are not those of "
                "its files."
            )
        manifest["facts"] = part_of(facts)
        pinned.append(f"{facts.tensor_count:,} tensors of {facts.name}")
    for file in parts:
        facts = await describe(folder / file["path"])
        file["facts"] = part_of(facts)
        pinned.append(f"{facts.tensor_count:,} tensors of {file['path']}")
    return pinned


def _to_pin(manifest: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The weight files whose facts stand beside each of them, and those that have theirs together. Raises PinError."""
    files = weight_files(manifest)
    if manifest.get("weights_kind"):
        return files, []
    if manifest.get("engine") == "generic":
        return [], files  # a pipeline's folders are one tree
    together = [file for file in files if file["component"] in _MAIN]
    return [file for file in files if file["component"] not in _MAIN], together


def weight_files(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The files of a manifest that hold weights. Raises PinError: none, or not written as files are."""
    files = manifest.get("files")
    listed = files if isinstance(files, list) else []
    weights = [file for file in listed if isinstance(file, dict) and file.get("component")]
    if not weights:
        raise PinError("The manifest lists no weight files.")
    for file in weights:
        if not isinstance(file.get("path"), str) or not file["path"]:
            raise PinError('The manifest has a file without a "path".')
    return weights


def folder_of(model: Path) -> Path:
    """The folder that a manifest's paths are relative to."""
    return model if model.is_dir() else model.parent


def _few(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "no files"


def new_manifest(
    catalog_id: str,
    facts: weights_pb2.WeightFacts,
    engine: int,
    *,
    repository: str,
    revision: str,
    license_name: str,
    max_context_tokens: int = 0,
) -> dict[str, Any]:
    """A manifest for a chat model that has none yet.

    Raises PinError for what a manifest cannot say by itself: where images render well, which parts go together.
    """
    if not _ID.fullmatch(catalog_id):
        raise PinError(
            f"{catalog_id!r} is no id: a manifest is named by lower-case letters, digits, dots and dashes, 64 at most, "
            "and .json."
        )
    if not _LICENSE.fullmatch(license_name):
        raise PinError(f"{license_name!r} is no SPDX licence: write such as Apache-2.0, or LicenseRef-its-name.")
    if not _REPOSITORY.fullmatch(repository):
        raise PinError("A new manifest needs to say where its files come from: add --repository OWNER/NAME.")
    if engine not in _ENGINES or facts.format == weights_pb2.WEIGHT_FORMAT_DIFFUSERS:
        raise PinError(
            "A manifest of an image or video model says more than its files do (sizes it renders well, parts that go "
            "together). Write it first, then pin facts into it."
        )
    use, engine_name = _ENGINES[engine]  # type: ignore[index] # looked up above
    manifest: dict[str, Any] = {
        "format": MANIFEST_FORMAT,
        "id": catalog_id,
        "version": "1.0.0",
        "name": facts.name or catalog_id,
        "use": use,
        "engine": engine_name,
        "license": license_name,
        "repository": {"name": repository, **({"revision": revision} if revision else {})},
        "files": [{"path": file.name, "component": "model", "size_bytes": file.size_bytes} for file in facts.files],
    }
    words = {"architecture": facts.architecture, "quantization": facts.quantization}
    manifest |= {name: word for name, word in words.items() if word}
    if max_context_tokens:
        manifest["chat"] = {"max_context_tokens": max_context_tokens}
    return manifest


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest at `path`; None where there is no file. Raises PinError for what is none."""
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise PinError(f"{path} is larger than any manifest.")
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise PinError(f"{path} cannot be read as a manifest: {error}") from None
    if not isinstance(document, dict) or document.get("format") != MANIFEST_FORMAT:
        raise PinError(f'{path} is no manifest: "format" must be "{MANIFEST_FORMAT}".')
    return document


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a document whole or not at all, one tensor a line, so that a change can be read as a difference.

    A link stays one: what it names is written. Raises PinError for more than a catalogue reads, OSError.
    """
    text = as_text(document).encode()
    if len(text) > MAX_MANIFEST_BYTES:
        raise PinError(f"With these facts the manifest would be larger than {MAX_MANIFEST_BYTES >> 20} MiB.")
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("xb") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        if path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def as_text(document: Mapping[str, Any]) -> str:
    """JSON for people: indented, with one tensor a line."""
    lines: list[str] = []

    def keep(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: mark(entry) if key == "tensors" else keep(entry) for key, entry in value.items()}
        return [keep(entry) for entry in value] if isinstance(value, list) else value

    def mark(tensors: Any) -> Any:
        if not isinstance(tensors, list):
            return keep(tensors)
        lines.extend(json.dumps(tensor, ensure_ascii=False) for tensor in tensors)
        return [f"\0{len(lines) - len(tensors) + number}" for number in range(len(tensors))]

    text = json.dumps(keep(dict(document)), indent=1, ensure_ascii=False)
    # A zero byte is written as an escape and stands in no key or value of a manifest.
    return re.sub(r'"\\u0000(\d+)"', lambda match: lines[int(match[1])], text) + "\n"


def add_digests(manifest: dict[str, Any], folder: Path, on_bytes: Callable[[int], None]) -> None:
    """Puts each weight file's SHA-256 into a manifest: all of it is read. Raises PinError, OSError."""
    for file in weight_files(manifest):
        hasher = hashlib.sha256()
        with (folder / file["path"]).open("rb") as opened:
            while piece := opened.read(CHUNK_BYTES):
                hasher.update(piece)
                on_bytes(len(piece))
        file["sha256"] = hasher.hexdigest()

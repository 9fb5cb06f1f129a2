"""Facts about weights, written into a catalogue's manifest: then the model is priced to the byte before it is here.

What a manifest may hold is described by the published schema; fit reads it strictly and verifies the facts.
"""

import hashlib
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping
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


async def pin_into(manifest: dict[str, Any], folder: Path, describe: Describe) -> list[str]:
    """Puts the facts of the files in `folder` into a manifest; returns what was pinned, in words.

    A manifest of parts (sd-server's) has the facts of each part beside it, any other one those of all files together.
    Raises PinError.
    """
    files = [file for file in manifest.get("files", []) if isinstance(file, dict) and file.get("component")]
    if not files:
        raise PinError("The manifest lists no weight files.")
    for file in files:
        path = folder / str(file.get("path", ""))
        if not path.is_file():
            raise PinError(f"{path} is not there, and the manifest lists it.")
        if (size := path.stat().st_size) != file.get("size_bytes"):
            raise PinError(
                f"{path} has {size:,} bytes, the manifest says {file.get('size_bytes')!r}: not the same file."
            )
    if not manifest.get("weights_kind"):
        facts = await describe(folder)
        manifest["facts"] = part_of(facts)
        return [f"{facts.tensor_count:,} tensors of {facts.name}"]
    pinned = []
    for file in files:
        facts = await describe(folder / file["path"])
        file["facts"] = part_of(facts)
        pinned.append(f"{facts.tensor_count:,} tensors of {file['path']}")
    return pinned


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
    if engine not in _ENGINES or facts.format == weights_pb2.WEIGHT_FORMAT_DIFFUSERS:
        raise PinError(
            "A manifest of an image or video model says more than its files do (sizes it renders well, parts that go "
            "together). Write it first, then pin facts into it."
        )
    if not repository:
        raise PinError("A new manifest needs to say where its files come from: add --repository OWNER/NAME.")
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
    """Writes a document whole or not at all, one tensor a line, so that a change can be read as a difference."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as opened:
            opened.write(as_text(document))
            opened.flush()
            os.fsync(opened.fileno())
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
    """Puts each file's SHA-256 into a manifest: all of it is read."""
    for file in manifest["files"]:
        hasher = hashlib.sha256()
        with (folder / file["path"]).open("rb") as opened:
            while piece := opened.read(CHUNK_BYTES):
                hasher.update(piece)
                on_bytes(len(piece))
        file["sha256"] = hasher.hexdigest()

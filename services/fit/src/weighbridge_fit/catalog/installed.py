"""Which catalogue models are on this machine, and where.

A model lies in a folder of its own, named by its id. `weighbridge pull` writes `weighbridge.json` there when everything
else is in place, with each file and its size; a folder without it counts as whole when it holds every file that the
entry lists, in its size.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import ConfigDict, Field

from weighbridge_fit.bounded_json import loads_object
from weighbridge_fit.catalog.entry import CatalogEntry
from weighbridge_fit.catalog.format import MAX_FILES
from weighbridge_fit.catalog.manifest import is_id
from weighbridge_fit.errors import WeightError
from weighbridge_fit.files import open_regular

RECORD_NAME = "weighbridge.json"
# A line for each file.
MAX_RECORD_BYTES = 4 << 20

Fingerprint = tuple[tuple[str, int, int], ...]
"""Name, size and time of the last change of every file that a reading of the folder depends on."""


class _RecordedFile(pydantic.BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    # Into the folder, and nowhere else.
    path: Annotated[str, Field(pattern=r"^[^/\x00][^\x00]*$", max_length=4096)]
    size_bytes: Annotated[int, Field(ge=0)]


class _Record(pydantic.BaseModel):
    """What a pull left. A later version may say more: what is not known here is not read."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    catalog_id: str
    files: Annotated[list[_RecordedFile], Field(max_length=MAX_FILES)]


@dataclass(frozen=True, slots=True)
class Installed:
    """A catalogue model's folder, whole or in part. `fingerprint` changes with what a reading of it would find."""

    folder: Path
    whole: bool
    present: int
    expected: int
    fingerprint: Fingerprint


def look(folder: Path, entry: CatalogEntry) -> Installed:
    """How much of an entry is in a folder. Sizes alone are looked at; absent and unreadable are the same."""
    wanted = {file.path: file.size_bytes for file in entry.files}
    record = _read_record(folder)
    if record is not None and record.catalog_id == entry.catalog_id:
        # A repository's further files are in it, and the sizes that were really found.
        wanted = {file.path: file.size_bytes for file in record.files if ".." not in file.path.split("/")}
    sizes = {path: _size(folder / path) for path in wanted}
    present = sum(sizes[path] == size for path, size in wanted.items())
    whole = bool(wanted) and present == len(wanted)
    return Installed(folder, whole, present, len(wanted), _fingerprint(folder, wanted) if whole else ())


def recorded_id(folder: Path) -> str:
    """The catalogue id of what a pull left in a folder, "" if none did."""
    record = _read_record(folder)
    return record.catalog_id if record is not None and is_id(record.catalog_id) else ""


def _read_record(folder: Path) -> _Record | None:
    path = folder / RECORD_NAME
    try:
        with open_regular(path) as file:
            if file.size > MAX_RECORD_BYTES:
                return None
            value: dict[str, Any] = loads_object(file.read_exactly(0, file.size))
        return _Record.model_validate(value)
    except (WeightError, pydantic.ValidationError):
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return -1


def _fingerprint(folder: Path, paths: Iterable[str]) -> Fingerprint:
    """Everything in the folders that the files are in: configurations and indexes decide too what a reading finds."""
    parents = {folder} | {(folder / path).parent for path in paths}
    found: list[tuple[str, int, int]] = []
    for parent in sorted(parents):
        try:
            with os.scandir(parent) as listing:
                for item in listing:
                    status = item.stat()
                    found.append((item.path, status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((str(parent), -1, -1))
    return tuple(sorted(found))

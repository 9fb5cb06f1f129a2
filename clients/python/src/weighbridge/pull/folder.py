"""A model's folder: one pull at a time, room on the disk, and the record that says it is whole."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weighbridge.pull.errors import PullError, PullReason
from weighbridge.pull.transfer import sync_folder
from weighbridge.pull.wanted import WantedFile
from weighbridge.sizes import format_size

RECORD_NAME = "weighbridge.json"
"""Written last: a folder without it is not whole."""
RECORD_FORMAT = "weighbridge.pulled-model/1"
WORK_NAME = ".weighbridge-pull"
"""What has come so far; a dot keeps it out of every reader's sight."""

SPARE_BYTES = 512 << 20
"""Left free on the disk: a full one breaks more than a download."""


@contextmanager
def only_one(folder: Path) -> Iterator[Path]:
    """The folder for work in progress, with nobody else at it. Raises PullError BUSY, OSError."""
    import fcntl

    work = folder / WORK_NAME
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PullError(PullReason.BUSY, "Another pull of this model is at work.") from error
        yield work
    finally:
        os.close(descriptor)


def check_room(folder: Path, missing_bytes: int) -> None:
    """Raises PullError DISK_FULL unless the file system of `folder` takes so many bytes more."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if missing_bytes + SPARE_BYTES > free:
        raise PullError(
            PullReason.DISK_FULL,
            f"{format_size(missing_bytes)} are to come, and {format_size(free)} are free at {existing} "
            f"({format_size(SPARE_BYTES)} are left to everything else). Make room, or put the models elsewhere.",
        )


def read_record(folder: Path) -> Mapping[str, Any]:
    """What an earlier pull recorded; empty if nothing, or nothing that can be read."""
    try:
        record = json.loads((folder / RECORD_NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.get("format") == RECORD_FORMAT else {}


def write_record(folder: Path, record: Mapping[str, Any], files: list[WantedFile]) -> None:
    """Says that the model is whole, with what each file was when it was verified."""
    entries = []
    for file in files:
        status = file.target(folder).stat()
        entries.append(
            {
                "path": file.path,
                "size_bytes": file.size_bytes,
                "sha256": file.sha256,
                "modified_ns": status.st_mtime_ns,
            }
        )
    text = json.dumps({"format": RECORD_FORMAT, **record, "files": entries}, indent=1, ensure_ascii=False)
    draft = folder / WORK_NAME / RECORD_NAME
    with draft.open("w", encoding="utf-8") as opened:
        opened.write(text + "\n")
        opened.flush()
        os.fsync(opened.fileno())
    draft.replace(folder / RECORD_NAME)
    sync_folder(folder)


def drop_record(folder: Path) -> None:
    """Before files change: what is not whole must not say that it is."""
    (folder / RECORD_NAME).unlink(missing_ok=True)


def clear_work(folder: Path) -> None:
    """Throws away what was left of the work; what cannot be removed does no harm."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder / WORK_NAME)


def verified_before(folder: Path, record: Mapping[str, Any], file: WantedFile) -> bool:
    """Whether `file` is there as it was when an earlier pull verified it, by size and time of its last change."""
    try:
        status = file.target(folder).stat()
    except OSError:
        return False
    for entry in record.get("files", ()):
        if isinstance(entry, dict) and entry.get("path") == file.path:
            same = entry.get("size_bytes") == file.size_bytes == status.st_size and entry.get("sha256") == file.sha256
            return same and entry.get("modified_ns") == status.st_mtime_ns
    return False

"""A model's folder: one pull at a time, room on the disk, and the record that says it is whole."""

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weighbridge.pull.errors import PullError, PullReason
from weighbridge.pull.part import sync_folder
from weighbridge.pull.wanted import WantedFile
from weighbridge.sizes import format_size

RECORD_NAME = "weighbridge.json"
"""Written last: a folder without it is not whole."""
RECORD_FORMAT = "weighbridge.pulled-model/1"
MAX_RECORD_BYTES = 4 << 20
"""As much as fit reads of it."""
WORK_NAME = ".weighbridge-pull"
"""What has come so far; a dot keeps it out of every reader's sight."""
LOCK_NAME = "lock"
VERIFIED_NAME = "verified.json"
LOCK_TRIES = 100

SPARE_BYTES = 512 << 20
"""Left free on the disk: a full one breaks more than a download."""


@contextmanager
def only_one(folder: Path) -> Iterator[Path]:
    """The folder for work in progress, with nobody else at it; it goes with the last thing in it.

    Raises PullError BUSY, OSError.
    """
    work = folder / WORK_NAME
    descriptor = _locked(work)
    try:
        yield work
    finally:
        # While it is still locked: whoever waits for it sees that it has gone, and takes a new one.
        with contextlib.suppress(OSError):
            if [path.name for path in work.iterdir()] == [LOCK_NAME]:
                (work / LOCK_NAME).unlink()
                work.rmdir()
                folder.rmdir()  # only if nothing else is there
        os.close(descriptor)


def _locked(work: Path) -> int:
    """A descriptor that holds the lock. Raises PullError BUSY, OSError."""
    import fcntl

    for _ in range(LOCK_TRIES):
        work.mkdir(parents=True, exist_ok=True)
        if work.is_symlink():
            raise PullError(PullReason.NOT_WRITABLE, f"{work} is a link, and work in progress follows none: remove it.")
        try:
            descriptor = os.open(work / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # another pull has just removed the folder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            named = (work / LOCK_NAME).lstat()
            if os.path.samestat(named, os.fstat(descriptor)):
                return descriptor
            os.close(descriptor)
        except FileNotFoundError:
            os.close(descriptor)
        except BlockingIOError as error:
            os.close(descriptor)
            raise PullError(PullReason.BUSY, "Another pull of this model is at work.") from error
        except OSError:
            os.close(descriptor)
            raise
    raise PullError(PullReason.BUSY, "Other pulls of this model come and go.")


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
    return _read(folder / RECORD_NAME)


def read_verified(work: Path) -> Mapping[str, Any]:
    """What a pull that did not come to its end had verified; empty if nothing."""
    return _read(work / VERIFIED_NAME)


def _read(path: Path) -> Mapping[str, Any]:
    """A record with `files` that are objects, each with a path; empty for all else."""
    try:
        status = path.stat()
        # A pipe of that name would keep us waiting for good.
        readable = stat.S_ISREG(status.st_mode) and status.st_size <= MAX_RECORD_BYTES
        record = json.loads(path.read_text("utf-8")) if readable else None
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(record, dict) or record.get("format") != RECORD_FORMAT:
        return {}
    files = record.get("files")
    entries = files if isinstance(files, list) else []
    kept = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("path"), str)]
    return {**record, "files": kept}


def write_record(folder: Path, record: Mapping[str, Any], files: Sequence[WantedFile]) -> None:
    """Says that the model is whole, with what each file was when it was verified."""
    _write(folder / RECORD_NAME, folder, record, files)


def write_verified(folder: Path, files: Sequence[WantedFile]) -> None:
    """Remembers files that are there and verified, so that a pull that goes on need not read or get them again."""
    _write(folder / WORK_NAME / VERIFIED_NAME, folder, {}, files)


def _write(path: Path, folder: Path, record: Mapping[str, Any], files: Sequence[WantedFile]) -> None:
    """Whole or not at all. Raises OSError."""
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
    draft = folder / WORK_NAME / f"{path.name}.draft"
    draft.unlink(missing_ok=True)
    with draft.open("x", encoding="utf-8") as opened:
        opened.write(text + "\n")
        opened.flush()
        os.fsync(opened.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def drop_record(folder: Path) -> None:
    """Before files change: what is not whole must not say that it is."""
    (folder / RECORD_NAME).unlink(missing_ok=True)


def clear_work(work: Path, keep: Iterable[str] = ()) -> None:
    """Throws away what was left of the work, but for the names in `keep`; what cannot be removed does no harm.

    For whoever holds the lock, which stays.
    """
    kept = {LOCK_NAME, *keep}
    with contextlib.suppress(OSError):
        for path in list(work.iterdir()):
            if path.name in kept:
                continue
            with contextlib.suppress(OSError):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def verified_before(folder: Path, record: Mapping[str, Any], file: WantedFile) -> bool:
    """Whether `file` is there as it was when an earlier pull verified it, by size and time of its last change."""
    try:
        status = file.target(folder).stat()
    except OSError:
        return False
    for entry in record.get("files", ()):
        if entry["path"] == file.path:
            same = entry.get("size_bytes") == file.size_bytes == status.st_size
            known = not file.sha256 or entry.get("sha256") == file.sha256
            return same and known and bool(entry.get("modified_ns") == status.st_mtime_ns)
    return False

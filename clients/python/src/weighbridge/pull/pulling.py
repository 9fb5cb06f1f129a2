"""A whole model: what is missing is found out, room is made sure of, files come one by one, the record is last."""

import contextlib
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weighbridge.pull.errors import PullError, PullReason, refused_by_disk
from weighbridge.pull.folder import (
    RECORD_NAME,
    VERIFIED_NAME,
    check_room,
    clear_work,
    drop_record,
    only_one,
    read_record,
    read_verified,
    verified_before,
    write_record,
    write_verified,
)
from weighbridge.pull.hub import HUB_NAME, Repository
from weighbridge.pull.part import names_of, size_of
from weighbridge.pull.transfer import Transfer, Watcher
from weighbridge.pull.wanted import WantedFile, checked, distinct

_WEIGHTS = (
    ".safetensors",
    ".gguf",
    ".ckpt",
    ".pt",
    ".pth",
    ".bin",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".tflite",
)
_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".mp4", ".webm", ".mov", ".wav", ".mp3", ".pdf")
NOT_BESIDE = _WEIGHTS + _PICTURES
"""What no model needs beside the files that its entry lists."""

MAX_FILES = 4096
"""Of one model: as many as fit reads of a record."""
REMEMBER_BYTES = 64 << 20
"""After so many bytes what is verified is remembered; a process that is killed loses no more than that much reading."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to pull. `files` are those that the catalogue lists; with a `repository`, those it has beside them come
    too."""

    catalog_id: str
    version: str
    folder: Path
    files: tuple[WantedFile, ...]
    repository: str = ""
    revision: str = ""


@dataclass(frozen=True, slots=True)
class Listener:
    """Who hears how a pull goes.

    `on_plan` hears once how many files there are, their bytes, those of files that are not there, and how many of these
    came earlier; `on_file` of each file before it comes or is skipped, and whether it is there already; `on_bytes` how
    much of it is there; `on_verify` how much of it was read to verify it (of files that were there before: ahead of the
    plan); `on_done` that it is in its place.
    """

    on_plan: Callable[[int, int, int, int], None] = lambda files, total, missing, partial: None
    on_file: Callable[[WantedFile, bool], None] = lambda file, there: None
    on_bytes: Callable[[WantedFile, int], None] = lambda file, count: None
    on_note: Callable[[str], None] = lambda _: None
    stopped: Callable[[], bool] = lambda: False
    on_verify: Callable[[WantedFile, int], None] = lambda file, count: None
    on_done: Callable[[WantedFile], None] = lambda _: None

    def watcher(self, file: WantedFile) -> Watcher:
        """The listener of one file."""
        return Watcher(
            lambda count: self.on_bytes(file, count),
            self.on_note,
            self.stopped,
            lambda count: self.on_verify(file, count),
        )


@dataclass(frozen=True, slots=True)
class Pulled:
    """What is there now."""

    folder: Path
    files: int
    total_bytes: int
    downloaded_bytes: int
    revision: str = field(default="")


def pull(
    order: Order,
    transfer: Callable[[Path], Transfer],
    repository: Callable[[Path], Repository] | None,
    listener: Listener,
) -> Pulled:
    """Brings a model into its folder, or finds that it is there.

    `transfer` and `repository` are made for the folder that holds the work in progress. Raises PullError, also for what
    the disk refuses, and PullStoppedError; what has come is kept for the next time, and the folder does not say that it
    is whole.
    """
    listed = [checked(file) for file in order.files]
    distinct(listed, RECORD_NAME)
    try:
        with only_one(order.folder) as work:
            return _pull(order, listed, work, transfer, repository, listener)
    except BrokenPipeError:
        raise  # whoever listened to the progress has gone: not the disk's doing
    except OSError as error:
        raise refused_by_disk(error, order.catalog_id) from error


def _pull(
    order: Order,
    listed: Sequence[WantedFile],
    work: Path,
    transfer: Callable[[Path], Transfer],
    repository: Callable[[Path], Repository] | None,
    listener: Listener,
) -> Pulled:
    folder = order.folder
    record = read_record(folder)
    if (whole := _whole_already(order, record)) is not None:
        total = sum(file.size_bytes for file in whole)
        listener.on_plan(len(whole), total, 0, 0)
        for file in whole:
            listener.on_file(file, True)
        clear_work(work)
        return Pulled(folder, len(whole), total, 0, order.revision)
    source = repository(work) if repository and order.repository else None
    revision, files = _all_files(order, listed, source)
    verified = read_verified(work)
    there = [file for file in files if _is_there(folder, work, (record, verified), file, listener)]
    missing = [file for file in files if file not in there]
    missing_bytes = sum(file.size_bytes for file in missing)
    names = {name for file in missing if file.url for name in names_of(file)}
    clear_work(work, {*names, VERIFIED_NAME, *([HUB_NAME] if source else [])})
    partial_bytes = _come_so_far(work, missing)
    check_room(folder, missing_bytes - partial_bytes)
    listener.on_plan(len(files), sum(file.size_bytes for file in files), missing_bytes, partial_bytes)
    if missing:
        _remember(folder, there)
        drop_record(folder)
        _bring_all(order, files, there, transfer(work), source, listener)
    else:
        for file in files:
            listener.on_file(file, True)
    write_record(
        folder,
        {
            "catalog_id": order.catalog_id,
            "version": order.version,
            "repository": order.repository,
            "revision": revision,
            "pull_time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        },
        files,
    )
    clear_work(work)
    return Pulled(folder, len(files), sum(file.size_bytes for file in files), missing_bytes, revision)


def _bring_all(
    order: Order,
    files: Sequence[WantedFile],
    there: Sequence[WantedFile],
    carrier: Transfer,
    source: Repository | None,
    listener: Listener,
) -> None:
    """Brings what is not there; what was brought and verified is remembered, however this ends."""
    here, unremembered = set(there), 0
    try:
        for file in files:
            listener.on_file(file, file in here)
            if file in here:
                continue
            target = file.target(order.folder)
            if file.url:
                carrier.bring(file, target, listener.watcher(file))
            elif source is not None:
                source.bring(file, target, listener.watcher(file))
            else:
                message = f"The catalogue does not say where {file.path} comes from."
                raise PullError(PullReason.BAD_ENTRY, message)
            here.add(file)
            listener.on_done(file)
            unremembered += file.size_bytes
            if unremembered >= REMEMBER_BYTES:
                _remember(order.folder, [file for file in files if file in here])
                unremembered = 0
    except BaseException:
        _remember(order.folder, [file for file in files if file in here])
        raise


def _remember(folder: Path, files: Sequence[WantedFile]) -> None:
    """Saves a later pull some reading, and fails no pull."""
    if files:
        with contextlib.suppress(OSError):
            write_verified(folder, files)


def _whole_already(order: Order, record: Mapping[str, Any]) -> list[WantedFile] | None:
    """The files of an earlier pull of the very same version, unchanged since; None where anything is to be asked."""
    wanted = (order.catalog_id, order.version, order.repository, order.revision)
    if wanted != tuple(record.get(name) for name in ("catalog_id", "version", "repository", "revision")):
        return None
    if order.repository and not order.revision:
        return None  # its newest may have moved on
    recorded = {}
    for entry in record["files"]:
        size, digest = entry.get("size_bytes"), entry.get("sha256")
        if type(size) is not int or not isinstance(digest, str):
            return None
        try:
            recorded[entry["path"]] = checked(WantedFile(entry["path"], size, digest))
        except PullError:
            return None
    for file in order.files:
        # The entry may have changed without its version: a person's own, most likely.
        found = recorded.get(file.path)
        if found is None or found.size_bytes != file.size_bytes or (file.sha256 and found.sha256 != file.sha256):
            return None
    files = list(recorded.values())
    return files if files and all(verified_before(order.folder, record, file) for file in files) else None


def _all_files(order: Order, listed: Sequence[WantedFile], source: Repository | None) -> tuple[str, list[WantedFile]]:
    """The catalogue's files, and with a repository what it has beside them; the two have to agree. Raises PullError."""
    if source is None:
        return order.revision, list(listed)
    revision, offered = source.files()
    if listed:
        # The catalogue lists all of the weights: a repository may hold other editions, of many times their size.
        wanted = {file.path for file in listed}
        offered = [file for file in offered if file.path in wanted or not file.path.lower().endswith(NOT_BESIDE)]
    by_path = {file.path: file for file in offered}
    for file in listed:
        found = by_path.get(file.path)
        if found is None and not file.url:
            message = f"The repository {order.repository} has no {file.path}, which the catalogue lists."
            raise PullError(PullReason.NOT_THERE, message)
        if found is not None and (
            found.size_bytes != file.size_bytes or (file.sha256 and found.sha256 and file.sha256 != found.sha256)
        ):
            message = (
                f"{file.path}: the repository {order.repository} holds another file than the catalogue describes "
                f"({found.size_bytes:,} bytes instead of {file.size_bytes:,})."
            )
            raise PullError(PullReason.SIZE_MISMATCH, message)
        if found is None or file.sha256:
            by_path[file.path] = file
    files = list(by_path.values())
    if len(files) > MAX_FILES:
        raise PullError(PullReason.BAD_ENTRY, f"{order.catalog_id} has more than {MAX_FILES:,} files.")
    distinct(files, RECORD_NAME)
    return revision, files


def _is_there(
    folder: Path, work: Path, records: Sequence[Mapping[str, Any]], file: WantedFile, listener: Listener
) -> bool:
    """Whether it need not come. A file that nobody verified before is read once. Raises PullError, PullStoppedError."""
    target = file.target(folder)
    if not target.resolve().is_relative_to(folder.resolve()):
        message = f"{target} is, or lies behind, a link that leads out of the model's folder: remove it."
        raise PullError(PullReason.BAD_ENTRY, message)
    if any(verified_before(folder, record, file) for record in records):
        return True
    _check_disk(target, work)
    if not target.is_file() or target.stat().st_size != file.size_bytes or file.hasher() is None:
        return False
    return listener.watcher(file).verify(target, file)


def _check_disk(target: Path, work: Path) -> None:
    """Raises PullError NOT_WRITABLE if what came could not be moved there in one step."""
    above = target.parent
    while not above.exists():
        above = above.parent
    if above.stat().st_dev != work.stat().st_dev or (target.is_dir() and not target.is_symlink()):
        what = "a folder" if target.is_dir() else "on another disk than the model's folder"
        raise PullError(PullReason.NOT_WRITABLE, f"{target} is {what}: no file can be put there.")


def _come_so_far(work: Path, missing: Sequence[WantedFile]) -> int:
    """Bytes of missing files that are on the disk already."""
    parts = sum(min(file.size_bytes, size_of(work / names_of(file)[0])) for file in missing if file.url)
    from_hub = sum(file.size_bytes for file in missing if not file.url)
    return parts + min(from_hub, sum(size_of(path) for path in (work / HUB_NAME).rglob("*")))

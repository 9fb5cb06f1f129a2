"""A whole model: what is missing is found out, room is made sure of, files come one by one, the record is last."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weighbridge.pull.errors import PullError, PullReason
from weighbridge.pull.folder import (
    RECORD_NAME,
    check_room,
    clear_work,
    drop_record,
    only_one,
    read_record,
    verified_before,
    write_record,
)
from weighbridge.pull.hub import Repository
from weighbridge.pull.transfer import Transfer, Watcher
from weighbridge.pull.wanted import WantedFile, checked, digest_of

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
    """Who hears how a pull goes. `on_file` hears of each file before it comes or is skipped: name, size, whether it is
    there already."""

    on_plan: Callable[[int, int, int], None] = lambda files, total, missing: None
    on_file: Callable[[WantedFile, bool], None] = lambda file, there: None
    on_bytes: Callable[[WantedFile, int], None] = lambda file, count: None
    on_note: Callable[[str], None] = lambda _: None
    stopped: Callable[[], bool] = lambda: False


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

    `transfer` and `repository` are made for the folder that holds the work in progress. Raises PullError,
    PullStoppedError, OSError; what has come is kept for the next time, and the folder does not say that it is whole.
    """
    folder = order.folder
    listed = _distinct([checked(file) for file in order.files])
    with only_one(folder) as work:
        record = read_record(folder)
        if (whole := _whole_already(order, record)) is not None:
            for file in whole:
                listener.on_file(file, True)
            return Pulled(folder, len(whole), sum(file.size_bytes for file in whole), 0, order.revision)
        source = repository(work) if repository and order.repository else None
        revision, files = _all_files(order, listed, source)
        there = {file.path for file in files if _is_there(folder, record, file)}
        missing = [file for file in files if file.path not in there]
        missing_bytes = sum(file.size_bytes for file in missing)
        check_room(folder, missing_bytes - _come_so_far(work, missing_bytes))
        listener.on_plan(len(files), sum(file.size_bytes for file in files), missing_bytes)
        if missing:
            drop_record(folder)
        carrier = transfer(work)
        for file in files:
            listener.on_file(file, file.path in there)
            if file.path in there:
                continue
            heard = Watcher(_hearing(listener, file), listener.on_note, listener.stopped)
            if file.url:
                carrier.bring(file, file.target(folder), heard)
            elif source is not None:
                source.bring(file, file.target(folder), heard)
            else:
                message = f"The catalogue does not say where {file.path} comes from."
                raise PullError(PullReason.BAD_ENTRY, message)
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
    clear_work(folder)
    return Pulled(folder, len(files), sum(file.size_bytes for file in files), missing_bytes, revision)


def _distinct(files: list[WantedFile]) -> list[WantedFile]:
    """The files themselves. Raises PullError BAD_ENTRY for two of one name, and for one with the record's name."""
    seen = {RECORD_NAME.casefold()}
    for file in files:
        # Not every file system tells capitals apart.
        if (name := file.path.casefold()) in seen:
            raise PullError(PullReason.BAD_ENTRY, f"{file.path!r} cannot be a file of this model: the name is taken.")
        seen.add(name)
    return files


def _whole_already(order: Order, record: Mapping[str, Any]) -> list[WantedFile] | None:
    """The files of an earlier pull of the very same version, unchanged since; None where anything is to be asked."""
    wanted = (order.catalog_id, order.version, order.repository, order.revision)
    if wanted != tuple(record.get(name) for name in ("catalog_id", "version", "repository", "revision")):
        return None
    if order.repository and not order.revision:
        return None  # its newest may have moved on
    files = [
        WantedFile(str(entry.get("path")), entry.get("size_bytes", -1), str(entry.get("sha256")))
        for entry in record.get("files", ())
        if isinstance(entry, dict)
    ]
    paths = {file.path for file in files}
    listed = all(file.path in paths for file in order.files)
    return files if listed and all(verified_before(order.folder, record, file) for file in files) else None


def _all_files(order: Order, listed: Sequence[WantedFile], source: Repository | None) -> tuple[str, list[WantedFile]]:
    """The catalogue's files, and with a repository what it has beside them; the two have to agree. Raises PullError."""
    if source is None:
        return order.revision, list(listed)
    revision, offered = source.files()
    if listed:
        # The catalogue lists all of the weights: a repository may hold other editions, of many times their size.
        wanted = {file.path for file in listed}
        offered = [file for file in offered if file.path in wanted or not file.path.lower().endswith(NOT_BESIDE)]
    _distinct(offered)
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
    return revision, list(by_path.values())


def _is_there(folder: Path, record: Mapping[str, Any], file: WantedFile) -> bool:
    """Whether it need not come. A file that nobody verified before is read once."""
    target = file.target(folder)
    if not target.resolve().is_relative_to(folder.resolve()):
        raise PullError(PullReason.BAD_ENTRY, f"{target} leads out of the model's folder.")
    if verified_before(folder, record, file):
        return True
    if not target.is_file() or target.stat().st_size != file.size_bytes:
        return False
    hasher = digest_of(target, file)
    return hasher is not None and file.is_right(hasher)


def _come_so_far(work: Path, at_most: int) -> int:
    """Bytes on the disk already that need no new room."""
    return min(at_most, sum(path.stat().st_size for path in work.rglob("*") if path.is_file()))


def _hearing(listener: Listener, file: WantedFile) -> Callable[[int], None]:
    return lambda count: listener.on_bytes(file, count)

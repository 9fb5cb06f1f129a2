"""Why a data folder cannot be used, in words, and what to do about it: SQLite calls a full disk an I/O error."""

import errno
import shutil
import sqlite3
from pathlib import Path

from weighbridge_common.sizes import format_gib

from weighbridge_ledger.store.interface import StoreRefusedError

ELSEWHERE = "name another folder with WEIGHBRIDGE_LEDGER_DATA_DIR"

ROOM_TO_START_BYTES = 2**18
"""Less than this free, and an I/O error is taken for a full disk. A first start needs some 100 KiB: the log's index (32
KiB), and the first tables in the log and in the database (32 KiB each; SQLite 3.40, December 2026)."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NOT_ALLOWED_IN_SQLITE = frozenset({sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN})


def unusable(path: Path, error: OSError | sqlite3.Error) -> StoreRefusedError:
    """The refusal of a database for what the system or SQLite said.

    Args:
        path: the database; it need not be there, nor its folder.
        error: what was raised when it was made, opened or written.
    """
    folder = path.parent
    if (obstacle := _file_in_place_of(folder)) is not None:
        return StoreRefusedError(
            f"{obstacle} is a file, and the ledger keeps its database in the folder {folder}. "
            f"Move the file away, or {ELSEWHERE}."
        )
    if _is_full(folder, error):
        return StoreRefusedError(
            f"The disk of {folder} is full{_free_words(folder)}, and the ledger writes down what it grants. Nothing "
            f"was changed. Make room there, or {ELSEWHERE}."
        )
    said = error.strerror if isinstance(error, OSError) else str(error)
    if _is_not_allowed(error):
        return StoreRefusedError(
            f"The ledger may not write to its data folder {folder}: {said}. Let its user write there, or {ELSEWHERE}."
        )
    return StoreRefusedError(f"{path} cannot be used: {said}. Put that right, or {ELSEWHERE}.")


def _file_in_place_of(folder: Path) -> Path | None:
    """What is no folder, and is where `folder` or one above it should be."""
    for place in (folder, *folder.parents):
        try:
            if place.exists():
                return None if place.is_dir() else place
        except OSError:  # one above may not be looked into: that is the error to tell
            return None
    return None


def _is_full(folder: Path, error: OSError | sqlite3.Error) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    code = _code(error)
    if code == sqlite3.SQLITE_FULL:
        return True
    free = _free_bytes(folder)
    return code == sqlite3.SQLITE_IOERR and free is not None and free < ROOM_TO_START_BYTES


def _is_not_allowed(error: OSError | sqlite3.Error) -> bool:
    if isinstance(error, OSError):
        return error.errno in _NOT_ALLOWED
    return _code(error) in _NOT_ALLOWED_IN_SQLITE


def _code(error: sqlite3.Error) -> int:
    """The primary code: the low byte of an extended one (sqlite.org/rescode.html); 0: SQLite gave none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _free_words(folder: Path) -> str:
    free = _free_bytes(folder)
    # A quota can be used up on a disk with room, and the disk's figure would then say the opposite.
    return f" ({format_gib(free)} free)" if free is not None and free < ROOM_TO_START_BYTES else ""

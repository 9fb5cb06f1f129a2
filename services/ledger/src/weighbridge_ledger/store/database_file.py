"""What can be said of a database file before it is used, and how to look into it without changing anything."""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from weighbridge_ledger.store.interface import StoreRefusedError
from weighbridge_ledger.store.migrations import APPLICATION_ID, SCHEMA_VERSION, schema_of

T = TypeVar("T")

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
"""The header of an SQLite file: magic at 0, user_version at 60, application_id at 68, both big-endian 32-bit."""

_ATTEMPTS = 5
"""Looks at a file that a ledger opens or closes meanwhile: each takes milliseconds, and a ledger longer to start."""


class DamagedError(StoreRefusedError):
    """The file is broken, or its records are."""


class NewerSchemaError(StoreRefusedError):
    """A newer version wrote the file."""


class OtherProgramError(StoreRefusedError):
    """The file is somebody else's."""


def examine(path: Path) -> int:
    """Refuse what is not ours, damaged or newer. Nothing is changed, nor is any file made beside it.

    Returns:
        Its schema; 0: it is absent or empty, and will become a database.

    Raises:
        DamagedError, NewerSchemaError, OtherProgramError: it is that.
        StoreRefusedError: it cannot be read.
    """
    return read(path, schema_of) if path.exists() and path.stat().st_size > 0 else 0


def read(path: Path, query: Callable[[sqlite3.Connection], T]) -> T:
    """Run `query` on one consistent view of a database of ours, also of one that a ledger is using, which goes on.

    Nothing is changed, nor is any file made beside it: a database that nobody has open is read as a file that cannot
    change, and read again if it did. `query` may run more than once.

    Raises:
        DamagedError, NewerSchemaError, OtherProgramError: it is that.
        StoreRefusedError: it cannot be read.
    """
    _check_header(path)
    for _ in range(_ATTEMPTS):
        before = _state(path)
        try:
            result = _read_once(path, query, unchanging=not before[1])
        except (sqlite3.Error, StoreRefusedError) as error:
            if _state(path) != before and not before[1]:
                continue
            if isinstance(error, StoreRefusedError):
                raise
            if isinstance(error, sqlite3.OperationalError):  # such as a lock, or a folder that may not be written
                raise StoreRefusedError(f"{path} cannot be read: {error}. {left_alone(path)}") from error
            raise DamagedError(f"{damage(path, str(error))} {left_alone(path)}") from error
        if before[1] or _state(path) == before:
            return result
    raise StoreRefusedError(f"{path} is being opened and closed all the time. Try again.")


def left_alone(path: Path) -> str:
    """What to do with a file that cannot be used."""
    return (
        "It was left as it is. Stop the engines first, because the leases of living ones would then be unknown. Then "
        f"move {path} away, with {path.name}-wal and {path.name}-shm where they are there, and put a backup in its "
        "place, or start with an empty store."
    )


def damage(path: Path, found: str) -> str:
    """That a database is damaged, with the first line of what SQLite found."""
    return f"{path} is damaged: parts of it were overwritten or lost (SQLite: {first_line(found)})."


def first_line(found: str) -> str:
    """The first finding in a text of SQLite's, which may be many lines under a head such as "*** in database main ***"
    (sqlite.org/pragma.html#pragma_integrity_check)."""
    lines = [line.strip() for line in found.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith("***")), lines[0] if lines else "no words").rstrip(".")


def _state(path: Path) -> tuple[tuple[int, int, int] | None, bool]:
    """(which file it is and when it was last written, whether somebody has it open or was killed with it open)."""
    beside = any(path.with_name(path.name + suffix).exists() for suffix in ("-wal", "-journal"))
    try:
        status = path.stat()
    except OSError:
        return None, beside
    return (status.st_ino, status.st_size, status.st_mtime_ns), beside


def _read_once(path: Path, query: Callable[[sqlite3.Connection], T], *, unchanging: bool) -> T:
    uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if unchanging else ''}"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as db:
        db.execute("BEGIN")  # the first look of a transaction fixes what all of it sees
        _check_contents(path, db)
        return query(db)


def _check_header(path: Path) -> None:
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError as error:
        raise StoreRefusedError(f"{path} cannot be read: {error.strerror}.") from error
    if len(header) < _HEADER_BYTES or header[:16] != _MAGIC:
        raise DamagedError(f"{path} is no database of the ledger, or it is damaged. {left_alone(path)}")
    _check_version(path, int.from_bytes(header[60:64], "big"))


def _check_contents(path: Path, db: sqlite3.Connection) -> None:
    _check_version(path, schema_of(db))
    application = db.execute("PRAGMA application_id").fetchone()[0]
    # Ours carries its mark from the transaction on that made its first table.
    if application != APPLICATION_ID and (application or db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()):
        raise OtherProgramError(f"{path} belongs to another program. {left_alone(path)}")
    found = [str(row[0]) for row in db.execute("PRAGMA quick_check(1)")]
    if found != ["ok"]:
        raise DamagedError(f"{damage(path, found[0])} {left_alone(path)}")


def _check_version(path: Path, version: int) -> None:
    if version > SCHEMA_VERSION:
        raise NewerSchemaError(
            f"{path} was written by a newer version (schema {version}, this one knows {SCHEMA_VERSION}). It was left "
            "as it is. Start that version again, or give this one a data folder of its own."
        )

"""A copy of the database while the ledger goes on: SQLite's own online backup, written whole or not at all."""

import contextlib
import errno
import os
import sqlite3
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weighbridge_ledger.store.database_file import first_line, read
from weighbridge_ledger.store.interface import StoreRefusedError

NUMBERS_SKIPPED = 2**32
"""A ledger that is started on a copy gives fences and sequences from so much further on. The original went on counting
after the copy was made, at most some thousands a second: seven weeks of that, and in int64 room for two billion copies
of copies."""

_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})
"""How file systems without hard links (FAT, some network ones) say so."""


class BackupError(Exception):
    """There is no copy, and nothing was changed. The text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Backup:
    """A finished copy."""

    source: Path
    target: Path
    size_bytes: int
    leases: int
    epoch: str
    """The run of the ledger that the copy was made of; empty if none had begun."""


def back_up(source: Path, target: Path, now_wall: float, *, force: bool = False) -> Backup:
    """Copy the database `source` as it stands at one moment to the new file `target`, verified and on disk.

    The copy is one file, readable by nobody else. It differs from the original in what must not happen twice when a
    ledger is started on it: it has no store id, so that epochs (and with them watched revisions) are new ones, and its
    numbers are further on.

    Args:
        source: the database. A ledger may be using it and is not stopped.
        target: where to.
        now_wall: seconds since the epoch, for the copy's own record of when it was made.
        force: replace a file that is there. Never the database itself.

    Raises:
        StoreRefusedError: the database cannot be copied: damaged, newer, another program's, or not there.
        BackupError: the copy cannot be written there.
    """
    _check_target(source, target, force=force)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        # Made before SQLite would, so that nobody else can read it for a moment.
        os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            leases, epoch = read(source, lambda db: _copy(db, partial, now_wall))
            _sync(partial)
            size_bytes = partial.stat().st_size
            _publish(partial, target, force=force)
        finally:
            for suffix in ("", "-journal"):
                partial.with_name(partial.name + suffix).unlink(missing_ok=True)
        _sync(target.parent)
    except FileExistsError as error:
        raise BackupError(_exists(target)) from error
    except OSError as error:
        raise BackupError(f"{target} cannot be written: {error.strerror}. Nothing was changed.") from error
    return Backup(source, target, size_bytes, leases, epoch)


def _check_target(source: Path, target: Path, *, force: bool) -> None:
    if target.is_dir():
        raise BackupError(f"{target} is a folder. Name the file.")
    if source.exists() and target.exists() and target.samefile(source):
        raise BackupError(f"{target} is the ledger's database itself. Name another file.")
    for suffix in ("-wal", "-journal"):
        beside = target.with_name(target.name + suffix)
        if beside.exists():
            # SQLite would take it for changes that belong to the copy.
            raise BackupError(f"{beside} belongs to an open or unfinished database of that name. Name another file.")
    if target.exists() and not force:
        raise BackupError(_exists(target))


def _exists(target: Path) -> str:
    return f"{target} exists. Name another file, or replace it with --force."


def _copy(db: sqlite3.Connection, partial: Path, now_wall: float) -> tuple[int, str]:
    with _as_backup_errors(), contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as copy:
        db.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE").fetchall()  # one file, also once it was opened
        found = [str(row[0]) for row in copy.execute("PRAGMA integrity_check(1)")]
        if found != ["ok"]:
            raise StoreRefusedError(
                f"The database is damaged (SQLite: {first_line(found[0])}): `check` says more. No copy was made."
            )
        if not copy.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            raise StoreRefusedError("The database is empty: no ledger has been started on it. No copy was made.")
        meta = dict(copy.execute("SELECT key, value FROM meta"))
        epoch = f"{meta['store_id']}.{meta.get('epoch', '0')}" if "store_id" in meta else ""
        copy.execute("BEGIN")
        copy.execute("DELETE FROM meta WHERE key = 'store_id'")
        copy.execute(
            "UPDATE meta SET value = CAST(CAST(value AS INTEGER) + ? AS TEXT) WHERE key = 'counter'", (NUMBERS_SKIPPED,)
        )
        copy.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)",
            [("backup_of", epoch), ("backup_wall", repr(now_wall))],
        )
        copy.execute("COMMIT")
        return copy.execute("SELECT COUNT(*) FROM leases").fetchone()[0], epoch


@contextlib.contextmanager
def _as_backup_errors() -> Iterator[None]:
    """What SQLite cannot write is the copy: the original was looked at before."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise BackupError(f"The copy cannot be written: {error}. Nothing was changed.") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(partial: Path, target: Path, *, force: bool) -> None:
    """Give the finished copy its name in one step.

    Raises:
        FileExistsError: somebody else took the name meanwhile.
    """
    if force:
        partial.replace(target)
        return
    try:
        target.hardlink_to(partial)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))  # takes the name
        try:
            partial.replace(target)
        except OSError:
            target.unlink(missing_ok=True)
            raise

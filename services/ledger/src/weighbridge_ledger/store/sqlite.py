"""The embedded store: one SQLite file in WAL mode with full sync.

The standard driver in one thread was measured 2 times as fast as aiosqlite and 3.5 to 7 times as fast as an ORM
(November 2026); WAL with NORMAL sync would be 11 times faster still, and can lose the last commits with the power: a
lease outlives its process, so it is not for us.
"""

import contextlib
import os
import sqlite3
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import structlog

from weighbridge_ledger.book.records import (
    DropEnded,
    DropLease,
    DropTicket,
    PutCounter,
    PutEnded,
    PutLease,
    PutTicket,
    PutWishes,
    Snapshot,
)
from weighbridge_ledger.book.states import Lease
from weighbridge_ledger.store import codec
from weighbridge_ledger.store.contents import read_snapshot, refuse_unreadable
from weighbridge_ledger.store.database_file import DamagedError, examine, left_alone
from weighbridge_ledger.store.interface import (
    OBSERVATIONS_KEPT,
    AnyWrite,
    Observation,
    PutObservation,
    StoreError,
)
from weighbridge_ledger.store.lock import StoreLock
from weighbridge_ledger.store.migrations import SCHEMA_VERSION, migrate
from weighbridge_ledger.store.unusable import unusable
from weighbridge_ledger.store.upgrade import prepare

DATABASE = "ledger.db"
"""Its name in the ledger's data folder."""

CHECKPOINT_PAGES = 128
"""The write-ahead log is folded into the database after so many pages (512 KiB; SQLite's own default is 1000). From
then on it is overwritten where it lies, and syncing a file that does not grow changes nothing in the file system's own
records: a commit took 156 µs instead of 219 (medians of 700, ext4, November 2026)."""

ROWS_AT_ONCE = 64
"""Rows of one statement: twice what 32 calls in flight leave in a table, and far below what SQLite binds (999 values
before 3.32)."""

PUT_LEASE = "INSERT OR REPLACE INTO leases VALUES (?,?,?)"

PROBE = "probe"
"""The record of a probe; one that was killed leaves it, and nothing reads it."""

PROBE_BYTES = 64 * 4096
"""Twice the pages that a batch of 32 admissions rewrites: each lease may lie on a page of its own."""

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class SqliteStore:
    """One file, one owner.

    Args:
        path: the database; its folder is made (0700) if it is missing. One of an earlier version is brought up to this
            version's schema, in one step and once a copy of it lies beside it.

    Raises:
        StoreRefusedError: another ledger has it, it is no database of ours, it is damaged, or a newer version wrote it.
            Nothing was changed then.
    """

    def __init__(self, path: Path) -> None:
        # A symbolic link is another name for the same file: SQLite's log lies beside the file itself.
        path = path.resolve()
        self._path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise unusable(path, error) from error
        self._lock = StoreLock(path)
        try:
            schema = examine(path)
            if 0 < schema < SCHEMA_VERSION:
                copy = prepare(path, schema)
                _log.info("store_migrating", schema=schema, to=SCHEMA_VERSION, copy=str(copy))
            self._lock.confirm()
            self._db = _open(path)
        except BaseException:
            self._lock.release()
            raise
        try:
            self._lock.confirm()
        except BaseException:
            self._db.close()
            self._lock.release()
            raise
        self._closed = False

    def begin_epoch(self) -> str:
        """See Store."""
        with _as_store_errors(self._db):
            self._db.execute("BEGIN IMMEDIATE")
            epoch = int(self._meta("epoch") or 0) + 1
            store_id = self._meta("store_id")
            if store_id is None:
                store_id = uuid.uuid4().hex[:12]
                self._set_meta("store_id", store_id)
            self._set_meta("epoch", str(epoch))
            self._db.execute("COMMIT")
        return f"{store_id}.{epoch}"

    def load(self) -> Snapshot:
        """See Store."""
        try:
            snapshot, unreadable = read_snapshot(self._db)
        except sqlite3.DatabaseError as error:
            raise DamagedError(f"{self._path} cannot be read ({error}). {left_alone(self._path)}") from error
        refuse_unreadable(self._path, unreadable)
        return snapshot

    def commit(self, writes: Sequence[AnyWrite]) -> None:
        """See Store."""
        with _as_store_errors(self._db):
            if len(writes) == 1 and isinstance(writes[0], PutLease):
                # One statement is a transaction by itself: two fewer in the way of a grant.
                self._db.execute(PUT_LEASE, _row_of(writes[0].lease))
                return
            self._db.execute("BEGIN IMMEDIATE")
            gathered: dict[str, dict[str, tuple[Any, ...] | None]] = {}
            for write in writes:
                if (record := _record_of(write)) is None:
                    self._apply(write)
                else:
                    table, key, row = record
                    gathered.setdefault(table, {})[key] = row
            for table, rows in gathered.items():
                self._put(table, [row for row in rows.values() if row is not None])
                self._drop(table, [key for key, row in rows.items() if row is None])
            self._db.execute("COMMIT")

    def probe(self) -> None:
        """See Store."""
        with _as_store_errors(self._db):
            # Not zeros: a file system that compresses has room for any number of those.
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (PROBE, os.urandom(PROBE_BYTES)))
            try:
                # The log alone may have room where the database has none, and a commit does not tell.
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            finally:
                self._db.execute("DELETE FROM meta WHERE key = ?", (PROBE,))

    def last_observation(self) -> int:
        """See Store."""
        return int(self._db.execute("SELECT COALESCE(MAX(number), 0) FROM observations").fetchone()[0])

    def observations(
        self, model_digest: str, engine_build: str, shape: str, before: int | None, limit: int
    ) -> list[Observation]:
        """See Store."""
        wanted: list[tuple[str, str | int]] = [
            (f"{column} = ?", value)
            for column, value in (("model_digest", model_digest), ("engine_build", engine_build), ("shape", shape))
            if value
        ]
        if before is not None:
            wanted.append(("number < ?", before))
        where = " AND ".join(condition for condition, _ in wanted) or "1"
        rows = self._db.execute(
            # Conditions come from the constants above, values are bound.
            f"SELECT number, model_digest, engine_build, shape, record FROM observations WHERE {where} "  # noqa: S608
            "ORDER BY number DESC LIMIT ?",
            (*(value for _, value in wanted), limit),
        )
        return [codec.decode_observation(*row) for row in rows]

    def close(self) -> None:
        """See Store."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._lock.release()

    def _put(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        """Insert or replace. Many rows in one statement: after each, the thread would wait for the interpreter again,
        and on a busy ledger for longer than for the disk."""
        for some in _in_parts(rows):
            marks = ",".join(["(" + ",".join("?" * len(some[0])) + ")"] * len(some))
            self._db.execute(f"INSERT OR REPLACE INTO {table} VALUES {marks}", [value for row in some for value in row])  # noqa: S608 # no value

    def _drop(self, table: str, keys: list[str]) -> None:
        for some in _in_parts(keys):
            self._db.execute(f"DELETE FROM {table} WHERE {_KEYS[table]} IN ({','.join('?' * len(some))})", some)  # noqa: S608 # no value

    def _apply(self, write: AnyWrite) -> None:
        """Write what is not gathered."""
        db = self._db
        match write:
            case PutCounter(counter):
                self._set_meta("counter", str(max(counter, int(self._meta("counter") or 0))))
            case PutWishes(limit_bytes, allow_spill):
                self._set_meta("limit_bytes", "" if limit_bytes is None else str(limit_bytes))
                self._set_meta("allow_spill", "" if allow_spill is None else str(int(allow_spill)))
            case PutObservation(one, unless_recorded):
                # A lease has one: the index on lease_id makes a later one replace the earlier, or give way to it.
                db.execute(
                    f"INSERT OR {'IGNORE' if unless_recorded else 'REPLACE'} INTO observations "  # noqa: S608 # no value
                    "(number, model_digest, engine_build, shape, lease_id, record) VALUES (?, ?, ?, ?, ?, ?)",
                    (
                        one.number,
                        one.model_digest,
                        one.engine_build,
                        one.shape,
                        one.lease_id,
                        codec.encode_observation(one),
                    ),
                )
                db.execute("DELETE FROM observations WHERE number <= ?", (one.number - OBSERVATIONS_KEPT,))

    def _meta(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def _set_meta(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


_KEYS = {"leases": "lease_id", "tickets": "request_id", "ended": "lease_id"}
"""The tables whose rows are written many at a time, and what names a row."""


def _record_of(write: AnyWrite) -> tuple[str, str, tuple[Any, ...] | None] | None:
    """(table, key, row; None: without one) of a write of which only the last of a batch counts; None: it is none."""
    match write:
        case PutLease(lease):
            return "leases", lease.lease_id, _row_of(lease)
        case DropLease(lease_id):
            return "leases", lease_id, None
        case PutTicket(ticket):
            return "tickets", ticket.request_id, (ticket.request_id, codec.encode_ticket(ticket))
        case DropTicket(request_id):
            return "tickets", request_id, None
        case PutEnded(ended):
            return "ended", ended.lease_id, (ended.lease_id, codec.encode_ended(ended))
        case DropEnded(lease_id):
            return "ended", lease_id, None
        case _:
            return None


def _row_of(lease: Lease) -> tuple[Any, ...]:
    return lease.lease_id, lease.fence, codec.encode_lease(lease)


def _in_parts(values: list[T]) -> Iterator[list[T]]:
    """Parts of so many, that a statement for each number of them stays prepared."""
    return (values[start : start + ROWS_AT_ONCE] for start in range(0, len(values), ROWS_AT_ONCE))


@contextlib.contextmanager
def _as_store_errors(db: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(sqlite3.Error):
            if db.in_transaction:
                db.execute("ROLLBACK")
        if isinstance(error, sqlite3.Error):
            raise StoreError(str(error)) from error
        raise


def _open(path: Path) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=256)
    except sqlite3.Error as error:
        raise unusable(path, error) from error
    try:
        _configure(db)
        if migrate(db):
            # So that the version stands in the file's own header, where the next start looks before it opens anything.
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except sqlite3.Error as error:
        db.close()
        raise unusable(path, error) from error
    return db


def _configure(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    if sys.platform == "darwin":
        # fsync on macOS leaves the data in the drive's cache; F_FULLFSYNC does not.
        db.execute("PRAGMA fullfsync = ON")
        db.execute("PRAGMA checkpoint_fullfsync = ON")

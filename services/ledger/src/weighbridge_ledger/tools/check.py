"""Whether a database is sound: its pages, its tables, its records, and the book that they make up."""

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from weighbridge_ledger.book import Ceilings, Policy, Snapshot
from weighbridge_ledger.store.contents import Unreadable, read_observations, read_snapshot
from weighbridge_ledger.store.database_file import DamagedError, first_line
from weighbridge_ledger.store.image import image
from weighbridge_ledger.store.migrations import SCHEMA_VERSION, migrate
from weighbridge_ledger.tools.audit import Finding, audit

INTEGRITY_LINES = 20
"""So many of the damages that SQLite finds are told; one is enough to know."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found."""

    path: Path
    schema: int
    epoch: str
    """Of the last run of a ledger on it; empty: none."""
    snapshot: Snapshot
    observations: int
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """Whether a ledger may be started on it."""
        return not any(finding.is_fault for finding in self.findings)


def check(path: Path, ceilings: Ceilings, policy: Policy) -> Report:
    """Check a database, also one that a ledger is using. Nothing is changed.

    Args:
        path: the database, or a backup of one.
        ceilings: what the machine allows by itself.
        policy: the bounds of the book.

    Raises:
        NewerSchemaError, OtherProgramError: it cannot be checked by this version, or is none.
        StoreRefusedError: it cannot be read.
    """
    try:
        with image(path) as (db, schema):
            return _check(path, db, schema, ceilings, policy)
    except DamagedError as damaged:
        return Report(path, 0, "", Snapshot(), 0, (Finding("DAMAGED", str(damaged)),))


def _check(path: Path, db: sqlite3.Connection, schema: int, ceilings: Ceilings, policy: Policy) -> Report:
    findings = [
        Finding("INTEGRITY", f"The database is damaged (SQLite: {first_line(str(row[0]))}).")
        for row in db.execute(f"PRAGMA integrity_check({INTEGRITY_LINES})")
        if row[0] != "ok"
    ]
    findings += _differences(db)
    if schema < SCHEMA_VERSION:
        text = f"It has schema {schema}, and a start would bring it to {SCHEMA_VERSION}."
        findings.append(Finding("OLDER_SCHEMA", text, is_fault=False))
    snapshot, observations, epoch = Snapshot(), 0, ""
    if not findings or not any(finding.is_fault for finding in findings):
        snapshot, unreadable = read_snapshot(db)
        peaks, unreadable_peaks = read_observations(db)
        findings += [_of(record) for record in (*unreadable, *unreadable_peaks)]
        observations, epoch = len(peaks), epoch_of(db)
        try:
            findings += audit(snapshot, peaks, ceilings, policy)
        except (TypeError, ValueError, AttributeError) as error:
            findings.append(Finding("RECORD", f"A record holds what it must not: {error!r}."))
    return Report(path, schema, epoch, snapshot, observations, tuple(findings))


def epoch_of(db: sqlite3.Connection) -> str:
    """The last run of a ledger on this database, or on the one that it is a copy of; empty: none."""
    meta = dict(db.execute("SELECT key, value FROM meta"))
    if "store_id" in meta:
        return f"{meta['store_id']}.{meta.get('epoch', '0')}"
    return f"copy of {meta['backup_of']}" if meta.get("backup_of") else ""


def _of(record: Unreadable) -> Finding:
    return Finding("RECORD", f"A record of the table {record.table} cannot be read: {record.problem}.", record.key)


def _differences(db: sqlite3.Connection) -> list[Finding]:
    """Tables and indexes that are not as this version makes them."""
    fresh = sqlite3.connect(":memory:", isolation_level=None)
    try:
        migrate(fresh)
        expected, found = _schema(fresh), _schema(db)
    finally:
        fresh.close()
    return [
        Finding("SCHEMA", "is missing, changed or not the ledger's own.", name)
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]


def _schema(db: sqlite3.Connection) -> dict[str, str]:
    return {
        str(name): str(sql) for name, sql in db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    }

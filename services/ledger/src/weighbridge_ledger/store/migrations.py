"""The schema, as the steps that lead to it. A released step is never changed; the next one is added."""

import sqlite3
from typing import Any

APPLICATION_ID = 0x57424C47
"""Marks our files for SQLite and for `file`: "WBLG"."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE leases (lease_id TEXT PRIMARY KEY, fence INTEGER NOT NULL, record TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE tickets (request_id TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE ended (lease_id TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE observations (number INTEGER PRIMARY KEY, model_digest TEXT NOT NULL, engine_build TEXT "
        "NOT NULL, shape TEXT NOT NULL, record TEXT NOT NULL)",
        "CREATE INDEX observations_by_launch ON observations (model_digest, engine_build, shape, number)",
    ),
    # One measured peak for each lease, whoever tells it and how often. Of those that were told twice, the last stays.
    (
        "ALTER TABLE observations ADD COLUMN lease_id TEXT NOT NULL DEFAULT ''",
        "UPDATE observations SET lease_id = json_extract(record, '$[6]')",
        "DELETE FROM observations WHERE lease_id <> '' AND number NOT IN "
        "(SELECT MAX(number) FROM observations GROUP BY lease_id)",
        "CREATE UNIQUE INDEX observations_by_lease ON observations (lease_id) WHERE lease_id <> ''",
    ),
)

SCHEMA_VERSION = len(MIGRATIONS)


def schema_of(db: sqlite3.Connection) -> int:
    """The schema of an open database; 0: it is empty."""
    version: Any = db.execute("PRAGMA user_version").fetchone()[0]
    return int(version)


def migrate(db: sqlite3.Connection) -> bool:
    """Bring the schema of an open database up to this version's, in one transaction; False: it was.

    Raises:
        sqlite3.Error: it could not be done, and the database is as it was.
    """
    if schema_of(db) >= SCHEMA_VERSION:
        return False
    db.execute("BEGIN IMMEDIATE")
    try:
        for step in MIGRATIONS[schema_of(db) :]:
            for statement in step:
                db.execute(statement)
        # PRAGMA takes no bound values; both are integers of ours.
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
    except sqlite3.Error:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return True

"""What the tables hold, as the values that the book knows."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from weighbridge_ledger.book.records import Snapshot
from weighbridge_ledger.store import codec
from weighbridge_ledger.store.database_file import DamagedError, left_alone
from weighbridge_ledger.store.interface import Observation

T = TypeVar("T")

_WRONG = (ValueError, KeyError, TypeError, IndexError, AttributeError)
"""What decoding raises for a record that is not as this version or an earlier one writes it."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that cannot be decoded."""

    table: str
    key: str
    problem: str


def read_snapshot(db: sqlite3.Connection) -> tuple[Snapshot, tuple[Unreadable, ...]]:
    """What a restart reads back, and what of it cannot be read."""
    bad: list[Unreadable] = []
    meta = dict(db.execute("SELECT key, value FROM meta"))
    limit, counter = _number(meta, "limit_bytes", bad), _number(meta, "counter", bad)
    snapshot = Snapshot(
        leases=tuple(_decoded(db, "leases", "lease_id, fence, record", codec.decode_lease, bad)),
        tickets=tuple(_decoded(db, "tickets", "request_id, record", codec.decode_ticket, bad)),
        ended=tuple(_decoded(db, "ended", "lease_id, record", codec.decode_ended, bad)),
        counter=counter or 0,
        limit_bytes=limit,
        allow_spill={"1": True, "0": False}.get(meta.get("allow_spill") or ""),
    )
    return snapshot, tuple(bad)


def read_observations(db: sqlite3.Connection) -> tuple[tuple[Observation, ...], tuple[Unreadable, ...]]:
    """The measured peaks, and what of them cannot be read."""
    bad: list[Unreadable] = []
    columns = "number, model_digest, engine_build, shape, record"
    return tuple(_decoded(db, "observations", columns, codec.decode_observation, bad)), tuple(bad)


def refuse_unreadable(path: Path, unreadable: Sequence[Unreadable]) -> None:
    """Nothing, if all records of the database `path` can be read.

    Raises:
        DamagedError: one cannot.
    """
    if unreadable:
        first = unreadable[0]
        raise DamagedError(
            f"{path} holds records that cannot be read ({first.table} {first.key}: {first.problem}). {left_alone(path)}"
        )


def _decoded(
    db: sqlite3.Connection, table: str, columns: str, decode: Callable[..., T], bad: list[Unreadable]
) -> Iterator[T]:
    for row in db.execute(f"SELECT {columns} FROM {table}"):  # noqa: S608 # both are constants of this module
        try:
            yield decode(*row)
        except _WRONG as error:
            bad.append(Unreadable(table, str(row[0]), repr(error)))


def _number(meta: dict[str, Any], key: str, bad: list[Unreadable]) -> int | None:
    text = meta.get(key)
    try:
        return int(text) if text else None
    except _WRONG as error:
        bad.append(Unreadable("meta", key, repr(error)))
        return None

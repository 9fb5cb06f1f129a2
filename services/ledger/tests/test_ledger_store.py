"""One suite for every store, then what only SQLite can get wrong."""

import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from weighbridge_common.processes import ProcessIdentity
from weighbridge_ledger.book import Charge, Claim, DeviceWant, Lease, LeaseState, Purpose, Snapshot
from weighbridge_ledger.book.records import (
    DropLease,
    Ended,
    PutLease,
    PutTicket,
    Ticket,
)
from weighbridge_ledger.store import (
    MemoryStore,
    Observation,
    SqliteStore,
    Store,
    StoreError,
    StoreRefusedError,
)

LEASE = Lease(
    lease_id="l1",
    request_id="r1",
    fence=7,
    sequence=6,
    state=LeaseState.ACTIVE,
    claim=Claim(2**40, (DeviceWant("GPU-é", 3, 4),), 5, "2"),
    holder=ProcessIdentity(1, 2, "boot", "pid:[1]"),
    charge=Charge(2**40, (("GPU-é", 2),), (("GPU-é", 1),)),
    engines=(ProcessIdentity(3, 4, "boot", "pid:[1]"),),
    foreign=True,
    suspect=True,
    secret_digest=b"\x00\xff" * 16,
    previous_digest=b"\x01" * 32,
    term_s=12.5,
    holder_name="engine-mlx",
    memory_limit_bytes=9,
    purpose=Purpose("mlx", "a model", "digest", "build", "shape", 11),
    priority=3,
    pinned=True,
    requested_wall=1.25,
    granted_wall=2.5,
    activated_wall=3.75,
)
TICKET = Ticket("r2", Claim(3), 5, 1.5, 4)
ENDED = Ended("l0", "r0", b"\x01" * 32, 10.0)
OBSERVATION = Observation("digest", "build", "shape", 1, 2, 3, 4.5, 5.5, "node", "l1", 1)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Each kind of store, empty."""
    made: Store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "ledger.db")
    yield made
    made.close()


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "data" / "ledger.db"
    store = SqliteStore(path)
    store.commit([PutLease(LEASE)])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
    store.close()


def test_commits_are_synced_in_full(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ledger.db")
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)
    store.close()


def test_a_second_ledger_on_the_same_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    first = SqliteStore(path)
    with pytest.raises(StoreRefusedError, match=f"process {os.getpid()}"):
        SqliteStore(path)
    first.close()
    SqliteStore(path).close()


def test_a_second_ledger_is_refused_by_whatever_link_it_comes(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "data" / "ledger.db")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ledger.db").symlink_to(tmp_path / "data" / "ledger.db")
    (tmp_path / "folder").symlink_to(tmp_path / "data")
    for by in ("other", "folder"):
        with pytest.raises(StoreRefusedError, match="Another ledger"):
            SqliteStore(tmp_path / by / "ledger.db")
    store.close()
    SqliteStore(tmp_path / "other" / "ledger.db").close()


def spoil_with_text(path: Path) -> None:
    path.write_text("not a database, but somebody's notes\n" * 10)


def spoil_by_another_program(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE other (x)")
    db.execute("PRAGMA application_id = 42")
    db.commit()
    db.close()


def spoil_by_a_program_without_a_mark(path: Path) -> None:
    """Most programs set no application_id."""
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE postings (x)")
    db.commit()
    db.close()


def spoil_by_newer_schema(path: Path) -> None:
    SqliteStore(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 1000")
    db.commit()
    db.close()


def spoil_by_truncation(path: Path) -> None:
    store = SqliteStore(path)
    store.commit([PutTicket(Ticket(f"r{number}", Claim(3), number, 1.5, 4)) for number in range(2000)])
    store.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoil_with_text, "no database of the ledger"),
        (spoil_by_another_program, "belongs to another program"),
        (spoil_by_a_program_without_a_mark, "belongs to another program"),
        (spoil_by_newer_schema, "newer version"),
        (spoil_by_truncation, "damaged"),
    ],
)
def test_what_cannot_be_used_is_refused_and_left_alone(
    spoil: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.db"
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(StoreRefusedError, match=says) as refused:
        SqliteStore(path)
    assert "left as it is" in str(refused.value)
    assert path.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {"ledger.db", "ledger.db.lock"}
    # The lock was given back, so that the next start is told the same and not that somebody has it.
    with pytest.raises(StoreRefusedError, match=says):
        SqliteStore(path)


def test_records_that_cannot_be_read_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    store = SqliteStore(path)
    store.commit([PutLease(LEASE)])
    store._db.execute("UPDATE leases SET record = '{}'")
    with pytest.raises(StoreRefusedError, match="cannot be read"):
        store.load()
    store.close()


def test_a_full_disk_loses_nothing_and_takes_nothing_half(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ledger.db")
    store.commit([PutLease(LEASE)])
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    tickets = [PutTicket(Ticket(f"r{number}", Claim(3), number, 1.5, 4)) for number in range(2000)]
    with pytest.raises(StoreError, match="full"):
        store.commit([DropLease("l1"), *tickets])
    assert store.load() == Snapshot(leases=(LEASE,))
    store._db.execute("PRAGMA max_page_count = 100000")
    store.commit(tickets)
    assert len(store.load().tickets) == 2000
    store.close()

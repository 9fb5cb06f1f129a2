"""One suite for every store, then what only SQLite can get wrong."""

import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from weighbridge_common.processes import ProcessIdentity
from weighbridge_ledger.book import Charge, Claim, DeviceWant, Lease, LeaseState, Purpose, Snapshot
from weighbridge_ledger.book.records import (
    DropEnded,
    DropLease,
    DropTicket,
    Ended,
    PutCounter,
    PutEnded,
    PutLease,
    PutTicket,
    PutWishes,
    Ticket,
)
from weighbridge_ledger.store import (
    MemoryStore,
    Observation,
    PutObservation,
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


# -- every store ---------------------------------------------------------------------------------------------------


def test_an_empty_store_holds_nothing(store: Store) -> None:
    assert store.load() == Snapshot()
    assert store.last_observation() == 0


def test_every_field_comes_back(store: Store) -> None:
    store.commit([PutLease(LEASE), PutTicket(TICKET), PutEnded(ENDED), PutCounter(9), PutWishes(2**35, False)])
    assert store.load() == Snapshot((LEASE,), (TICKET,), (ENDED,), 9, 2**35, False)


def test_the_last_write_of_a_record_counts(store: Store) -> None:
    later = Lease(**{name: getattr(LEASE, name) for name in LEASE.__slots__} | {"state": LeaseState.VACATING})
    store.commit([PutLease(LEASE), PutLease(later), PutTicket(TICKET), DropTicket("r2")])
    assert store.load() == Snapshot(leases=(later,))
    store.commit([DropLease("l1"), PutEnded(ENDED)])
    store.commit([DropEnded("l0")])
    assert store.load() == Snapshot()


def test_dropping_what_is_not_there_is_harmless(store: Store) -> None:
    store.commit([DropLease("x"), DropTicket("x"), DropEnded("x")])
    assert store.load() == Snapshot()


def test_wishes_can_be_taken_back(store: Store) -> None:
    store.commit([PutWishes(5, True)])
    store.commit([PutWishes(None, None)])
    assert (store.load().limit_bytes, store.load().allow_spill) == (None, None)


def test_no_epoch_comes_twice(store: Store) -> None:
    assert len({store.begin_epoch() for _ in range(3)}) == 3


def test_observations_are_found_latest_first(store: Store) -> None:
    ones = [
        Observation("d1" if number % 2 else "d2", "b", "s", 1, 2, 3, 0.5, 1.0, "n", "l", number)
        for number in range(1, 8)
    ]
    store.commit([PutObservation(one) for one in ones])
    assert [one.number for one in store.observations("d1", "", "", None, 2)] == [7, 5]
    assert [one.number for one in store.observations("d1", "b", "s", 5, 10)] == [3, 1]
    assert store.observations("d1", "other", "", None, 10) == []
    assert store.last_observation() == 7
    assert store.observations("d2", "", "", None, 1) == [ones[5]]


# -- SQLite --------------------------------------------------------------------------------------------------------


def test_what_was_committed_survives_reopening(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    first = SqliteStore(path)
    epoch = first.begin_epoch()
    first.commit([PutLease(LEASE), PutCounter(7), PutObservation(OBSERVATION)])
    first.close()
    second = SqliteStore(path)
    assert second.load() == Snapshot(leases=(LEASE,), counter=7)
    assert second.observations("", "", "", None, 10) == [OBSERVATION]
    assert second.begin_epoch() != epoch
    second.close()


def test_what_was_committed_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    code = (
        "import os, pathlib, signal\n"
        "from weighbridge_ledger.book.records import PutCounter\n"
        "from weighbridge_ledger.store import SqliteStore\n"
        f"store = SqliteStore(pathlib.Path({str(path)!r}))\n"
        "store.commit([PutCounter(41)])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    store = SqliteStore(path)
    assert store.load().counter == 41
    store.close()


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

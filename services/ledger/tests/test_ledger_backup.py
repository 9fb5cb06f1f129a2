"""Backups: of a ledger that runs, whole or not at all, and nothing happens twice on them."""

import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest
from weighbridge_common.processes import ProcessIdentity
from weighbridge_ledger.book import Charge, Claim, Lease, LeaseState
from weighbridge_ledger.book.records import DropLease, PutCounter, PutLease, PutTicket, PutWishes, Ticket
from weighbridge_ledger.store import SqliteStore, StoreRefusedError
from weighbridge_ledger.store.backup import NUMBERS_SKIPPED, BackupError, back_up


def lease(number: int) -> Lease:
    return Lease(
        f"lease-{number}",
        "",
        2 * number + 2,
        2 * number + 1,
        LeaseState.ACTIVE,
        Claim(10),
        ProcessIdentity(1, 2, "boot", "pid:[1]"),
        charge=Charge(10),
        secret_digest=number.to_bytes(32, "big"),
        activated_wall=1.0,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database, closed."""
    made = tmp_path / "data" / "ledger.db"
    store = SqliteStore(made)
    store.begin_epoch()
    store.commit([PutLease(lease(1)), PutTicket(Ticket("r", Claim(3), 9, 1.5, 4)), PutCounter(20), PutWishes(99, None)])
    store.close()
    return made


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_ledger_can_be_started_on_a_backup_and_finds_everything(path: Path, tmp_path: Path) -> None:
    made = back_up(path, tmp_path / "copy.db", 5.0)
    assert (made.leases, made.size_bytes) == (1, (tmp_path / "copy.db").stat().st_size)
    original, copy = SqliteStore(path), SqliteStore(tmp_path / "copy.db")
    before, after = original.load(), copy.load()
    assert (after.leases, after.tickets, after.limit_bytes) == (before.leases, before.tickets, 99)
    # The original may give fences and epochs after the backup: a ledger on the copy gives none of them again.
    assert after.counter == before.counter + NUMBERS_SKIPPED
    assert original.begin_epoch().partition(".")[0] != copy.begin_epoch().partition(".")[0]
    assert made.epoch.partition(".")[0] == original.begin_epoch().partition(".")[0]
    original.close()
    copy.close()


def test_a_backup_is_one_file_that_nobody_else_can_read(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "copies" / "copy.db"
    target.parent.mkdir()
    back_up(path, target, 5.0)
    assert names(target.parent) == {"copy.db"}
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with sqlite3.connect(f"{target.as_uri()}?mode=ro", uri=True) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_backup_leaves_the_original_and_its_folder_as_they_are(path: Path, tmp_path: Path) -> None:
    before, beside = path.read_bytes(), names(path.parent)
    back_up(path, tmp_path / "copy.db", 5.0)
    assert path.read_bytes() == before
    assert names(path.parent) == beside


def test_a_backup_of_a_ledger_at_work_is_of_one_moment(path: Path, tmp_path: Path) -> None:
    """A writer goes on swapping one lease for the next: no backup has both, or neither."""
    store = SqliteStore(path)
    stop = threading.Event()
    commits: list[int] = []

    def write() -> None:
        number = 1
        while not stop.is_set():
            store.commit([DropLease(f"lease-{number}"), PutLease(lease(number + 1))])
            number += 1
            commits.append(number)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            count = len(commits)
            assert back_up(path, tmp_path / "copy.db", 5.0, force=True).leases == 1
            copy = SqliteStore(tmp_path / "copy.db")
            assert len(copy.load().leases) == 1
            copy.close()
            while len(commits) == count:  # the writer was not stopped
                pass
    finally:
        stop.set()
        writer.join()
        store.close()


def test_what_a_killed_ledger_left_in_its_log_is_in_the_backup(path: Path, tmp_path: Path) -> None:
    store = SqliteStore(path)
    store.commit([PutLease(lease(2))])
    # As it lies after SIGKILL: the commit is in the log, not in the database.
    killed = tmp_path / "killed" / "ledger.db"
    killed.parent.mkdir()
    for suffix in ("", "-wal"):
        killed.with_name(killed.name + suffix).write_bytes(path.with_name(path.name + suffix).read_bytes())
    store.close()
    assert back_up(killed, tmp_path / "copy.db", 5.0).leases == 2


def test_a_file_that_is_there_is_replaced_only_by_force(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    target.write_text("precious")
    with pytest.raises(BackupError, match="--force"):
        back_up(path, target, 5.0)
    assert target.read_text() == "precious"
    back_up(path, target, 5.0, force=True)
    assert target.read_bytes().startswith(b"SQLite format 3")


def test_a_file_that_appears_meanwhile_is_not_replaced(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "copy.db"
    synced = os.fsync

    def fsync(descriptor: int) -> None:
        target.write_text("somebody was quicker")
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(BackupError, match="exists"):
        back_up(path, target, 5.0)
    assert target.read_text() == "somebody was quicker"
    assert names(tmp_path) == {"data", "copy.db"}


def test_a_file_system_without_hard_links_gets_its_backup_too(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", no_links)
    assert back_up(path, tmp_path / "copy.db", 5.0).leases == 1
    assert names(tmp_path) == {"data", "copy.db"}
    with pytest.raises(BackupError, match="exists"):
        back_up(path, tmp_path / "copy.db", 5.0)


@pytest.mark.parametrize("force", [False, True])
def test_the_database_itself_is_never_the_target(path: Path, tmp_path: Path, force: bool) -> None:
    before = path.read_bytes()
    (tmp_path / "link.db").symlink_to(path)
    for target in (path, tmp_path / "link.db"):
        with pytest.raises(BackupError, match="itself"):
            back_up(path, target, 5.0, force=force)
    with pytest.raises(BackupError, match="folder"):
        back_up(path, path.parent, 5.0, force=force)
    assert path.read_bytes() == before


def test_the_database_of_another_ledger_at_work_is_not_replaced(path: Path, tmp_path: Path) -> None:
    other = SqliteStore(tmp_path / "other.db")
    other.commit([PutCounter(5)])
    with pytest.raises(BackupError, match=r"other\.db-wal"):
        back_up(path, tmp_path / "other.db", 5.0, force=True)
    assert other.load().counter == 5
    other.close()


def test_a_full_disk_leaves_nothing_behind(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def small(database, *arguments, **more):
        made = connect(database, *arguments, **more)
        if str(database).endswith(".partial"):
            made.execute("PRAGMA max_page_count = 2")
        return made

    monkeypatch.setattr(sqlite3, "connect", small)
    with pytest.raises(BackupError, match="full"):
        back_up(path, tmp_path / "copy.db", 5.0)
    assert names(tmp_path) == {"data"}


def test_a_damaged_database_is_not_backed_up(path: Path, tmp_path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(StoreRefusedError, match="damaged"):
        back_up(path, tmp_path / "copy.db", 5.0)
    assert names(tmp_path) == {"data"}


def test_a_folder_that_is_not_there_is_said(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="No such file"):
        back_up(path, tmp_path / "nowhere" / "copy.db", 5.0)

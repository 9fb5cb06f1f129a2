"""One ledger on one database, by whatever name a second one reaches it, and SQLite's own locks beside that."""

import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from weighbridge_ledger.book.records import PutCounter
from weighbridge_ledger.store import SqliteStore, StoreRefusedError
from weighbridge_ledger.store import lock as lock_module
from weighbridge_ledger.store.lock import LOCK_BYTE, StoreLock

HOLD = """
import pathlib, sys
from weighbridge_ledger.store import SqliteStore, StoreRefusedError
from weighbridge_ledger.book.records import PutCounter
try:
    store = SqliteStore(pathlib.Path(sys.argv[1]))
except StoreRefusedError as refused:
    print("refused:", refused, flush=True)
    sys.exit()
store.commit([PutCounter(5)])
print("open", flush=True)
sys.stdin.readline()
store.close()
"""


def another_process(path: Path, through: Sequence[str] = ()) -> tuple[subprocess.Popen[str], str]:
    """Another process opens the database; what it says of that."""
    argv = [*through, sys.executable, "-c", HOLD, str(path)]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, child.stdout.readline()


def end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.communicate("\n", timeout=30)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a database shall be."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "ledger.db"


@pytest.fixture
def held(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A database that another process has open."""
    child, said = another_process(path)
    assert said == "open\n"
    yield child
    end(child)


def by_its_path(path: Path, other: Path) -> Path:
    return path


def by_a_symbolic_link(path: Path, other: Path) -> Path:
    (other / "ledger.db").symlink_to(path)
    return other / "ledger.db"


def by_a_linked_folder(path: Path, other: Path) -> Path:
    (other / "folder").symlink_to(path.parent)
    return other / "folder" / "ledger.db"


def by_a_hard_link(path: Path, other: Path) -> Path:
    (other / "ledger.db").hardlink_to(path)
    return other / "ledger.db"


def by_another_name_in_its_folder(path: Path, other: Path) -> Path:
    path.with_name("same.db").hardlink_to(path)
    return path.with_name("same.db")


def after_its_lock_file_was_removed(path: Path, other: Path) -> Path:
    path.with_name("ledger.db.lock").unlink()
    return path


@pytest.mark.parametrize(
    "reach",
    [
        by_its_path,
        by_a_symbolic_link,
        by_a_linked_folder,
        by_a_hard_link,
        by_another_name_in_its_folder,
        after_its_lock_file_was_removed,
    ],
)
def test_a_second_ledger_is_refused_and_told_who_has_it(
    reach, path: Path, held: subprocess.Popen[str], tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    by = reach(path, tmp_path / "other")
    with pytest.raises(StoreRefusedError, match=rf"Another ledger \(process {held.pid}\)"):
        SqliteStore(by)
    end(held)
    SqliteStore(path).close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="user namespaces are Linux's")
def test_a_second_ledger_is_refused_through_another_mount_of_the_folder(
    path: Path, held: subprocess.Popen[str], tmp_path: Path
) -> None:
    """As two containers see one volume."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    path.with_name("ledger.db.lock").unlink()
    mount = f'mount --bind {path.parent} {mounted} && exec "$@"'
    unshared = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*unshared, "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount in a namespace of their own")
    other, said = another_process(mounted / "ledger.db", through=unshared)
    assert said.startswith(f"refused: Another ledger (process {held.pid}) has the store in {mounted}")
    end(other)


def test_a_second_one_in_the_same_process_is_refused_and_the_first_keeps_its_locks(path: Path, tmp_path: Path) -> None:
    """A process that closes any descriptor of a file loses its own locks on it, SQLite's among them: then another
    program takes itself for the last one that has the database open, and removes its log."""
    store = SqliteStore(path)
    store.commit([PutCounter(5)])
    by_a_hard_link(path, tmp_path)
    path.with_name("ledger.db.lock").unlink()
    for by in (path, tmp_path / "ledger.db"):
        with pytest.raises(StoreRefusedError, match=f"process {os.getpid()}"):
            SqliteStore(by)
    look = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('SELECT COUNT(*) FROM meta').fetchone())"
    subprocess.run([sys.executable, "-c", look, str(path)], check=True, capture_output=True)
    assert path.with_name("ledger.db-wal").exists()
    store.commit([PutCounter(6)])
    store.close()
    again = SqliteStore(path)
    assert again.load().counter == 6
    again.close()


def test_a_killed_ledger_leaves_no_lock(path: Path, held: subprocess.Popen[str]) -> None:
    held.send_signal(signal.SIGKILL)
    held.wait()
    store = SqliteStore(path)
    assert store.load().counter == 5
    store.close()


def test_a_ledger_of_version_0_1_is_heeded_and_heeds(path: Path) -> None:
    """It takes and knows the lock file alone, and may run on when the new version is started."""
    with path.with_name("ledger.db.lock").open("w") as old:
        old.write("4711\n")
        old.flush()
        fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(StoreRefusedError, match="process 4711"):
            SqliteStore(path)
    store = SqliteStore(path)
    with path.with_name("ledger.db.lock").open("r+") as old, pytest.raises(BlockingIOError):
        fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
    store.close()


def test_sqlites_own_locks_go_on_beside_it(path: Path) -> None:
    """Another program may read, sees what is committed, may not write while the ledger does, and waits no longer."""
    store = SqliteStore(path)
    store.commit([PutCounter(5)])
    look = (
        "import sqlite3, sys\n"
        "db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=0)\n"
        "print(db.execute(\"SELECT value FROM meta WHERE key = 'counter'\").fetchone()[0])\n"
        "try:\n"
        "    db.execute('BEGIN IMMEDIATE')\n"
        "    db.execute('COMMIT')\n"
        "    print('may write')\n"
        "except sqlite3.OperationalError as error:\n"
        "    print(error)\n"
    )

    def seen() -> str:
        return subprocess.run(
            [sys.executable, "-c", look, str(path)], check=True, capture_output=True, text=True
        ).stdout

    assert seen() == "5\nmay write\n"
    store._db.execute("BEGIN IMMEDIATE")
    assert seen() == "5\ndatabase is locked\n"
    store._db.execute("COMMIT")
    # And the other way round.
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store._db.execute("PRAGMA busy_timeout = 0")
    with pytest.raises(Exception, match="locked"):
        store.commit([PutCounter(6), PutCounter(7)])
    other.execute("ROLLBACK")
    store.commit([PutCounter(7)])
    store.close()


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="no locks of descriptors here")
def test_the_lock_outlives_other_descriptors_of_the_file(path: Path) -> None:
    """The file is looked into before it is opened, and what looks into it closes it."""
    lock = StoreLock(path)
    os.close(os.open(path, os.O_RDWR))
    path.with_name("ledger.db.lock").unlink()
    child, said = another_process(path)
    assert said.startswith("refused:")
    child.wait()
    lock.release()


def test_without_locks_of_descriptors_one_of_the_process_does(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_SET_LOCK", fcntl.F_SETLK)
    store = SqliteStore(path)
    path.with_name("ledger.db.lock").unlink()
    child, said = another_process(path)
    assert f"process {os.getpid()}" in said
    child.wait()
    store.close()
    child, said = another_process(path)
    assert said == "open\n"
    with pytest.raises(StoreRefusedError, match=f"process {child.pid}"):
        SqliteStore(path)
    end(child)


def test_the_lock_lies_beyond_what_sqlite_uses() -> None:
    """sqlite3: PENDING_BYTE is 2^30, RESERVED_BYTE follows, then 510 shared ones; a file has at most 2^48 bytes."""
    assert LOCK_BYTE > 2**48 > 2**30 + 512


def test_a_file_system_without_locks_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, command: int, request: bytes) -> bytes:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", no_locks)
    with pytest.raises(StoreRefusedError, match=r"cannot be locked: No locks available\. Give .* local disk"):
        SqliteStore(path)

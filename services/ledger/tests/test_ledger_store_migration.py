"""Databases of earlier versions: brought up whole or not at all, with a copy beside them.

`store_schemas/schema-1.sql` was written by version 0.1 (commit fe18dc3), with every field of its records set.
"""

import contextlib
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from weighbridge_common.processes import ProcessIdentity
from weighbridge_ledger.book import Ceilings, Charge, Claim, DeviceWant, Lease, LeaseState, Policy, Purpose, Snapshot
from weighbridge_ledger.book.records import Ended, PutCounter, Ticket
from weighbridge_ledger.store import Observation, SqliteStore, StoreRefusedError
from weighbridge_ledger.store.codec import encode_lease
from weighbridge_ledger.store.migrations import MIGRATIONS, SCHEMA_VERSION, migrate
from weighbridge_ledger.tools.check import check
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

SCHEMAS = Path(__file__).parent / "store_schemas"
GIB = 2**30
BOOT, NAMESPACE = "0b0f1f5e-4f6e-4a5c-9a53-5e2f0f5a7f10", "pid:[4026531836]"


def process(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid, 1000 + pid, BOOT, NAMESPACE)


def digest(first: int) -> bytes:
    return bytes(range(first, first + 32))


# What version 0.1 was told to keep, in this version's words.
ACTIVE = Lease(
    "a1c4",
    "request-a",
    4,
    1,
    LeaseState.ACTIVE,
    Claim(7 * GIB, (), GIB, "2"),
    process(41),
    Charge(7 * GIB, on_gpu=True),
    (process(42), process(43)),
    secret_digest=digest(0),
    previous_digest=digest(32),
    term_s=20.0,
    holder_name="engine-mlx",
    memory_limit_bytes=32 * GIB,
    purpose=Purpose("mlx", "Qwen3 8B, 4 bit", "sha256:6f1d", "mlx-0.29.1", "context=8192 slots=1", 6 * GIB),
    priority=3,
    pinned=True,
    requested_wall=1790000000.25,
    granted_wall=1790000001.5,
    activated_wall=1790000002.75,
)
VACATING = Lease(
    "b2d5",
    "",
    5,
    2,
    LeaseState.VACATING,
    Claim(2 * GIB, (DeviceWant("GPU-8c2e", 20 * GIB, 4 * GIB), DeviceWant("GPU-91aa", 10 * GIB))),
    process(51),
    Charge(5 * GIB, (("GPU-8c2e", 17 * GIB), ("GPU-91aa", 10 * GIB)), (("GPU-8c2e", 3 * GIB),)),
    (process(52),),
    foreign=True,
    suspect=True,
    secret_digest=digest(64),
    holder_name="sd – Bilder",
    purpose=Purpose("sd", "FLUX"),
    priority=1,
    requested_wall=1790000010.0,
    granted_wall=1790000011.0,
    activated_wall=1790000012.0,
)
GRANTED = Lease(
    "c3e6",
    "request-c",
    6,
    3,
    LeaseState.GRANTED,
    Claim(GIB),
    process(61),
    Charge(GIB, on_gpu=True),
    secret_digest=digest(96),
    priority=2,
    requested_wall=1790000020.0,
    granted_wall=1790000020.0,
)
KEPT = Snapshot(
    (ACTIVE, VACATING, GRANTED),
    (Ticket("request-d", Claim(30 * GIB, (DeviceWant("", GIB),), 0, "1"), 7, 1790000030.5, 3),),
    (Ended("f0f0", "request-z", digest(128), 1789999990.0),),
    1024,
    40 * GIB,
    True,
)
PEAKS = [
    Observation(
        "sha256:6f1d", "mlx-0.29.1", "context=8192 slots=1", *figures, 3.5, 1790000040.0 + n, "node-1", lease, n
    )
    for n, lease, figures in (
        (5, "a1c4", (6 * GIB, 7 * GIB, 6 * GIB + 789)),
        (1, "a0a0", (6 * GIB, 7 * GIB, 6 * GIB + 123)),
    )
]
"""Of the model 6f1d, latest first. Number 2 was told of the same lease as number 5."""


def write_dump(path: Path, name: str = "schema-1", then: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript((SCHEMAS / f"{name}.sql").read_text() + then)
    return path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A database of version 0.1."""
    return write_dump(tmp_path / "data" / "ledger.db")


def schema(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
        return db.execute("PRAGMA user_version").fetchone()[0]


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_there_is_a_database_of_each_earlier_version_to_try() -> None:
    assert names(SCHEMAS) == {f"schema-{version}.sql" for version in range(1, SCHEMA_VERSION)}


def test_everything_that_an_earlier_version_kept_is_there(old: Path) -> None:
    store = SqliteStore(old)
    assert store.load() == KEPT
    assert store.observations("sha256:6f1d", "", "", None, 9) == PEAKS
    assert [one.number for one in store.observations("", "", "", None, 9)] == [5, 4, 3, 1]
    assert store.begin_epoch() == "3f6b9c1de042.3"
    store.close()
    assert schema(old) == SCHEMA_VERSION
    assert check(old, Ceilings(64 * GIB, {"GPU-8c2e": 24 * GIB, "GPU-91aa": 24 * GIB}), Policy()).findings == ()


def test_a_migrated_schema_is_that_of_a_new_database(old: Path, tmp_path: Path) -> None:
    SqliteStore(old).close()
    SqliteStore(tmp_path / "new.db").close()
    schemas = []
    for path in (old, tmp_path / "new.db"):
        with contextlib.closing(sqlite3.connect(path)) as db:
            schemas.append(sorted(map(str, db.execute("SELECT name, sql FROM sqlite_master"))))
    assert schemas[0] == schemas[1]


def test_the_copy_beside_it_is_what_the_earlier_version_wrote(old: Path) -> None:
    SqliteStore(old).close()
    copy = old.with_name("ledger.db.schema-1")
    assert schema(copy) == 1
    assert copy.stat().st_mode & 0o777 == 0o600
    with contextlib.closing(sqlite3.connect(copy)) as db, contextlib.closing(sqlite3.connect(":memory:")) as dumped:
        dumped.executescript((SCHEMAS / "schema-1.sql").read_text())
        for table in ("leases", "tickets", "ended", "observations"):
            query = f"SELECT * FROM {table}"
            assert db.execute(query).fetchall() == dumped.execute(query).fetchall()


def test_one_can_go_back_to_the_copy_and_forward_again(old: Path) -> None:
    store = SqliteStore(old)
    before = store.begin_epoch()
    store.close()
    old.with_name("ledger.db.schema-1").replace(old)
    again = SqliteStore(old)
    assert again.load().leases == KEPT.leases
    # Neither a fence nor an epoch is given that was given since.
    assert again.load().counter > 2**32
    assert again.begin_epoch().partition(".")[0] != before.partition(".")[0]
    again.close()


def test_an_up_to_date_database_is_not_copied(tmp_path: Path) -> None:
    for _ in range(2):
        SqliteStore(tmp_path / "ledger.db").close()
    assert names(tmp_path) == {"ledger.db", "ledger.db.lock"}


KILLED_AT = """
import os, pathlib, signal, sqlite3, sys
connect, left = sqlite3.connect, [int(sys.argv[2])]
def traced(database, *arguments, **more):
    made = connect(database, *arguments, **more)
    if str(database) == sys.argv[1]:
        made.set_trace_callback(die)
    return made
def die(statement):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
sqlite3.connect = traced
from weighbridge_ledger.store import SqliteStore
SqliteStore(pathlib.Path(sys.argv[1]))
print("opened")
"""


def test_killed_before_any_statement_of_it_the_next_start_finds_the_old_or_the_new(tmp_path: Path) -> None:
    """A real SIGKILL before the first, the second … statement on the database, until it is open without one."""
    seen = set()
    for statements in range(100):
        path = write_dump(tmp_path / str(statements) / "ledger.db")
        child = subprocess.run(
            [sys.executable, "-c", KILLED_AT, str(path), str(statements)], capture_output=True, text=True
        )
        seen.add((child.returncode, schema(path)))
        store = SqliteStore(path)
        assert store.load() == KEPT
        assert store.observations("sha256:6f1d", "", "", None, 9) == PEAKS
        store.close()
        assert names(path.parent) == {"ledger.db", "ledger.db.lock", "ledger.db.schema-1"}
        if child.returncode == 0:
            break
    # The last two are the statements after the commit: the new schema stood, and the process was killed.
    assert seen == {(-signal.SIGKILL, 1), (-signal.SIGKILL, SCHEMA_VERSION), (0, SCHEMA_VERSION)}
    assert statements > len(MIGRATIONS[-1]) + 4  # not before the migration alone


@pytest.mark.parametrize("failing", range(len(MIGRATIONS[-1])))
def test_a_step_that_fails_leaves_the_old_one_whole(failing: int, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is full in the middle of it."""
    statements = list(MIGRATIONS[-1])
    statements[failing] = "INSERT INTO nowhere VALUES (1)"
    broken = (*MIGRATIONS[:-1], tuple(statements))
    with contextlib.closing(sqlite3.connect(old, isolation_level=None)) as db:
        monkeypatch.setattr("weighbridge_ledger.store.migrations.MIGRATIONS", broken)
        with pytest.raises(sqlite3.OperationalError, match="nowhere"):
            migrate(db)
        assert not db.in_transaction
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
    monkeypatch.undo()
    store = SqliteStore(old)
    assert store.load() == KEPT
    store.close()


def untouched(path: Path) -> dict[str, bytes]:
    """Every file of the folder, but for the lock file, which the attempt may make."""
    return {file.name: file.read_bytes() for file in path.parent.iterdir() if not file.name.endswith(".lock")}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ("UPDATE leases SET record = '{}' WHERE lease_id = 'b2d5';", "leases b2d5"),
        ("UPDATE tickets SET record = '[1]';", "tickets request-d"),
        ("UPDATE observations SET record = 'no json' WHERE number = 4;", "cannot be brought up to date"),
        ("UPDATE observations SET record = '[6]' WHERE number = 4;", "cannot be brought up to date"),
        ("UPDATE observations SET record = replace(record, ',3.5', '') WHERE number = 4;", "cannot be"),
        ("DROP TABLE observations;", "cannot be brought up to date"),
    ],
)
def test_an_old_database_that_cannot_be_read_is_refused_and_left_as_it_is(
    spoil: str, says: str, tmp_path: Path
) -> None:
    path = write_dump(tmp_path / "data" / "ledger.db", then=spoil)
    before = untouched(path)
    with pytest.raises(StoreRefusedError, match=f"{says}.*left as it is"):
        SqliteStore(path)
    assert untouched(path) == before


def test_an_old_database_left_by_a_kill_is_refused_with_its_log_untouched(tmp_path: Path) -> None:
    """To open it for writing and to close it would fold the log into it."""
    source = write_dump(tmp_path / "source" / "ledger.db")
    with contextlib.closing(sqlite3.connect(source, isolation_level=None)) as db:
        db.execute("UPDATE leases SET record = '{}' WHERE lease_id = 'b2d5'")
        path = tmp_path / "killed" / "ledger.db"
        path.parent.mkdir()
        for suffix in ("", "-wal"):
            path.with_name(path.name + suffix).write_bytes(source.with_name(source.name + suffix).read_bytes())
    before = untouched(path)
    with pytest.raises(StoreRefusedError, match="leases b2d5"):
        SqliteStore(path)
    after = untouched(path)
    after.pop("ledger.db-shm", None)  # an index of the log, which any reader makes anew
    assert after == before


def test_without_room_for_the_copy_nothing_is_begun(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def small(database, *arguments, **more):
        made = connect(database, *arguments, **more)
        if str(database).endswith(".partial"):
            made.execute("PRAGMA max_page_count = 2")
        return made

    monkeypatch.setattr(sqlite3, "connect", small)
    before = untouched(old)
    with pytest.raises(StoreRefusedError, match=r"once there is a copy of it\..*full.*Nothing was changed"):
        SqliteStore(old)
    assert untouched(old) == before


def test_what_a_killed_attempt_left_of_its_copy_is_removed(old: Path) -> None:
    for name in (".ledger.db.schema-1.0a1b2c3d.partial", ".ledger.db.schema-1.0a1b2c3d.partial-journal"):
        old.with_name(name).write_text("half")
    SqliteStore(old).close()
    assert names(old.parent) == {"ledger.db", "ledger.db.lock", "ledger.db.schema-1"}


def test_the_tools_look_at_an_old_database_and_leave_it_old(old: Path) -> None:
    before = old.read_bytes()
    report = check(old, Ceilings(64 * GIB, {"GPU-8c2e": 24 * GIB, "GPU-91aa": 24 * GIB}), Policy())
    assert [finding.code for finding in report.findings] == ["OLDER_SCHEMA"]
    assert (report.schema, report.snapshot) == (1, KEPT)
    assert old.read_bytes() == before


def test_a_row_of_an_earlier_version_reads_as_one_that_says_its_defaults(tmp_path: Path) -> None:
    """Rows are rewritten when their lease changes, not when the schema does: both kinds lie side by side."""
    old = write_dump(tmp_path / "ledger.db")
    store = SqliteStore(old)
    rows = dict(store._db.execute("SELECT lease_id, record FROM leases"))
    assert rows["b2d5"] != encode_lease(VACATING)
    store._db.execute("UPDATE leases SET record = ? WHERE lease_id = 'b2d5'", (encode_lease(VACATING),))
    assert store.load() == KEPT
    store.commit([PutCounter(2000)])
    store.close()


@pytest.mark.parametrize("log", [False, True], ids=["closed", "with a log"])
def test_a_newer_versions_database_is_refused_and_left_byte_by_byte(log: bool, tmp_path: Path) -> None:
    made = tmp_path / "made" / "ledger.db"
    store = SqliteStore(made)
    path = tmp_path / "newer" / "ledger.db"
    path.parent.mkdir()
    store.commit([PutCounter(9)])
    store._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    if not log:
        store.close()
    for suffix in ("", "-wal") if log else ("",):
        path.with_name(path.name + suffix).write_bytes(made.with_name(made.name + suffix).read_bytes())
    store.close()
    before = untouched(path)
    with pytest.raises(StoreRefusedError, match=rf"newer version \(schema {SCHEMA_VERSION + 1}.*Start that version"):
        SqliteStore(path)
    after = untouched(path)
    after.pop("ledger.db-shm", None)
    assert after == before


async def test_a_ledger_starts_on_it(ledger_process) -> None:
    data = Path(ledger_process.environ["WEIGHBRIDGE_LEDGER_DATA_DIR"])
    write_dump(data / "ledger.db")
    stub = await ledger_process.start()
    # Another boot's processes are gone; the one of another container is waited for. What was measured is kept.
    leases = (await stub.ListLeases(pb.ListLeasesRequest())).leases
    assert [lease.lease_id for lease in leases] == ["b2d5"]
    found = (await stub.ListObservations(pb.ListObservationsRequest())).observations
    assert [one.observation_id for one in found] == ["5", "4", "3", "1"]
    assert await ledger_process.end(signal.SIGTERM) == 0
    assert schema(data / "ledger.db") == SCHEMA_VERSION
    assert schema(data / "ledger.db.schema-1") == 1

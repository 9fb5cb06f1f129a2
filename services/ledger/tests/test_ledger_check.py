"""`check`: each invariant of a stored book is found broken, and a book that keeps its rules is found sound."""

import json
import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weighbridge_common.processes import ProcessIdentity
from weighbridge_ledger.book import Ask, Ceilings, Charge, Claim, Lease, LeaseState, Policy, Refused, Snapshot
from weighbridge_ledger.book.records import Ended, PutCounter, PutLease, PutWishes, Ticket
from weighbridge_ledger.store import Observation, PutObservation, SqliteStore
from weighbridge_ledger.store.database_file import first_line
from weighbridge_ledger.store.migrations import SCHEMA_VERSION
from weighbridge_ledger.tools.audit import audit
from weighbridge_ledger.tools.check import check

GIB = 2**30
CEILINGS = Ceilings(100, {"a": 50})
HOLDER = ProcessIdentity(1, 2, "boot", "pid:[1]")
ENGINE = ProcessIdentity(3, 4, "boot", "pid:[1]")
LEASE = Lease(
    "one",
    "r1",
    2,
    1,
    LeaseState.ACTIVE,
    Claim(40),
    HOLDER,
    charge=Charge(40, (("a", 20),), (("a", 5),)),
    engines=(ENGINE,),
    secret_digest=b"\x01" * 32,
)
OTHER = replace(LEASE, lease_id="two", request_id="r2", fence=4, sequence=3, secret_digest=b"\x02" * 32)
TICKET = Ticket("r3", Claim(3), 5, 1.5, 4)
ENDED = Ended("zero", "r0", b"\x01" * 32, 10.0)
SOUND = Snapshot((LEASE, OTHER), (TICKET,), (ENDED,), counter=6, limit_bytes=120)
PEAK = Observation("digest", "build", "shape", 1, 2, 3, 4.5, 5.5, "node", "one", 1)


def codes(snapshot: Snapshot, *observations: Observation, faults: bool = True) -> list[str]:
    found = audit(snapshot, observations, CEILINGS, Policy())
    return [finding.code for finding in found if finding.is_fault is faults]


def with_lease(**changes: object) -> Snapshot:
    return replace(SOUND, leases=(replace(LEASE, **changes), OTHER))  # type: ignore[arg-type]


def test_a_book_that_keeps_its_rules_is_sound() -> None:
    assert codes(SOUND, PEAK) == codes(SOUND, PEAK, faults=False) == []
    assert codes(Snapshot()) == []


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (with_lease(state=LeaseState.RELEASED), "LEASE_STATE"),
        (with_lease(state=LeaseState.QUEUED), "LEASE_STATE"),
        (with_lease(charge=Charge(-1)), "CHARGE"),
        (with_lease(charge=Charge(1, (("a", -1),))), "CHARGE"),
        (with_lease(charge=Charge(1, (("a", 1), ("a", 1)))), "CHARGE"),
        (with_lease(charge=Charge(1, (("", 1),))), "CHARGE"),
        (with_lease(charge=Charge()), "CHARGE"),
        (with_lease(charge=Charge(4, (("a", 20),), (("a", 5),))), "SPILL"),
        (with_lease(charge=Charge(40, (("a", 20),), (("a", 5),), 36)), "OPTIONAL"),
        (with_lease(charge=Charge(40, optional_host_bytes=-1)), "OPTIONAL"),
        (with_lease(charge=Charge(40, (("a", 20),), optional_devices=(("a", 21),))), "OPTIONAL"),
        (with_lease(charge=Charge(40, (("a", 20),), optional_devices=(("b", 1),))), "OPTIONAL"),
        (with_lease(charge=Charge(40, (("a", 20),), optional_devices=(("a", 1), ("a", 1)))), "OPTIONAL"),
        (with_lease(exclusive=True, charge=replace(LEASE.charge, exclusive=True)), "NOT_ALONE"),
        (with_lease(charge=Charge(40, exclusive=True)), "PLACES"),
        (with_lease(charge=Charge(40, (("b", 20),), exclusive=True)), "PLACES"),
        (with_lease(charge=Charge(40, (("b", 20),), on_gpu=True)), "PLACES"),
        (with_lease(charge=Charge(40, on_gpu=True), claim=Claim(40, cpu_only=True)), "PLACES"),
        (with_lease(load_s=-1.0), "LOADED"),
        (with_lease(loaded_wall=5.0), "LOADED"),
        (with_lease(claim=Claim(0)), "CLAIM"),
        (with_lease(claim=Claim(5, (), -1)), "CLAIM"),
        (with_lease(secret_digest=b""), "DIGEST"),
        (with_lease(previous_digest=b"\x00"), "DIGEST"),
        (with_lease(secret_digest=OTHER.secret_digest), "SECRET_SHARED"),
        (with_lease(holder=replace(HOLDER, pid=0)), "PROCESS"),
        (with_lease(engines=(ENGINE, ENGINE)), "PROCESS"),
        (with_lease(engines=tuple(replace(ENGINE, pid=pid) for pid in range(1, 66))), "PROCESS"),
        (with_lease(term_s=4.9), "TERM"),
        (with_lease(term_s=601.0), "TERM"),
        (with_lease(fence=0), "NUMBER_MISSING"),
        (with_lease(fence=OTHER.fence), "NUMBER_REPEATED"),
        (with_lease(sequence=TICKET.sequence), "NUMBER_REPEATED"),
        (replace(SOUND, counter=5, tickets=(replace(TICKET, sequence=6),)), "NUMBER_AHEAD"),
        (with_lease(fence=1, sequence=2), "NUMBER_ORDER"),
        (with_lease(request_id="r2"), "REQUEST_REPEATED"),
        (with_lease(request_id="r0"), "REQUEST_ENDED"),
        (with_lease(lease_id="zero"), "LEASE_ENDED"),
        (with_lease(charge=Charge(61)), "OVER_CEILING"),
        (with_lease(charge=Charge(1, (("a", 31),))), "OVER_CEILING"),
        (replace(SOUND, limit_bytes=0), "LIMIT"),
        (replace(SOUND, tickets=(replace(TICKET, passes=-1),)), "PLACE"),
        (replace(SOUND, tickets=(replace(TICKET, claim=Claim(-1)),)), "CLAIM"),
        (replace(SOUND, ended=(replace(ENDED, secret_digest=b"x"),)), "DIGEST"),
        (
            replace(
                SOUND,
                counter=2000,
                tickets=tuple(replace(TICKET, request_id=str(n), sequence=n) for n in range(5, 1030)),
            ),
            "TOO_MANY",
        ),
    ],
)
def test_a_broken_invariant_is_a_fault(broken: Snapshot, code: str) -> None:
    assert code in codes(broken)


@pytest.mark.parametrize("figure", ["planned_bytes", "claimed_bytes", "granted_bytes", "peak_bytes", "load_s"])
def test_a_measured_peak_below_nothing_is_a_fault(figure: str) -> None:
    assert codes(SOUND, replace(PEAK, **{figure: -1})) == ["OBSERVATION"]


def test_the_words_of_leases_that_keep_the_rules_are_no_faults() -> None:
    alone = replace(
        LEASE,
        exclusive=True,
        charge=Charge(40, (("b", 20),), optional_host_bytes=40, optional_devices=(("b", 20),), exclusive=True),
        activated_wall=2.0,
        loaded_wall=5.0,
        load_s=3.0,
    )
    assert codes(replace(SOUND, leases=(alone, OTHER))) == []
    # One that asked to be alone where that is not heeded, or on the processor, is not.
    assert codes(with_lease(exclusive=True)) == []
    # Where engines coexist a lease keeps the flag that it was granted with, and others come.
    company = with_lease(exclusive=True, charge=replace(LEASE.charge, exclusive=True))
    assert audit(company, (), replace(CEILINGS, exclusive_heeded=False), Policy()) == []


def test_company_on_the_gpu_of_a_unified_machine_is_found_too() -> None:
    on_gpu = [replace(one, charge=Charge(20, on_gpu=True)) for one in (LEASE, OTHER)]
    assert codes(replace(SOUND, leases=tuple(on_gpu))) == []
    alone = replace(on_gpu[0], exclusive=True, charge=Charge(20, on_gpu=True, exclusive=True))
    found = audit(replace(SOUND, leases=(alone, on_gpu[1])), (), CEILINGS, Policy())
    assert [(one.code, one.subject) for one in found] == [("NOT_ALONE", "one")]
    beside = replace(OTHER, claim=Claim(20, cpu_only=True), charge=Charge(20))
    assert codes(replace(SOUND, leases=(alone, beside))) == []


def test_what_happens_to_a_book_that_keeps_its_rules_is_said_and_is_no_fault() -> None:
    # 2 × (40 + 20) under a limit that was lowered below it, and a card that was taken out.
    lowered = replace(SOUND, limit_bytes=119)
    assert (codes(lowered), codes(lowered, faults=False)) == ([], ["OVER_LIMIT"])
    gone = with_lease(charge=Charge(40, (("b", 20),)))
    assert (codes(gone), codes(gone, faults=False)) == ([], ["DEVICE_UNKNOWN"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 60), st.integers(0, 4)), max_size=40))
def test_whatever_the_book_does_what_it_stores_is_sound(new_world, steps: list[tuple[int, int, int]]) -> None:
    world = new_world(Ceilings(100, has_shared_gpu=True), Policy(optional_step_bytes=4))
    held: list[tuple[str, str]] = []
    for number, (verb, size, which) in enumerate(steps):
        lease_id, secret = held[which % len(held)] if held else ("", "")
        try:
            if verb <= 1:
                claim = Claim(size, optional_host_bytes=which * 5, cpu_only=size % 5 == 0)
                ask = Ask(f"request-{number}", world.process(1 + which), claim, exclusive=which == 3)
                admission = world.book.admit(ask, world.now)
                if admission.lease.state is LeaseState.GRANTED and verb == 0:
                    secret = world.secret(admission.lease.lease_id)
                    world.book.activate(
                        admission.lease.lease_id,
                        secret,
                        admission.lease.holder,
                        (world.process(50 + number),),
                        world.now,
                    )
                    held.append((admission.lease.lease_id, secret))
            elif verb == 2 and held:
                exclusive = {0: True, 1: False}.get(which)
                world.book.resize(lease_id, secret, Claim(size, optional_host_bytes=8), world.now, exclusive)
            elif verb == 6 and held:
                world.book.renew(lease_id, secret, None, world.now, load_complete=True)
            elif verb == 3 and held:
                world.release(lease_id, secret)
            elif verb == 4:
                world.pass_time(size)
            else:
                world.restart()
        except Refused:
            pass
        world.drain()
        assert audit(world.store.load(), (), world.ceilings, world.policy) == []


# -- the file ------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound database, closed."""
    made = tmp_path / "data" / "ledger.db"
    store = SqliteStore(made)
    store.begin_epoch()
    store.commit([PutLease(LEASE), PutLease(OTHER), PutCounter(6), PutWishes(120, None), PutObservation(PEAK)])
    store.close()
    return made


def checked(path: Path) -> list[str]:
    return [finding.code for finding in check(path, CEILINGS, Policy()).findings if finding.is_fault]


def change(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(statement)
    db.close()


def test_a_sound_database_is_sound_and_left_alone(path: Path) -> None:
    before, beside = path.read_bytes(), {file.name for file in path.parent.iterdir()}
    report = check(path, CEILINGS, Policy())
    assert report.sound
    assert (report.schema, len(report.snapshot.leases), report.observations) == (SCHEMA_VERSION, 2, 1)
    assert report.epoch.endswith(".1")
    assert path.read_bytes() == before
    assert {file.name for file in path.parent.iterdir()} == beside


def test_a_ledger_at_work_is_checked_as_it_stands(path: Path) -> None:
    store = SqliteStore(path)
    store.commit([PutLease(replace(OTHER, lease_id="three", fence=6, sequence=5, request_id="r3"))])
    report = check(path, CEILINGS, Policy())
    assert [finding.code for finding in report.findings] == ["SECRET_SHARED"] * 2 + ["OVER_CEILING"] * 2 + [
        "OVER_LIMIT"
    ]
    store.commit([PutCounter(7)])
    assert store.load().counter == 7
    store.close()


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("UPDATE leases SET record = '{}' WHERE lease_id = 'one'", "RECORD"),
        ("UPDATE leases SET record = replace(record, '\"ACTIVE\"', '\"DANCING\"') WHERE lease_id = 'one'", "RECORD"),
        ("UPDATE leases SET record = replace(record, '[40,', '[\"40\",') WHERE lease_id = 'one'", "RECORD"),
        ("UPDATE observations SET record = '[]'", "RECORD"),
        ("UPDATE meta SET value = 'many' WHERE key = 'counter'", "RECORD"),
        ("UPDATE leases SET fence = 9 WHERE lease_id = 'one'", "NUMBER_AHEAD"),
        ("DROP INDEX observations_by_launch", "SCHEMA"),
        ("DROP TABLE tickets", "SCHEMA"),
        ("CREATE TABLE postings (x)", "SCHEMA"),
    ],
)
def test_what_was_done_to_the_tables_is_found(path: Path, statement: str, code: str) -> None:
    change(path, statement)
    assert code in checked(path)


def test_a_damaged_file_is_a_fault(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    assert checked(path) == ["DAMAGED"]


def test_a_lost_page_is_a_fault(path: Path) -> None:
    pages = path.read_bytes()
    assert len(pages) > 3 * 4096
    path.write_bytes(pages[:8192] + b"\xff" * 4096 + pages[12288:])
    assert checked(path) == ["DAMAGED"]


def test_overwritten_pages_are_told_in_words_with_one_line_of_sqlite_and_what_to_do(path: Path, tmp_path: Path) -> None:
    pages = path.read_bytes()
    path.write_bytes(pages[:4096] + b"\xff" * (len(pages) - 4096))
    found = tool(tmp_path, "check")
    assert found.returncode == 1
    assert f"{path} is damaged: parts of it were overwritten or lost (SQLite: " in found.stdout
    # SQLite's own text is of many lines, under a head of stars; a line break would be shown as a question mark.
    assert "?" not in found.stdout and "***" not in found.stdout
    assert "Stop the engines first" in found.stdout
    for file in (str(path), "ledger.db-wal", "ledger.db-shm"):
        assert file in found.stdout
    assert "put a backup in its place" in found.stdout


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("*** in database main ***\nTree 2 page 2: unknown\nTree 3 page 3: unknown", "Tree 2 page 2: unknown"),
        ("row 1 missing from index observations_by_launch", "row 1 missing from index observations_by_launch"),
        ("database disk image is malformed.", "database disk image is malformed"),
        ("*** in database main ***\n", "*** in database main ***"),
        ("", "no words"),
    ],
)
def test_of_what_sqlite_finds_the_first_line_is_told(said: str, line: str) -> None:
    assert first_line(said) == line


# -- the command ---------------------------------------------------------------------------------------------------


def tool(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHBRIDGE_")}
    environ |= {"WEIGHBRIDGE_LEDGER_DATA_DIR": str(tmp_path / "data"), "WEIGHBRIDGE_LEDGER_MACHINE": "discrete:64+24"}
    return subprocess.run(
        [sys.executable, "-m", "weighbridge_ledger", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_says_sound_faulty_or_not_to_be_checked_by_its_exit_code(path: Path, tmp_path: Path) -> None:
    sound = tool(tmp_path, "check")
    assert (sound.returncode, sound.stderr) == (0, "")
    assert sound.stdout.endswith("Sound.\n")
    assert "2 leases" in sound.stdout and "64.00 GiB + 24.00 GiB" in sound.stdout

    change(path, "UPDATE leases SET fence = 9 WHERE lease_id = 'one'")
    faulty = tool(tmp_path, "check", "--json")
    assert faulty.returncode == 1
    said = json.loads(faulty.stdout)
    assert (said["sound"], said["leases"], said["charged_bytes"]) == (False, 2, 120)
    assert [(one["code"], one["subject"]) for one in said["findings"] if one["fault"]] == [("NUMBER_AHEAD", "one")]

    change(path, "PRAGMA user_version = 1000")
    newer = tool(tmp_path, "check", "--json")
    assert newer.returncode == 2
    assert "newer version" in json.loads(newer.stderr)["failure"]
    for arguments, says in (
        (("check", str(tmp_path / "nothing.db")), "There is no database"),
        (("check", "--machine", "large"), "--machine"),
        (("polish",), "invalid choice"),
    ):
        wrong = tool(tmp_path, *arguments)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert says in wrong.stderr


def test_the_command_backs_up_and_reads_the_backup(path: Path, tmp_path: Path) -> None:
    made = tool(tmp_path, "backup", str(tmp_path / "copy.db"), "--json")
    assert made.returncode == 0
    assert json.loads(made.stdout)["leases"] == 2
    again = tool(tmp_path, "backup", str(tmp_path / "copy.db"))
    assert (again.returncode, "--force" in again.stderr) == (1, True)
    assert tool(tmp_path, "backup", str(tmp_path / "copy.db"), "--force").returncode == 0
    assert tool(tmp_path, "check", str(tmp_path / "copy.db")).returncode == 0
    replayed = tool(tmp_path, "replay", str(tmp_path / "copy.db"))
    assert replayed.returncode == 0
    assert "copy of" in replayed.stdout

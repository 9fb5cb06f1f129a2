"""`replay`: says what a start would do, and a start then does it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from weighbridge_common.processes import ProcessIdentity
from weighbridge_ledger.book import Ceilings, Charge, Claim, Home, Lease, LeaseState, Moment, Policy
from weighbridge_ledger.book.records import Ended, PutCounter, PutEnded, PutLease, PutTicket, PutWishes, Ticket
from weighbridge_ledger.machine.model import Machine, Pool, Source
from weighbridge_ledger.service.app import assemble
from weighbridge_ledger.store import SqliteStore, StoreRefusedError
from weighbridge_ledger.tools.replay import Start, replay
from weighbridge_ledger.tools.telling import start_json, start_lines

HOME = Home("boot", "pid:[1]")
NOW = Moment(1000.0, 2_000_000.0)
MACHINE = Machine("node", Pool.CPU, 160, (), Source.DECLARED)


def process(pid: int, boot: str = "boot", namespace: str = "pid:[1]") -> ProcessIdentity:
    return ProcessIdentity(pid, 100 + pid, boot, namespace)


def lease(number: int, state: LeaseState = LeaseState.ACTIVE, **more: object) -> Lease:
    made = Lease(
        f"lease-{number}",
        f"request-{number}",
        2 * number,
        2 * number - 1,
        state,
        Claim(number),
        process(number),
        charge=Charge(number),
        secret_digest=number.to_bytes(32, "big"),
        term_s=20.0,
    )
    return replace(made, **more)  # type: ignore[arg-type]


LEASES = [
    lease(1),  # alive
    lease(2),  # dead
    lease(3, engines=(process(33),)),  # its holder is dead, its engine is not
    lease(4, engines=(process(44),)),  # both are dead
    lease(5, LeaseState.GRANTED),
    lease(6, LeaseState.VACATING, engines=(process(66),)),  # its engine is dead, its holder is not
    lease(7, suspect=True),
    lease(8, holder=process(8, namespace="pid:[2]"), foreign=True),  # of another container
    lease(9, holder=process(9, boot="earlier")),  # of an earlier boot
]
DEAD = {process(pid) for pid in (2, 3, 4, 44, 66)} | {process(9, boot="earlier")}
SWEPT = {"lease-2", "lease-4", "lease-6", "lease-9"}


def is_alive(one: ProcessIdentity) -> bool | None:
    if one.pid_namespace != HOME.pid_namespace:
        return None
    return one not in DEAD


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with leases of every kind."""
    made = tmp_path / "ledger.db"
    store = SqliteStore(made)
    store.begin_epoch()
    store.commit([PutLease(one) for one in LEASES])
    store.commit(
        [
            PutTicket(Ticket("later", Claim(7), 42, 5.0, 3)),
            PutTicket(Ticket("sooner", Claim(8), 41, 6.0, 0)),
            PutTicket(Ticket("request-1", Claim(1), 1, 5.0, 0)),
            PutEnded(Ended("gone", "request-0", b"\x01" * 32, 1_999_999.0)),
            PutCounter(50),
            PutWishes(77, None),
        ]
    )
    store.close()
    return made


def replayed(path: Path) -> Start:
    return replay(path, lambda limit, spill: Ceilings(96, limit_bytes=limit), Policy(), HOME, NOW, is_alive)


def test_a_start_would_sweep_the_dead_and_extend_the_others(path: Path) -> None:
    start = replayed(path)
    fates = {fate.lease.lease_id: fate for fate in start.fates}
    assert list(fates) == [one.lease_id for one in LEASES]
    assert {name: fate.released for name, fate in fates.items() if fate.released} == dict.fromkeys(
        SWEPT, "PROCESSES_DEAD"
    )
    # Rule 14: a term × (1..2) to survivors, one more activate_by (10 s) to a grant.
    assert fates["lease-1"].within_s == (20.0, 40.0)
    assert fates["lease-5"].within_s == (10.0, 10.0)
    assert (fates["lease-3"].holder_alive, fates["lease-3"].engines_alive) == (False, (True,))
    assert fates["lease-8"].holder_alive is None
    assert (start.before.total_bytes, start.after.total_bytes) == (45, 45 - 2 - 4 - 6 - 9)
    assert (start.limit_bytes, start.ceilings.total_bytes) == (77, 77)
    # The place of a request that holds its lease is nobody's.
    assert [place.request_id for place in start.places] == ["sooner", "later"]
    assert start.ended == 1


async def test_the_start_then_does_what_was_said(path: Path) -> None:
    said = replayed(path)

    class Probe:
        machine = MACHINE
        findings = ()

    store = SqliteStore(path)
    servicer = await assemble(Probe(), store, Policy(), clock=lambda: NOW, is_alive=is_alive, home=HOME)  # type: ignore[arg-type]
    book = servicer._keeper.book
    assert set(book.lease_ids()) == {fate.lease.lease_id for fate in said.fates if not fate.released}
    assert book.committed() == said.after
    for fate in said.fates:
        view = book.view(fate.lease.lease_id)
        assert view is not None
        if fate.released:
            assert view.cause == fate.released
        elif not fate.lease.suspect:
            assert view.deadline is not None
            assert fate.within_s[0] <= view.deadline - NOW.monotonic <= fate.within_s[1]
    await servicer.aclose()
    assert {one.lease_id for one in SqliteStore(path).load().leases} == set(book.lease_ids())


def test_nothing_is_written(path: Path) -> None:
    before = path.read_bytes()
    replayed(path)
    assert path.read_bytes() == before
    assert {file.name for file in path.parent.iterdir()} == {"ledger.db", "ledger.db.lock"}


def test_a_ledger_at_work_can_be_replayed(path: Path) -> None:
    store = SqliteStore(path)
    assert {fate.lease.lease_id for fate in replayed(path).fates if fate.released} == SWEPT
    assert len(store.load().leases) == len(LEASES)
    store.close()


def test_it_is_told_to_people_and_to_programs(path: Path) -> None:
    start = replayed(path)
    lines = start_lines(start, MACHINE)
    told = {line.split()[0]: line for line in lines if line.startswith("  lease-")}
    assert told["lease-1"].endswith("stay; silent unless renewed within 20 to 40 s")
    assert told["lease-2"].endswith("end: processes dead")
    assert told["lease-5"].endswith("end in 10 s unless it is activated")
    assert told["lease-7"].endswith("stay silent: its holder may live")
    assert "not visible from here" in told["lease-8"]
    assert lines[-1] == "1 ended request would be remembered, 9 records changed. Nothing was."
    data = json.loads(json.dumps(start_json(start)))
    assert [one["lease_id"] for one in data["leases"] if one["released"]] == sorted(SWEPT)
    # Four leases end and are remembered; one place is dropped.
    assert sorted(data["writes"]) == ["DropLease"] * 4 + ["DropTicket"] + ["PutEnded"] * 4
    assert data["committed_bytes"] == {"before": 45, "after": 24}


def test_what_is_optional_and_who_is_alone_is_told(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "ledger.db")
    alone = Charge(5, optional_host_bytes=2, on_gpu=True, exclusive=True)
    store.commit([PutLease(lease(1, charge=alone, exclusive=True, suspect=True)), PutCounter(50)])
    store.close()
    start = replayed(tmp_path / "ledger.db")
    assert any("active (silent, alone)" in line for line in start_lines(start, MACHINE))
    assert start_json(start)["leases"][0]["charge"] == {
        "host_bytes": 5,
        "devices": {},
        "spilled": {},
        "optional": {"host_bytes": 2, "devices": {}},
        "occupies": ["gpu"],
        "exclusive": True,
        "total_bytes": 5,
    }


def test_records_that_cannot_be_read_end_it_with_what_to_do(path: Path) -> None:
    store = SqliteStore(path)
    store._db.execute("UPDATE leases SET record = '{}' WHERE lease_id = 'lease-3'")
    store.close()
    with pytest.raises(StoreRefusedError, match=r"lease-3.*left as it is"):
        replayed(path)

"""What every store promises (store/interface.py), held against each of them. Another store is a line more in KINDS."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

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
from weighbridge_ledger.store.interface import OBSERVATIONS_KEPT


@dataclass(frozen=True)
class Kind:
    """One implementation."""

    name: str
    open: Callable[[Path], Any]
    """The store that a folder names: the same folder, the same store."""
    fill: Callable[[Any], Callable[[], None]]
    """Takes an open store's room away, and returns what gives it back."""
    lasts: bool = True
    """Whether it outlives its process."""
    spoil: Callable[[Any], None] | None = None
    """Makes one record of an open store unreadable; None: it keeps values, which always can be read."""


def spoil_sqlite(store: SqliteStore) -> None:
    store._db.execute("""UPDATE leases SET record = '{"state": "DANCING"}'""")


def fill_sqlite(store: SqliteStore) -> Callable[[], None]:
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    return lambda: store._db.execute("PRAGMA max_page_count = 1000000")


def fill_memory(store: MemoryStore) -> Callable[[], None]:
    store.fail_with = "full"
    return lambda: setattr(store, "fail_with", None)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("memory", lambda folder: MemoryStore(), fill_memory, lasts=False),
        Kind("sqlite", lambda folder: SqliteStore(folder / "ledger.db"), fill_sqlite, spoil=spoil_sqlite),
    )
}

LEASE = Lease(
    lease_id="l1",
    request_id="r1",
    fence=7,
    sequence=6,
    state=LeaseState.ACTIVE,
    claim=Claim(2**40, (DeviceWant("GPU-é", 3, 4),), 5, "2", cpu_only=True),
    holder=ProcessIdentity(1, 2, "boot", "pid:[1]"),
    charge=Charge(2**40, (("GPU-é", 2),), (("GPU-é", 1),), 4, (("GPU-é", 1),), on_gpu=True, exclusive=True),
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
    exclusive=True,
    requested_wall=1.25,
    granted_wall=2.5,
    activated_wall=3.75,
    loaded_wall=8.5,
    load_s=4.75,
)
TICKET = Ticket("r2", Claim(3), 5, 1.5, 4)
ENDED = Ended("l0", "r0", b"\x01" * 32, 10.0)


def observed(number: int, lease_id: str = "", **changes: Any) -> PutObservation:
    one = Observation("digest", "build", "shape", 1, 2, 3, 4.5, 5.5, "node", lease_id, number, 6)
    return PutObservation(replace(one, **changes))


def kept(store: Store) -> list[int]:
    return [one.number for one in store.observations("", "", "", None, 100)]


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each implementation."""
    return request.param


@pytest.fixture(params=[kind for kind in KINDS.values() if kind.lasts], ids=lambda kind: kind.name)
def lasting(request: pytest.FixtureRequest) -> Kind:
    """Each that outlives its process."""
    return request.param


@pytest.fixture
def store(kind: Kind, tmp_path: Path) -> Iterator[Store]:
    """An empty one of each."""
    made = kind.open(tmp_path)
    yield made
    made.close()


# -- records -------------------------------------------------------------------------------------------------------


def test_an_empty_store_holds_nothing(store: Store) -> None:
    assert store.load() == Snapshot()
    assert store.last_observation() == 0


@pytest.mark.parametrize("record", [LEASE, LEASE.claim, LEASE.charge, LEASE.purpose, observed(1, "l1").observation])
def test_the_examples_set_every_field(record: Any) -> None:
    """A field at its default would come back by itself, written or not."""
    defaults = {field.name: field.default for field in fields(record)}
    assert [name for name, default in defaults.items() if getattr(record, name) == default] == []


def test_every_field_comes_back(store: Store) -> None:
    store.commit([PutLease(LEASE), PutTicket(TICKET), PutEnded(ENDED), PutCounter(9), PutWishes(2**35, False)])
    assert store.load() == Snapshot((LEASE,), (TICKET,), (ENDED,), 9, 2**35, False)
    store.commit([observed(1, "l1")])
    assert store.observations("", "", "", None, 9) == [observed(1, "l1").observation]


def test_the_last_write_of_a_record_counts(store: Store) -> None:
    later = replace(LEASE, state=LeaseState.VACATING)
    store.commit([PutLease(LEASE), PutLease(later), PutTicket(TICKET), DropTicket("r2")])
    assert store.load() == Snapshot(leases=(later,))
    store.commit([DropLease("l1"), PutEnded(ENDED)])
    store.commit([DropEnded("l0")])
    assert store.load() == Snapshot()


def test_a_batch_may_be_larger_than_a_statement(store: Store) -> None:
    many = [replace(LEASE, lease_id=f"lease-{number}", fence=number) for number in range(1, 1000)]
    store.commit([PutLease(lease) for lease in many])
    assert sorted(store.load().leases, key=lambda lease: lease.fence) == many
    store.commit([DropLease(lease.lease_id) for lease in many[:-1]])
    assert store.load().leases == (many[-1],)


def test_a_batch_whose_answer_was_lost_can_be_sent_again(store: Store) -> None:
    batch = [PutLease(LEASE), PutTicket(TICKET), DropTicket("r1"), PutEnded(ENDED), PutCounter(9), PutWishes(5, True)]
    store.commit([*batch, observed(1, "l1"), observed(2, "l2", peak_bytes=8)])
    once = store.load(), store.observations("", "", "", None, 9)
    store.commit([*batch, observed(1, "l1"), observed(2, "l2", peak_bytes=8)])
    assert (store.load(), store.observations("", "", "", None, 9)) == once


def test_dropping_what_is_not_there_is_harmless(store: Store) -> None:
    store.commit([DropLease("x"), DropTicket("x"), DropEnded("x")])
    assert store.load() == Snapshot()


def test_the_counter_never_goes_back(store: Store) -> None:
    """A batch that could not be written is sent again after a later one: fences would be given out twice."""
    store.commit([PutCounter(2048)])
    store.commit([PutCounter(1024)])
    assert store.load().counter == 2048


def test_wishes_can_be_taken_back(store: Store) -> None:
    store.commit([PutWishes(5, True)])
    store.commit([PutWishes(None, None)])
    assert (store.load().limit_bytes, store.load().allow_spill) == (None, None)


# -- all or nothing ------------------------------------------------------------------------------------------------


def many_tickets() -> list[PutTicket]:
    return [PutTicket(Ticket(f"r{number}", Claim(3), number, 1.5, 4)) for number in range(2000)]


def test_a_batch_that_does_not_fit_changes_nothing_and_fits_later(kind: Kind, store: Any) -> None:
    store.commit([PutLease(LEASE)])
    make_room = kind.fill(store)
    with pytest.raises(StoreError, match="full"):
        store.commit([DropLease("l1"), *many_tickets()])
    assert store.load() == Snapshot(leases=(LEASE,))
    make_room()
    store.commit(many_tickets())
    assert len(store.load().tickets) == 2000


def test_a_write_that_is_none_takes_its_batch_with_it_and_not_the_store(lasting: Kind, tmp_path: Path) -> None:
    store = lasting.open(tmp_path)
    with pytest.raises((StoreError, TypeError)):
        store.commit([PutLease(LEASE), PutTicket(replace(TICKET, first_wall=object()))])
    assert store.load() == Snapshot()
    store.commit([PutLease(LEASE), PutTicket(TICKET)])
    assert store.load() == Snapshot((LEASE,), (TICKET,))
    store.close()


def test_a_probe_finds_out_whether_there_is_room_and_leaves_nothing(kind: Kind, store: Any) -> None:
    store.commit([PutLease(LEASE)])
    make_room = kind.fill(store)
    with pytest.raises(StoreError):
        store.probe()
    make_room()
    store.probe()
    assert store.load() == Snapshot(leases=(LEASE,))


# -- this and the next ledger --------------------------------------------------------------------------------------


def test_no_epoch_comes_twice_not_even_from_another_store(kind: Kind, store: Store, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = kind.open(tmp_path / "other")
    epochs = [one.begin_epoch() for one in (store, store, other, store, other)]
    assert len(set(epochs)) == 5
    other.close()


def test_closing_twice_is_closing_once(store: Store) -> None:
    store.close()
    store.close()


def test_what_was_committed_is_there_when_it_is_opened_again(lasting: Kind, tmp_path: Path) -> None:
    first = lasting.open(tmp_path)
    epoch = first.begin_epoch()
    first.commit([PutLease(LEASE), PutCounter(7), observed(1, "l1")])
    first.close()
    second = lasting.open(tmp_path)
    assert second.load() == Snapshot(leases=(LEASE,), counter=7)
    assert second.observations("", "", "", None, 10) == [observed(1, "l1").observation]
    assert second.last_observation() == 1
    assert second.begin_epoch() != epoch
    second.close()


def test_what_was_committed_survives_a_kill_and_what_was_not_leaves_no_trace(lasting: Kind, tmp_path: Path) -> None:
    """Killed while a batch of 2000 is being written, again and again: it is there whole, or not at all."""
    committed: set[str] = set()
    epochs: set[str] = set()
    for run in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", f"import runpy; runpy.run_path({__file__!r})['write_until_killed']()"],
            env={**os.environ, "STORE": lasting.name, "FOLDER": str(tmp_path), "RUN": str(run)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        epochs.add(child.stdout.readline().strip())
        committed |= {child.stdout.readline().strip() for _ in range(run + 1)}
        child.send_signal(signal.SIGKILL)
        told = child.stdout.read().split()  # what it had committed before the signal reached it
        child.wait()
        committed |= set(told)
        store = lasting.open(tmp_path)
        leases, tickets = {lease.lease_id for lease in store.load().leases}, len(store.load().tickets)
        store.close()
        # Told is committed. One more may be committed and untold: that is what a lost answer is.
        assert committed <= leases
        assert len(leases - committed) <= 1
        assert tickets == 2000 * len(leases)
        committed = leases
    assert len(epochs) == 4


def write_until_killed() -> None:
    """The child of the test above: tells its epoch, then each lease once it is committed with its 2000 tickets."""
    run = os.environ["RUN"]
    store = KINDS[os.environ["STORE"]].open(Path(os.environ["FOLDER"]))
    print(store.begin_epoch(), flush=True)
    for number in range(10_000):
        name = f"{run}-{number}"
        tickets = [PutTicket(Ticket(f"{name}-{index}", Claim(3), 1, 1.5, 4)) for index in range(2000)]
        store.commit([PutLease(replace(LEASE, lease_id=name)), *tickets])
        print(name, flush=True)


def test_a_second_ledger_is_refused_while_the_first_has_it(lasting: Kind, tmp_path: Path) -> None:
    first = lasting.open(tmp_path)
    first.commit([PutLease(LEASE)])
    with pytest.raises(StoreRefusedError, match="stop it"):
        lasting.open(tmp_path)
    first.commit([PutCounter(7)])
    first.close()
    second = lasting.open(tmp_path)
    assert second.load() == Snapshot(leases=(LEASE,), counter=7)
    second.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.spoil], ids=lambda kind: kind.name)
def test_a_record_that_cannot_be_read_is_refused_and_stays(kind: Kind, tmp_path: Path) -> None:
    store = kind.open(tmp_path)
    store.commit([PutLease(LEASE), PutLease(replace(LEASE, lease_id="l2"))])
    assert kind.spoil is not None
    kind.spoil(store)
    for _ in range(2):
        with pytest.raises(StoreRefusedError, match=r"cannot be read.*left as it is"):
            store.load()
    store.close()


# -- observations --------------------------------------------------------------------------------------------------


def test_observations_are_found_latest_first(store: Store) -> None:
    ones = [observed(number, model_digest="d1" if number % 2 else "d2") for number in range(1, 8)]
    store.commit(ones)
    assert [one.number for one in store.observations("d1", "", "", None, 2)] == [7, 5]
    assert [one.number for one in store.observations("d1", "build", "shape", 5, 10)] == [3, 1]
    assert store.observations("d1", "other", "", None, 10) == []
    assert store.observations("d1", "", "other", None, 10) == []
    assert store.last_observation() == 7
    assert store.observations("d2", "", "", None, 1) == [ones[5].observation]


def test_paging_finds_each_once_whatever_is_recorded_meanwhile(store: Store) -> None:
    store.commit([observed(number) for number in range(1, 8)])
    found, before = [], None
    while page := store.observations("digest", "", "", before, 3):
        found += [one.number for one in page]
        before = page[-1].number
        store.commit([observed(store.last_observation() + 1)])
    assert found == [7, 6, 5, 4, 3, 2, 1]


def test_a_lease_has_one_observation_and_the_later_word_counts(store: Store) -> None:
    store.commit([observed(1, "l1", peak_bytes=10), observed(2, "l2"), observed(3, ""), observed(4, "")])
    store.commit([observed(5, "l1", peak_bytes=11)])
    assert kept(store) == [5, 4, 3, 2]
    assert store.observations("", "", "", None, 1)[0].peak_bytes == 11


def test_the_ledgers_own_word_gives_way_to_its_holders(store: Store) -> None:
    store.commit([observed(1, "l1", peak_bytes=10)])
    ours = replace(observed(2, "l1", peak_bytes=9), unless_recorded=True)
    store.commit([ours, replace(observed(3, "l2"), unless_recorded=True)])
    assert kept(store) == [3, 1]
    store.commit([observed(4, "l2", peak_bytes=12)])
    assert kept(store) == [4, 1]


def test_observations_are_bounded(store: Store) -> None:
    store.commit([observed(number) for number in (1, 2, 3)])
    store.commit([observed(OBSERVATIONS_KEPT + 2)])
    assert kept(store) == [OBSERVATIONS_KEPT + 2, 3]

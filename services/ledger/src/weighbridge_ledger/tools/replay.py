"""What a ledger would make of a database: the book rebuilt by its own rules, in memory, and nothing written.

The store keeps the book as it stands and no history of it, so what is played again is the start: the records are taken
up, the dead are looked for, and what the book decides then is told instead of committed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weighbridge_common.processes import ProcessIdentity

from weighbridge_ledger.book import Book, Ceilings, EventKind, Home, Lease, LeaseState, Moment, Policy, Snapshot
from weighbridge_ledger.book.book import Committed
from weighbridge_ledger.book.records import Ticket, Write
from weighbridge_ledger.service.sweep import IsAlive, dead_among
from weighbridge_ledger.store.contents import read_snapshot, refuse_unreadable
from weighbridge_ledger.store.image import image
from weighbridge_ledger.tools.check import epoch_of


@dataclass(frozen=True, slots=True)
class Fate:
    """What a start would do with one lease."""

    lease: Lease
    """As it is stored."""
    released: str
    """Why it would end; empty: it would go on."""
    within_s: tuple[float, float]
    """When its holder must be heard of: between so many seconds after the start, spread over them."""
    holder_alive: bool | None
    """None: cannot be known from here."""
    engines_alive: tuple[bool | None, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """What a start now would do."""

    path: Path
    schema: int
    epoch: str
    """Of the last run."""
    fates: tuple[Fate, ...]
    """In the order of asking."""
    places: tuple[Ticket, ...]
    """Places of claims that waited: kept for a minute, and given to nobody who does not ask again."""
    ended: int
    """Ended requests that are remembered."""
    limit_bytes: int | None
    ceilings: Ceilings
    before: Committed
    after: Committed
    writes: tuple[Write, ...]
    """What it would commit, beside the new epoch."""


def read_book(path: Path) -> tuple[Snapshot, int, str]:
    """What a database holds: (the book, its schema, the last epoch).

    Raises:
        StoreRefusedError: it cannot be read.
    """
    with image(path) as (db, schema):
        snapshot, unreadable = read_snapshot(db)
        refuse_unreadable(path, unreadable)
        return snapshot, schema, epoch_of(db)


def replay(
    path: Path,
    ceilings_under: Callable[[int | None, bool | None], Ceilings],
    policy: Policy,
    home: Home,
    now: Moment,
    is_alive: IsAlive,
) -> Start:
    """Rebuild the book of a database and start it, all but the writing.

    Args:
        path: the database, or a backup of one; a ledger may be using it.
        ceilings_under: the machine's ceilings under the person's limit and wish to spill.
        policy: the numbers of the rules.
        home: the kernel whose processes can be seen.
        now: the moment of the start.
        is_alive: whether a process lives.

    Raises:
        StoreRefusedError: it cannot be read.
    """
    snapshot, schema, epoch = read_book(path)
    ceilings = ceilings_under(snapshot.limit_bytes, snapshot.allow_spill)
    # Terms are extended by 1 to 2 of them, spread at random: here the shortest, and the longest is told beside it.
    book = Book(ceilings, policy, home, new_id=_nothing_new, new_secret=_nothing_new, spread=lambda: 0.0, now=now)
    book.restore(snapshot, now)
    before = book.committed()
    kept = {view.lease.lease_id: view for view in book.charged()}
    dead = dead_among(book.processes_to_watch(), is_alive)
    book.processes_died(dead, now)
    drained = book.drain()
    causes = {
        event.lease.lease_id: event.cause.value
        for event in drained.events
        if event.kind is EventKind.RELEASED and event.lease is not None and event.cause is not None
    }
    fates = []
    for lease in sorted(snapshot.leases, key=lambda lease: lease.sequence):
        deadline = kept[lease.lease_id].deadline
        least = 0.0 if deadline is None else deadline - now.monotonic
        most = least if lease.state is LeaseState.GRANTED else 2 * least
        fates.append(
            Fate(
                lease,
                causes.get(lease.lease_id, ""),
                (least, most),
                _alive(lease.holder, is_alive),
                tuple(_alive(engine, is_alive) for engine in lease.engines),
            )
        )
    dropped = {lease.request_id for lease in snapshot.leases}
    places = sorted((one for one in snapshot.tickets if one.request_id not in dropped), key=lambda one: one.sequence)
    return Start(
        path,
        schema,
        epoch,
        tuple(fates),
        tuple(places),
        len(snapshot.ended),
        snapshot.limit_bytes,
        ceilings,
        before,
        book.committed(),
        drained.writes,
    )


def _alive(process: ProcessIdentity, is_alive: IsAlive) -> bool | None:
    try:
        return is_alive(process)
    except OSError:
        return None


def _nothing_new() -> str:
    raise AssertionError("a start grants nothing")

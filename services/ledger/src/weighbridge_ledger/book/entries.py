"""What the book knows about a lease beyond its committed record: all of it may be lost in a crash."""

from dataclasses import dataclass, field

from weighbridge_ledger.book.records import Ended, Ticket
from weighbridge_ledger.book.states import Lease, Observed


@dataclass(slots=True)
class Entry:
    """One charged lease in memory."""

    lease: Lease
    deadline: float
    """GRANTED: when it is freed unless activated. Else: when it turns SUSPECT unless renewed (rule 10)."""
    secret: str | None = None
    """Kept in memory so that a retry by the same process gets the same one (rule 8); a restart forgets it."""
    stream: int = 0
    """The newest Admit stream: while GRANTED, only its end frees the lease (rules 6, 9)."""
    uses: dict[str, None] = field(default_factory=dict)
    last_use_wall: float = 0.0
    keep_alives: int = 0
    """KeepAlive streams open for it: shown as connected, decides nothing (rule 10)."""
    observed: Observed | None = None
    vacate_deadline: float | None = None
    overdue: bool = False
    timer: float | None = None
    """When the book looks at it next; another entry in the heap is stale."""


@dataclass(frozen=True, slots=True)
class Place:
    """A kept place in the order. Both moments are on the monotonic clock: a wall clock that is set moves nobody."""

    ticket: Ticket
    since: float
    """Since when it waits."""
    expires: float


@dataclass(frozen=True, slots=True)
class Remembered:
    """An ended lease, until `expires` on the monotonic clock."""

    ended: Ended
    expires: float


@dataclass(frozen=True, slots=True)
class Released:
    """A lease that ended, for those who ask."""

    lease: Lease
    cause: str
    wall: float

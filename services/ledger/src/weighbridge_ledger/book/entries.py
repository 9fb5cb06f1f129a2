"""What the book knows about a lease beyond its committed record: all of it may be lost in a crash."""

from dataclasses import dataclass, field

from weighbridge_common.immutable import immutable

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
    idle_since: float = 0.0
    """Since when nobody uses it, on the monotonic clock."""
    heard: bool = True
    """False: taken up after a restart, and its holder has not been heard of yet. Its uses were lost, so it counts as in
    use until then."""
    loading_since: float | None = None
    """Since when its engine may be loading: from the grant until load complete or the first use."""
    resident_until: float = 0.0
    """The end of its minimum residency (rule 22)."""
    replaced_by: str = ""
    """The claim that waits to take its place: it has lost its pin (rule 24)."""
    asked_by: str = ""
    """The claim for which it was asked to vacate; empty: it was not, or was released."""
    shrink: "Shrink | None" = None
    """Set: optional bytes were asked back (rule 4)."""
    shrink_asked: bool = False
    """They were asked back once; whoever did not give them then is not asked again until its size has changed."""
    keep_alives: int = 0
    """KeepAlive streams open for it: shown as connected, decides nothing (rule 10)."""
    observed: Observed | None = None
    vacate_deadline: float | None = None
    overdue: bool = False
    stuck: bool = False
    """Nobody can be asked for its bytes: it is pinned, suspect or overdue (rule 17)."""
    timer: float | None = None
    """When the book looks at it next; another entry in the heap is stale."""


@immutable
class Shrink:
    """Optional bytes that were asked back, all that the lease has, and until when they are hoped for."""

    optional_bytes: int
    deadline: float


@immutable
class Place:
    """A kept place in the order. Both moments are on the monotonic clock: a wall clock that is set moves nobody."""

    ticket: Ticket
    since: float
    """Since when it waits."""
    expires: float


@immutable
class Remembered:
    """An ended lease, until `expires` on the monotonic clock."""

    ended: Ended
    expires: float


@immutable
class Released:
    """A lease that ended, for those who ask."""

    lease: Lease
    cause: str
    wall: float

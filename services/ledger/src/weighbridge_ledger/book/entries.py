"""What the book knows about a lease beyond its committed record: all of it may be lost in a crash."""

from dataclasses import dataclass, field

from weighbridge_ledger.book.states import Lease, Observed


@dataclass(slots=True)
class Entry:
    """One charged lease in memory."""

    lease: Lease
    deadline: float
    """GRANTED: when it is freed unless activated. Else: when it turns SUSPECT unless renewed (rule 10)."""
    secret: str | None = None
    """Kept in memory so that a retry by the same process gets the same one (rule 8); a restart forgets it."""
    previous_digest: bytes = b""
    """The secret before the last attach: accepted by AttachLease alone, when the answer with the new one got lost."""
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
    """When the book looks at it next; an older entry in the heap is stale."""


@dataclass(frozen=True, slots=True)
class Released:
    """A lease that ended, for those who ask."""

    lease: Lease
    cause: str
    wall: float

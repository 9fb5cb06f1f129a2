"""What the book tells: one event per transition, in the order in which they happened."""

import enum

from weighbridge_common.immutable import immutable

from weighbridge_ledger.book.refusals import Reason
from weighbridge_ledger.book.states import Ceilings, Lease, Observed


class EventKind(enum.StrEnum):
    """What happened to a lease, or to the machine."""

    QUEUED = "QUEUED"
    RECLAIMING = "RECLAIMING"
    GRANTED = "GRANTED"
    ACTIVATED = "ACTIVATED"
    LOADED = "LOADED"
    SUSPECTED = "SUSPECTED"
    ATTACHED = "ATTACHED"
    RESIZED = "RESIZED"
    SHRINK_ASKED = "SHRINK_ASKED"
    VACATING = "VACATING"
    OVERDUE = "OVERDUE"
    RELEASED = "RELEASED"
    CEILINGS_CHANGED = "CEILINGS_CHANGED"


class ReleaseCause(enum.StrEnum):
    """Why a lease ended."""

    HOLDER = "HOLDER"
    """Its holder gave it back."""
    CANCELLED = "CANCELLED"
    """Its Admit call ended before it was activated."""
    NOT_ACTIVATED = "NOT_ACTIVATED"
    """Granted, and activate_by passed (rule 6)."""
    PROCESSES_DEAD = "PROCESSES_DEAD"
    """Every process of it was proven dead (rule 12)."""
    FENCED = "FENCED"
    """Its foreign holder was silent for term + grace and has killed its engine by its own rule (rule 12)."""
    WAITED_TOO_LONG = "WAITED_TOO_LONG"
    """It waited until its deadline."""
    EXCEEDS_CAPACITY = "EXCEEDS_CAPACITY"
    """While it waited, the ceilings fell below it."""
    WOULD_WAIT_FOR_USE = "WOULD_WAIT_FOR_USE"
    """Its caller keeps a lease busy meanwhile, and it would have waited for one that is in use (rule 25)."""
    NOT_STORED = "NOT_STORED"
    """The grant could not be committed, so nobody was told."""
    OPERATOR = "OPERATOR"
    """An operator said that its processes are gone (rule 12)."""


REFUSAL_OF: dict[ReleaseCause, Reason] = {
    ReleaseCause.NOT_ACTIVATED: Reason.GRANT_NOT_ACTIVATED,
    ReleaseCause.WAITED_TOO_LONG: Reason.ADMISSION_TIMED_OUT,
    ReleaseCause.EXCEEDS_CAPACITY: Reason.CLAIM_EXCEEDS_CAPACITY,
    ReleaseCause.WOULD_WAIT_FOR_USE: Reason.WAIT_WHILE_HOLDING,
    ReleaseCause.NOT_STORED: Reason.STORE_UNAVAILABLE,
}
"""What an Admit stream is told when its lease ends for one of these causes."""


@immutable
class Event:
    """One transition. `lease` is the record after it (with its last charge, when it was released).

    RECLAIMING is told of the claim that waits, with `asked`: the leases that were asked to vacate for it. SHRINK_ASKED
    is told of a holder that was asked for optional bytes back; it changes nothing of the lease. RELEASED is told with
    what its holder last `observed`, if it ever said.
    """

    kind: EventKind
    wall: float
    lease: Lease | None = None
    cause: ReleaseCause | None = None
    ceilings: Ceilings | None = None
    asked: tuple[str, ...] = ()
    observed: Observed | None = None

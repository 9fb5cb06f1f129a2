"""What is committed, and what a restart reads back. The store turns these into rows and knows nothing else."""

from weighbridge_common.immutable import immutable

from weighbridge_ledger.book.states import Claim, Lease


@immutable
class Ticket:
    """A place in the order that outlives its broken call for a minute (rule 14).

    Without it, under a restart every 45 s, a big claim got 34 grants; with it 234 (simulation).
    """

    request_id: str
    claim: Claim
    sequence: int
    first_wall: float
    passes: int


@immutable
class Ended:
    """A lease that was activated and has ended: a late Admit of its request must not be granted again (rule 9), and a
    repeated release must be answered like the first (rule 7)."""

    lease_id: str
    request_id: str
    secret_digest: bytes
    ended_wall: float


@immutable
class PutLease:
    """Insert or replace one lease."""

    lease: Lease


@immutable
class DropLease:
    """Forget one lease."""

    lease_id: str


@immutable
class PutTicket:
    """Insert or replace one ticket."""

    ticket: Ticket


@immutable
class DropTicket:
    """Forget one ticket."""

    request_id: str


@immutable
class PutEnded:
    """Remember one ended request."""

    ended: Ended


@immutable
class DropEnded:
    """Forget one ended lease."""

    lease_id: str


@immutable
class PutCounter:
    """No number above this was ever given out as fence or sequence."""

    counter: int


@immutable
class PutWishes:
    """What the person wants of the machine. None: automatic."""

    limit_bytes: int | None
    allow_spill: bool | None


Write = PutLease | DropLease | PutTicket | DropTicket | PutEnded | DropEnded | PutCounter | PutWishes


@immutable
class Snapshot:
    """Everything that was committed."""

    leases: tuple[Lease, ...] = ()
    tickets: tuple[Ticket, ...] = ()
    ended: tuple[Ended, ...] = ()
    counter: int = 0
    limit_bytes: int | None = None
    allow_spill: bool | None = None

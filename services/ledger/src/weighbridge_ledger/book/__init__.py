"""The admission book: who holds which bytes of one machine, as a state machine without clock, disk, socket or gRPC.

Read `states` for the words, `charging` for what a claim costs (rule 2), `passing` for who may overtake whom (rule 16),
and `book` for the verbs. Rule numbers in comments are those of docs/ledger.md.
"""

from weighbridge_ledger.book.book import Book
from weighbridge_ledger.book.events import Event, EventKind, ReleaseCause
from weighbridge_ledger.book.policy import Policy
from weighbridge_ledger.book.records import Snapshot, Write
from weighbridge_ledger.book.refusals import Reason, Refused
from weighbridge_ledger.book.states import (
    GPU,
    HOST,
    Ask,
    Ceilings,
    Charge,
    Claim,
    Credential,
    DeviceWant,
    External,
    Hold,
    Home,
    Lease,
    LeaseState,
    Moment,
    Observed,
    Purpose,
    Shortage,
)

__all__ = [
    "GPU",
    "HOST",
    "Ask",
    "Book",
    "Ceilings",
    "Charge",
    "Claim",
    "Credential",
    "DeviceWant",
    "Event",
    "EventKind",
    "External",
    "Hold",
    "Home",
    "Lease",
    "LeaseState",
    "Moment",
    "Observed",
    "Policy",
    "Purpose",
    "Reason",
    "Refused",
    "ReleaseCause",
    "Shortage",
    "Snapshot",
    "Write",
]

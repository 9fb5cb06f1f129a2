"""Why a lease is vacating, in words: for the claim that waits for its memory, or because it was released (rule 21)."""

import grpc
from weighbridge_common.sizes import format_gib
from weighbridge_proto.memory.v1 import failure_pb2

from weighbridge_ledger.book import Book, Lease, LeaseState, Reason
from weighbridge_ledger.service.naming import name_of

_CODE = grpc.StatusCode.FAILED_PRECONDITION.value[0]
_DO = "Finish what is in flight, begin nothing new, end the engine and release the lease."
_CHARGED = "Its memory is charged until its processes are gone."


class Vacating:
    """Knows for whom leases were asked to vacate.

    Args:
        book: as it was restored: of leases that are vacating in it nobody knows why any more, for the claims that
            waited when the ledger was stopped are gone.
    """

    def __init__(self, book: Book) -> None:
        self._book = book
        self._since_before = frozenset(
            view.lease.lease_id for view in book.charged() if view.lease.state is LeaseState.VACATING
        )

    def request(self, lease_id: str) -> failure_pb2.Failure:
        """What its holder is told: for whom, and what to do."""
        asked_by = self._asked_by(lease_id)
        return _failure(f"{self._wish(asked_by)} {_DO}" if asked_by else _DO, asked_by)

    def end_reason(self, lease: Lease) -> failure_pb2.Failure:
        """What everybody is told of a lease that is vacating, or was when `lease` was recorded."""
        asked_by = self._asked_by(lease.lease_id)
        if asked_by is None:
            text = "It was released, or asked to make room."
        elif asked_by:
            text = f"It was asked to make room: {self._wish(asked_by)}"
        else:
            text = "It was released."
        return _failure(f"{text} {_CHARGED}", asked_by)

    def _asked_by(self, lease_id: str) -> str | None:
        """The claim that it was asked for; empty: it was released. None: that is not known any more."""
        view = self._book.view(lease_id)
        if view is None or view.lease.state is not LeaseState.VACATING:
            return None
        return view.asked_by or (None if lease_id in self._since_before else "")

    def _wish(self, lease_id: str) -> str:
        """Who waits for the memory, or waited: it is to come back even when the claim was served or has ended."""
        view = self._book.view(lease_id)
        if view is None:
            return "A claim waited for its memory."
        verb = "waits" if view.lease.state is LeaseState.QUEUED else "waited"
        return f"{name_of(view.lease)} ({format_gib(view.lease.claim.total_bytes)}) {verb} for its memory."


def _failure(message: str, asked_by: str | None) -> failure_pb2.Failure:
    metadata = {"waiting_lease_id": asked_by} if asked_by else {}
    return failure_pb2.Failure(code=_CODE, reason=Reason.LEASE_VACATING.value, message=message, metadata=metadata)

"""What outlives a lease: kept places in the order, and requests that have ended (rules 7, 9, 14). All of it bounded."""

from collections import OrderedDict

from weighbridge_ledger.book.entries import Place, Remembered
from weighbridge_ledger.book.policy import Policy
from weighbridge_ledger.book.records import DropEnded, DropTicket, Ended, PutEnded, PutTicket, Ticket, Write
from weighbridge_ledger.book.states import Lease, Moment


class Memories:
    """Places and endings, oldest first.

    Args:
        policy: how many are kept, and for how long.
        writes: where what must be committed is left.
    """

    def __init__(self, policy: Policy, writes: list[Write]) -> None:
        self._policy = policy
        self._writes = writes
        self._places: OrderedDict[str, Place] = OrderedDict()
        self._ended: OrderedDict[str, Remembered] = OrderedDict()
        self._ended_requests: dict[str, str] = {}

    def place(self, request_id: str) -> Place | None:
        """The kept place of a request."""
        return self._places.get(request_id) if request_id else None

    def take_place(self, request_id: str) -> None:
        """Its request waits again: the place is in the queue. Its row stays until it is granted."""
        del self._places[request_id]

    def keep_place(self, ticket: Ticket, since: float, now: Moment) -> None:
        """Keep a place for a retry; nobody can take up the place of a claim without a name."""
        if not ticket.request_id:
            return
        self._places[ticket.request_id] = Place(ticket, since, now.monotonic + self._policy.ticket_s)
        self._places.move_to_end(ticket.request_id)
        self._writes.append(PutTicket(ticket))
        if len(self._places) > self._policy.tickets_kept:
            self._give_place_up(next(iter(self._places)))

    def restore_place(self, ticket: Ticket, since: float, expires: float) -> None:
        """Take up a place that was committed before a restart."""
        self._places[ticket.request_id] = Place(ticket, since, expires)

    def ended(self, lease_id: str) -> Ended | None:
        """A lease that was activated and has ended."""
        remembered = self._ended.get(lease_id)
        return None if remembered is None else remembered.ended

    def has_ended(self, request_id: str) -> bool:
        """Whether a request was granted, activated and has ended."""
        return request_id in self._ended_requests

    def remember_ended(self, lease: Lease, now: Moment) -> None:
        """A lease that was activated has ended."""
        ended = Ended(lease.lease_id, lease.request_id, lease.secret_digest, now.wall)
        self.restore_ended(ended, now)
        self._writes.append(PutEnded(ended))
        if len(self._ended) > self._policy.ended_kept:
            self._forget(next(iter(self._ended)))

    def restore_ended(self, ended: Ended, now: Moment) -> None:
        """Take up an ending, also one that was committed before a restart."""
        self._ended[ended.lease_id] = Remembered(ended, now.monotonic + self._policy.ended_s)
        if ended.request_id:
            self._ended_requests[ended.request_id] = ended.lease_id

    def forget_what_is_old(self, now: Moment) -> None:
        """Let time act."""
        while self._places and (oldest := next(iter(self._places.values()))).expires <= now.monotonic:
            self._give_place_up(oldest.ticket.request_id)
        while self._ended and next(iter(self._ended.values())).expires <= now.monotonic:
            self._forget(next(iter(self._ended)))

    def _give_place_up(self, request_id: str) -> None:
        del self._places[request_id]
        self._writes.append(DropTicket(request_id))

    def _forget(self, lease_id: str) -> None:
        ended = self._ended.pop(lease_id).ended
        if self._ended_requests.get(ended.request_id) == lease_id:
            del self._ended_requests[ended.request_id]
        self._writes.append(DropEnded(lease_id))

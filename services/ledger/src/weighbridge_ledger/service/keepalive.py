"""The KeepAlive stream: renewals and observations up, requests to vacate or shrink down (rules 4, 10, 12, 21-23)."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import structlog
from weighbridge_common.tasks import cancel_and_wait
from weighbridge_proto.errors import RequestError, resource_exhausted
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

from weighbridge_ledger.book import Event, EventKind, Moment, Reason, Refused, ReleaseCause
from weighbridge_ledger.book.holding import Renewal
from weighbridge_ledger.service import failures, lease_messages, messages, times
from weighbridge_ledger.service.clock import wall_of
from weighbridge_ledger.service.keeper import Keeper
from weighbridge_ledger.service.vacating import Vacating

LEASES_PER_STREAM = 256
"""Leases that one stream may carry: a holder has a handful."""

ANSWERS_BEHIND = 1024
"""Answers waiting to be read by one holder before its stream is ended."""

_PUSHED = frozenset({EventKind.VACATING, EventKind.SHRINK_ASKED, EventKind.RELEASED, EventKind.SUSPECTED})
"""What a holder is told before it asks."""

_log = structlog.get_logger(__name__)


class _Session:
    """One open stream: the leases it has renewed, and what it is to be told."""

    def __init__(self) -> None:
        self.leases: set[str] = set()
        self.asked: set[str] = set()
        """Leases that were asked to vacate on this stream."""
        self.shrinks: dict[str, float] = {}
        """Until when each lease was asked to give optional bytes back, on the monotonic clock."""
        self.answers: asyncio.Queue[pb.KeepAliveResponse | Exception | None] = asyncio.Queue(ANSWERS_BEHIND)

    def offer(self, answer: pb.KeepAliveResponse | Exception | None) -> None:
        if self.answers.full():
            with contextlib.suppress(asyncio.QueueEmpty):
                self.answers.get_nowait()
            answer = resource_exhausted(
                "KEEP_ALIVE_TOO_SLOW", "The answers to renewals are not being read. Open the stream again."
            )
        self.answers.put_nowait(answer)


class KeepAliveDesk:
    """Serves the KeepAlive streams of all holders."""

    def __init__(self, keeper: Keeper, vacating: Vacating) -> None:
        self._keeper = keeper
        self._vacating = vacating
        self._sessions: set[_Session] = set()
        self._stopping = False
        keeper.listen(self.on_events)

    async def serve(self, requests: AsyncIterator[pb.KeepAliveRequest]) -> AsyncGenerator[pb.KeepAliveResponse, None]:
        """Serves one stream until the holder ends it. Losing it only clears `connected` (rule 10).

        Raises:
            RequestError: KEEP_ALIVE_TOO_SLOW, LEDGER_STOPPING.
        """
        if self._stopping:
            raise failures.stopping()
        session = _Session()
        self._sessions.add(session)
        reader = asyncio.create_task(self._read(requests, session))
        try:
            while (answer := await session.answers.get()) is not None:
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            self._sessions.discard(session)
            await cancel_and_wait(reader)
            for lease_id in session.leases:
                self._keeper.book.connected(lease_id, -1)

    def on_events(self, events: Sequence[Event]) -> None:
        """Push what a holder must know before its next renewal."""
        for event in events:
            if event.lease is None or event.kind not in _PUSHED:
                continue
            lease_id = event.lease.lease_id
            for session in [session for session in self._sessions if lease_id in session.leases]:
                self._push(session, lease_id, event)

    def stop(self) -> None:
        """End every stream: the ledger is stopping."""
        self._stopping = True
        for session in self._sessions:
            session.offer(failures.stopping())

    async def _read(self, requests: AsyncIterator[pb.KeepAliveRequest], session: _Session) -> None:
        try:
            async for request in requests:
                await self._renew(request, session)
        except Exception as error:  # it belongs to the stream, which raises it
            session.offer(error)
            return
        session.offer(None)

    async def _renew(self, request: pb.KeepAliveRequest, session: _Session) -> None:
        lease_id = request.lease_id
        observed = messages.observed_of(request.observed) if request.HasField("observed") else None
        try:
            renewal = self._keeper.run(
                lambda book, now: book.renew(lease_id, request.secret, observed, now, request.load_complete)
            )
        except RequestError as error:
            session.offer(pb.KeepAliveResponse(lease_id=lease_id, failure=error.failure.to_message()))
            return
        if lease_id not in session.leases:
            if len(session.leases) >= LEASES_PER_STREAM:
                raise resource_exhausted("TOO_MANY_LEASES", f"One stream renews at most {LEASES_PER_STREAM} leases.")
            session.leases.add(lease_id)
            self._keeper.book.connected(lease_id, +1)
        # A renewal is not committed (rule 5), but a charge that it tells is. A full disk must not make holders believe
        # that they were not renewed: those who fence themselves would end their engines.
        on_disk = await self._keeper.committer.durable() is None
        now = self._keeper.clock()
        session.offer(_renewed(renewal, now, with_charge=on_disk))
        if renewal.out_of_grant is not None:
            _log.warning("lease_out_of_grant", lease_id=lease_id, **renewal.out_of_grant.metadata)
            failure = failures.failure_of(renewal.out_of_grant).to_message()
            session.offer(pb.KeepAliveResponse(lease_id=lease_id, failure=failure))
        if renewal.vacate_deadline is not None:
            self._ask_to_vacate(session, lease_id, renewal.vacate_deadline, now)
        self._ask_to_shrink(session, lease_id, renewal.shrink, now)

    def _push(self, session: _Session, lease_id: str, event: Event) -> None:
        view, now = self._keeper.book.view(lease_id), self._keeper.clock()
        if event.kind is EventKind.VACATING:
            if view is not None and view.vacate_deadline is not None:
                self._ask_to_vacate(session, lease_id, view.vacate_deadline, now)
            return
        if event.kind is EventKind.SHRINK_ASKED:
            self._ask_to_shrink(session, lease_id, None if view is None else view.shrink, now)
            return
        if event.kind is EventKind.RELEASED:
            session.leases.discard(lease_id)
            if event.cause is ReleaseCause.HOLDER:
                return
            refused = Refused(Reason.LEASE_NOT_FOUND, "The lease has ended and its bytes were given away.")
        else:
            refused = Refused(
                Reason.LEASE_SUSPECT, "The lease was silent for longer than its term. Attach to it again."
            )
        failure = failures.failure_of(refused).to_message()
        session.offer(pb.KeepAliveResponse(lease_id=lease_id, failure=failure))

    def _ask_to_vacate(self, session: _Session, lease_id: str, deadline: float, now: Moment) -> None:
        if lease_id in session.asked:
            return
        session.asked.add(lease_id)
        session.offer(
            pb.KeepAliveResponse(
                lease_id=lease_id,
                vacate=pb.VacateRequested(
                    deadline=times.timestamp(wall_of(deadline, now)),
                    reason=self._vacating.request(lease_id),
                ),
            )
        )

    def _ask_to_shrink(self, session: _Session, lease_id: str, shrink: tuple[int, float] | None, now: Moment) -> None:
        """Once for each time that the book asks: a later one has a later deadline."""
        if shrink is None:
            session.shrinks.pop(lease_id, None)
            return
        optional_bytes, deadline = shrink
        if session.shrinks.get(lease_id) == deadline:
            return
        session.shrinks[lease_id] = deadline
        session.offer(
            pb.KeepAliveResponse(
                lease_id=lease_id,
                shrink=pb.ShrinkRequested(
                    optional_bytes=optional_bytes, deadline=times.timestamp(wall_of(deadline, now))
                ),
            )
        )


def _renewed(renewal: Renewal, now: Moment, *, with_charge: bool) -> pb.KeepAliveResponse:
    return pb.KeepAliveResponse(
        lease_id=renewal.lease.lease_id,
        renewed=pb.LeaseRenewed(
            expire_time=times.timestamp(wall_of(renewal.deadline, now)),
            term=times.duration(renewal.lease.term_s),
            charge=lease_messages.charge_message(renewal.lease.charge) if with_charge else None,
        ),
    )

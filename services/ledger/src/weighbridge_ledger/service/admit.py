"""The Admit stream: queued, reclaiming, granted, and open until the lease is activated (rules 5-9, 15, 21)."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from opentelemetry import trace
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

from weighbridge_ledger.book import Event, EventKind, LeaseState, Reason, Refused, ReleaseCause
from weighbridge_ledger.book.states import Ask
from weighbridge_ledger.service import failures, lease_messages, messages, times
from weighbridge_ledger.service.clock import wall_of
from weighbridge_ledger.service.endings import Waited, end_of
from weighbridge_ledger.service.keeper import Keeper

UPDATE_PERIOD_S = 0.25
"""A waiter is told its position at most four times a second (rule 15)."""

RECHECK_PERIOD_S = 1.0
"""What a waiter waits for may change without any event: programs outside the ledger come and go."""


class _Call:
    """One open Admit call, as events reach it."""

    def __init__(self) -> None:
        self.moved = asyncio.Event()
        """Something about it may have changed."""
        self.pressing = asyncio.Event()
        """Holders were asked, it is granted or over: told at once, where other news keeps its distance."""
        self.asked: tuple[str, ...] = ()
        """Who was asked to vacate for it, in the order of asking."""
        self.granted = False
        self.activated = False
        self.waited: Waited | None = None
        """What it waited for when that was last looked at."""
        self.end: Exception | ReleaseCause | None = None

    def press(self) -> None:
        """Something is to be told at once."""
        self.pressing.set()
        self.moved.set()

    def ask(self, victims: Sequence[str]) -> None:
        """Holders were asked to vacate for it."""
        self.asked = tuple(dict.fromkeys((*self.asked, *victims)))
        self.press()

    def finish(self, end: Exception | ReleaseCause) -> None:
        """The call is over; the first reason counts."""
        self.end = self.end or end
        self.press()


class AdmitDesk:
    """Knows which call waits for which lease."""

    def __init__(self, keeper: Keeper, node_id: str) -> None:
        self._keeper = keeper
        self._node_id = node_id
        self._calls: dict[str, _Call] = {}
        self._stopping = False
        keeper.listen(self.on_events)
        keeper.listen_unkept(self._on_unkept)

    async def admit(self, ask: Ask) -> AsyncGenerator[pb.AdmitResponse, None]:
        """Serves one call. However it ends, `stream_ended` runs.

        Raises:
            RequestError: any refusal of the book, STORE_UNAVAILABLE, LEDGER_STOPPING.
        """
        keeper = self._keeper
        keeper.refuse_if_unwritable()
        if self._stopping:
            raise failures.stopping()
        admission = keeper.run(lambda book, now: book.admit(ask, now))
        lease_id = admission.lease.lease_id
        call = self._open(lease_id)
        span = trace.get_current_span()
        span.set_attribute("weighbridge.lease_id", lease_id)
        span.set_attribute("weighbridge.claim.bytes", ask.claim.total_bytes)
        try:
            if admission.lease.state is LeaseState.QUEUED:
                asked = keeper.book.asked_for(lease_id)
                await keeper.settled()
                span.add_event("weighbridge.queued")
                if asked is not None:  # at once, or for an earlier call of the same request
                    call.ask(asked[0])
                async for news in self._wait(lease_id, call, ask):
                    yield news
                granted = self._granted(lease_id)
            else:
                # Made while the disk is at work, told when it is done.
                granted = self._granted(lease_id)
                await keeper.settled()
                self._raise_end(call, ask)
            span.add_event("weighbridge.granted", {"weighbridge.lease.fence": granted.granted.lease.fence})
            yield granted
            while not call.activated and admission.lease.state in (LeaseState.QUEUED, LeaseState.GRANTED):
                self._raise_end(call, ask)
                call.moved.clear()
                await call.moved.wait()
        finally:
            if self._calls.get(lease_id) is call:
                del self._calls[lease_id]
            keeper.run(lambda book, now: book.stream_ended(lease_id, admission.stream, now))

    async def preview(self, ask: Ask) -> pb.AdmitResponse:
        """How the claim would fare (validate_only)."""
        preview = await self._keeper.decide(lambda book, now: book.preview(ask, now))
        return pb.AdmitResponse(preview=messages.preview_message(preview))

    def on_events(self, events: Sequence[Event]) -> None:
        """Hand committed events to the calls they concern."""
        waiting_may_have_moved = False
        for event in events:
            waiting_may_have_moved |= event.kind is not EventKind.SUSPECTED
            call = self._calls.get(event.lease.lease_id) if event.lease is not None else None
            if call is None:
                continue
            if event.kind is EventKind.GRANTED:
                call.granted = True
                call.press()
            elif event.kind is EventKind.RECLAIMING:
                call.ask(event.asked)
            elif event.kind is EventKind.ACTIVATED:
                call.activated = True
            elif event.kind is EventKind.RELEASED and event.cause is not None:
                call.finish(event.cause)
            call.moved.set()
        if waiting_may_have_moved:
            for call in self._calls.values():
                if not call.granted:
                    call.moved.set()

    def stop(self) -> None:
        """End every call that waits: the ledger is stopping."""
        self._stopping = True
        for call in self._calls.values():
            call.finish(failures.stopping())

    def _on_unkept(self, lease_id: str) -> None:
        call = self._calls.get(lease_id)
        if call is not None:
            call.finish(ReleaseCause.NOT_STORED)

    def _open(self, lease_id: str) -> _Call:
        older = self._calls.get(lease_id)
        if older is not None:
            taken_over = Refused(
                Reason.REQUEST_TAKEN_OVER, "A newer call with the same request id has taken this one over."
            )
            older.finish(failures.error_of(taken_over))
        call = self._calls[lease_id] = _Call()
        return call

    async def _wait(self, lease_id: str, call: _Call, ask: Ask) -> AsyncIterator[pb.AdmitResponse]:
        """Position and reasons whenever they change, and who was asked to vacate, until the grant is on disk."""
        clock = asyncio.get_running_loop().time
        last: tuple[object, ...] | None = None
        told: tuple[str, ...] = ()
        update_at = clock()
        while True:
            self._raise_end(call, ask)
            if call.granted:
                return
            call.moved.clear()
            call.pressing.clear()
            if clock() >= update_at:
                # Also when nothing is told: hundreds of waiters that look at every event would starve it.
                update_at = clock() + UPDATE_PERIOD_S
                waiting = self._keeper.book.waiting_for(lease_id)
                if waiting is not None:
                    position, since, reasons = waiting
                    call.waited = Waited(since, reasons)
                    if (position, reasons) != last:
                        last = (position, reasons)
                        yield self._queued(lease_id, position, call.waited)
            if call.asked != told and (reclaiming := self._reclaiming(lease_id, call.asked)) is not None:
                told = call.asked
                yield reclaiming
            await _within(update_at - clock(), call.pressing)
            if not call.pressing.is_set():
                await _within(RECHECK_PERIOD_S, call.moved)

    def _queued(self, lease_id: str, position: int, waited: Waited) -> pb.AdmitResponse:
        return pb.AdmitResponse(
            queued=pb.AdmitQueued(
                lease_id=lease_id,
                position=position,
                reasons=[lease_messages.reason_message(reason) for reason in waited.reasons],
                waited=times.duration(max(0.0, self._keeper.clock().monotonic - waited.since)),
            )
        )

    def _reclaiming(self, lease_id: str, victims: tuple[str, ...]) -> pb.AdmitResponse | None:
        """Who was asked, and until when; None: it no longer waits for them."""
        asked = self._keeper.book.asked_for(lease_id)
        if asked is None:
            return None
        deadline = times.timestamp(wall_of(asked[1], self._keeper.clock()))
        return pb.AdmitResponse(
            reclaiming=pb.AdmitReclaiming(lease_id=lease_id, victim_lease_ids=victims, deadline=deadline)
        )

    def _granted(self, lease_id: str) -> pb.AdmitResponse:
        view, secret = self._keeper.book.view(lease_id), self._keeper.book.secret_of(lease_id)
        if view is None or secret is None or view.deadline is None:
            raise failures.error_of(
                Refused(Reason.LEASE_NOT_FOUND, "The lease ended before it could be told. Ask again.")
            )
        now = self._keeper.clock()
        answer = pb.AdmitResponse()
        lease_messages.write_lease(answer.granted.lease, view, now, self._node_id)
        answer.granted.secret = secret
        times.write_time(answer.granted.activate_before_time, wall_of(view.deadline, now))
        return answer

    def _raise_end(self, call: _Call, ask: Ask) -> None:
        if isinstance(call.end, ReleaseCause):
            raise end_of(call.end, ask, call.waited, self._keeper)
        if call.end is not None:
            raise call.end


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Wait for `event`, at most for `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()

"""The uses of one lease: begun by the ledger's leave, told again after it was away, ended however long that takes."""

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from weighbridge_common.tasks import TaskOwner
from weighbridge_proto.errors import RequestError, RpcFailure
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as ledger_pb
from weighbridge_proto.ledger.v1 import ledger_service_pb2_grpc

from weighbridge_engines.host.clock import Clock
from weighbridge_engines.host.refusals import ATTACH_FIRST, MUST_REST, LeaseEndingError, is_silence
from weighbridge_engines.host.waiting import first_of

LONGEST_REST_S = 600.0
"""A use waits for its device at most this long, as a claim does (admission rule 15)."""

REST_S = 5.0
"""Pause before a use is asked for again, where the ledger names none."""

RETELL_S = (0.1, 1.0)
"""First and longest pause between attempts to tell the end of a use."""

Insist = Callable[[Callable[[str], Awaitable[None]]], Awaitable[None]]
"""Makes a call with the lease's secret, again while the ledger is silent or knows the holder no longer as it is."""


class LeaseUses:
    """What of one lease is in use. Whoever begins a use ends it, whether it was granted or not.

    Args:
        stub: the ledger.
        lease_id: the lease.
        secret: tells its secret as it is now.
        insist: see :data:`Insist`.
        call_timeout_s: deadline of a call that is made once.
        clock: for waiting.
    """

    def __init__(
        self,
        stub: "ledger_service_pb2_grpc.LedgerServiceAsyncStub",
        lease_id: str,
        secret: Callable[[], str],
        insist: Insist,
        call_timeout_s: float,
        clock: Clock,
    ) -> None:
        self._stub = stub
        self._lease_id = lease_id
        self._secret = secret
        self._insist = insist
        self._call_timeout_s = call_timeout_s
        self._clock = clock
        self._begun: set[str] = set()
        """Granted by the ledger, and not ended."""
        self._asked: set[str] = set()
        """Asked for, and not answered: the ledger may count them all the same."""
        self._owed: dict[str, contextvars.Context] = {}
        """Ended, and the ledger has not heard it. With the context of who ended it, whose trace that belongs to."""
        self._telling: asyncio.Task[None] | None = None
        self._tasks = TaskOwner()

    async def begin(self, use_id: str, *unless: "asyncio.Future[Any]") -> AsyncGenerator[RpcFailure, None]:
        """Become busy; ends when the ledger has granted it. Yields the reason whenever the device must rest first.

        Args:
            use_id: the caller's name for the use; asking again under it counts once.
            unless: one of them is done when it is no use to rest any longer.

        Raises:
            LeaseEndingError: the lease takes no new use, or one of ``unless`` is done.
            RequestError: UNAVAILABLE LEDGER_UNREACHABLE, DEVICE_UNHEALTHY after 10 minutes, or another refusal.
        """
        until_s = self._clock.monotonic() + LONGEST_REST_S
        self._asked.add(use_id)
        while True:
            if self._telling is not None:
                # One after the other: uses that follow each other must not look like one that never ends, or a claim
                # that waits for a quiet moment waits for ever.
                await first_of(self._telling, timeout_s=self._call_timeout_s)
            try:
                await self._insist(partial(self._begin, use_id))
                self._asked.discard(use_id)
                self._begun.add(use_id)
                return
            except LeaseEndingError:
                self._asked.discard(use_id)
                raise
            except RequestError as error:
                failure = error.failure
            rest_s = REST_S if failure.retry_after_s is None else failure.retry_after_s
            if failure.reason not in MUST_REST or self._clock.monotonic() + rest_s > until_s:
                raise RequestError.from_failure(failure)
            yield failure
            await self._pause(rest_s, *unless)
            if any(ended.done() for ended in unless):
                raise LeaseEndingError

    def end(self, use_id: str) -> None:
        """Be no longer busy. Told in the background until the ledger has heard it, or the lease is over."""
        if use_id not in self._begun and use_id not in self._asked:
            return
        self._begun.discard(use_id)
        self._asked.discard(use_id)
        self._owe(use_id)

    async def repeat(self) -> None:
        """Tell the ledger of every open use again: one that was restarted has forgotten them, and takes a holder
        without uses for idle. Each is told once: a ledger that is silent now is attached to, and told, again."""
        await asyncio.gather(*(self._repeat(use_id) for use_id in list(self._begun)))

    async def aclose(self) -> None:
        """The lease is over: nothing is told any more."""
        await self._tasks.aclose()

    async def _begin(self, use_id: str, secret: str) -> None:
        await self._stub.BeginUse(
            ledger_pb.BeginUseRequest(lease_id=self._lease_id, secret=secret, use_id=use_id),
            timeout=self._call_timeout_s,
        )

    async def _repeat(self, use_id: str, after_s: float = 0.0) -> None:
        if after_s:
            await self._clock.sleep(after_s)
            if use_id not in self._begun:
                return
        try:
            await self._begin(use_id, self._secret())
        except grpc.RpcError as error:
            failure = RpcFailure.from_rpc_error(error)
            if failure.reason in MUST_REST:
                rest_s = REST_S if failure.retry_after_s is None else failure.retry_after_s
                self._tasks.start(self._repeat(use_id, rest_s), f"repeat-use-{use_id}")
            # Refused as vacating it is none the worse: what is in flight may be finished.
        if use_id not in self._begun:
            self._owe(use_id)  # ended meanwhile; the ledger may have heard that first, and this just now

    def _owe(self, use_id: str) -> None:
        self._owed[use_id] = contextvars.copy_context()
        if self._telling is None or self._telling.done():
            telling = self._tell_ends()
            self._telling = contextvars.Context().run(self._tasks.start, telling, f"end-uses-{self._lease_id}")

    async def _tell_ends(self) -> None:
        wait_s = RETELL_S[0]
        while self._owed:
            use_id, context = next(iter(self._owed.items()))
            failure = await asyncio.create_task(self._end(use_id), context=context)
            if failure is not None and (is_silence(failure) or failure.reason in ATTACH_FIRST):
                await self._clock.sleep(wait_s)
                wait_s = min(2 * wait_s, RETELL_S[1])
                continue
            wait_s = RETELL_S[0]
            if self._owed.get(use_id) is context:
                del self._owed[use_id]

    async def _end(self, use_id: str) -> RpcFailure | None:
        try:
            await self._stub.EndUse(
                ledger_pb.EndUseRequest(lease_id=self._lease_id, secret=self._secret(), use_id=use_id),
                timeout=self._call_timeout_s,
            )
        except grpc.RpcError as error:
            return RpcFailure.from_rpc_error(error)
        return None

    async def _pause(self, seconds: float, *unless: "asyncio.Future[Any]") -> None:
        pause = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await first_of(pause, *unless)
        finally:
            pause.cancel()

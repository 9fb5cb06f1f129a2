"""One lease in the hands of its holder: activated, kept alive, attached again after silence, used, released."""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from weighbridge_common.tasks import TaskOwner, cancel_and_wait
from weighbridge_proto.errors import RequestError, RpcFailure
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2_grpc
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as ledger_pb
from weighbridge_proto.memory.v1 import process_pb2, requirement_pb2

from weighbridge_engines.host.clock import Clock
from weighbridge_engines.host.failures import ledger_unreachable
from weighbridge_engines.host.footprint import FootprintVerdict, judge
from weighbridge_engines.host.refusals import ATTACH_FIRST, ENDING, LeaseEndingError, is_silence
from weighbridge_engines.host.uses import LeaseUses
from weighbridge_engines.host.waiting import first_of

FIRST_RENEWAL_S = 2.0
"""Until the ledger has told the term."""

SHORTEST_TERM_S = 5.0
"""The ledger's lower bound of a term (contract, AdmitRequest.term)."""

RECONNECT_S = (0.1, 1.0)
"""First and longest wait between attempts to reach a silent ledger."""

STREAM_END_S = 0.5
"""How long the ledger may take to end a stream that is over; it takes a millisecond."""

_GIVEN_AWAY = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.PERMISSION_DENIED)
"""Answers to an attempt to attach: the lease has ended, or a later process holds it."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class LeasePolicy:
    """Figures of a holder.

    Attributes:
        term_s: the term asked for; 0: the ledger's default.
        patience_s: how long a use waits for a ledger that does not answer.
        call_timeout_s: deadline of one call to the ledger; each is answered in milliseconds or not at all.
        fences_itself: end the engine when nothing was renewed for a term (ledger rule 12: the ledger cannot see our
            processes, and gives the bytes away after term and grace); None: if the ledger says that this is so.
    """

    term_s: float = 0.0
    patience_s: float = 5.0
    call_timeout_s: float = 3.0
    fences_itself: bool | None = None


class _LedgerSilentError(Exception):
    """The ledger did not answer, or did not know us as we are: attach again."""


class LeaseHold:
    """A granted lease.

    Attributes:
        lease: as the ledger last told it.
        vacate: set, with the reason, when the ledger asks to vacate.
        lost: set, with the reason, when the engine must end at once: the bytes are given away, or are not enough.
        over: whether it is released, or given away.
        granted_bytes: what was charged at the grant, or after it grew on request, wherever it lives.
        shrink_asked: set when optional bytes are asked back; :attr:`shrink_bytes` says how many. Whoever has looked
            clears it.
    """

    def __init__(
        self,
        stub: "ledger_service_pb2_grpc.LedgerServiceAsyncStub",
        lease: lease_pb2.Lease,
        secret: str,
        process: process_pb2.ProcessIdentity,
        policy: LeasePolicy,
        clock: Clock,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.lease = lease
        self.vacate: asyncio.Future[RpcFailure] = loop.create_future()
        self.lost: asyncio.Future[RpcFailure] = loop.create_future()
        self.over = False
        self.granted_bytes = self.charged_bytes
        self.shrink_asked = asyncio.Event()
        self.shrink_bytes = 0
        self._stub = stub
        self._secret = secret
        self._process = process
        self._policy = policy
        self._fences_itself = not lease.processes_visible if policy.fences_itself is None else policy.fences_itself
        self._clock = clock
        self._observe: Callable[[], process_pb2.ObservedMemory | None] = lambda: None
        self._load_complete = False
        self._renew_now = asyncio.Event()
        self._reattach = asyncio.Event()
        self._term_s = policy.term_s or 3 * FIRST_RENEWAL_S
        self._renewed_s = clock.monotonic()
        self._keeper: asyncio.Task[None] | None = None
        self._uses = LeaseUses(stub, self.lease_id, lambda: self._secret, self._insist, policy.call_timeout_s, clock)
        self._tasks = TaskOwner()

    @property
    def lease_id(self) -> str:
        """The lease's id."""
        return self.lease.lease_id

    @property
    def credential(self) -> ledger_pb.LeaseCredential:
        """The lease and the authority over it, as they are now."""
        return ledger_pb.LeaseCredential(lease_id=self.lease_id, secret=self._secret)

    @property
    def charged_host_bytes(self) -> int:
        """What is charged on the host now."""
        return self.lease.charge.host_bytes

    @property
    def charged_bytes(self) -> int:
        """What is charged in all now."""
        return self.lease.charge.host_bytes + sum(device.bytes for device in self.lease.charge.devices)

    async def activate(self) -> None:
        """Tell that the engine is about to allocate.

        Raises:
            grpc.RpcError: the ledger refused or did not answer. It may have heard it: a release is owed.
        """
        response = await self._stub.ActivateLease(
            ledger_pb.ActivateLeaseRequest(lease_id=self.lease_id, secret=self._secret, process=self._process),
            timeout=self._policy.call_timeout_s,
        )
        self.lease = response.lease

    async def record_processes(self, engine_processes: Sequence[process_pb2.ProcessIdentity]) -> None:
        """Record the engine's processes, before they are let through their gate.

        Raises:
            LeaseEndingError, RequestError: as :meth:`begin_use`.
        """

        async def record(secret: str) -> None:
            response = await self._stub.ActivateLease(
                ledger_pb.ActivateLeaseRequest(
                    lease_id=self.lease_id, secret=secret, process=self._process, engine_processes=engine_processes
                ),
                timeout=self._policy.call_timeout_s,
            )
            self.lease = response.lease

        await self._insist(record)

    def keep(self, observe: Callable[[], process_pb2.ObservedMemory | None]) -> None:
        """Renew the lease from now on and report what ``observe`` says."""
        self._observe = observe
        self._keeper = self._tasks.start(self._keep(), f"keep-{self.lease_id}")

    def load_is_complete(self) -> None:
        """Tell the ledger at once that the engine is loaded, and what it uses."""
        self._load_complete = True
        self._renew_now.set()

    def renew_soon(self) -> None:
        """Renew and report before the time has come: something changed that the ledger should know."""
        self._renew_now.set()

    def begin_use(self, use_id: str, unless: "asyncio.Future[Any]") -> AsyncGenerator[RpcFailure, None]:
        """Become busy, see :meth:`weighbridge_engines.host.uses.LeaseUses.begin`. Owes an :meth:`end_use` in any case.

        Args:
            use_id: the caller's name for the use.
            unless: done when the use is not wanted any more.
        """
        return self._uses.begin(use_id, unless, self.vacate, self.lost)

    def end_use(self, use_id: str) -> None:
        """Be no longer busy. Told in the background, and again after the ledger was away."""
        self._uses.end(use_id)

    async def resize(self, claim: requirement_pb2.Claim) -> None:
        """Change the lease to ``claim``; down only after the bytes are free.

        Raises:
            LeaseEndingError, RequestError: the lease is as it was, or KeepAlive tells what it is.
        """

        async def resize(secret: str) -> None:
            response = await self._stub.ResizeLease(
                ledger_pb.ResizeLeaseRequest(lease_id=self.lease_id, secret=secret, claim=claim),
                timeout=self._policy.call_timeout_s,
            )
            self.lease = response.lease

        await self._insist(resize)

    def attach_soon(self, doubtful: ledger_pb.LeaseCredential) -> None:
        """The ledger did not take ``doubtful``: attach again, unless that has happened since."""
        if doubtful.secret == self._secret:
            self._reattach.set()

    async def release(self, reason: str) -> None:
        """End the lease; repeated until the ledger has answered, so this may take as long as the ledger is away."""
        if self._keeper is not None:
            await cancel_and_wait(self._keeper)
        wait_s = RECONNECT_S[0]
        while True:
            try:
                await self._stub.ReleaseLease(
                    ledger_pb.ReleaseLeaseRequest(lease_id=self.lease_id, secret=self._secret, reason=reason),
                    timeout=self._policy.call_timeout_s,
                )
                break
            except grpc.RpcError as error:
                failure = RpcFailure.from_rpc_error(error)
            if failure.code is grpc.StatusCode.NOT_FOUND:
                break
            if failure.reason in ATTACH_FIRST:
                try:
                    await self._attach_once()
                    continue
                except grpc.RpcError as error:
                    failure = RpcFailure.from_rpc_error(error)
                    if failure.code is grpc.StatusCode.NOT_FOUND:
                        break
            if failure.code is grpc.StatusCode.PERMISSION_DENIED:
                break  # a later process holds the lease, so it is not ours to release
            if not is_silence(failure):
                _log.warning("release_refused", lease_id=self.lease_id, reason=failure.reason)
            await self._clock.sleep(wait_s)
            wait_s = min(2 * wait_s, RECONNECT_S[1])
        self.over = True
        await self.aclose()

    async def aclose(self) -> None:
        """Stop renewing, without a word to the ledger."""
        await self._tasks.aclose()
        await self._uses.aclose()

    # -- keeping --

    async def _keep(self) -> None:
        while not self.lost.done():
            with contextlib.suppress(_LedgerSilentError, grpc.RpcError, asyncio.InvalidStateError):
                await self._renew_until_silent()
            if self.lost.done():
                return
            # A ledger that lets us attach and then ends the stream must not be asked without a pause.
            await self._clock.sleep(RECONNECT_S[0])
            # Hours after the request that loaded the model: not part of its trace.
            attaching = contextvars.Context().run(self._tasks.start, self._attach(), f"attach-{self.lease_id}")
            try:
                await attaching
            finally:
                attaching.cancel()

    async def _renew_until_silent(self) -> None:
        call = self._stub.KeepAlive()
        reader = asyncio.create_task(self._hear(call))
        self._reattach.clear()
        again = asyncio.create_task(self._reattach.wait())
        try:
            while not reader.done() and not again.done():
                # Before the message is made: what is to be told at once, and comes while it is written, must not wait
                # for the next third of the term.
                self._renew_now.clear()
                await call.write(
                    ledger_pb.KeepAliveRequest(
                        lease_id=self.lease_id,
                        secret=self._secret,
                        observed=self._observe(),
                        load_complete=self._load_complete,
                    )
                )
                nudge = asyncio.create_task(self._renew_now.wait())
                pause = asyncio.ensure_future(self._clock.sleep(self._renewal_period_s()))
                try:
                    await first_of(reader, again, nudge, pause)
                finally:
                    nudge.cancel()
                    pause.cancel()
                if self._clock.monotonic() - self._renewed_s > self._term_s:
                    raise _LedgerSilentError  # it takes what is written and answers nothing
            if reader.done():
                reader.result()
        finally:
            await _close(call, reader)
            reader.cancel()
            again.cancel()
            await asyncio.gather(reader, again, return_exceptions=True)

    async def _hear(
        self, call: "grpc.aio.StreamStreamCall[ledger_pb.KeepAliveRequest, ledger_pb.KeepAliveResponse]"
    ) -> None:
        async for response in call:
            if response.lease_id != self.lease_id:
                continue
            event = response.WhichOneof("event")
            if event == "renewed":
                self._renewed_s = self._clock.monotonic()
                if response.renewed.term.ToNanoseconds() > 0:
                    self._term_s = response.renewed.term.ToNanoseconds() / 1e9
                if response.renewed.HasField("charge"):
                    self.lease.charge.CopyFrom(response.renewed.charge)
                self.lease.expire_time.CopyFrom(response.renewed.expire_time)
            elif event == "vacate":
                self._set_vacate(RpcFailure.from_message(response.vacate.reason))
            elif event == "shrink":
                self.shrink_bytes = response.shrink.optional_bytes
                self.shrink_asked.set()
            elif event == "failure":
                failure = RpcFailure.from_message(response.failure)
                if failure.reason == "OUT_OF_GRANT":
                    self._growth_refused(failure)  # the lease itself is renewed
                    continue
                if failure.code is grpc.StatusCode.NOT_FOUND:
                    self._set_lost(failure)
                raise _LedgerSilentError

    def _growth_refused(self, failure: RpcFailure) -> None:
        """What was observed is above the grant and stays uncharged. A little of that is lived with (see footprint)."""
        observed, granted = (int(failure.metadata.get(name, 0)) for name in ("observed_bytes", "granted_bytes"))
        if judge(observed, granted) is FootprintVerdict.KILL:
            self._set_lost(failure)

    def _renewal_period_s(self) -> float:
        return max(self._term_s, SHORTEST_TERM_S) / 3 if self._term_s else FIRST_RENEWAL_S

    # -- coming back --

    async def _attach(self) -> None:
        wait_s = RECONNECT_S[0]
        while not self.lost.done():
            try:
                await self._attach_once()
                # Before anything else: a restarted ledger knows of no use, and a holder without uses is asked to go.
                await self._uses.repeat()
                return
            except grpc.RpcError as error:
                failure = RpcFailure.from_rpc_error(error)
            if failure.code in _GIVEN_AWAY:
                self._set_lost(failure)
                return
            silent_s = self._clock.monotonic() - self._renewed_s
            if self._fences_itself and silent_s > self._term_s:
                self._set_lost(
                    RpcFailure(
                        grpc.StatusCode.UNAVAILABLE,
                        "LEDGER_UNREACHABLE",
                        f"The ledger has not renewed the lease for {silent_s:.0f} s and will give its memory away.",
                    )
                )
                return
            await self._clock.sleep(wait_s)
            wait_s = min(2 * wait_s, RECONNECT_S[1])

    async def _attach_once(self) -> None:
        # Without the secret: a ledger that was frozen carries out several attempts that we gave up, and knows then
        # neither the secret that we last heard nor the one after it. That we are the holder's process is the proof.
        response = await self._stub.AttachLease(
            ledger_pb.AttachLeaseRequest(lease_id=self.lease_id, process=self._process),
            timeout=self._policy.call_timeout_s,
        )
        self._secret = response.secret
        self.lease = response.lease
        self._renewed_s = self._clock.monotonic()
        if response.lease.state == lease_pb2.LEASE_STATE_VACATING:
            self._set_vacate(RpcFailure.from_message(response.lease.end_reason))

    async def _insist(self, call: Callable[[str], Awaitable[None]]) -> None:
        """Make a call with the lease's secret, again while the ledger is silent or knows us no longer as we are."""
        deadline = self._clock.monotonic() + self._policy.patience_s
        while True:
            secret = self._secret
            try:
                await call(secret)
                return
            except grpc.RpcError as error:
                failure = RpcFailure.from_rpc_error(error)
            if failure.reason in ENDING or self.lost.done():
                raise LeaseEndingError
            if failure.reason in ATTACH_FIRST:
                if secret == self._secret:
                    self._reattach.set()
            elif not is_silence(failure):
                raise RequestError.from_failure(failure)
            if self._clock.monotonic() >= deadline:
                raise ledger_unreachable()
            await self._clock.sleep(RECONNECT_S[0])

    def _set_vacate(self, failure: RpcFailure) -> None:
        if not self.vacate.done():
            self.vacate.set_result(failure)

    def _set_lost(self, failure: RpcFailure) -> None:
        self.over = self.over or failure.code in _GIVEN_AWAY
        if not self.lost.done():
            self.lost.set_result(failure)


async def _close(
    call: "grpc.aio.StreamStreamCall[ledger_pb.KeepAliveRequest, ledger_pb.KeepAliveResponse]",
    reader: "asyncio.Task[None]",
) -> None:
    """End a stream from our side; by the book if the ledger answers, so that it does not look like a failure."""
    if not reader.done():
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await call.done_writing()
            await first_of(reader, timeout_s=STREAM_END_S)
    call.cancel()

"""Asking the ledger for memory: a claim from its first word to an activated lease."""

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from weighbridge_proto.errors import RequestError, RpcFailure, unavailable
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2_grpc
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as ledger_pb

from weighbridge_engines.host.clock import Clock
from weighbridge_engines.host.failures import ledger_unreachable
from weighbridge_engines.host.lease import STREAM_END_S, LeaseHold, LeasePolicy
from weighbridge_engines.host.refusals import ATTACH_FIRST, is_silence

RETRY_S = 0.2
"""Pause between attempts to reach a service that restarts (it takes about half a second)."""


@dataclass(frozen=True)
class ClaimTerms:
    """What a load says about its claim beside the bytes.

    Attributes:
        priority: how urgent it is.
        pinned: never asked to vacate, unless by a load that replaces it.
        max_wait_s: how long it may wait; None: as long as the ledger lets it.
        exclusive: whether nobody else may be on its devices; None: as its kind of engine has it.
    """

    priority: "lease_pb2.Priority.ValueType" = lease_pb2.PRIORITY_UNSPECIFIED
    pinned: bool = False
    max_wait_s: float | None = None
    exclusive: bool | None = None

    def cover(self, wanted: "ClaimTerms") -> bool:
        """Whether a lease on these terms is as good as one on ``wanted``. What was not said at the claim cannot be
        said of the lease later."""
        return (self.pinned or not wanted.pinned) and (bool(self.exclusive) or not wanted.exclusive)


class LedgerGateway:
    """The ledger, as an engine host uses it.

    Args:
        channel: to the ledger.
        holder: who holds the leases: this service.
        policy: of the leases.
        patience_s: how long a claim waits for a ledger that does not answer.
        clock: for waiting.
    """

    def __init__(
        self, channel: grpc.aio.Channel, holder: lease_pb2.Holder, policy: LeasePolicy, patience_s: float, clock: Clock
    ) -> None:
        self._stub = ledger_service_pb2_grpc.LedgerServiceStub(channel)
        self._holder = holder
        self._policy = policy
        self._patience_s = patience_s
        self._clock = clock

    async def admit(
        self,
        plan: fit_pb.PlanModelResponse,
        purpose: lease_pb2.Purpose,
        terms: ClaimTerms,
        tell: Callable[[ledger_pb.AdmitResponse], None],
        owe_release: Callable[[LeaseHold], object],
        replaced: LeaseHold | None = None,
    ) -> LeaseHold:
        """Claim what the plan needs, wait for it in order, and activate the lease.

        Args:
            tell: hears of queueing, reclaiming and the grant.
            owe_release: takes over a lease whose activation was begun and not completed: it may be active, and must be
                released until the ledger answers (ledger rule 7).
            replaced: the lease that this one takes the place of: its bytes count as available, and when nothing else is
                missing its holder is asked to vacate (ledger rule 24).

        Raises:
            RequestError: the ledger's refusal; UNAVAILABLE LEDGER_UNREACHABLE. The replaced lease is as it was, unless
                it had been asked to vacate.
        """
        request = ledger_pb.AdmitRequest(
            request_id=uuid.uuid4().hex,
            holder=self._holder,
            purpose=purpose,
            claim=plan.claim,
            priority=terms.priority,
            pinned=terms.pinned,
            exclusive=bool(terms.exclusive),
        )
        if terms.max_wait_s is not None:
            request.max_wait.FromNanoseconds(round(terms.max_wait_s * 1e9))
        if self._policy.term_s:
            request.term.FromNanoseconds(round(self._policy.term_s * 1e9))
        silent_since_s: float | None = None

        def owe(hold: LeaseHold) -> None:
            # That claim will be released, and a request that has ended is not granted again.
            request.request_id = uuid.uuid4().hex
            owe_release(hold)

        def hear(response: ledger_pb.AdmitResponse) -> None:
            nonlocal silent_since_s
            silent_since_s = None
            tell(response)

        while True:
            request.ClearField("replaces_lease")
            if replaced is not None and not replaced.over:
                # Its secret is another one after each time that it was attached to a restarted ledger.
                request.replaces_lease.CopyFrom(replaced.credential)
            try:
                return await self._admit_once(request, hear, owe)
            except grpc.RpcError as error:
                failure = RpcFailure.from_rpc_error(error)
                if not is_silence(failure) and not _concerns_replaced(request, failure):
                    raise RequestError.from_failure(failure) from error
            if replaced is not None and failure.reason in ATTACH_FIRST:
                replaced.attach_soon(request.replaces_lease)
            elif failure.reason == "LEASE_NOT_FOUND":
                replaced = None  # it was given away, and its holder will hear of it
                continue
            # The same request id again: a restarted ledger gives a waiting claim its old place. A claim may have waited
            # for minutes without news, so patience begins where the ledger was first missed.
            now_s = self._clock.monotonic()
            silent_since_s = now_s if silent_since_s is None else silent_since_s
            if now_s - silent_since_s >= self._patience_s:
                raise ledger_unreachable() if is_silence(failure) else RequestError.from_failure(failure)
            await self._clock.sleep(RETRY_S)

    async def record(self, observation: lease_pb2.Observation) -> None:
        """Keep a measured peak, as well as can be: a lost one is no loss worth failing for."""
        with contextlib.suppress(grpc.RpcError):
            await self._stub.RecordObservation(
                ledger_pb.RecordObservationRequest(observation=observation), timeout=self._policy.call_timeout_s
            )

    async def _admit_once(
        self,
        request: ledger_pb.AdmitRequest,
        tell: Callable[[ledger_pb.AdmitResponse], None],
        owe_release: Callable[[LeaseHold], object],
    ) -> LeaseHold:
        call = self._stub.Admit(request)
        try:
            async for response in call:
                if response.WhichOneof("event") == "granted":
                    granted = response.granted
                    hold = LeaseHold(
                        self._stub, granted.lease, granted.secret, self._holder.process, self._policy, self._clock
                    )
                    await _activate(hold, call, owe_release)
                    tell(ledger_pb.AdmitResponse(granted=ledger_pb.AdmitGranted(lease=hold.lease)))
                    return hold
                tell(response)
        finally:
            # Ends a claim that waits or is granted; an activated lease no longer depends on the stream.
            call.cancel()
        raise unavailable("ADMISSION_INTERRUPTED", "The ledger ended the admission without a word.", retry_after_s=1.0)


async def _activate(
    hold: LeaseHold,
    admission: "grpc.aio.UnaryStreamCall[ledger_pb.AdmitRequest, ledger_pb.AdmitResponse]",
    owe_release: Callable[[LeaseHold], object],
) -> None:
    try:
        await hold.activate()
        # The ledger ends the stream now. Cancelling it instead would look like a failure in the trace.
        with contextlib.suppress(TimeoutError, grpc.RpcError):
            async with asyncio.timeout(STREAM_END_S):
                async for _ in admission:
                    continue
    except BaseException:
        owe_release(hold)
        raise


def _concerns_replaced(request: ledger_pb.AdmitRequest, failure: RpcFailure) -> bool:
    """Whether a claim failed for what the ledger knows of the lease that it replaces, which passes: LEASE_STATE while
    it has not heard yet that an earlier claim in that place was given up."""
    return request.HasField("replaces_lease") and failure.reason in (*ATTACH_FIRST, "LEASE_STATE", "LEASE_NOT_FOUND")

"""Memory for engines that a program runs itself: a claim, from its first word to the lease."""

from collections.abc import AsyncGenerator, Sequence

import grpc
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

from weighbridge.client import Suite
from weighbridge.failures import CallError


async def admit(
    suite: Suite,
    holder: lease_pb2.Holder,
    claim: requirement_pb2.Claim,
    *,
    purpose: lease_pb2.Purpose | None = None,
    request_id: str = "",
    priority: "lease_pb2.Priority.ValueType" = lease_pb2.PRIORITY_UNSPECIFIED,
    pinned: bool = False,
    exclusive: bool = False,
    replaces: ledger_service_pb2.LeaseCredential | None = None,
    while_holding: Sequence[ledger_service_pb2.LeaseCredential] = (),
    max_wait_s: float | None = None,
) -> AsyncGenerator[ledger_service_pb2.AdmitResponse, None]:
    """Claim ``claim`` and wait for it, yielding each event; ``granted`` has the lease and its secret.

    The lease must be activated (``suite.ledger.ActivateLease``) while the iterator is open, and before anything is
    allocated. Closing the iterator before that gives a place in the queue, or the grant, back. From the activation on
    the caller keeps the lease alive (``suite.ledger.KeepAlive``), and owes a release.

    Args:
        suite: whose ledger is asked.
        holder: the process that will answer for the lease.
        claim: the bytes.
        purpose: what for.
        request_id: the caller's name for the claim, under which it can be asked for again; empty: none.
        priority: how urgent it is.
        pinned: never asked to vacate once active.
        exclusive: nobody else may be on its devices.
        replaces: the caller's own lease that this one takes the place of.
        while_holding: the caller's own leases that it keeps busy meanwhile. Such a claim waits only for what is being
            given back or is idle; it is refused with WAIT_WHILE_HOLDING where it would wait for others that are busy,
            who may in their turn wait for the caller.
        max_wait_s: give up after waiting this long; None: 10 minutes.

    Raises:
        CallError: the ledger's refusal.
    """
    request = ledger_service_pb2.AdmitRequest(
        holder=holder,
        claim=claim,
        purpose=purpose,
        request_id=request_id,
        priority=priority,
        pinned=pinned,
        exclusive=exclusive,
        replaces_lease=replaces,
        while_holding=while_holding,
    )
    if max_wait_s is not None:
        request.max_wait.FromNanoseconds(round(max_wait_s * 1e9))
    await suite.reach("ledger")
    call = suite.ledger.Admit(request)
    try:
        async for event in call:
            yield event
    except grpc.RpcError as error:
        raise CallError.from_rpc_error(error, "ledger") from error
    finally:
        # Without it a caller that stops early would leave its claim waiting.
        call.cancel()

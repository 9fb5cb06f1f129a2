"""Refusals of the book as failures of a call."""

import grpc
from weighbridge_proto.errors import RequestError, RpcFailure

from weighbridge_ledger.book.refusals import Reason, Refused

_CODES: dict[Reason, grpc.StatusCode] = {
    Reason.CLAIM_EMPTY: grpc.StatusCode.INVALID_ARGUMENT,
    # Not RESOURCE_EXHAUSTED: waiting never helps, only another claim or another machine does.
    Reason.CLAIM_EXCEEDS_CAPACITY: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.DEVICE_UNKNOWN: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.ADMISSION_TIMED_OUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.REQUEST_ID_REUSED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.REQUEST_IN_USE: grpc.StatusCode.ALREADY_EXISTS,
    Reason.REQUEST_ENDED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.REQUEST_TAKEN_OVER: grpc.StatusCode.ABORTED,
    Reason.GRANT_NOT_ACTIVATED: grpc.StatusCode.ABORTED,
    Reason.LEASE_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.LEASE_SECRET_MISMATCH: grpc.StatusCode.PERMISSION_DENIED,
    Reason.LEASE_STATE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LEASE_SUSPECT: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LEASE_VACATING: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.CANNOT_GROW: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.WAIT_WHILE_HOLDING: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DEVICE_UNHEALTHY: grpc.StatusCode.UNAVAILABLE,
    Reason.OUT_OF_GRANT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.PROCESS_ALIVE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.TOO_MANY_PROCESSES: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_USES: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.STORE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}

_FIELDS: dict[Reason, str] = {
    Reason.CLAIM_EMPTY: "claim",
    Reason.DEVICE_UNKNOWN: "claim.devices",
    Reason.REQUEST_ID_REUSED: "request_id",
}
"""Where in the request the mistake is, for those that are one."""


def code_of(reason: Reason) -> grpc.StatusCode:
    """The canonical code of a refusal."""
    return _CODES[reason]


def failure_of(refused: Refused) -> RpcFailure:
    """What a call is told."""
    field = _FIELDS.get(refused.reason)
    return RpcFailure(
        _CODES[refused.reason],
        refused.reason.value,
        refused.message,
        refused.metadata,
        refused.retry_after_s,
        ((field, refused.message),) if field else (),
        refused.missing,
    )


def error_of(refused: Refused) -> RequestError:
    """What a handler raises."""
    return RequestError.from_failure(failure_of(refused))


def store_unavailable() -> RequestError:
    """The decision could not be kept, so it was not made."""
    return RequestError(
        grpc.StatusCode.UNAVAILABLE,
        Reason.STORE_UNAVAILABLE.value,
        "The ledger cannot write its decisions to disk (is it full?). Nothing was granted. Try again.",
        retry_after_s=1.0,
    )


def stopping() -> RequestError:
    """The ledger is being stopped."""
    return RequestError(
        grpc.StatusCode.UNAVAILABLE, "LEDGER_STOPPING", "The ledger is stopping. Try again.", retry_after_s=1.0
    )

"""What a refusal of the ledger's means to a holder."""

import grpc
from weighbridge_proto.errors import RpcFailure

ATTACH_FIRST = ("LEASE_SUSPECT", "LEASE_SECRET_MISMATCH")
"""Refusals that pass when the lease has been attached again."""

COMES_BACK = ("LEDGER_STOPPING",)
"""Refusals of a ledger that is being restarted: as good as silence."""

ENDING = ("LEASE_VACATING", "LEASE_NOT_FOUND", "LEASE_STATE")
"""Refusals after which a lease takes no new use."""

MUST_REST = ("DEVICE_UNHEALTHY",)
"""Refusals of a use that pass when the device has rested for as long as RetryInfo says."""


class LeaseEndingError(Exception):
    """The lease is vacating or over: it takes no new use. A new claim is needed."""


def is_silence(failure: RpcFailure) -> bool:
    """Whether a call failed because no ledger was there to decide it, so that it is worth making again."""
    if failure.is_ours:
        return failure.reason in COMES_BACK
    return failure.code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    )

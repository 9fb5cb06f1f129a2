"""What a failed call means to the caller, and to the shell."""

import re
from collections.abc import Awaitable
from dataclasses import replace
from enum import IntEnum
from typing import TypeVar

import grpc
from weighbridge_proto.errors import UNREACHABLE, RpcFailure
from weighbridge_proto.memory.v1 import requirement_pb2

from weighbridge.sizes import format_size

T = TypeVar("T")


class CallError(Exception):
    """A call that did not succeed; ``failure`` says why.

    Raised by every method of :class:`weighbridge.Suite` and :class:`weighbridge.SyncSuite`.
    """

    def __init__(self, failure: RpcFailure) -> None:
        super().__init__(f"{failure.reason}: {failure.message}")
        self.failure = failure

    @classmethod
    def from_rpc_error(cls, error: grpc.RpcError, service: str = "") -> "CallError":
        """What a failed call means, whoever failed it. ``service``: whom it went to, by the name of its socket."""
        failure = RpcFailure.from_rpc_error(error)
        if failure.is_ours:
            return cls(failure)
        return cls(_too_large(failure) or _went_away(failure, service) or failure)


MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
"""Reason of a call whose request or answer no message can carry: gRPC itself turns it away."""

_LARGER = re.compile(r"(CLIENT|SERVER): (Sent|Received) message larger than max \((\d+) vs\. (\d+)\)")
"""gRPC's words, as of 1.85 (2026-11)."""


def _too_large(failure: RpcFailure) -> RpcFailure | None:
    """What gRPC says of a message that is larger than it may be, for people; None: the failure is another one."""
    found = _LARGER.search(failure.message)
    if failure.code is not grpc.StatusCode.RESOURCE_EXHAUSTED or found is None:
        return None
    side, verb, size, limit = found.groups()
    metadata = {"message_bytes": size, "limit_bytes": limit}
    holds = f"{format_size(int(size))}, and one message takes {format_size(int(limit))}"
    if (side, verb) in (("CLIENT", "Sent"), ("SERVER", "Received")):
        text = f"The request is too large: it has {holds}. Send fewer or smaller pictures, or a shorter text."
    else:
        text = f"The answer is too large: it has {holds}. Ask for less at once."
    return RpcFailure(failure.code, MESSAGE_TOO_LARGE, text, metadata, is_ours=False)


def _went_away(failure: RpcFailure, service: str) -> RpcFailure | None:
    """That ``service`` ended while it was asked; None: the failure is another one, or it is not known whom it is of."""
    if failure.reason != UNREACHABLE or not service:
        return None
    text = (
        f"The service {service} went away during the call. A suite that runs starts it again: ask again in a few "
        "seconds. If that does not help, `weighbridge doctor` says what is wrong."
    )
    return replace(failure, message=text, metadata={**failure.metadata, "service": service})


class ExitCode(IntEnum):
    """Exit codes of the command. Usage errors (2) are raised by the command line parser."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    UNREACHABLE = 4
    INTERRUPTED = 130  # 128 + SIGINT, as shells have it


REFUSED_REASONS = frozenset(
    {
        "MODEL_WONT_RUN",
        "CLAIM_EXCEEDS_CAPACITY",
        "QUEUE_FULL",
        "ADMISSION_TIMED_OUT",
        "CANNOT_GROW",
        "RENDER_TOO_LARGE",
        "WAIT_WHILE_HOLDING",
        "DEVICE_UNHEALTHY",
        "TOO_MANY_REQUESTS",
    }
)
"""Reasons by which a service that works as it should turns a request away: too large for the machine, or not now."""

UNREACHABLE_REASONS = frozenset({UNREACHABLE, "LEDGER_UNREACHABLE", "FIT_UNREACHABLE", "ENGINE_UNREACHABLE"})
"""Reasons that say a service, ours or the one behind it, did not answer."""


def exit_code(failure: RpcFailure) -> ExitCode:
    """The exit code that a failed call ends the command with."""
    if failure.reason in REFUSED_REASONS:
        return ExitCode.REFUSED
    if failure.reason in UNREACHABLE_REASONS:
        return ExitCode.UNREACHABLE
    return ExitCode.FAILED


def verdict_exit_code(verdict: "requirement_pb2.Verdict.ValueType") -> ExitCode:
    """The exit code of ``fit``: a verdict is an answer, and only WONT_RUN is a refusal."""
    return ExitCode.REFUSED if verdict == requirement_pb2.VERDICT_WONT_RUN else ExitCode.DONE


def unreachable(name: str, target: str, advice: str = "Start the suite with `weighbridge up`.") -> CallError:
    """Nobody answers at ``target``, where the service ``name`` is expected."""
    return CallError(
        RpcFailure(
            grpc.StatusCode.UNAVAILABLE,
            UNREACHABLE,
            f"The service {name} does not answer at {target}. {advice}",
            {"service": name, "target": target},
        )
    )


async def answered(call: Awaitable[T], service: str = "") -> T:
    """The answer of ``call`` to ``service``.

    Raises:
        CallError: the call failed.
    """
    try:
        return await call
    except grpc.RpcError as error:
        raise CallError.from_rpc_error(error, service) from error

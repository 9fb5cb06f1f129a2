"""What a failed call means to the caller, and to the shell."""

from collections.abc import Awaitable
from enum import IntEnum
from typing import TypeVar

import grpc
from weighbridge_proto.errors import UNREACHABLE, RpcFailure
from weighbridge_proto.memory.v1 import requirement_pb2

T = TypeVar("T")


class CallError(Exception):
    """A call that did not succeed; ``failure`` says why.

    Raised by every method of :class:`weighbridge.Suite` and :class:`weighbridge.SyncSuite`.
    """

    def __init__(self, failure: RpcFailure) -> None:
        super().__init__(f"{failure.reason}: {failure.message}")
        self.failure = failure


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


async def answered(call: Awaitable[T]) -> T:
    """The answer of ``call``.

    Raises:
        CallError: the call failed.
    """
    try:
        return await call
    except grpc.RpcError as error:
        raise CallError(RpcFailure.from_rpc_error(error)) from error

"""The server's half of failures: what a handler raises becomes the status of the call, and nothing else gets out."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import structlog
from opentelemetry import trace
from weighbridge_proto.errors import RequestError, RpcFailure
from weighbridge_proto.telemetry import CONTENT_METHODS, record_error

from weighbridge_common.handlers import AnyContext, AnyHandler, Serve, wrap_handler
from weighbridge_common.logs import describe_error

INTERNAL_ERROR = "INTERNAL_ERROR"
NOT_IMPLEMENTED = "NOT_IMPLEMENTED"

_PASSED_ON = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,
    }
)
"""Codes of another service's bare failure that mean the same to our caller; any other would blame the wrong request."""

_log = structlog.get_logger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends a failed call with a rich status.

    ``RequestError`` → its code, reason and details. A call to another service that failed with a reason of ours → the
    same failure, since its reason explains ours. Anything unexpected → ``INTERNAL``, ``INTERNAL_ERROR``, a message
    without internals; the log has the type and the stack. Cancellation passes.
    """

    async def intercept_service(self, continuation: Serve, details: grpc.HandlerCallDetails) -> AnyHandler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(details)
        if handler is None:
            return None
        method = details.method.lstrip("/")

        async def guarded(serve: Callable[[], Awaitable[Any]], context: AnyContext) -> Any:
            try:
                return await serve()
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                failure = failure_of(error)
                if failure is None:
                    failure = _unexpected(error, method)
                else:
                    _log.info("call_failed", method=method, code=failure.code.name, reason=failure.reason)
                await context.abort_with_status(failure.to_grpc_status())

        return wrap_handler(handler, guarded)


def failure_of(error: BaseException) -> RpcFailure | None:
    """The failure that ``error`` states; None if it is an unexpected one."""
    leaves = list(_leaves(error))
    for leaf in leaves:
        # A task group wraps what its tasks raise; a refusal inside one is still that refusal.
        if isinstance(leaf, RequestError):
            return leaf.failure
    if len(leaves) != 1:
        return None
    if isinstance(error, NotImplementedError):
        return RpcFailure(grpc.StatusCode.UNIMPLEMENTED, NOT_IMPLEMENTED, "This service does not offer this method.")
    if isinstance(leaves[0], grpc.RpcError):
        failure = RpcFailure.from_rpc_error(leaves[0])
        if failure.is_ours or failure.code in _PASSED_ON:
            return failure
    return None


def _unexpected(error: Exception, method: str) -> RpcFailure:
    _log.error(
        "unexpected_error",
        method=method,
        **describe_error(error, with_text=not method.startswith(CONTENT_METHODS)),
    )
    record_error(trace.get_current_span(), error, method)
    return RpcFailure(
        grpc.StatusCode.INTERNAL,
        INTERNAL_ERROR,
        "The service failed in a way that it did not expect. Its log says where.",
    )


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error

"""Wrapping the handler of a gRPC method, whatever its kind, for interceptors of asyncio servers."""

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    AnyHandler = grpc.RpcMethodHandler[Any, Any]
    AnyContext = grpc.aio.ServicerContext[Any, Any]
else:
    # grpc's classes are generic in their type stubs only.
    AnyHandler = grpc.RpcMethodHandler
    AnyContext = grpc.aio.ServicerContext
Serve = Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]]

Around = Callable[[Callable[[], Awaitable[Any]], AnyContext], Awaitable[Any]]
"""Serves one call: awaits its argument, once, and returns what that returned."""


def wrap_handler(handler: AnyHandler, around: Around) -> AnyHandler:
    """The same handler with ``around`` about each call.

    A stream of responses is written from the wrapper, in the call's own task, and its generator is closed there too:
    so a cancelled call runs the handler's ``finally`` blocks at once, not when the garbage collector comes by.
    """
    serve: Any
    make: Any
    if handler.response_streaming:
        inner: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream
        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )

        async def serve_stream(request: Any, context: AnyContext) -> None:
            async def run() -> None:
                responses = inner(request, context)
                if not hasattr(responses, "__aiter__"):
                    await _settled(responses)  # a handler that writes for itself
                    return
                async with contextlib.AsyncExitStack() as stack:
                    if hasattr(responses, "aclose"):
                        await stack.enter_async_context(contextlib.aclosing(responses))
                    async for response in responses:
                        await _write(context, response)

            await around(run, context)

        serve = serve_stream
    else:
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )

        async def serve_one(request: Any, context: AnyContext) -> Any:
            async def run() -> Any:
                return await _settled(inner(request, context))

            return await around(run, context)

        serve = serve_one
    wrapped: AnyHandler = make(
        serve, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )
    return wrapped


async def _write(context: AnyContext, response: Any) -> None:
    try:
        await context.write(response)
    except grpc.aio.InternalError as error:
        # How gRPC says that the caller went while this waited for room on the connection: its own cancellation of the
        # call comes after that.
        raise asyncio.CancelledError from error


async def _settled(result: Any) -> Any:
    # Generated base classes have plain functions for methods that a servicer leaves out.
    return await result if inspect.isawaitable(result) else result

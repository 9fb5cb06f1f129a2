"""The host's side of the connection to an MLX runtime."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from weighbridge_proto.channel import open_channel
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.engines.v1 import runtime_service_pb2 as runtime_pb
from weighbridge_proto.engines.v1 import runtime_service_pb2_grpc
from weighbridge_proto.errors import RequestError, RpcFailure
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb

from weighbridge_engines.host.kind import EngineLostError

PROBE_TIMEOUT_S = 2.0


class MlxRuntimeClient:
    """See :class:`weighbridge_engines.host.kind.Runtime`."""

    def __init__(self, socket: Path) -> None:
        self._channel = open_channel(f"unix:{socket}")
        self._runtime = runtime_service_pb2_grpc.RuntimeServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def is_ready(self) -> bool:
        """Whether its health says so."""
        # The stub's methods are made at run time, and its types do not name them.
        check: Any = self._health.Check  # type: ignore[attr-defined] # set by the stub's own constructor
        response = await check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        serving: bool = response.status == health_pb2.HealthCheckResponse.SERVING
        return serving

    async def is_alive(self) -> bool:
        """Whether its event loop answers; the thread that computes is another."""
        return await self.is_ready()

    async def load(self, plan: fit_pb.PlanModelResponse) -> AsyncGenerator[engine_pb.LoadStarting, None]:
        """Open the weights as planned."""
        request = runtime_pb.LoadRequest(
            model_path=plan.resolved_path, launch=plan.launch.mlx, model_name=plan.model_name
        )
        with _engine_errors():
            call = self._runtime.Load(request)
            try:
                async for response in call:
                    if response.phase != "done":
                        yield engine_pb.LoadStarting(phase=response.phase, fraction=response.fraction)
            finally:
                call.cancel()

    async def chat(self, request: chat_pb.ChatRequest) -> AsyncGenerator[chat_pb.ChatResponse, None]:
        """One answer."""
        with _engine_errors():
            call = self._runtime.Generate(runtime_pb.GenerateRequest(chat=request))
            try:
                async for response in call:
                    event = response.WhichOneof("event")
                    if event == "started":
                        yield chat_pb.ChatResponse(started=response.started)
                    elif event == "delta":
                        yield chat_pb.ChatResponse(delta=response.delta)
                    elif event == "finished":
                        yield chat_pb.ChatResponse(finished=response.finished)
            finally:
                call.cancel()

    async def settle(self) -> None:
        """At once: what is given up ends at the next token or prefill step."""

    async def aclose(self) -> None:
        """Close the connection; calls in flight end."""
        await self._channel.close()


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    """The runtime's own refusals as they are; every other end of a call as :class:`EngineLostError`."""
    try:
        yield
    except grpc.RpcError as error:
        failure = RpcFailure.from_rpc_error(error)
        if failure.is_ours:
            raise RequestError.from_failure(failure) from error
        raise EngineLostError(failure.code.name) from error
    except grpc.aio.UsageError as error:
        raise EngineLostError("the connection was closed before the call") from error
    except asyncio.CancelledError:
        # grpc.aio ends the calls of a connection that is closed like those that their caller gives up.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EngineLostError("the connection was closed during the call") from None

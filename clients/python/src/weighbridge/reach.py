"""Whether anybody answers at a target, and how a service says it is."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weighbridge.failures import answered, unreachable

CONNECT_TIMEOUT_S = 5.0
"""How long one attempt to connect may take: a service of this machine accepts within milliseconds."""

CALL_TIMEOUT_S = 30.0
"""Deadline of a call that answers from memory or from file headers (fit's own budget for headers is far below it)."""

HEALTH_TIMEOUT_S = 3.0
"""How long a health check may take; its answer is a look at a variable."""

HEALTH_SERVICES: dict[str, tuple[str, ...]] = {
    "ledger": ("weighbridge.ledger.v1.LedgerService",),
    "fit": ("weighbridge.fit.v1.FitService",),
    "engine-mlx": ("weighbridge.engines.v1.EngineService", "weighbridge.engines.v1.ChatService"),
    "engine-ds4": ("weighbridge.engines.v1.EngineService", "weighbridge.engines.v1.ChatService"),
    "engine-sd": ("weighbridge.engines.v1.EngineService", "weighbridge.engines.v1.ImageService"),
}
"""The gRPC services that each process serves, by which it is asked for its health."""


async def reach(channel: grpc.aio.Channel, name: str, target: str, patience_s: float = 0.0) -> None:
    """Return once ``channel`` is connected.

    Args:
        channel: a channel to ``target``.
        name: the service expected there, for the message.
        target: where that is.
        patience_s: keep trying for this long while nobody listens; 0: one attempt.

    Raises:
        CallError: nobody answers (reason UNREACHABLE).
    """
    states = grpc.ChannelConnectivity
    try:
        async with asyncio.timeout(max(patience_s, CONNECT_TIMEOUT_S)):
            while (state := channel.get_state(try_to_connect=True)) is not states.READY:
                if state is states.SHUTDOWN:
                    raise unreachable(name, target, "The channel is closed.")
                if state is states.TRANSIENT_FAILURE and patience_s <= 0:
                    raise unreachable(name, target)
                await channel.wait_for_state_change(state)
    except TimeoutError:
        raise unreachable(name, target) from None


async def serving(channel: grpc.aio.Channel, service: str, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
    """Whether the gRPC service ``service`` says SERVING.

    Raises:
        CallError: no answer (UNREACHABLE, DEADLINE_EXCEEDED), or no such service there (NOT_FOUND).
    """
    stub: Any = health_pb2_grpc.HealthStub(channel)  # the published stubs know no methods of it
    response = await answered(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s))
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

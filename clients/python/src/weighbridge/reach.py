"""Whether anybody answers at a target, and how a service says it is."""

import asyncio
import socket
import struct
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
        process = listener(target)
        raise (unreachable(name, target) if process is None else unreachable(name, target, _hangs(process))) from None


UNKNOWN_PROCESS = 0
"""Process id of a listener that the system does not tell, as in another container."""

_CREDENTIALS = struct.Struct("iII")
"""`struct ucred` of Linux: process, user, group."""


def listener(target: str) -> int | None:
    """The process that listens on a Unix socket, whether it answers or not; None: nobody does, or it is no Unix socket.

    The kernel takes connections for a process that hangs or is stopped, so this tells it from one that is gone.
    """
    path = target.removeprefix("unix:")
    if path == target:
        return None
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # its queue of connections is full
            return UNKNOWN_PROCESS
        except OSError:
            return None
        if not hasattr(socket, "SO_PEERCRED"):  # Linux alone has it
            return UNKNOWN_PROCESS
        process, _user, _group = _CREDENTIALS.unpack(
            probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        return int(process)


def _hangs(process: int) -> str:
    which = f"process {process}" if process else "a process"
    return (
        f"There is {which} that listens and says nothing: it hangs, or was stopped. Let it go on, or kill it; "
        "`weighbridge up` starts what it has started again."
    )


async def serving(channel: grpc.aio.Channel, service: str, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
    """Whether the gRPC service ``service`` says SERVING.

    Raises:
        CallError: no answer (UNREACHABLE, DEADLINE_EXCEEDED), or no such service there (NOT_FOUND).
    """
    stub: Any = health_pb2_grpc.HealthStub(channel)  # the published stubs know no methods of it
    response = await answered(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s))
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

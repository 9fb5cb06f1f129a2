"""What any answer costs on the ledger's server: rpcs that do nothing, beside the ledger's own on the same server, and
what the process has used. They are registered by hand, for a contract of theirs would be part of the product."""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
from google.protobuf import empty_pb2, wrappers_pb2

SERVICE = "weighbridge.benchmarks.v1.FloorService"

REPEATS = 2000
"""Messages of one call of Repeat."""

LAG_PERIOD_S = 0.005
"""How often the event loop is asked to come back."""


@dataclass(frozen=True, slots=True)
class Used:
    """What the server's process has used."""

    cpu_s: float
    lags_ms: list[float]
    """How late its event loop came back each time, since the last look."""


class Floor:
    """The handlers, in the ledger's event loop."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=100_000)
        self._asking: asyncio.Task[None] | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server` too, through the interceptors that it has."""
        handlers = {
            "Stream": grpc.unary_stream_rpc_method_handler(
                self._stream,
                request_deserializer=empty_pb2.Empty.FromString,
                response_serializer=empty_pb2.Empty.SerializeToString,
            ),
            "Repeat": grpc.unary_stream_rpc_method_handler(
                self._repeat,
                request_deserializer=wrappers_pb2.BytesValue.FromString,
                response_serializer=wrappers_pb2.BytesValue.SerializeToString,
            ),
            "Used": grpc.unary_unary_rpc_method_handler(
                self._used,
                request_deserializer=empty_pb2.Empty.FromString,
                response_serializer=wrappers_pb2.StringValue.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def _stream(self, request: empty_pb2.Empty, context: object) -> AsyncIterator[empty_pb2.Empty]:
        yield empty_pb2.Empty()

    async def _repeat(
        self, request: wrappers_pb2.BytesValue, context: object
    ) -> AsyncIterator[wrappers_pb2.BytesValue]:
        for _ in range(REPEATS):
            yield request

    async def _used(self, request: empty_pb2.Empty, context: object) -> wrappers_pb2.StringValue:
        if self._asking is None:
            # Only for those who look: its wake-ups would be in every other figure.
            self._asking = asyncio.create_task(self._ask_for_ever())
        lags, self._lags = list(self._lags), deque(maxlen=self._lags.maxlen)
        return wrappers_pb2.StringValue(value=json.dumps({"cpu_s": time.process_time(), "lags_ms": lags}))

    async def _ask_for_ever(self) -> None:
        while True:
            due = time.perf_counter() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self._lags.append(max(0.0, time.perf_counter() - due) * 1e3)


class FloorStub:
    """The callers' side."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.empty_stream = channel.unary_stream(
            f"/{SERVICE}/Stream",
            request_serializer=empty_pb2.Empty.SerializeToString,
            response_deserializer=empty_pb2.Empty.FromString,
        )
        """One empty message: the floor of an admission."""
        self.repeat = channel.unary_stream(
            f"/{SERVICE}/Repeat",
            request_serializer=wrappers_pb2.BytesValue.SerializeToString,
            response_deserializer=wrappers_pb2.BytesValue.FromString,
        )
        """The request, REPEATS times: the floor of a watch whose changes are as long."""
        self._used = channel.unary_unary(
            f"/{SERVICE}/Used",
            request_serializer=empty_pb2.Empty.SerializeToString,
            response_deserializer=wrappers_pb2.StringValue.FromString,
        )

    async def used(self) -> Used:
        """What the server's process has used by now."""
        return Used(**json.loads((await self._used(empty_pb2.Empty())).value))

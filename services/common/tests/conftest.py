"""Real asyncio gRPC servers with methods made of bytes, and everything that their spans and measurements said."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import structlog
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from weighbridge_common.errors import ErrorInterceptor
from weighbridge_common.telemetry import ServerTelemetry
from weighbridge_proto.channel import CHANNEL_OPTIONS, MESSAGE_OPTIONS
from weighbridge_proto.telemetry import trace_channel

SERVICE = "test.Service"


@dataclass
class Recorder:
    """What was traced and measured, in memory."""

    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    reader: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)

    def __post_init__(self) -> None:
        self.tracer_provider = TracerProvider(shutdown_on_exit=False)
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meter_provider = MeterProvider(metric_readers=[self.reader], shutdown_on_exit=False)
        self.tracer = self.tracer_provider.get_tracer("test")

    @property
    def options(self) -> dict[str, Any]:
        return {"tracer_provider": self.tracer_provider, "meter_provider": self.meter_provider}

    async def spans(self, count: int) -> list[ReadableSpan]:
        """All spans, once ``count`` have ended (a call's span ends a moment after the call)."""
        async with asyncio.timeout(10):
            # The exporter offers nothing to wait for.
            while len(self.exporter.get_finished_spans()) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        spans = list(self.exporter.get_finished_spans())
        assert len(spans) == count, [span.name for span in spans]
        return spans

    async def both(self) -> tuple[ReadableSpan, ReadableSpan]:
        """The client's and the server's span of the only call."""
        by_kind = {span.kind: span for span in await self.spans(2)}
        return by_kind[SpanKind.CLIENT], by_kind[SpanKind.SERVER]

    def measured(self) -> dict[str, list[dict[str, Any]]]:
        """Attributes of every data point, by metric."""
        found: dict[str, list[dict[str, Any]]] = {}
        data = self.reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points = found.setdefault(metric.name, [])
                    points += [dict(point.attributes or {}) for point in metric.data.data_points]
        return found


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What logs.configure() changes for a whole process must not reach the next test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


Serve = Callable[..., Awaitable[grpc.aio.Channel]]


@pytest.fixture
async def serve(recorder: Recorder) -> AsyncIterator[Serve]:
    """Starts a server for the given handlers (by method name) and opens a channel to it."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            service: str = SERVICE,
            traced_client: bool = True,
            interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
            **handlers: grpc.RpcMethodHandler,
        ) -> grpc.aio.Channel:
            server = grpc.aio.server(
                interceptors=[ServerTelemetry(**recorder.options), ErrorInterceptor(), *interceptors],
                options=MESSAGE_OPTIONS,
            )
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
            target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            stack.push_async_callback(server.stop, None)
            channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
            if traced_client:
                channel = trace_channel(channel, target, **recorder.options)
            return await stack.enter_async_context(channel)

        yield start

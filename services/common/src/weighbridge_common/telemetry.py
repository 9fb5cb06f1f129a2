"""Telemetry of a service process: OpenTelemetry traces and metrics over OTLP, on with one variable, free when off."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import grpc
from opentelemetry import context as otel_context
from opentelemetry import metrics, trace
from opentelemetry.metrics import Meter, MeterProvider
from opentelemetry.trace import Tracer, TracerProvider
from weighbridge_proto import telemetry as rpc

from weighbridge_common.handlers import AnyContext, AnyHandler, Serve, wrap_handler
from weighbridge_common.settings import SettingsError

ENDPOINT_VARIABLE = "WEIGHBRIDGE_OTLP_ENDPOINT"

EXPORT_DELAY_MS = 500
"""How long an ended span waits to be sent with others: short, so that a trace can be looked at right after the call."""

METRICS_PERIOD_MS = 5_000

EXPORT_TIMEOUT_S = 5.0
"""How long one export may take; the SDK's retries end with it."""

SHUTDOWN_TIMEOUT_S = 3.0
"""How long the last export may hold up the end of a process whose collector does not answer."""

DEADLINE_SLACK_S = 0.1
"""A client that gives up at its deadline resets the stream a moment before the server's own clock reaches it."""


def tracer() -> Tracer:
    """The tracer for a service's own spans; without an SDK it does nothing."""
    return trace.get_tracer(rpc.SCOPE)


def meter() -> Meter:
    """The meter for a service's own metrics; without an SDK it does nothing."""
    return metrics.get_meter(rpc.SCOPE)


def configure(service_name: str, endpoint: str | None = None) -> Callable[[], None]:
    """Send this process's traces and metrics to an OTLP/gRPC collector, if one is named.

    Args:
        service_name: ``service.name`` of everything that is sent.
        endpoint: ``http://host:port`` or ``https://host:port``; None: from ``WEIGHBRIDGE_OTLP_ENDPOINT``. Empty: no
            SDK is loaded, and every span and metric stays a no-op.

    Returns:
        What to call at the end of the process: sends what is left, for at most :data:`SHUTDOWN_TIMEOUT_S`.

    Raises:
        SettingsError: the endpoint is no such URL.
    """
    url = os.environ.get(ENDPOINT_VARIABLE, "") if endpoint is None else endpoint
    if not url:
        return lambda: None
    insecure = _check_endpoint(url)

    # Imported here, because a process without telemetry shall not pay for the SDK.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create(
        {"service.name": service_name, "service.namespace": "weighbridge", "process.pid": os.getpid()}
    )
    spans = SdkTracerProvider(resource=resource, shutdown_on_exit=False)
    spans.add_span_processor(
        BatchSpanProcessor(
            OTLPSpanExporter(endpoint=url, insecure=insecure, timeout=EXPORT_TIMEOUT_S),
            schedule_delay_millis=EXPORT_DELAY_MS,
        )
    )
    reader = PeriodicExportingMetricReader(
        OTLPMetricExporter(endpoint=url, insecure=insecure, timeout=EXPORT_TIMEOUT_S),
        export_interval_millis=METRICS_PERIOD_MS,
        export_timeout_millis=EXPORT_TIMEOUT_S * 1000,
    )
    measurements = SdkMeterProvider(resource=resource, metric_readers=[reader], shutdown_on_exit=False)
    trace.set_tracer_provider(spans)
    metrics.set_meter_provider(measurements)

    def shut_down() -> None:
        # In threads that may be left behind: an exporter in its retries returns late, and no limit reaches it.
        workers = [
            threading.Thread(target=provider.shutdown, daemon=True, name="telemetry-shutdown")
            for provider in (spans, measurements)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(SHUTDOWN_TIMEOUT_S / len(workers))

    return shut_down


class ServerTelemetry(grpc.aio.ServerInterceptor):
    """A span and a measured duration for every call served, in the caller's trace.

    Args as in :class:`weighbridge_proto.telemetry.RpcTelemetry`.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        long_streams: tuple[str, ...] = rpc.LONG_STREAMS,
    ) -> None:
        self._telemetry = rpc.RpcTelemetry(
            True, tracer_provider=tracer_provider, meter_provider=meter_provider, long_streams=long_streams
        )

    async def intercept_service(self, continuation: Serve, details: grpc.HandlerCallDetails) -> AnyHandler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(details)
        method = details.method.lstrip("/")
        if handler is None or not rpc.traced(method):
            return handler

        async def measured(serve: Callable[[], Awaitable[Any]], context: AnyContext) -> Any:
            call, span_context = self._telemetry.start_server_call(method, details.invocation_metadata or ())
            # Never detached: every call runs in a task of its own, whose context ends with it. (Detaching in a
            # cancelled stream is what makes other instrumentations log "Failed to detach context".)
            otel_context.attach(span_context)
            try:
                response = await serve()
            except asyncio.CancelledError:
                # The server cancels a call whose deadline passed just as one whose client gave up.
                left = context.time_remaining()
                over = left is not None and left <= DEADLINE_SLACK_S
                call.end(grpc.StatusCode.DEADLINE_EXCEEDED if over else grpc.StatusCode.CANCELLED)
                raise
            except grpc.aio.AbortError:
                call.end(context.code(), context.details())
                raise
            except BaseException as error:
                # What the transport will answer: the code that the handler set, else UNKNOWN.
                call.end(context.code() or grpc.StatusCode.UNKNOWN, type(error).__qualname__, error)
                raise
            call.end(context.code(), context.details())
            return response

        return wrap_handler(handler, measured)


def _check_endpoint(url: str) -> bool:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
        raise SettingsError(f"{ENDPOINT_VARIABLE}: must be http://host:port or https://host:port, not {url!r}.")
    return parts.scheme == "http"

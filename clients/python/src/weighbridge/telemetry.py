"""Traces of the command: on when a collector is named and an OpenTelemetry SDK is installed, nothing otherwise."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import util

from opentelemetry import trace
from weighbridge_proto.telemetry import SCOPE

ENDPOINT_VARIABLE = "WEIGHBRIDGE_OTLP_ENDPOINT"
"""The same variable that switches telemetry on in the services."""

SERVICE_NAME = "weighbridge-cli"

FLUSH_TIMEOUT_S = 3.0
"""How long the last export may hold up the end of a command whose collector does not answer."""


@contextmanager
def tracing(endpoint: str) -> Iterator[None]:
    """Record the spans of this process while the body runs, and send them to the OTLP/gRPC ``endpoint``.

    Without an endpoint, or without an SDK, only the body runs. Channels opened in the body are traced. A process can
    do this once: OpenTelemetry takes no second provider.
    """
    if not endpoint or not sdk_installed():
        yield
        return
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(
        resource=Resource.create({"service.name": SERVICE_NAME, "service.namespace": "weighbridge"}),
        shutdown_on_exit=False,
    )
    insecure = not endpoint.startswith("https://")
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=FLUSH_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        # In a thread that may be left behind: an exporter in its retries returns late, and no limit reaches it.
        last_export = threading.Thread(target=provider.shutdown, daemon=True, name="telemetry-shutdown")
        last_export.start()
        last_export.join(FLUSH_TIMEOUT_S)


@contextmanager
def root_span(name: str) -> Iterator[str]:
    """Run the body in the span ``name``. Yields its trace id in hex, all zeros where nothing records."""
    tracer = trace.get_tracer(SCOPE)
    # An error's text may hold a prompt, and what failed is on the spans of the calls anyway.
    with tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False) as span:
        yield format(span.get_span_context().trace_id, "032x")


@contextmanager
def traced_command(name: str, environ: Mapping[str, str] | None = None) -> Iterator[None]:
    """Run the body inside the root span ``name``, and send its trace at the end, where telemetry is on."""
    with tracing((os.environ if environ is None else environ).get(ENDPOINT_VARIABLE, "")), root_span(name):
        yield


def sdk_installed() -> bool:
    """Whether spans can be recorded and sent from here."""
    try:
        return all(
            util.find_spec(module) is not None
            for module in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
        )
    except ModuleNotFoundError:
        return False

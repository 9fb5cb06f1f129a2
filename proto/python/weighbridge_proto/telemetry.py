"""How a trace follows a call: spans and durations of gRPC calls, by the OpenTelemetry RPC conventions.

This module needs the OpenTelemetry API alone, which does nothing until an application installs an SDK; the client
library therefore never brings one along.

Own code rather than opentelemetry-instrumentation-grpc (0.66b2, tried November 2026): that one's asyncio client keeps a
cancelled unary call running on the server (open-telemetry/opentelemetry-python-contrib#3271), reports wrong codes for
rich errors, deadlines and UNIMPLEMENTED, and has no metrics.

Client calls are traced by a channel that wraps another, not by grpc.aio interceptors: those replace the call object
by one with other behaviour (a write on a broken stream raises asyncio.InvalidStateError, writes are queued), so code
would behave differently as soon as telemetry is switched on.
"""

import asyncio
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import Histogram, MeterProvider
from opentelemetry.propagate import extract, inject
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider

from weighbridge_proto.errors import code_of

SCOPE = "weighbridge"
"""Instrumentation scope of every span and metric that weighbridge makes."""

UNTRACED_METHODS = ("grpc.health.v1.", "grpc.reflection.", "opentelemetry.proto.collector.")
"""Probes would drown the traces, and an exporter that traces its own calls never ends."""

LONG_STREAMS = ("/KeepAlive", "/Watch")
"""Streams that live as long as a process: each is a trace of its own, linked to the request that opened it."""

CONTENT_METHODS = ("weighbridge.engines.",)
"""Methods whose requests hold prompts and images: the text of an unexpected error there could quote them."""

# Semantic conventions 1.45 renamed rpc.response.status_code to rpc.status_code; the Python package of constants
# (0.66b2) still has the old name, so the names stand here.
RPC_SYSTEM, RPC_METHOD, RPC_STATUS = "rpc.system.name", "rpc.method", "rpc.status_code"
ERROR_TYPE, SERVER_ADDRESS, SERVER_PORT = "error.type", "server.address", "server.port"

DURATION_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Bucket bounds that the RPC conventions give for call durations."""

_SERVER_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Codes that are the server's fault; a refused admission, say, is an answer and no error of the server."""

# W3C trace state entry by which a client says that it opened a long stream's own trace already, so that the server
# joins that one. Callers in other languages do not say it, and the server cuts for them.
_STATE_KEY, _STATE_OWN_TRACE = "weighbridge", "own"


def recording() -> bool:
    """Whether this process has installed an SDK that records spans or metrics."""
    providers = (trace.get_tracer_provider(), metrics.get_meter_provider())
    # What the API itself brings (proxies, no-ops) records nothing.
    return any(not type(p).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics")) for p in providers)


def traced(method: str) -> bool:
    """Whether calls of ``method`` (``package.Service/Method``) get spans at all."""
    return not method.startswith(UNTRACED_METHODS)


def trace_headers() -> dict[str, str]:
    """Headers that carry the current trace over a call that is not gRPC, such as an engine's HTTP."""
    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier


def record_error(span: Span, error: BaseException, method: str = "") -> None:
    """Put an unexpected error on a span: its type and where it arose, its text only where it cannot hold a prompt."""
    attributes = {
        "exception.type": f"{type(error).__module__}.{type(error).__qualname__}",
        "exception.stacktrace": "".join(traceback.format_tb(error.__traceback__)),
    }
    if not method.startswith(CONTENT_METHODS):
        attributes["exception.message"] = str(error)
    span.add_event("exception", attributes)


class CallSpan:
    """The span of one call and its duration, ended exactly once with the call's code."""

    __slots__ = ("_attributes", "_done", "_histogram", "_is_server", "_method", "_started", "span")

    def __init__(
        self, span: Span, histogram: Histogram, method: str, attributes: Mapping[str, str | int], is_server: bool
    ) -> None:
        self.span = span
        self._histogram = histogram
        self._method = method
        self._attributes = attributes
        self._is_server = is_server
        self._started = time.perf_counter()
        self._done = False

    def end(
        self, code: grpc.StatusCode | int | None, details: str | None = None, error: BaseException | None = None
    ) -> None:
        """End span and measurement; a second call changes nothing."""
        if self._done:
            return
        self._done = True
        name = code_of(code).name
        attributes: dict[str, str | int] = {**self._attributes, RPC_STATUS: name}
        self.span.set_attribute(RPC_STATUS, name)
        if error is not None:
            record_error(self.span, error, self._method)
        if name in _SERVER_FAULTS if self._is_server else name != "OK":
            attributes[ERROR_TYPE] = name
            self.span.set_attribute(ERROR_TYPE, name)
            self.span.set_status(Status(StatusCode.ERROR, details or None))
        self.span.end()
        self._histogram.record(time.perf_counter() - self._started, attributes)


class RpcTelemetry:
    """Starts the span of a call on one side, server or client.

    Args:
        is_server: which side.
        attributes: what every span and measurement says beside the method.
        tracer_provider, meter_provider: other than the process-wide ones, for tests.
        long_streams: endings of methods that get a trace of their own.
    """

    def __init__(
        self,
        is_server: bool,
        attributes: Mapping[str, str | int] | None = None,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        long_streams: tuple[str, ...] = LONG_STREAMS,
    ) -> None:
        self._is_server = is_server
        self._attributes = dict(attributes or {})
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)
        self._histogram = _duration_histogram(is_server, meter_provider or metrics.get_meter_provider())
        self._long_streams = long_streams

    def start_client_call(self, method: str) -> tuple[CallSpan, dict[str, str]]:
        """Start the span of an outgoing call; also the metadata by which the server joins the trace."""
        carrier: dict[str, str] = {}
        if method.endswith(self._long_streams):
            call = self._start(method, Context(), _links(trace.get_current_span()))
            inject(carrier, trace.set_span_in_context(call.span, Context()))
            if carrier:
                entry = f"{_STATE_KEY}={_STATE_OWN_TRACE}"
                carrier["tracestate"] = ",".join(filter(None, [entry, carrier.get("tracestate")]))
        else:
            call = self._start(method, None, ())
            inject(carrier, trace.set_span_in_context(call.span))
        return call, carrier

    def start_server_call(self, method: str, metadata: Iterable[tuple[str, Any]]) -> tuple[CallSpan, Context]:
        """Start the span of an incoming call; also the context in which its handler runs."""
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        context = extract(carrier, Context())
        if method.endswith(self._long_streams):
            caller = trace.get_current_span(context)
            if caller.get_span_context().trace_state.get(_STATE_KEY) != _STATE_OWN_TRACE:
                call = self._start(method, Context(), _links(caller))
                return call, trace.set_span_in_context(call.span, context)
        call = self._start(method, context, ())
        return call, trace.set_span_in_context(call.span, context)

    def _start(self, method: str, context: Context | None, links: Sequence[Link]) -> CallSpan:
        attributes: dict[str, str | int] = {RPC_SYSTEM: "grpc", RPC_METHOD: method, **self._attributes}
        kind = SpanKind.SERVER if self._is_server else SpanKind.CLIENT
        span = self._tracer.start_span(method, context=context, kind=kind, attributes=attributes, links=links)
        return CallSpan(span, self._histogram, method, attributes, self._is_server)


class TracedChannel(grpc.aio.Channel):
    """A channel whose calls are spans; the call objects are those of the channel beneath, unchanged."""

    def __init__(self, channel: grpc.aio.Channel, telemetry: RpcTelemetry) -> None:
        self._channel = channel
        self._telemetry = telemetry

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._traced(method, self._channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._traced(method, self._channel.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._traced(method, self._channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._traced(method, self._channel.stream_stream(method, *args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self._channel.channel_ready()

    async def __aenter__(self) -> "TracedChannel":
        await self._channel.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> bool | None:
        return await self._channel.__aexit__(exc_type, exc_val, exc_tb)

    def _traced(self, path: str, start: Callable[..., grpc.aio.Call]) -> Callable[..., grpc.aio.Call]:
        method = path.lstrip("/")
        if not traced(method):
            return start

        def call(*args: Any, metadata: Iterable[tuple[str, Any]] | None = None, **kwargs: Any) -> grpc.aio.Call:
            span, carrier = self._telemetry.start_client_call(method)
            own = [(key, value) for key, value in metadata or () if key not in carrier]
            try:
                started = start(*args, metadata=grpc.aio.Metadata(*own, *carrier.items()), **kwargs)
            except BaseException as error:
                span.end(grpc.StatusCode.INTERNAL, error=error)
                raise
            started.add_done_callback(lambda done: _end_later(span, done))
            return started

        return call


def trace_channel(channel: grpc.aio.Channel, target: str, **options: Any) -> TracedChannel:
    """Wrap ``channel`` to ``target`` so that its calls are traced; ``options`` as in :class:`RpcTelemetry`."""
    return TracedChannel(channel, RpcTelemetry(False, _server_attributes(target), **options))


# The loop keeps only weak references to tasks.
_ending: set[asyncio.Task[None]] = set()


def _end_later(span: CallSpan, call: grpc.aio.Call) -> None:
    # A finished call gives its code only to an await.
    async def end() -> None:
        span.end(await call.code(), await call.details())

    task = asyncio.get_running_loop().create_task(end())
    _ending.add(task)
    task.add_done_callback(_ending.discard)


def _links(caller: Span) -> tuple[Link, ...]:
    context = caller.get_span_context()
    return (Link(context),) if context.is_valid else ()


def _server_attributes(target: str) -> dict[str, str | int]:
    if target.startswith("unix:"):
        return {SERVER_ADDRESS: target.removeprefix("unix:").removeprefix("//")}
    host, _, port = target.rpartition(":")
    if host and port.isdigit():
        return {SERVER_ADDRESS: host.removeprefix("dns:").strip("/[]"), SERVER_PORT: int(port)}
    return {SERVER_ADDRESS: target}


# One instrument per provider and side: an SDK warns about a name that is created twice.
_histograms: weakref.WeakKeyDictionary[MeterProvider, dict[str, Histogram]] = weakref.WeakKeyDictionary()


def _duration_histogram(is_server: bool, provider: MeterProvider) -> Histogram:
    name = f"rpc.{'server' if is_server else 'client'}.call.duration"
    known = _histograms.setdefault(provider, {})
    if name not in known:
        known[name] = provider.get_meter(SCOPE).create_histogram(
            name,
            unit="s",
            description="Duration of gRPC calls.",
            explicit_bucket_boundaries_advisory=DURATION_BUCKETS_S,
        )
    return known[name]

"""An OTLP/gRPC receiver on loopback: keeps the spans that arrive, and takes metrics without looking at them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from weighbridge_proto.telemetry import RPC_STATUS

from weighbridge.demo.trace_tree import SpanRecord


class OtlpReceiver:
    """Receives telemetry while it is open; a context manager.

    It serves from threads of its own rather than from an event loop: the exporter of this same process then reaches
    it even while the loop is busy with its end.
    """

    def __init__(self) -> None:
        self._spans: list[SpanRecord] = []
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(max_workers=2, thread_name_prefix="otlp-receiver"))
        # Ignored by the type checker: the generated code of opentelemetry-proto has no annotations.
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(self), self._server)  # type: ignore[no-untyped-call]
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(), self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        """Where exporters send."""

    def __enter__(self) -> "OtlpReceiver":
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(grace=None).wait()

    def spans(self) -> list[SpanRecord]:
        """What has arrived so far."""
        with self._lock:
            return list(self._spans)

    def add(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        """Keep the spans of one export."""
        arrived = read_spans(request)
        with self._lock:
            self._spans.extend(arrived)


def read_spans(request: trace_service_pb2.ExportTraceServiceRequest) -> list[SpanRecord]:
    """The spans of one export, each with the service that its resource names."""
    return [
        SpanRecord(
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            name=span.name,
            service=_attribute(resource.resource.attributes, "service.name"),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            status=_attribute(span.attributes, RPC_STATUS),
            linked_trace_ids=tuple(link.trace_id.hex() for link in span.links),
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _attribute(attributes: Any, key: str) -> str:
    pair: common_pb2.KeyValue
    for pair in attributes:
        if pair.key == key:
            return str(pair.value.string_value)
    return ""


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(  # noqa: N802 # the contract's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._receiver.add(request)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def Export(  # noqa: N802 # the contract's name
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: Any
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        return metrics_service_pb2.ExportMetricsServiceResponse()

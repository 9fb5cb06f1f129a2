"""The host's rules without processes: states, what the metrics say."""

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from weighbridge_engines.host.metrics import ChatMeasure, HostMetrics, mark_chat_span
from weighbridge_engines.host.states import ResidencyState, advance, engine_state
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb

S = ResidencyState


def test_a_model_goes_one_way():
    steps = [(S.STARTING, S.READY), (S.STARTING, S.ENDING), (S.READY, S.ENDING), (S.ENDING, S.GONE)]
    for before in S:
        for after in S:
            if (before, after) in steps:
                assert advance(before, after) is after
            else:
                with pytest.raises(ValueError, match="no step"):
                    advance(before, after)


@pytest.mark.parametrize(
    ("stopping", "current", "loads", "state"),
    [
        (False, None, False, engine_pb.ENGINE_STATE_EMPTY),
        (False, None, True, engine_pb.ENGINE_STATE_LOADING),  # planned, or waits for memory
        (False, S.STARTING, True, engine_pb.ENGINE_STATE_LOADING),
        (False, S.READY, False, engine_pb.ENGINE_STATE_READY),
        (False, S.READY, True, engine_pb.ENGINE_STATE_READY),  # another model waits for its requests
        (False, S.ENDING, True, engine_pb.ENGINE_STATE_UNLOADING),
        (True, S.READY, False, engine_pb.ENGINE_STATE_STOPPING),
    ],
)
def test_what_the_engine_is_doing(stopping, current, loads, state):
    assert engine_state(stopping, current, loads) == state


def test_answers_are_measured_by_the_conventions(monkeypatch):
    reader = InMemoryMetricReader()
    monkeypatch.setattr(metrics, "get_meter", MeterProvider([reader]).get_meter)
    host = HostMetrics("mlx")
    measure = ChatMeasure(started_s=10.0)
    measure.heard(chat_pb.ChatResponse(started=chat_pb.ChatStarted()), 10.1)
    for now_s in (10.5, 11.0, 11.5):
        measure.heard(chat_pb.ChatResponse(delta=chat_pb.ChatDelta(text="secret text")), now_s)
    host.answered("demo", measure, 12.0, chat_pb.Usage(output_tokens=5), None)
    host.answered("", ChatMeasure(started_s=20.0), 21.0, None, "MODEL_NOT_FOUND")
    host.peaked("demo", planned_bytes=100, peak_bytes=110)
    host.loaded("demo", 3.0)
    data = reader.get_metrics_data()
    points = {metric.name: metric.data.data_points for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    assert points["gen_ai.server.time_to_first_token"][0].sum == pytest.approx(0.5)
    assert points["gen_ai.server.time_per_output_token"][0].sum == pytest.approx(0.25)  # 1 s over 4 tokens
    good, bad = sorted(points["gen_ai.server.request.duration"], key=lambda point: -point.sum)
    assert (good.sum, dict(good.attributes)["gen_ai.request.model"]) == (pytest.approx(2.0), "demo")
    assert dict(bad.attributes)["error.type"] == "MODEL_NOT_FOUND"
    assert "gen_ai.request.model" not in bad.attributes  # it never came to one
    assert points["weighbridge.engine.estimate.ratio"][0].sum == pytest.approx(1.1)
    assert points["weighbridge.engine.load.duration"][0].sum == pytest.approx(3.0)
    assert "secret text" not in data.to_json()


def test_a_chats_span_tells_how_it_was_asked_by_the_conventions():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    request = chat_pb.ChatRequest(
        max_output_tokens=7, sampling=chat_pb.Sampling(temperature=0.0, seed=-1), stop_sequences=["secret text"]
    )
    with provider.get_tracer("test").start_as_current_span("chat"):
        mark_chat_span("mlx", "demo", "lease-1", request)
    [span] = exporter.get_finished_spans()
    told = {name.removeprefix("gen_ai."): value for name, value in span.attributes.items() if "gen_ai." in name}
    assert told == {
        "operation.name": "chat", "provider.name": "weighbridge.mlx", "request.model": "demo",
        "response.model": "demo", "request.stream": True, "request.max_tokens": 7, "request.temperature": 0.0,
        "request.seed": -1,
    }  # fmt: skip
    assert "secret text" not in span.to_json()

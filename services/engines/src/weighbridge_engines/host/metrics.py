"""What a host measures: how long loads and answers take, and how good estimates are. Never a text."""

from dataclasses import dataclass
from typing import Literal

from opentelemetry import trace
from weighbridge_common import telemetry
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb

from weighbridge_engines.sd_server.jobs import RenderJob

# Names of the semantic conventions for generative AI (OpenTelemetry 1.45; package opentelemetry-semantic-conventions
# 0.66b2 has no module that is not marked incubating for them, so the names stand here).
OPERATION, PROVIDER = "gen_ai.operation.name", "gen_ai.provider.name"
REQUEST_MODEL, RESPONSE_MODEL = "gen_ai.request.model", "gen_ai.response.model"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
REQUEST_SAMPLING: tuple[Literal["temperature", "top_p", "top_k", "seed"], ...] = (
    "temperature", "top_p", "top_k", "seed"
)  # fmt: skip
"""Sampling parameters that the conventions name as we do, after ``gen_ai.request.``."""
FINISH_REASONS = "gen_ai.response.finish_reasons"
ERROR_TYPE = "error.type"

DURATION_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0
)  # fmt: skip
PER_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""Bounds that the conventions give."""

RENDER_BUCKETS_S = (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LOAD_BUCKETS_S = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Around 1, where estimate and measurement agree. A ratio, not a difference: a histogram takes no negative value.
ESTIMATE_BUCKETS = (0.5, 0.75, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0)


@dataclass
class ChatMeasure:
    """Times of one answer, in seconds of one monotonic clock."""

    started_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None

    def heard(self, response: chat_pb.ChatResponse, now_s: float) -> None:
        """A response went out."""
        if response.WhichOneof("event") == "delta":
            self.first_token_s = now_s if self.first_token_s is None else self.first_token_s
            self.last_token_s = now_s


class HostMetrics:
    """The instruments of one engine."""

    def __init__(self, kind: str) -> None:
        meter = telemetry.meter()
        self._base = {OPERATION: "chat", PROVIDER: f"weighbridge.{kind}"}
        self._kind = {"weighbridge.engine.kind": kind}
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration", "s", "Time from request to end of the answer.",
            explicit_bucket_boundaries_advisory=DURATION_BUCKETS_S,
        )  # fmt: skip
        self._first = meter.create_histogram(
            "gen_ai.server.time_to_first_token", "s", "Time from request to the first token.",
            explicit_bucket_boundaries_advisory=FIRST_TOKEN_BUCKETS_S,
        )  # fmt: skip
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token", "s", "Time per token after the first.",
            explicit_bucket_boundaries_advisory=PER_TOKEN_BUCKETS_S,
        )  # fmt: skip
        self._load = meter.create_histogram(
            "weighbridge.engine.load.duration", "s", "Time from start of the process to ready.",
            explicit_bucket_boundaries_advisory=LOAD_BUCKETS_S,
        )  # fmt: skip
        self._render = meter.create_histogram(
            "weighbridge.engine.render.duration", "s", "Time from a request for images to the end of the last one.",
            explicit_bucket_boundaries_advisory=RENDER_BUCKETS_S,
        )  # fmt: skip
        self._estimate = meter.create_histogram(
            "weighbridge.engine.estimate.ratio", "1", "Measured peak over planned peak.",
            explicit_bucket_boundaries_advisory=ESTIMATE_BUCKETS,
        )  # fmt: skip

    def loaded(self, model_name: str, seconds: float) -> None:
        """A model became ready."""
        self._load.record(seconds, {**self._kind, REQUEST_MODEL: model_name})

    def rendered(self, model_name: str, seconds: float, error_type: str | None) -> None:
        """A request for images ended; ``error_type`` names why, if not well."""
        model = {REQUEST_MODEL: model_name} if model_name else {}
        failed = {ERROR_TYPE: error_type} if error_type else {}
        self._render.record(seconds, {**self._kind, **model, **failed})

    def peaked(self, model_name: str, planned_bytes: int, peak_bytes: int) -> None:
        """A model was unloaded, having held ``peak_bytes``."""
        if planned_bytes > 0 and peak_bytes > 0:
            self._estimate.record(peak_bytes / planned_bytes, {**self._kind, REQUEST_MODEL: model_name})

    def answered(
        self, model_name: str, measure: ChatMeasure, now_s: float, usage: chat_pb.Usage | None, error_type: str | None
    ) -> None:
        """An answer ended; ``error_type`` names why, if not well."""
        # A request that never came to a model has none.
        attributes = {**self._base, **({REQUEST_MODEL: model_name, RESPONSE_MODEL: model_name} if model_name else {})}
        if measure.first_token_s is not None:
            self._first.record(measure.first_token_s - measure.started_s, attributes)
            if usage is not None and usage.output_tokens > 1 and measure.last_token_s is not None:
                per_token_s = (measure.last_token_s - measure.first_token_s) / (usage.output_tokens - 1)
                self._per_token.record(per_token_s, attributes)
        failed = {ERROR_TYPE: error_type} if error_type else {}
        self._duration.record(now_s - measure.started_s, {**attributes, **failed})


def mark_chat_span(kind: str, model_name: str, lease_id: str, request: chat_pb.ChatRequest) -> None:
    """Say on the current span which model answers, and how it was asked to."""
    span = trace.get_current_span()
    span.set_attributes(
        {
            OPERATION: "chat",
            PROVIDER: f"weighbridge.{kind}",
            REQUEST_MODEL: model_name,
            RESPONSE_MODEL: model_name,
            "gen_ai.request.stream": True,
            "weighbridge.engine.kind": kind,
            "weighbridge.lease_id": lease_id,
        }
    )
    if request.max_output_tokens:
        span.set_attribute("gen_ai.request.max_tokens", request.max_output_tokens)
    for field in REQUEST_SAMPLING:
        if request.sampling.HasField(field):
            span.set_attribute(f"gen_ai.request.{field}", getattr(request.sampling, field))


def mark_image_span(kind: str, model_name: str, lease_id: str, job: RenderJob) -> None:
    """Say on the current span which model renders, and how much."""
    trace.get_current_span().set_attributes(
        {
            PROVIDER: f"weighbridge.{kind}",
            REQUEST_MODEL: model_name,
            RESPONSE_MODEL: model_name,
            "weighbridge.engine.kind": kind,
            "weighbridge.lease_id": lease_id,
            "weighbridge.image.width": job.width,
            "weighbridge.image.height": job.height,
            "weighbridge.image.batch": job.batch,
            "weighbridge.image.steps": job.steps,
        }
    )


def mark_chat_end(finished: chat_pb.ChatFinished) -> None:
    """Say on the current span what the answer took."""
    span = trace.get_current_span()
    reason = chat_pb.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
    span.set_attributes(
        {
            INPUT_TOKENS: finished.usage.prompt_tokens,
            OUTPUT_TOKENS: finished.usage.output_tokens,
            FINISH_REASONS: (reason,),
        }
    )

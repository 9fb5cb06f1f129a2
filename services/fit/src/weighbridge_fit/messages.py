"""Between the core's plain values and the contract's messages. No rule lives here."""

from typing import Any

from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

from weighbridge_fit.capacity import Capacity, Ceiling, DeviceCeiling, Pool
from weighbridge_fit.claim import Claim
from weighbridge_fit.facts import ComponentTotal, FileSummary, PrecisionTotal, WeightFacts, WeightFormat
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.lines import Line, Range, Requirement, Source
from weighbridge_fit.model_config import MAX_LAYERS, MAX_SIZE, MAX_WORD
from weighbridge_fit.plans.mlx_options import MlxRequest, MlxShape
from weighbridge_fit.plans.mlx_qwen import MlxPlan
from weighbridge_fit.verdict import Assessment, Verdict

_FORMATS = {
    WeightFormat.UNKNOWN: weights_pb2.WEIGHT_FORMAT_UNSPECIFIED,
    WeightFormat.SAFETENSORS: weights_pb2.WEIGHT_FORMAT_SAFETENSORS,
    WeightFormat.GGUF: weights_pb2.WEIGHT_FORMAT_GGUF,
    WeightFormat.TORCH_CHECKPOINT: weights_pb2.WEIGHT_FORMAT_TORCH_CHECKPOINT,
    WeightFormat.DIFFUSERS: weights_pb2.WEIGHT_FORMAT_DIFFUSERS,
    WeightFormat.MIXED: weights_pb2.WEIGHT_FORMAT_MIXED,
}
_LAYERS = {
    LayerKind.FULL_ATTENTION: weights_pb2.LAYER_KIND_FULL_ATTENTION,
    LayerKind.SLIDING_ATTENTION: weights_pb2.LAYER_KIND_SLIDING_ATTENTION,
    LayerKind.GATED_DELTA: weights_pb2.LAYER_KIND_GATED_DELTA,
}
_SOURCES = {
    Source.MEASURED: requirement_pb2.FIGURE_SOURCE_MEASURED,
    Source.DERIVED: requirement_pb2.FIGURE_SOURCE_DERIVED,
    Source.ASSUMED: requirement_pb2.FIGURE_SOURCE_ASSUMED,
}
_VERDICTS = {
    Verdict.RUNS: requirement_pb2.VERDICT_RUNS,
    Verdict.TIGHT: requirement_pb2.VERDICT_TIGHT,
    Verdict.WONT_RUN: requirement_pb2.VERDICT_WONT_RUN,
    Verdict.UNKNOWN: requirement_pb2.VERDICT_UNKNOWN,
}
_POOLS = {
    machine_pb2.POOL_KIND_UNIFIED: Pool.UNIFIED,
    machine_pb2.POOL_KIND_DISCRETE: Pool.DISCRETE,
    machine_pb2.POOL_KIND_CPU: Pool.CPU,
}
# Geometry fields that have the same name and meaning on both sides.
_GEOMETRY_NUMBERS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "attention_heads",
    "kv_heads",
    "head_size",
    "sliding_window_tokens",
    "delta_key_heads",
    "delta_value_heads",
    "delta_key_size",
    "delta_value_size",
    "delta_conv_width",
    "experts",
    "experts_per_token",
    "expert_intermediate_size",
    "max_context_tokens",
    "activation_bytes",
    "quantization_bits",
    "quantization_group_size",
    "tied_embeddings",
)
# Facts given inline are nobody's file: 1 EiB is 2^20 times the largest published model, and sums of such sizes still
# fit the contract's 64 bits.
MAX_INLINE_BYTES = 1 << 60
MAX_INLINE_ITEMS = 4096
# float64
MAX_ACTIVATION_BYTES = 8
_LAYERS_BACK = {number: kind for kind, number in _LAYERS.items()}
_FORMATS_BACK = {number: kind for kind, number in _FORMATS.items()}


class UnpriceableFactsError(Exception):
    """Facts given inline that no plan can be made from; the message says which field and why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


def facts_message(facts: WeightFacts) -> weights_pb2.WeightFacts:
    """Facts as they travel."""
    return weights_pb2.WeightFacts(
        name=facts.name,
        format=_FORMATS[facts.format],
        file_bytes=facts.file_bytes,
        tensor_bytes=facts.tensor_bytes,
        tensor_count=facts.tensor_count,
        element_count=facts.element_count,
        precisions=map(_precision_message, facts.precisions),
        components=[
            weights_pb2.ComponentTally(
                component=total.component,
                tensor_count=total.tensors,
                bytes=total.bytes,
                precisions=map(_precision_message, total.precisions),
            )
            for total in facts.components
        ],
        files=[
            weights_pb2.WeightFile(
                name=file.name,
                size_bytes=file.file_bytes,
                header_bytes=file.header_bytes,
                format=_FORMATS[file.format],
                tensor_count=file.tensors,
            )
            for file in facts.files
        ],
        architecture=facts.architecture,
        quantization=facts.quantization,
        model_digest=facts.model_digest,
        geometry=None if facts.geometry is None else _geometry_message(facts.geometry),
        notes=facts.notes,
        largest_tensor_bytes=facts.largest_tensor_bytes,
    )


def facts_from(message: weights_pb2.WeightFacts) -> WeightFacts:
    """Facts given inline. Raises UnpriceableFactsError for values that no file could have."""
    counts = {
        "file_bytes": message.file_bytes,
        "tensor_bytes": message.tensor_bytes,
        "tensor_count": message.tensor_count,
        "element_count": message.element_count,
        "largest_tensor_bytes": message.largest_tensor_bytes,
    }
    for name, value in counts.items():
        if not 0 <= value <= MAX_INLINE_BYTES:
            raise UnpriceableFactsError(f"model.facts.{name}", "is not a size that a model can have")
    for name in ("components", "precisions", "files", "notes"):
        if len(getattr(message, name)) > MAX_INLINE_ITEMS:
            raise UnpriceableFactsError(f"model.facts.{name}", f"holds more than {MAX_INLINE_ITEMS} entries")
    for name in ("architecture", "quantization", "model_digest"):
        if len(getattr(message, name)) > MAX_WORD:
            raise UnpriceableFactsError(f"model.facts.{name}", "is longer than any such word")
    if not message.tensor_bytes:
        raise UnpriceableFactsError("model.facts.tensor_bytes", "is needed to price a model")
    components = tuple(
        ComponentTotal(tally.component, tally.tensor_count, tally.bytes, tuple(map(_precision_from, tally.precisions)))
        for tally in message.components
    ) or (ComponentTotal("model", message.tensor_count, message.tensor_bytes, ()),)
    if any(total.bytes < 0 for total in components) or sum(total.bytes for total in components) != message.tensor_bytes:
        raise UnpriceableFactsError("model.facts.components", "must add up to tensor_bytes")
    return WeightFacts(
        name=message.name,
        format=_FORMATS_BACK.get(message.format, WeightFormat.UNKNOWN),
        components=components,
        precisions=tuple(map(_precision_from, message.precisions)),
        files=tuple(
            FileSummary(
                file.name,
                file.size_bytes,
                file.header_bytes,
                _FORMATS_BACK.get(file.format, WeightFormat.UNKNOWN),
                file.tensor_count,
            )
            for file in message.files
        ),
        architecture=message.architecture,
        quantization=message.quantization,
        model_digest=message.model_digest,
        geometry=_geometry_from(message.geometry) if message.HasField("geometry") else None,
        notes=tuple(message.notes),
        **counts,
    )


def capacity_from(message: machine_pb2.Capacity) -> Capacity:
    """The ceilings of the ledger's answer."""
    return Capacity(
        pool=_POOLS.get(message.pool, Pool.CPU),
        host=_ceiling_from(message.host),
        total=_ceiling_from(message.total),
        devices=tuple(
            DeviceCeiling(device.device.device_id, _ceiling_from(device.ceiling), device.device.allocation_limit_bytes)
            for device in message.devices
        ),
    )


def requirement_message(requirement: Requirement) -> requirement_pb2.Requirement:
    """Lines and sums as they travel."""
    return requirement_pb2.Requirement(
        lines=map(_line_message, requirement.lines),
        total=_range_message(requirement.total),
        device=_range_message(requirement.device),
        device_peak=_range_message(requirement.device_peak),
        largest_buffer=_range_message(requirement.largest_buffer),
        peak_phase=requirement.peak_phase.value,
    )


def assessment_message(assessment: Assessment) -> requirement_pb2.Assessment:
    """The verdict as it travels."""
    return requirement_pb2.Assessment(
        verdict=_VERDICTS[assessment.verdict],
        reason_code=assessment.reason_code,
        reason=assessment.reason,
        help=assessment.help,
    )


def claim_message(claim: Claim, source: Source) -> requirement_pb2.Claim:
    """The claim as it travels."""
    return requirement_pb2.Claim(
        host_bytes=claim.host_bytes, optional_host_bytes=claim.optional_host_bytes, source=_SOURCES[source]
    )


def mlx_request_from(workload: plan_pb2.Workload, options: plan_pb2.EngineOptions) -> MlxRequest:
    """What an MLX plan is asked for. Options that no plan of this version honours are refused by the caller."""
    chat, given = workload.chat, set_options(options)
    return MlxRequest(
        context_tokens=chat.context_tokens,
        slots=chat.slots,
        prefill_step_tokens=given.get("prefill_step_tokens"),
        kv_bits=given.get("kv_bits"),
        kv_group_size=given.get("kv_group_size"),
        allocator_cache_bytes=given.get("allocator_cache_bytes"),
    )


def set_options(options: plan_pb2.EngineOptions) -> dict[str, Any]:
    """The MLX options that the caller has set, by name; a set zero is set."""
    return {field.name: value for field, value in options.mlx.ListFields()}


def workload_message(shape: MlxShape) -> plan_pb2.Workload:
    """The workload as planned."""
    chat = plan_pb2.ChatWorkload(context_tokens=shape.context_tokens, slots=shape.slots)
    return plan_pb2.Workload(chat=chat)


def options_message(shape: MlxShape) -> plan_pb2.EngineOptions:
    """The options as planned."""
    options = plan_pb2.MlxOptions(
        prefill_step_tokens=shape.prefill_step_tokens, allocator_cache_bytes=shape.allocator_cache_bytes
    )
    if shape.kv_bits:
        options.kv_bits, options.kv_group_size = shape.kv_bits, shape.kv_group_size
    return plan_pb2.EngineOptions(mlx=options)


def launch_message(plan: MlxPlan) -> plan_pb2.Launch:
    """How the runtime is started."""
    shape = plan.shape
    return plan_pb2.Launch(
        mlx=plan_pb2.MlxLaunch(
            context_tokens=shape.context_tokens,
            slots=shape.slots,
            prefill_step_tokens=shape.prefill_step_tokens,
            allocator_cache_bytes=shape.allocator_cache_bytes,
            memory_limit_bytes=plan.memory_limit_bytes,
            kv_bits=shape.kv_bits,
            kv_group_size=shape.kv_group_size,
            weight_bytes=plan.weight_bytes,
        )
    )


def _precision_message(total: PrecisionTotal) -> weights_pb2.PrecisionTally:
    return weights_pb2.PrecisionTally(
        dtype=total.dtype, tensor_count=total.tensors, element_count=total.elements, bytes=total.bytes
    )


def _precision_from(tally: weights_pb2.PrecisionTally) -> PrecisionTotal:
    return PrecisionTotal(tally.dtype, tally.tensor_count, tally.element_count, tally.bytes)


def _geometry_message(geometry: ModelGeometry) -> weights_pb2.ModelGeometry:
    values = {name: getattr(geometry, name) for name in _GEOMETRY_NUMBERS}
    return weights_pb2.ModelGeometry(layers=[_LAYERS[kind] for kind in geometry.layers], **values)


def _geometry_from(message: weights_pb2.ModelGeometry) -> ModelGeometry:
    values = {name: getattr(message, name) for name in _GEOMETRY_NUMBERS}
    for name, value in values.items():
        if isinstance(value, int) and not 0 <= value <= MAX_SIZE:
            raise UnpriceableFactsError(f"model.facts.geometry.{name}", "is not a size that a model can have")
    if message.activation_bytes > MAX_ACTIVATION_BYTES:
        raise UnpriceableFactsError("model.facts.geometry.activation_bytes", "is wider than any number")
    if len(message.model_type) > MAX_WORD:
        raise UnpriceableFactsError("model.facts.geometry.model_type", "is longer than any such word")
    if len(message.layers) > MAX_LAYERS:
        raise UnpriceableFactsError("model.facts.geometry.layers", f"names more than {MAX_LAYERS} layers")
    layers = []
    for number in message.layers:
        if number not in _LAYERS_BACK:
            raise UnpriceableFactsError("model.facts.geometry.layers", "names a kind of layer that is not priced yet")
        layers.append(_LAYERS_BACK[number])
    return ModelGeometry(layers=tuple(layers), **values)


def _ceiling_from(message: machine_pb2.Ceiling) -> Ceiling:
    limit = message.limit_bytes if message.HasField("limit_bytes") else None
    return Ceiling(message.automatic_bytes, message.effective_bytes, limit)


def _line_message(line: Line) -> requirement_pb2.RequirementLine:
    kind = requirement_pb2.PLACE_KIND_DEVICE if line.on_device else requirement_pb2.PLACE_KIND_HOST
    return requirement_pb2.RequirementLine(
        component=line.component,
        phase=line.phase.value,
        place=requirement_pb2.Place(kind=kind),
        low_bytes=line.bytes.low,
        expected_bytes=line.bytes.expected,
        high_bytes=line.bytes.high,
        source=_SOURCES[line.source],
        basis=line.basis,
    )


def _range_message(value: Range) -> requirement_pb2.ByteRange:
    return requirement_pb2.ByteRange(low_bytes=value.low, expected_bytes=value.expected, high_bytes=value.high)

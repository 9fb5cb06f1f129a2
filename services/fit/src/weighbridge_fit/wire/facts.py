"""Weight facts as they travel, and back. No rule lives here."""

import heapq
import math
from dataclasses import replace

from weighbridge_proto.fit.v1 import weights_pb2

from weighbridge_fit.facts import (
    MAX_ELEMENTS,
    ComponentTotal,
    FileSummary,
    Labelled,
    PrecisionTotal,
    Role,
    TensorFact,
    WeightFacts,
    WeightFormat,
)
from weighbridge_fit.geometry import LayerKind, LayerMeasure, ModelGeometry
from weighbridge_fit.model_config import MAX_LAYERS, MAX_SIZE, MAX_WORD
from weighbridge_fit.tally import FactsDisagreeError, verified

_FORMATS = {
    WeightFormat.UNKNOWN: weights_pb2.WEIGHT_FORMAT_UNSPECIFIED,
    WeightFormat.SAFETENSORS: weights_pb2.WEIGHT_FORMAT_SAFETENSORS,
    WeightFormat.GGUF: weights_pb2.WEIGHT_FORMAT_GGUF,
    WeightFormat.TORCH_CHECKPOINT: weights_pb2.WEIGHT_FORMAT_TORCH_CHECKPOINT,
    WeightFormat.DIFFUSERS: weights_pb2.WEIGHT_FORMAT_DIFFUSERS,
    WeightFormat.MIXED: weights_pb2.WEIGHT_FORMAT_MIXED,
}
_ROLES = {
    Role.MODEL: weights_pb2.WEIGHT_ROLE_UNSPECIFIED,
    Role.ADAPTER: weights_pb2.WEIGHT_ROLE_ADAPTER,
    Role.DRAFTER: weights_pb2.WEIGHT_ROLE_DRAFTER,
    Role.PROJECTOR: weights_pb2.WEIGHT_ROLE_PROJECTOR,
}
_LAYERS = {kind: weights_pb2.LayerKind.Value(f"LAYER_KIND_{kind.name}") for kind in LayerKind}
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
    "latent_rank",
    "latent_rope_size",
    "value_head_size",
    "draft_layers",
    "indexer_key_size",
)
# Facts given inline are nobody's file: 1 EiB is 2^20 times the largest published model, and sums of such sizes still
# fit the contract's 64 bits.
MAX_INLINE_BYTES = 1 << 60
MAX_INLINE_ITEMS = 4096
# As many as are read from files (describe.MAX_MODEL_TENSORS); the request's size limit is the tighter bound.
MAX_INLINE_TENSORS = 1 << 19
# About 10 ms.
SORTED_AT_ONCE = 4096
# float64
MAX_ACTIVATION_BYTES = 8
_MEASURES = ("kv_heads", "key_size", "value_size", "window_tokens", "state_elements", "convolution_elements")
_LAYERS_BACK = {number: kind for kind, number in _LAYERS.items()}
_FORMATS_BACK = {number: kind for kind, number in _FORMATS.items()}
_ROLES_BACK = {number: role for role, number in _ROLES.items()}


class UnpriceableFactsError(Exception):
    """Facts given inline that no plan can be made from; the message says which field and why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


def facts_message(facts: WeightFacts, *, include_tensors: bool = False) -> weights_pb2.WeightFacts:
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
        tensors=map(_tensor_message, facts.tensors if include_tensors else ()),
        role=_ROLES[facts.role],
        made_for=facts.made_for,
    )


def facts_from(message: weights_pb2.WeightFacts) -> WeightFacts:
    """Facts given inline or pinned. With tensors, everything that follows from them must agree, and is filled in where
    it is empty.

    Raises UnpriceableFactsError for values that no file could have and for facts that contradict themselves.
    """
    _refuse_impossible(message)
    facts = WeightFacts(
        name=message.name,
        format=_FORMATS_BACK.get(message.format, WeightFormat.UNKNOWN),
        file_bytes=message.file_bytes,
        tensor_bytes=message.tensor_bytes,
        tensor_count=message.tensor_count,
        element_count=message.element_count,
        largest_tensor_bytes=message.largest_tensor_bytes,
        precisions=tuple(map(_precision_from, message.precisions)),
        components=tuple(
            ComponentTotal(
                tally.component, tally.tensor_count, tally.bytes, tuple(map(_precision_from, tally.precisions))
            )
            for tally in message.components
        ),
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
        tensors=_in_order([_tensor_from(tensor) for tensor in message.tensors]),
        role=_ROLES_BACK.get(message.role, Role.MODEL),
        made_for=message.made_for,
    )
    try:
        facts = verified(facts)
    except FactsDisagreeError as error:
        raise UnpriceableFactsError(f"model.facts.{error.field}", error.message) from error
    if not facts.tensor_bytes:
        raise UnpriceableFactsError("model.facts.tensor_bytes", "is needed to price a model")
    if not facts.components:
        whole = ComponentTotal("model", facts.tensor_count, facts.tensor_bytes, ())
        return replace(facts, components=(whole,))
    if sum(total.bytes for total in facts.components) != facts.tensor_bytes:
        raise UnpriceableFactsError("model.facts.components", "must add up to tensor_bytes")
    return facts


def _refuse_impossible(message: weights_pb2.WeightFacts) -> None:
    """Raises UnpriceableFactsError for sizes and lengths beyond those of any model."""
    for name in ("file_bytes", "tensor_bytes", "tensor_count", "element_count", "largest_tensor_bytes"):
        if not 0 <= getattr(message, name) <= MAX_INLINE_BYTES:
            raise UnpriceableFactsError(f"model.facts.{name}", "is not a size that a model can have")
    for name in ("components", "precisions", "files", "notes"):
        if len(getattr(message, name)) > MAX_INLINE_ITEMS:
            raise UnpriceableFactsError(f"model.facts.{name}", f"holds more than {MAX_INLINE_ITEMS} entries")
    if len(message.tensors) > MAX_INLINE_TENSORS:
        raise UnpriceableFactsError("model.facts.tensors", f"holds more than {MAX_INLINE_TENSORS} entries")
    for name in ("architecture", "quantization", "model_digest"):
        if len(getattr(message, name)) > MAX_WORD:
            raise UnpriceableFactsError(f"model.facts.{name}", "is longer than any such word")
    if any(not 0 <= total.bytes <= MAX_INLINE_BYTES for total in message.components):
        raise UnpriceableFactsError("model.facts.components", "holds a size that no component can have")
    if any(not 0 <= file.size_bytes <= MAX_INLINE_BYTES for file in message.files):
        raise UnpriceableFactsError("model.facts.files", "holds a size that no file can have")


def _precision_message(total: PrecisionTotal) -> weights_pb2.PrecisionTally:
    return weights_pb2.PrecisionTally(
        dtype=total.dtype, tensor_count=total.tensors, element_count=total.elements, bytes=total.bytes
    )


def _precision_from(tally: weights_pb2.PrecisionTally) -> PrecisionTotal:
    return PrecisionTotal(tally.dtype, tally.tensor_count, tally.element_count, tally.bytes)


def _geometry_message(geometry: ModelGeometry) -> weights_pb2.ModelGeometry:
    values = {name: getattr(geometry, name) for name in _GEOMETRY_NUMBERS}
    return weights_pb2.ModelGeometry(
        layers=[_LAYERS[kind] for kind in geometry.layers],
        layer_measures=[
            weights_pb2.LayerMeasure(**{name: getattr(measure, name) for name in _MEASURES})
            for measure in geometry.measures
        ],
        **values,
    )


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
    if len(message.layer_measures) not in (0, len(message.layers)):
        raise UnpriceableFactsError("model.facts.geometry.layer_measures", "must be one for each layer, or none")
    measures = tuple(_measure_from(measure) for measure in message.layer_measures)
    return ModelGeometry(layers=tuple(layers), measures=measures, **values)


def _measure_from(message: weights_pb2.LayerMeasure) -> LayerMeasure:
    values = {name: getattr(message, name) for name in _MEASURES}
    for name, value in values.items():
        if not 0 <= value <= MAX_SIZE:
            field = f"model.facts.geometry.layer_measures.{name}"
            raise UnpriceableFactsError(field, "is not a size that a model can have")
    return LayerMeasure(**values)


def _in_order(tensors: list[Labelled]) -> tuple[Labelled, ...]:
    """By component and name. Sorted in runs that are merged: a single sort of 92,000 tensors in no order holds the
    interpreter, and every other caller with it, for a quarter of a second."""
    runs = [sorted(tensors[first : first + SORTED_AT_ONCE]) for first in range(0, len(tensors), SORTED_AT_ONCE)]
    return tuple(runs[0] if len(runs) == 1 else heapq.merge(*runs))


def _tensor_message(labelled: Labelled) -> weights_pb2.TensorFact:
    component, tensor = labelled
    return weights_pb2.TensorFact(
        component=component, name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, bytes=tensor.bytes
    )


def _tensor_from(message: weights_pb2.TensorFact) -> Labelled:
    shape = tuple(message.shape)
    sizes = all(0 <= size <= MAX_INLINE_BYTES for size in (*shape, message.bytes))
    elements = math.prod(shape) if sizes else -1
    if not 0 <= elements <= MAX_ELEMENTS:
        raise UnpriceableFactsError("model.facts.tensors", f"{message.name[:200]!r} is no tensor that a file can hold")
    return message.component, TensorFact(message.name, message.dtype, shape, elements, message.bytes)

"""The plan of a language model by another engine's law: priced, never launched."""

from dataclasses import replace

from weighbridge_common.sizes import format_gib

from weighbridge_fit.calibration import ComputeDevice
from weighbridge_fit.capacity import Capacity, Pool
from weighbridge_fit.facts import Role, WeightFacts, WeightFormat
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws.kv import KvLaw
from weighbridge_fit.laws.kv_layers import keeps_nothing
from weighbridge_fit.lines import MAX_BYTES, Line, OwnBudget, Requirement, requirement
from weighbridge_fit.plans.errors import UNSUPPORTED_ARCHITECTURE, PlanError
from weighbridge_fit.plans.generic import llama_cpp, mlx, vllm
from weighbridge_fit.plans.generic.caches import cache_of
from weighbridge_fit.plans.generic.options import GenericRequest, GenericShape, settle
from weighbridge_fit.plans.mlx.architectures import architecture_of
from weighbridge_fit.plans.mlx.options import MlxRequest, MlxShape
from weighbridge_fit.plans.mlx.plan import plan as mlx_plan
from weighbridge_fit.plans.plan import Engine, Note, Plan

# Beyond this many times the weights, a cache is more likely a wrong setting than a wish (ollama issue 9988).
SUSPICIOUS_CACHE = 10
# Their caches of compressed rows are a law of the engine that runs them, which is not among these.
COMPRESSED_TYPES = frozenset({"deepseek4", "deepseek41", "deepseek_v4", "deepseek_v41"})
# What the MLX plan calls the options that it is given from here.
_OWN_NAMES = {
    "options.mlx.kv_bits": "options.generic.kv_type",
    "options.mlx.kv_group_size": "options.generic.kv_type",
    "options.mlx.prefill_step_tokens": "options.generic.micro_batch_tokens",
}
_ATTENDING = frozenset({LayerKind.FULL_ATTENTION, LayerKind.SLIDING_ATTENTION, LayerKind.CROSS_ATTENTION})


def priceable(facts: WeightFacts) -> ModelGeometry | None:
    """The geometry of a model that these laws price, None for others."""
    geometry = facts.geometry
    if geometry is None or facts.role is not Role.MODEL or geometry.model_type in COMPRESSED_TYPES:
        return None
    return geometry if geometry.layers and geometry.hidden_size and not _missing(geometry) else None


def plan(facts: WeightFacts, request: GenericRequest, capacity: Capacity) -> Plan:
    """Plans one model on one machine. Raises PlanError: UNSUPPORTED_ARCHITECTURE, CONTEXT_TOO_LONG, INVALID_OPTION."""
    geometry = _supported(facts)
    shape = settle(request, facts, geometry, capacity)
    device = ComputeDevice.METAL if capacity.pool is Pool.UNIFIED else ComputeDevice.CPU
    if shape.law is KvLaw.MLX and facts.format is WeightFormat.GGUF:
        message = "mlx-lm reads safetensors; the law of GGUF files is llama_cpp."
        raise PlanError("INVALID_OPTION", "options.generic.law", message)
    if shape.law is KvLaw.MLX and architecture_of(geometry) is not None:
        return _as_the_mlx_engine(facts, request, shape, device)
    extra: list[Note] = []
    budget: OwnBudget | None = None
    if shape.law is KvLaw.LLAMA_CPP:
        lines = llama_cpp.lines(facts, geometry, shape)
    elif shape.law is KvLaw.VLLM:
        lines = vllm.lines(facts, geometry, shape, capacity)
        extra = vllm.notes(lines, geometry, shape, capacity)
        budget = vllm.own_budget(lines, shape, capacity)
    else:
        lines = mlx.lines(facts, geometry, shape, device)
    needed = _summed(lines, budget)
    return Plan(
        engine=Engine.GENERIC,
        shape=shape,
        requirement=needed,
        weight_bytes=_of(lines, "model", "embeddings"),
        process_bytes=_of(lines, "process"),
        notes=(*_notes(facts, geometry, shape), *extra),
    )


def _as_the_mlx_engine(facts: WeightFacts, request: GenericRequest, shape: GenericShape, device: ComputeDevice) -> Plan:
    """One model costs the same whether MLX is an engine here or a law."""
    quantised = shape.kv_type_name != "auto"
    asked = MlxRequest(
        context_tokens=shape.context_tokens,
        slots=shape.slots,
        prefill_step_tokens=request.micro_batch_tokens,
        kv_bits=int(shape.kv_type_name) if quantised else None,
    )
    try:
        made = mlx_plan(facts, asked, device)
    except PlanError as error:
        field = _OWN_NAMES.get(error.field, error.field)
        raise PlanError(error.reason, field, error.message) from error
    assert isinstance(made.shape, MlxShape)
    return Plan(
        engine=Engine.GENERIC,
        shape=replace(shape, micro_batch_tokens=made.shape.prefill_step_tokens),
        requirement=made.requirement,
        weight_bytes=made.weight_bytes,
        process_bytes=made.process_bytes,
        notes=(*_notes(facts, _supported(facts), shape), *(note for note in made.notes if note.code != "WEIGHTS")),
    )


def _supported(facts: WeightFacts) -> ModelGeometry:
    geometry = priceable(facts)
    if geometry is not None:
        return geometry
    if facts.geometry is not None and facts.geometry.model_type not in COMPRESSED_TYPES:
        missing = _missing(facts.geometry) or ["layers"]
        message = f"The model's geometry does not say its {', '.join(missing)}."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model.facts.geometry", message)
    named = f"of type {facts.architecture!r}" if facts.architecture else "whose type is not known"
    raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", f"No law of caches is known for a model {named}.")


def _missing(geometry: ModelGeometry) -> list[str]:
    """Sizes that the layers need and the geometry leaves out."""
    needed = {"layers": len(geometry.layers), "hidden_size": geometry.hidden_size}
    if LayerKind.LATENT_ATTENTION in geometry.layers:
        needed["latent_rank"] = geometry.latent_rank
    own = [measure for measure in geometry.measures if measure.kv_heads and measure.key_size]
    if _ATTENDING & set(geometry.layers) and not own:
        needed |= {"kv_heads": geometry.kv_heads, "head_size": geometry.head_size}
    if LayerKind.GATED_DELTA in geometry.layers and not any(measure.state_elements for measure in geometry.measures):
        needed |= {
            "delta_value_heads": geometry.delta_value_heads,
            "delta_key_size": geometry.delta_key_size,
            "delta_value_size": geometry.delta_value_size,
        }
    return [name for name, value in needed.items() if not value]


def _summed(lines: list[Line], budget: OwnBudget | None) -> Requirement:
    needed = requirement(tuple(line for line in lines if line.bytes.high), budget)
    if needed.total.high > MAX_BYTES:
        message = "The model's sizes multiply to more memory than can be counted: its configuration is wrong."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", message)
    return needed


def _of(lines: list[Line], *components: str) -> int:
    return sum(line.bytes.expected for line in lines if line.component in components)


def _notes(facts: WeightFacts, geometry: ModelGeometry, shape: GenericShape) -> list[Note]:
    found = [Note("WEIGHTS", text) for text in facts.notes]
    priced = f"Priced by the law of {shape.law.value}; weighbridge does not run this engine."
    found.append(Note("PRICED_ONLY", priced, {"law": shape.law.value}))
    if keeps_nothing(geometry):
        found.append(Note("NO_CACHE", "An encoder: it keeps nothing between calls, so no context costs memory."))
    cache = cache_of(geometry, shape).total
    if facts.tensor_bytes and cache > SUSPICIOUS_CACHE * facts.tensor_bytes:
        message = (
            f"The caches take {format_gib(cache)}, {cache // facts.tensor_bytes} times the weights: "
            "is a context this long for so many conversations meant?"
        )
        found.append(Note("CACHE_OUTWEIGHS_MODEL", message, {"cache_bytes": str(cache)}))
    if geometry.draft_layers:
        message = "The draft head is not used: its weights and its cache are not counted."
        found.append(Note("DRAFT_HEAD_NOT_USED", message, {"layers": str(geometry.draft_layers)}))
    return found

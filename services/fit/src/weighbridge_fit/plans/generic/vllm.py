"""A model as vLLM holds it: weights, the activations of its largest step, what CUDA takes, and a pool of pages from all
that is left of its share of the card."""

from weighbridge_common.sizes import format_gib

from weighbridge_fit.calibration.generic import generic
from weighbridge_fit.capacity import Capacity
from weighbridge_fit.components import Component
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.geometry import ModelGeometry
from weighbridge_fit.laws import kv_vllm
from weighbridge_fit.lines import NOTHING, Line, Phase, Range, Source
from weighbridge_fit.plans.generic.caches import bytes_per_token, cache_lines
from weighbridge_fit.plans.generic.options import VLLM_BATCH_TOKENS, GenericShape
from weighbridge_fit.plans.plan import Note

_NOT_LOADED = (Component.DRAFT, Component.UNUSED)


def lines(facts: WeightFacts, geometry: ModelGeometry, shape: GenericShape, capacity: Capacity) -> list[Line]:
    """All lines; with a card, its whole share is taken."""
    figures = generic().figures["vllm"]
    activation, other = _activation(geometry, shape), figures["non_torch_bytes"]
    process = figures["process_bytes"]
    made = [
        _weight_line(facts, geometry, shape),
        *cache_lines(geometry, shape),
        activation,
        Line("process", Phase.RESIDENT, process.range, process.source, process.basis),
    ]
    if shape.on_card:
        made.append(Line("cuda", Phase.RESIDENT, other.range, other.source, other.basis, NOTHING, True))
        made.append(_rest(made, shape, capacity))
    return made


def notes(made: list[Line], geometry: ModelGeometry, shape: GenericShape, capacity: Capacity) -> list[Note]:
    """How many tokens the pool holds, or that there is no pool."""
    if not shape.on_card:
        message = "Without a card vLLM takes no share: its caches are priced for the context alone."
        return [Note("NO_CARD", message)]
    card = capacity.largest_card.ceiling.automatic
    fixed = [line.bytes.expected for line in made if line.on_device and not line.component.startswith(_POOLED)]
    needed = sum(line.bytes.expected for line in made if line.on_device and line.component != "pool_rest")
    per_token = bytes_per_token(geometry, shape)
    found = []
    if needed > card * shape.device_share:
        share = needed / card if card else 2.0
        message = f"vLLM would not start: it needs {format_gib(needed)} and its share is {shape.device_share:.0%}."
        if share <= 1:
            message += f" A device_share of {share:.2f} is enough."
        found.append(Note("POOL_TOO_SMALL", message, {"needed_bytes": str(needed), "device_share": f"{share:.4f}"}))
    elif per_token:
        pool = kv_vllm.pool_bytes(card, shape.device_share, sum(fixed), 0, 0)
        tokens = kv_vllm.pool_tokens(pool, per_token)
        message = f"The pool holds about {tokens:,} tokens in {format_gib(pool)}."
        found.append(Note("POOL", message, {"tokens": str(tokens), "pool_bytes": str(pool)}))
    return found


_POOLED = ("kv_", "recurrent_state", "pool_rest")


def _weight_line(facts: WeightFacts, geometry: ModelGeometry, shape: GenericShape) -> Line:
    left_out = sum(facts.component_bytes(component) for component in _NOT_LOADED)
    loaded = facts.tensor_bytes - left_out
    basis = "tensor bytes of the headers"
    if geometry.activation_bytes > 2:
        wide = sum(total.bytes for total in facts.precisions if total.dtype == "F32")
        loaded -= min(wide, loaded) // 2
        basis += ", float32 loaded as 16 bit"
    if left_out:
        basis += "; a draft head and unused tensors are not loaded"
    largest = Range.exactly(min(facts.largest_tensor_bytes, loaded))
    return Line("model", Phase.RESIDENT, Range.exactly(loaded), Source.DERIVED, basis, largest, shape.on_card)


def _activation(geometry: ModelGeometry, shape: GenericShape) -> Line:
    """Measured with 8,192 tokens at once; a step of fewer tokens takes as much less."""
    figure = generic().figures["vllm"]["activation_bytes"]
    measured = generic().activations.get(geometry.model_type)
    sized, source = (measured, figure.source) if measured else (figure.range, Source.ASSUMED)
    scaled = Range(*(bound * shape.micro_batch_tokens // VLLM_BATCH_TOKENS for bound in _bounds(sized)))
    basis = f"{shape.micro_batch_tokens:,} tokens at once; {figure.basis}"
    if not measured:
        basis += f", {geometry.model_type} not among them"
    return Line("activations", Phase.RESIDENT, scaled, source, basis, NOTHING, shape.on_card)


def _rest(made: list[Line], shape: GenericShape, capacity: Capacity) -> Line:
    """What vLLM takes beyond this workload's need, because it takes its whole share. The ceiling stands for the card,
    which is a little larger."""
    card = capacity.largest_card.ceiling.automatic
    held = [line.bytes for line in made if line.on_device]
    need = Range(sum(item.low for item in held), sum(item.expected for item in held), sum(item.high for item in held))
    expected = max(0, int(card * shape.device_share) - need.expected)
    high = max(expected, card - need.high)
    basis = f"vLLM takes {shape.device_share:.0%} of the card whatever the workload: the rest of its pool"
    sized = Range(0, expected, high)
    return Line("pool_rest", Phase.RESIDENT, sized, Source.DERIVED, basis, NOTHING, on_device=True)


def _bounds(sized: Range) -> tuple[int, int, int]:
    return sized.low, sized.expected, sized.high

"""A model as vLLM holds it: weights, the activations of its largest step, what CUDA takes, and a pool of pages from all
that is left of its share of the card.

The share is one of the card's physical memory (`--gpu-memory-utilization`), and all of it is taken, whatever the
workload. What has to be in it and is not leaves no pool, and vLLM does not start.
"""

from weighbridge_common.sizes import format_gib

from weighbridge_fit.calibration.generic import generic
from weighbridge_fit.capacity import Capacity
from weighbridge_fit.components import Component
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.geometry import ModelGeometry
from weighbridge_fit.laws import kv_vllm
from weighbridge_fit.lines import NOTHING, Line, OwnBudget, Phase, Range, Source
from weighbridge_fit.plans.generic.caches import bytes_per_token, cache_lines
from weighbridge_fit.plans.generic.options import VLLM_BATCH_TOKENS, GenericShape
from weighbridge_fit.plans.plan import Note

_NOT_LOADED = (Component.DRAFT, Component.UNUSED)
_REST = "pool_rest"
_POOLED = ("kv_", "recurrent_state", _REST)


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
        made.append(_rest(_needed(made), shape, capacity))
    return made


def own_budget(made: list[Line], shape: GenericShape, capacity: Capacity) -> OwnBudget | None:
    """What has to fit into its share of the card; None without a card."""
    if not shape.on_card:
        return None
    what = f"{shape.device_share:.0%} of the card that vLLM is told to take"
    return OwnBudget(_needed(made), _share_bytes(shape, capacity), what)


def notes(made: list[Line], geometry: ModelGeometry, shape: GenericShape, capacity: Capacity) -> list[Note]:
    """How many tokens the pool holds, or that there is no pool."""
    if not shape.on_card:
        message = "Without a card vLLM takes no share: its caches are priced for the context alone."
        return [Note("NO_CARD", message)]
    needed, share = _needed(made).expected, _share_bytes(shape, capacity)
    per_token = bytes_per_token(geometry, shape)
    if needed > share:
        message = f"vLLM would not start: it needs {format_gib(needed)} and its share is {shape.device_share:.0%}."
        enough = needed / max(1, _card_bytes(capacity))
        if enough <= 1:
            message += f" A device_share of {enough:.2f} is enough."
        return [Note("POOL_TOO_SMALL", message, {"needed_bytes": str(needed), "device_share": f"{enough:.4f}"})]
    if not per_token:
        return []
    fixed = sum(line.bytes.expected for line in made if line.on_device and not line.component.startswith(_POOLED))
    pool = kv_vllm.pool_bytes(_card_bytes(capacity), shape.device_share, fixed, 0, 0)
    tokens = kv_vllm.pool_tokens(pool, per_token)
    message = f"The pool holds about {tokens:,} tokens in {format_gib(pool)}."
    return [Note("POOL", message, {"tokens": str(tokens), "pool_bytes": str(pool)})]


def _card_bytes(capacity: Capacity) -> int:
    """The card's physical memory; its ceiling where that is not known."""
    card = capacity.largest_card
    return card.total or card.ceiling.automatic


def _share_bytes(shape: GenericShape, capacity: Capacity) -> int:
    return int(_card_bytes(capacity) * shape.device_share)


def _needed(made: list[Line]) -> Range:
    """What must be on the card, the rest of the pool left out."""
    needed = NOTHING
    for line in made:
        if line.on_device and line.component != _REST:
            needed = needed + line.bytes
    return needed


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


def _rest(needed: Range, shape: GenericShape, capacity: Capacity) -> Line:
    """What vLLM takes beyond this workload's need, because it takes its whole share and no more. Its low bound is
    nothing: an engine that is told a smaller share would run this workload too."""
    share = _share_bytes(shape, capacity)
    sized = Range(0, max(0, share - needed.expected), max(0, share - needed.expected))
    basis = f"vLLM takes {shape.device_share:.0%} of the card whatever the workload: the rest of its pool"
    return Line(_REST, Phase.RESIDENT, sized, Source.DERIVED, basis, NOTHING, on_device=True)


def _bounds(sized: Range) -> tuple[int, int, int]:
    return sized.low, sized.expected, sized.high

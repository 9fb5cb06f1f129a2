"""The plan of a diffusers tree: components at the precision that they load in, and each phase's working memory.

Text is encoded, then the latent is denoised, then decoded; each phase frees what it used before the next begins, so the
peak is what stays plus the largest phase.
"""

from weighbridge_common.sizes import format_gib

from weighbridge_fit.calibration import Figure
from weighbridge_fit.calibration.diffusers import figures
from weighbridge_fit.capacity import Capacity, Pool
from weighbridge_fit.facts import ComponentTotal, WeightFacts
from weighbridge_fit.lines import MAX_BYTES, NOTHING, Line, Phase, Range, Requirement, Source, requirement
from weighbridge_fit.model import Model
from weighbridge_fit.plans.diffusers import working
from weighbridge_fit.plans.diffusers.options import DiffusersRequest, DiffusersShape, Offload, settle
from weighbridge_fit.plans.diffusers.pipelines import (
    Pipeline,
    Stage,
    is_pipeline,
    known_facts,
    pipeline_of,
    stage_of,
)
from weighbridge_fit.plans.errors import UNSUPPORTED_ARCHITECTURE, PlanError
from weighbridge_fit.plans.plan import Engine, Note, Plan

# What diffusers converts to the type it is told to load in: every floating-point type, eight-bit ones included. Codes
# and counters stay as they are.
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_PHASES = {Stage.TEXT: Phase.TEXT_ENCODE, Stage.DENOISE: Phase.DENOISE, Stage.DECODE: Phase.IMAGE_DECODE}


def plan(model: Model, request: DiffusersRequest, capacity: Capacity) -> Plan:
    """Plans one tree on one machine. Raises PlanError: UNSUPPORTED_ARCHITECTURE, INVALID_OPTION."""
    facts = known_facts(model)
    if not is_pipeline(facts):
        message = "This is no diffusers tree: it has no transformer or UNet in a folder of its own."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", message)
    pipeline = pipeline_of(facts)
    shape = settle(request, model, pipeline, capacity.pool)
    sizes = {total.component: _loaded(total, shape) for total in facts.components}
    on_card = capacity.pool is Pool.DISCRETE
    lines = [*_weight_lines(facts, sizes, shape, on_card), *_base_lines(on_card)]
    lines += working.lines(facts, pipeline, shape, capacity.pool)
    needed = requirement(tuple(lines))
    if needed.total.high > MAX_BYTES:
        raise PlanError("INVALID_OPTION", "workload.image", "This size needs more memory than can be counted.")
    return Plan(
        engine=Engine.GENERIC,
        shape=shape,
        requirement=needed,
        weight_bytes=sum(size.expected for size in sizes.values()),
        process_bytes=figures()["process_base_bytes"].range.expected,
        notes=_notes(facts, pipeline, request, shape, needed),
    )


def _loaded(total: ComponentTotal, shape: DiffusersShape) -> Range:
    """A component's bytes once it is loaded."""
    width = shape.vae_bytes if total.component == "vae" else shape.load_bytes
    if not total.precisions:
        # Stored in 16 or in 32 bits, nobody knows.
        return (
            Range(total.bytes // 2, total.bytes, total.bytes)
            if width == 2
            else Range(*(total.bytes,) * 2, 2 * total.bytes)
        )
    return Range.exactly(
        sum(
            precision.elements * width if precision.dtype in _FLOATS else precision.bytes
            for precision in total.precisions
        )
    )


def _weight_lines(facts: WeightFacts, sizes: dict[str, Range], shape: DiffusersShape, on_card: bool) -> list[Line]:
    lines = []
    whole = NOTHING
    for component, size in sorted(sizes.items()):
        whole = whole + size
        if shape.offload is Offload.NONE:
            basis = f"{_stored(facts, component)}, loaded in {_dtype(component, shape)}"
            buffer = _largest_tensor(facts, component, shape)
            source = _source(facts, component)
            lines.append(Line(component or "root", Phase.RESIDENT, size, source, basis, buffer, on_card))
    if shape.offload is not Offload.NONE:
        basis = "all components, in host memory between their turns on the card"
        lines.append(Line("offloaded_weights", Phase.RESIDENT, whole, Source.DERIVED, basis))
        lines += _turns(facts, sizes, shape)
    elif on_card:
        largest = max(sizes.values(), key=lambda size: size.expected, default=NOTHING)
        basis = "components pass through host memory: all of them before the first moves, at best one at a time"
        lines.append(
            Line(
                "loading",
                Phase.LOAD,
                Range(min(largest.low, whole.low), whole.expected, whole.high),
                Source.DERIVED,
                basis,
            )
        )
    return lines


def _turns(facts: WeightFacts, sizes: dict[str, Range], shape: DiffusersShape) -> list[Line]:
    """The largest component of each phase on the card; with sequential offload its largest tensor alone."""
    lines = []
    for stage, phase in _PHASES.items():
        own = {component: size for component, size in sizes.items() if stage_of(component) is stage}
        if not own:
            continue
        component = max(own, key=lambda name: (own[name].expected, name))
        size, basis = own[component], "its turn on the card: components of one phase follow one another"
        buffer = _largest_tensor(facts, component, shape)
        if shape.offload is Offload.SEQUENTIAL:
            size, basis = (
                _leaf(size, buffer),
                "one layer at a time: its largest tensor, and the next one while it loads",
            )
        lines.append(Line(component, phase, size, Source.DERIVED, basis, buffer, on_device=True))
    return lines


def _leaf(size: Range, buffer: Range) -> Range:
    """The largest tensor once, or twice while another is on its way; where tensors are not known, up to a tenth."""
    if buffer.expected:
        return Range(buffer.expected, buffer.expected, min(2 * buffer.expected, max(size.high, buffer.expected)))
    return Range(0, size.expected // 50, max(size.high // 10, size.expected // 50))


def _largest_tensor(facts: WeightFacts, component: str, shape: DiffusersShape) -> Range:
    width = shape.vae_bytes if component == "vae" else shape.load_bytes
    sizes = [
        tensor.elements * width if tensor.dtype in _FLOATS else tensor.bytes
        for tensor in facts.component_tensors(component)
    ]
    return Range.exactly(max(sizes, default=0))


def _base_lines(on_card: bool) -> list[Line]:
    lines = [_figure_line("process", Phase.RESIDENT, figures()["process_base_bytes"])]
    if on_card:
        lines.append(_figure_line("device_base", Phase.RESIDENT, figures()["device_base_bytes"], on_device=True))
    return lines


def _figure_line(component: str, phase: Phase, figure: Figure, on_device: bool = False) -> Line:
    return Line(component, phase, figure.range, figure.source, f"{figure.basis} ({figure.date})", on_device=on_device)


def _dtype(component: str, shape: DiffusersShape) -> str:
    return shape.vae_dtype if component == "vae" else shape.load_dtype


def _stored(facts: WeightFacts, component: str) -> str:
    total = next(total for total in facts.components if total.component == component)
    if not total.precisions:
        return "stored in a precision that is not known"
    return "stored in " + ", ".join(precision.dtype for precision in total.precisions[:4])


def _source(facts: WeightFacts, component: str) -> Source:
    known = any(total.component == component and total.precisions for total in facts.components)
    return Source.DERIVED if known else Source.ASSUMED


def _notes(
    facts: WeightFacts,
    pipeline: Pipeline,
    request: DiffusersRequest,
    shape: DiffusersShape,
    needed: Requirement,
) -> tuple[Note, ...]:
    notes = []
    if not facts.tensor_count:
        message = (
            "Only the sizes of its files are known, not the precision that they are stored in: it needs "
            f"{format_gib(needed.total.low)} to {format_gib(needed.total.high)}."
        )
        notes.append(Note("PRICED_BY_RANGE", message))
    if not pipeline.known:
        what = "video" if pipeline.video else "image"
        message = (
            f"No figures are known for {facts.architecture or 'this pipeline'}: it is priced as any {what} pipeline."
        )
        notes.append(Note("PIPELINE_UNKNOWN", message))
    if pipeline.video and not request.frames:
        message = f"Priced for {shape.frames} frames, the pipeline's default. One frame is an image."
        notes.append(Note("DEFAULT_FRAMES", message, {"frames": str(shape.frames)}))
    if request.offload not in (None, "none", shape.offload.value):
        message = "Offloading saves nothing here: the machine has one memory for the processor and the card."
        notes.append(Note("OFFLOAD_WITHOUT_EFFECT", message))
    if shape.vae_dtype != shape.load_dtype:
        message = f"The autoencoder is priced in {shape.vae_dtype}, as the pipeline's documentation loads it."
        notes.append(Note("VAE_DTYPE", message, {"dtype": shape.vae_dtype}))
    return tuple(notes)

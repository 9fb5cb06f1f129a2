"""The plan of an sd-server: what its process and the card will hold, line by line, and the flags that make it so.

The peak is what is resident plus the largest phase: the engine allocates a buffer for text, for each step and for the
autoencoder in turn, and gives each back before the next. On a card the weights are either there for good, or they stay
in host memory and each component comes to the card for its own phase.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from weighbridge_fit.capacity import Capacity, Pool
from weighbridge_fit.facts import Role, WeightFormat
from weighbridge_fit.laws.sd_resident import family_of
from weighbridge_fit.laws.sd_shapes import ARCHITECTURES, BufferOptions
from weighbridge_fit.lines import MAX_BYTES, Line, Phase, Range, Requirement, Source, requirement
from weighbridge_fit.model import Model
from weighbridge_fit.plans.errors import UNSUPPORTED_ARCHITECTURE, PlanError
from weighbridge_fit.plans.plan import Engine
from weighbridge_fit.plans.sd.architecture import architecture_of_model
from weighbridge_fit.plans.sd.buffers import Scratch, scratch_of
from weighbridge_fit.plans.sd.launch import arguments
from weighbridge_fit.plans.sd.notes import Situation, notes_for
from weighbridge_fit.plans.sd.options import SdRequest, SdShape, backend_of, retyping, settle
from weighbridge_fit.plans.sd.overhead import overhead_lines
from weighbridge_fit.plans.sd.parts import PICTURE, TEXT, WHOLE, LoadedPart, missing_parts, parts_of
from weighbridge_fit.plans.sd.pools import media_pool
from weighbridge_fit.plans.sd.profiles import profile_for
from weighbridge_fit.plans.sd.rendering import SdPlan, rendering_of
from weighbridge_fit.plans.sd.sizes import side_range
from weighbridge_fit.plans.sd.weights import Held, held_bytes
from weighbridge_fit.recognise.stable_diffusion import Part as Component

CARD_CONTEXT = Range(0, 300 << 20, 700 << 20)
"""What a driver's context and a library's pools take of a card. Not measured with this engine: CUDA contexts of other
runtimes hold 250 to 500 MiB, Vulkan's less, cuBLAS adds a workspace (November 2026)."""
HALF_OF_A_CHECKPOINT = 2
"""A diffusion model is more than half of every checkpoint measured (0.51 to 0.9 of it)."""


@dataclass(frozen=True, slots=True)
class _Loading:
    """What is placed: parts with their bytes, buffers with theirs. `chosen` False: nobody asked for the offloading, the
    plan did."""

    shape: SdShape
    held: tuple[Held, ...]
    scratch: tuple[Scratch, ...]
    options: BufferOptions
    card: bool
    chosen: bool = True

    def on_card(self, component: str) -> bool:
        """Whether a component computes on the card."""
        if component in TEXT and self.shape.text_encoder_on_cpu:
            return False
        return self.card and not (component in PICTURE and self.shape.vae_on_cpu)

    def phase_on_card(self, phase: Phase) -> bool:
        """Whether a phase computes on the card."""
        return self.on_card(_COMPONENT_OF[phase])


_COMPONENT_OF = {
    Phase.TEXT_ENCODE: Component.CLIP_L,
    Phase.IMAGE_ENCODE: Component.VAE,
    Phase.DENOISE: Component.DIFFUSION_MODEL,
    Phase.IMAGE_DECODE: Component.VAE,
}


def plan(model: Model, request: SdRequest, capacity: Capacity) -> SdPlan:
    """Plans one model on one machine. Raises PlanError: UNSUPPORTED_ARCHITECTURE, INVALID_OPTION."""
    architecture = architecture_of_model(model)
    parts = parts_of(model, architecture)
    _supported(model, parts, architecture)
    profile = profile_for(model, architecture)
    sides = side_range(model, architecture)
    pool = media_pool(capacity, backend_of(request))
    digests = {role: facts.model_digest for role, facts in model.companions.items()}
    shape = settle(request, architecture, profile, sides, digests, pool.value.lower())
    card = pool is Pool.DISCRETE
    conversion = retyping(shape.weight_type, shape.tensor_type_rules)
    family = family_of(architecture)
    held = tuple(held_bytes(part, family, conversion, card) for part in parts)
    have = {part.component: part for part in parts}
    vae = have.get(Component.VAE)
    options = shape.buffers(
        tiny=Component.TAESD in have,
        rescaled=architecture == "sdxl" and not (vae is not None and vae.separate),
        vision=Component.LLM_VISION in have,
    )
    scratch = scratch_of(architecture, profile.related_to, shape.render(), options)
    loading = _Loading(shape, held, scratch, options, card)
    needed, moved = _placed(loading, parts, request, capacity)
    if moved:
        shape = replace(shape, offload=True)
    if needed.total.high > MAX_BYTES:
        message = "The request's sizes multiply to more memory than can be counted."
        raise PlanError("INVALID_OPTION", "workload.image", message)
    card_bytes = capacity.largest_card.ceiling.effective if card else 0
    situation = Situation(model, request, shape, profile, sides, parts, held, architecture, pool, card_bytes, moved)
    checkpoint = _is_checkpoint(model, parts)
    return SdPlan(
        engine=Engine.SD,
        shape=shape,
        requirement=needed,
        weight_bytes=sum(part.tensor_bytes for part in parts),
        process_bytes=sum(line.bytes.expected for line in needed.lines if line.component == "process"),
        cpu_only=pool is Pool.CPU,
        notes=notes_for(situation, missing_parts(parts, architecture)),
        arguments=arguments(shape, model.paths, checkpoint, profile.steps if profile.distilled else 0),
        rendering=rendering_of(model, profile, sides, architecture, checkpoint=checkpoint),
    )


def _supported(model: Model, parts: tuple[LoadedPart, ...], architecture: str) -> None:
    facts = model.facts
    if model.entry is None and facts.format is WeightFormat.DIFFUSERS:
        message = "sd-server loads single files; this is a diffusers folder. Name its original checkpoint instead."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", message)
    if facts.role is not Role.MODEL:
        message = f"This file is no model of its own: it is the {facts.role.value} of one."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", message)
    main = {part.component for part in parts} & {Component.DIFFUSION_MODEL, WHOLE}
    # A language model's own name for its architecture is not one of these, with tensors or without.
    language = facts.geometry is not None and facts.geometry.layers and architecture not in ARCHITECTURES
    if not main or language:
        message = "sd-server renders with diffusion models; there is none in these files."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", message)


def _is_checkpoint(model: Model, parts: tuple[LoadedPart, ...]) -> bool:
    """Whether the model's own file holds more than the diffusion model."""
    if model.entry is not None and model.entry.weights_kind:
        return model.entry.weights_kind == "checkpoint"
    return any(part.component != Component.DIFFUSION_MODEL and not part.separate for part in parts)


def _placed(
    loading: _Loading, parts: tuple[LoadedPart, ...], request: SdRequest, capacity: Capacity
) -> tuple[Requirement, bool]:
    """The requirement, and whether weights were moved off the card because nobody chose and it would not hold them."""
    made = _requirement(loading, parts)
    if not loading.card:
        return made, False
    weights = _on_card_bytes(loading)
    if loading.shape.offload:
        return replace(made, device=_largest_alone(weights)), False
    if request.offload_to_cpu is not None:
        return replace(made, device=_all_of(weights)), False
    # Nobody chose: a model may hold as little as its largest component there, and holds all of it where that fits.
    either = Range(_largest_alone(weights).low, *_bounds_above(_all_of(weights)))
    if made.device_peak.expected > capacity.largest_card.ceiling.effective:
        moved = replace(loading, shape=replace(loading.shape, offload=True), chosen=False)
        offloaded = _requirement(moved, parts)
        if offloaded.device_peak.expected < made.device_peak.expected:
            return replace(offloaded, device=either), True
    return replace(made, device=either), False


def _bounds_above(size: Range) -> tuple[int, int]:
    return size.expected, size.high


def _on_card_bytes(loading: _Loading) -> list[Range]:
    """What each component that computes on the card brings there. Of a checkpoint known by its size alone, the largest
    component is at least half."""
    sizes = [part.bytes for part in loading.held if loading.on_card(part.component)]
    if len(sizes) == 1 and loading.held[0].component == WHOLE:
        whole = sizes[0]
        return [Range(whole.low // HALF_OF_A_CHECKPOINT, whole.expected, whole.high)]
    return sizes


def _largest_alone(sizes: Iterable[Range]) -> Range:
    largest = Range(0, 0, 0)
    for size in sizes:
        largest = largest.cover(size)
    return largest


def _all_of(sizes: Iterable[Range]) -> Range:
    total = Range(0, 0, 0)
    for size in sizes:
        total = total + size
    return total


def _requirement(loading: _Loading, parts: tuple[LoadedPart, ...]) -> Requirement:
    return requirement(
        (
            *_weight_lines(loading),
            *_copy_lines(loading),
            *_scratch_lines(loading),
            *overhead_lines(loading.shape, parts, loading.held, loading.options, loading.phase_on_card),
        )
    )


def _weight_lines(loading: _Loading) -> list[Line]:
    """Weights for as long as the model is loaded."""
    offload = loading.shape.offload and loading.card
    largest_part = max(
        (part for part in loading.held if loading.on_card(part.component)),
        key=lambda part: part.bytes.expected,
        default=None,
    )
    lines = []
    for part in loading.held:
        there = loading.on_card(part.component) and not offload
        size, basis = part.bytes, part.basis
        if offload and not loading.chosen and part is largest_part:
            # The least that must be in host memory: the other parts alone, if they compute on the CPU.
            size = Range(0, size.expected, size.high)
            basis += "; not in host memory too if the other parts compute there and leave it the card"
        largest = part.largest or part.bytes.low
        buffer = Range(min(largest, part.bytes.low), min(largest, part.bytes.expected), part.bytes.high)
        lines.append(Line(part.component, Phase.RESIDENT, size, part.source, basis, buffer, there))
    return lines


def _copy_lines(loading: _Loading) -> list[Line]:
    """Offloaded: each component is copied to the card for its own phase, and dropped after it."""
    if not loading.shape.offload or not loading.card:
        return []
    lines = []
    phases = {scratch.phase for scratch in loading.scratch}
    for phase in sorted(phases, key=lambda phase: phase.value):
        here = [part for part in loading.held if _phase_of(part.component, phase) and loading.on_card(part.component)]
        if not here:
            continue
        sizes = [part.bytes for part in here]
        largest, everything = _largest_alone(sizes), _all_of(sizes)
        basis = f"copy of {' or '.join(part.component for part in here)} for this phase, one at a time"
        size = Range(largest.low, largest.expected, everything.high)
        lines.append(Line("weights_on_card", phase, size, here[0].source, basis, on_device=True))
    return lines


def _phase_of(component: str, phase: Phase) -> bool:
    if component in TEXT:
        return phase is Phase.TEXT_ENCODE
    if component in PICTURE:
        return phase in (Phase.IMAGE_ENCODE, Phase.IMAGE_DECODE)
    return phase is Phase.DENOISE


def _scratch_lines(loading: _Loading) -> list[Line]:
    lines = []
    for scratch in loading.scratch:
        there = loading.phase_on_card(scratch.phase)
        lines.append(
            Line("working_buffer", scratch.phase, scratch.bytes, scratch.source, scratch.basis, scratch.bytes, there)
        )
        if loading.card:
            basis = "a driver's context and its libraries' pools; not measured with this engine"
            lines.append(Line("card_context", scratch.phase, CARD_CONTEXT, Source.ASSUMED, basis, on_device=True))
    return lines

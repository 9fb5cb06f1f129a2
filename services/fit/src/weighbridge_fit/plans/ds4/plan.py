"""The plan of a ds4 model: decided by the policy, priced by what the engine allocates."""

from dataclasses import dataclass

from weighbridge_common.sizes import format_gib

from weighbridge_fit.calibration.ds4 import Compute, ds4
from weighbridge_fit.capacity import Capacity
from weighbridge_fit.lines import MAX_BYTES, Line, Phase, Range, Source, requirement
from weighbridge_fit.model import Model
from weighbridge_fit.plans.ds4.decisions import decide_launch, figures_of
from weighbridge_fit.plans.ds4.launch import arguments
from weighbridge_fit.plans.ds4.lines import launch_lines
from weighbridge_fit.plans.ds4.machine import Ds4Machine, machine_from
from weighbridge_fit.plans.ds4.notes import launch_notes, printed_plan_bytes
from weighbridge_fit.plans.ds4.options import Ds4Request, Ds4Shape, settle
from weighbridge_fit.plans.ds4.shape import weights_of
from weighbridge_fit.plans.ds4.standing import Frame
from weighbridge_fit.plans.errors import UNSUPPORTED_ARCHITECTURE, PlanError
from weighbridge_fit.plans.plan import Engine, Plan

EXPERT_CACHE_UNSAFE = "EXPERT_CACHE_UNSAFE"


@dataclass(frozen=True, slots=True)
class Ds4Plan(Plan):
    """A plan, and what ds4 itself will print of it as planned; 0 where that is not known."""

    printed_bytes: int = 0


def plan(model: Model, request: Ds4Request, capacity: Capacity) -> Ds4Plan:
    """Plans one model on one machine.

    Raises PlanError: UNSUPPORTED_ARCHITECTURE, UNSUPPORTED_PLATFORM (ds4 has no build for this machine),
    CONTEXT_TOO_LONG, INVALID_OPTION, EXPERT_CACHE_UNSAFE (no expert cache leaves the system its memory).
    """
    calibration = ds4()
    weights = weights_of(model, calibration)
    machine = machine_from(capacity, request.compute)
    figures = figures_of(model)
    basics = settle(request, weights, machine, figures)
    decisions = decide_launch(model, weights, machine, figures, basics, request, calibration)
    frame = Frame(weights, basics, machine.compute, decisions.streams, machine.discrete)
    lines = launch_lines(frame, decisions, calibration)
    if decisions.shortfall is not None:
        least = requirement((*lines, _system_reserve(lines, decisions.shortfall.needed_ram_bytes, machine)))
        field, sentence = "options.ds4.expert_cache_gib", decisions.shortfall.sentence
        raise PlanError(EXPERT_CACHE_UNSAFE, field, sentence, least)
    needed = requirement(lines)
    if needed.total.high > MAX_BYTES:
        message = "The model's sizes multiply to more memory than can be counted: its header is wrong."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", message)
    printed_bytes = printed_plan_bytes(frame, decisions)
    return Ds4Plan(
        engine=Engine.DS4,
        shape=Ds4Shape(
            compute=machine.compute,
            layout=basics.layout,
            context_tokens=basics.context_tokens,
            sessions=basics.sessions,
            chunk_tokens=basics.chunk_tokens,
            streams=decisions.streams,
            expert_cache_gib=decisions.cache_gib,
            drafter=decisions.drafter,
            policy=basics.policy,
            vision=decisions.vision_file is not None,
            power=basics.power,
            disk_kv=basics.disk_kv,
        ),
        requirement=needed,
        weight_bytes=weights.non_routed.expected if decisions.streams else weights.mapped_bytes,
        process_bytes=int(calibration["process_bytes"].expected),
        notes=launch_notes(model, frame, machine, figures, decisions, needed, printed_bytes, calibration),
        arguments=arguments(model.path, weights, basics, decisions, machine.compute),
        cpu_only=machine.compute is Compute.CPU,
        printed_bytes=printed_bytes,
    )


def _system_reserve(lines: tuple[Line, ...], needed_ram_bytes: int, machine: Ds4Machine) -> Line:
    """What of the least memory that the policy starts on is left beside the engine's own bytes in it."""
    here = (line for line in lines if line.phase is Phase.RESIDENT and not line.on_device)
    left = max(0, needed_ram_bytes - sum(line.bytes.expected for line in here))
    basis = (
        f"not held: what the policy leaves to the system beside a streamed launch, which it starts on no less than "
        f"{format_gib(needed_ram_bytes)} of memory; this machine has {format_gib(machine.ram_bytes)}"
    )
    return Line("system_reserve", Phase.RESIDENT, Range.exactly(left), Source.DERIVED, basis)

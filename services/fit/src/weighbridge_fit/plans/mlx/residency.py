"""Where an MLX model's bytes are held other than as its weights lie in the file: experts in a slab of slots, a second
device's copies, saved prompts.

Slabs and shared projections are priced by the formulas of mlx-bun, whose engine has them (August and September 2026).
"""

from weighbridge_common.sizes import format_gib

from weighbridge_fit.components import Component
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.geometry import ModelGeometry
from weighbridge_fit.laws import mlx_experts, mlx_split
from weighbridge_fit.laws.mlx_experts import Experts
from weighbridge_fit.laws.mlx_split import SharedShape
from weighbridge_fit.lines import Line, Phase, Range, Source
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.mlx.options import MlxShape

# Shares of a projection that were run: of single projections, and of whole MLPs.
_SMALL_SHARE, _LARGE_SHARE = 0.375, 0.55
# Projections that are shared; keys, values and gates are too narrow to gain.
_SHARED = (".q_proj", ".o_proj", ".in_proj_qkv", ".in_proj_z", ".in_proj_qkvz", ".out_proj")


def prompt_cache_lines(shape: MlxShape) -> list[Line]:
    """Saved prompts: filled from what is left over and given back when memory is short, so nothing of it is claimed as
    required."""
    if not shape.prompt_cache_bytes:
        return []
    basis = "saved prompts may fill it; given back when memory is short, so nothing of it is required"
    size = Range(0, 0, shape.prompt_cache_bytes)
    return [Line("prompt_cache", Phase.RESIDENT, size, Source.DERIVED, basis)]


def slab(facts: WeightFacts, geometry: ModelGeometry, asked: int, rows: int, component: str) -> tuple[Experts, int]:
    """The routed experts of a component and how many slots `asked` bytes hold of them, at most all.

    `rows` are the tokens that are computed at once. Raises PlanError INVALID_OPTION, EXPERT_SLAB_TOO_SMALL.
    """
    field = "options.mlx.expert_slab_bytes"
    found = mlx_experts.experts_of(facts.component_tensors(component), geometry.experts)
    if not found.bytes and component == Component.DRAFT:
        return found, 0
    if not found.bytes:
        what = "this model has no routed experts" if facts.tensors else "these facts came without tensors"
        raise PlanError("INVALID_OPTION", field, f"A slab holds experts, and {what}.")
    needed = mlx_experts.working_slots(geometry.experts, geometry.experts_per_token, rows)
    slots = min(asked // found.slot_bytes, found.layers * geometry.experts)
    if slots < needed:
        message = (
            f"One layer may need {needed} experts at once, and {format_gib(asked)} hold {slots} of them. "
            f"At least {format_gib(needed * found.slot_bytes)} are needed."
        )
        raise PlanError("EXPERT_SLAB_TOO_SMALL", field, message)
    return found, slots


def slab_line(name: str, found: Experts, slots: int, experts: int) -> Line:
    """A slab's line."""
    size = Range.exactly(slots * found.slot_bytes)
    basis = (
        f"{slots:,} slots of {found.slot_bytes:,} bytes for {found.layers * experts:,} experts in {found.layers} "
        "layers, each part on a 16 KiB boundary; the others stay on disk"
    )
    return Line(name, Phase.RESIDENT, size, Source.DERIVED, basis, size)


def lane_lines(facts: WeightFacts, geometry: ModelGeometry, shape: MlxShape) -> list[Line]:
    """The second device's float16 copies of its shares: at least for the largest shape, expected for every shape, of
    which one copy serves all layers. On one processor's other stream the weights may be shared instead."""
    if not shape.split_lane:
        return []
    shapes = _shared_shapes(facts, geometry)
    step = min(shape.prefill_step_tokens, shape.context_tokens)
    small = [mlx_split.copy_bytes(one, _SMALL_SHARE, step) for one in shapes]
    large = [mlx_split.copy_bytes(one, _LARGE_SHARE, step) for one in shapes]
    if not any(small):
        message = "No projection of this model is large enough to be shared with a second device."
        raise PlanError("INVALID_OPTION", "options.mlx.split_lane", message)
    low = max(small) if shape.split_lane == "ane" else 0
    basis = (
        f"float16 copies of 37.5 to 55 % of the rows of {len(shapes)} shape(s) of projections, with their buffers of "
        "input and output; one copy serves all layers of a shape"
    )
    return [Line("split_lane", Phase.RESIDENT, Range(low, sum(large), sum(large)), Source.DERIVED, basis)]


def _shared_shapes(facts: WeightFacts, geometry: ModelGeometry) -> list[SharedShape]:
    """Distinct shapes of the projections that are shared, and the whole MLP."""
    tensors = facts.component_tensors(Component.MODEL)
    scales = {tensor.name: tensor for tensor in tensors if tensor.name.endswith(".scales")}
    found = set()
    for tensor in tensors:
        path = tensor.name.removesuffix(".weight")
        if not path.endswith(_SHARED) or path == tensor.name or len(tensor.shape) != 2:
            continue
        scale = scales.get(f"{path}.scales")
        inputs = tensor.shape[1]
        if scale is not None and len(scale.shape) == 2 and geometry.quantization_group_size:
            inputs = scale.shape[1] * geometry.quantization_group_size
        found.add(SharedShape(inputs, tensor.shape[0]))
    if geometry.intermediate_size and not geometry.experts:
        found.add(SharedShape(geometry.hidden_size, geometry.intermediate_size, matrices=3))
    return sorted(found)

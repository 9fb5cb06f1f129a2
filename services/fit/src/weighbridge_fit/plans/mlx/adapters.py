"""Adapters that are mounted beside an MLX model's weights, as mlx-lm 0.32.2 mounts them: never merged."""

from collections.abc import Mapping

from weighbridge_fit.calibration import BOUNDS, Calibration
from weighbridge_fit.components import Component
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.laws import mlx_adapters
from weighbridge_fit.laws.mlx_adapters import AdapterTarget
from weighbridge_fit.lines import Line, Phase, Range, Source
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.mlx.options import MlxShape

ROLE = "adapter:"
"""Prefix of an adapter's role among a model's companions; its name follows."""

# An embedding's rows are its inputs, a projection's its outputs.
_EMBEDDINGS = ("embed_tokens", "wte")


def adapter_lines(
    facts: WeightFacts, companions: Mapping[str, WeightFacts], shape: MlxShape, calibration: Calibration
) -> list[Line]:
    """Each mounted adapter's matrices, and what the one that is used needs while a prompt is read.

    Raises PlanError ADAPTER_MISMATCH.
    """
    lines, used = [], []
    for name in shape.adapters:
        adapter = companions.get(f"{ROLE}{name}")
        if adapter is None:
            raise _mismatch(f"The adapter {name!r} was not found beside the model.")
        found = _targets(name, adapter, facts)
        used += found
        kind = "DoRA" if any(target.magnitudes for target in found) else "LoRA"
        ranks = sorted({target.rank for target in found})
        basis = (
            f"{kind} factors of {len(found)} projections, rank {' and '.join(map(str, ranks))}: tensor bytes of the "
            "headers; kept beside the weights, not merged"
        )
        size = Range.exactly(adapter.tensor_bytes)
        lines.append(Line(f"adapter {name}", Phase.RESIDENT, size, Source.DERIVED, basis))
    if used:
        chunk = min(shape.prefill_step_tokens, shape.context_tokens)
        lines += _adapter_workspace(used, chunk, calibration)
    return lines


def _adapter_workspace(used: list[AdapterTarget], chunk: int, calibration: Calibration) -> list[Line]:
    """One request uses one adapter, and layers run one after the other: the largest target counts."""
    copies, dora = calibration["adapter_copies"], calibration["dora_copies"]
    residual = Range(
        *(int(max(mlx_adapters.delta_bytes(target, chunk, copies.at(bound)) for target in used)) for bound in BOUNDS)
    )
    basis = f"the largest target's input and output in float32 for a chunk of {chunk:,} tokens; {copies.basis}"
    lines = [Line("adapter_residual", Phase.PREFILL, residual, copies.source, basis)]
    matrix = Range(
        *(int(max(mlx_adapters.matrix_bytes(target, dora.at(bound)) for target in used)) for bound in BOUNDS)
    )
    if matrix.high:
        basis = f"the largest DoRA target's matrix in float32, made anew at every call; {dora.basis}"
        lines += [Line("adapter_matrix", phase, matrix, dora.source, basis) for phase in (Phase.PREFILL, Phase.DECODE)]
    return lines


def _targets(name: str, adapter: WeightFacts, base: WeightFacts) -> list[AdapterTarget]:
    tensors = [tensor for _, tensor in adapter.tensors]
    if any(".lora_A." in tensor.name for tensor in tensors):
        raise _mismatch(f"The adapter {name!r} is in PEFT's format, which mlx-lm does not read. Convert it.")
    try:
        found = mlx_adapters.targets(tensors)
    except ValueError as error:
        raise _mismatch(f"The adapter {name!r} cannot be mounted: {error}.") from error
    if not found:
        raise _mismatch(f"{name!r} holds no LoRA or DoRA factors. A full fine-tune is loaded as a model of its own.")
    rows = {
        tensor.name.removesuffix(".weight"): tensor.shape[-2]
        for tensor in base.component_tensors(Component.MODEL)
        if tensor.name.endswith(".weight") and len(tensor.shape) > 1
    }
    for target in found if rows else ():
        places = (target.path, f"language_model.{target.path}", target.path.removeprefix("language_model."))
        held = next((rows[place] for place in places if place in rows), None)
        wide = target.inputs if target.path.endswith(_EMBEDDINGS) else target.outputs
        if held != wide:
            what = "has no such projection" if held is None else f"has {held:,} rows there and the adapter {wide:,}"
            raise _mismatch(f"The adapter {name!r} was made for another model: at {target.path} this one {what}.")
    return found


def _mismatch(message: str) -> PlanError:
    return PlanError("ADAPTER_MISMATCH", "options.mlx.adapters", message)

"""What should be known about an MLX plan beside its lines."""

from weighbridge_fit.calibration import ComputeDevice
from weighbridge_fit.components import Component
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.geometry import LayerKind
from weighbridge_fit.laws import workspace
from weighbridge_fit.laws.kv_mlx import keeps_windows
from weighbridge_fit.plans.mlx.options import MlxShape
from weighbridge_fit.plans.mlx.working import Loaded
from weighbridge_fit.plans.plan import Note


def notes(facts: WeightFacts, model: Loaded, shape: MlxShape, launched_type: bool) -> tuple[Note, ...]:
    """Notes with stable codes, in the order in which they matter."""
    geometry = model.geometry
    found = [Note("WEIGHTS", text) for text in facts.notes]
    left_out = {Component.DRAFT: "draft head", Component.VISION: "vision tower"}
    for component, what in left_out.items():
        used = component is Component.DRAFT and shape.draft_head
        if facts.component_bytes(component) and not used:
            found.append(Note("NOT_LOADED", f"The {what} in these files is not loaded by the MLX engine."))
    if LayerKind.SLIDING_ATTENTION in geometry.layers and not keeps_windows(geometry):
        found.append(Note("WINDOW_NOT_USED", "mlx-lm keeps the whole context in this model's sliding layers."))
    half = geometry.activation_bytes < workspace.FLOAT32_BYTES
    if shape.device is ComputeDevice.CPU and geometry.experts and half and not geometry.quantization_bits:
        message = "MLX 0.32 multiplies experts in float32 only on the CPU: this model loads here and cannot answer."
        found.append(Note("EXPERTS_NEED_FLOAT32", message))
    if not half:
        message = "The weights make every activation float32, so keys and values take twice the usual bytes."
        found.append(Note("FLOAT32_ACTIVATIONS", message))
    unlaunched = not_launched(model, shape, launched_type)
    if unlaunched:
        message = f"This is a price, not a launch: the MLX engine of this version does not run {unlaunched}."
        found.append(Note("NOT_LAUNCHED", message))
    return tuple(found)


def not_launched(model: Loaded, shape: MlxShape, launched_type: bool) -> str:
    """What of a plan the MLX engine of this version does not run, in words; "" where it runs all of it."""
    reasons = []
    if not launched_type:
        reasons.append(f"models of type {model.geometry.model_type}")
    if model.trellis:
        reasons.append("trellis-coded projections")
    if shape.extras:
        reasons.append(f"the options {', '.join(shape.extras)}")
    return " and ".join(reasons)

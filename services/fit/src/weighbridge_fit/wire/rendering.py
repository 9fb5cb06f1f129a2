"""How a model is asked for pictures, as it travels."""

from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge_fit.plans.sd.rendering import Rendering


def rendering_message(rendering: Rendering) -> plan_pb2.SdRendering:
    """A rendering as it travels."""
    width, height = rendering.default_size
    return plan_pb2.SdRendering(
        steps=rendering.steps,
        guidance=rendering.guidance,
        default_width=width,
        default_height=height,
        min_side=rendering.least_side,
        max_width=rendering.sides.width[1],
        max_height=rendering.sides.height[1],
        size_multiple=rendering.sides.multiple,
        starts_from_source=rendering.starts_from_source,
        assessed_starts_from_source=rendering.assessed,
        weights_kind=rendering.weights_kind,
        flow=rendering.flow,
    )

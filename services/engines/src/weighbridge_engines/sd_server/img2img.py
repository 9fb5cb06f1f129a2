"""Whether a model starts from a source image: what is said of it, what was tried with it, what its kind lets expect.

sd-server takes a source for every model it loads; whether the model makes anything of it depends on its architecture.
The classic denoisers of SD 1.x and SDXL do. Newer diffusion models are taken not to until somebody has looked, so that
nobody gets a picture for an edit that never saw the source.
"""

import math
import struct

from weighbridge_proto.fit.v1 import plan_pb2

CHECKPOINT = "checkpoint"
"""Kind of weights that hold every part of a model: those of the classic denoisers. So are weights that do not say."""

DEFAULT_STRENGTH = 0.75
"""sd-server's own."""


def why_not_from_source(rendering: plan_pb2.SdRendering, model_name: str) -> str:
    """Why a model does not start from a source image, as a sentence; empty: it does.

    The first of these that speaks decides: the catalogue entry, an assessment on sd-server, the kind of the weights.
    """
    if rendering.HasField("starts_from_source"):
        declared = f"{model_name} does not start from a source image, as its catalogue entry says."
        return "" if rendering.starts_from_source else declared
    if rendering.HasField("assessed_starts_from_source"):
        assessed = f"{model_name} was assessed on sd-server, and does not start from a source image there."
        return "" if rendering.assessed_starts_from_source else assessed
    if rendering.weights_kind in ("", CHECKPOINT):
        return ""
    return (
        f"Nobody has verified that {model_name} starts from a source image on sd-server. Its catalogue entry can say "
        "that it does."
    )


def why_nothing_is_left(
    rendering: plan_pb2.SdRendering, model_name: str, steps: int, strength: float | None, *, has_mask: bool
) -> str:
    """Why nothing of a source would be in the picture at this strength, as a sentence; empty: something would.

    sd-server leaves out the steps before the strength, but always one fewer than that. A model trained on flows that
    takes them all begins with noise alone: the picture is the one without a source. With a mask, what is not repainted
    is the source's.
    """
    if has_mask or not rendering.flow:
        return ""
    share = DEFAULT_STRENGTH if strength is None else strength
    if int(_as_float(steps * _as_float(share))) < steps - 1:
        return ""
    instead = f"a strength below {math.floor(100 * (steps - 1) / steps) / 100:g}" if steps > 1 else "more steps"
    return (
        f"At strength {share:g} {model_name} begins with noise alone in {steps} steps, so nothing of the source would "
        f"be left. Ask for {instead}."
    )


def _as_float(value: float) -> float:
    """In the precision that the engine counts with."""
    return float(struct.unpack("f", struct.pack("f", value))[0])

"""Whether a model starts from a source image: what is said of it, what was tried with it, what its kind lets expect.

sd-server takes a source for every model it loads; whether the model makes anything of it depends on its architecture.
The classic denoisers of SD 1.x and SDXL do. Newer diffusion models are taken not to until somebody has looked, so that
nobody gets a picture for an edit that never saw the source.
"""

from weighbridge_proto.fit.v1 import plan_pb2

CHECKPOINT = "checkpoint"
"""Kind of weights that hold every part of a model: those of the classic denoisers. So are weights that do not say."""


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

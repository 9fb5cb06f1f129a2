"""How a model is asked for pictures: what its authors recommend, what it renders well, whether it starts from one."""

from dataclasses import dataclass

from weighbridge_fit.model import Model
from weighbridge_fit.plans.plan import Plan
from weighbridge_fit.plans.sd.profiles import Profile
from weighbridge_fit.plans.sd.sizes import SideRange, Tier, tier_size

CHECKPOINT, DIFFUSION_MODEL = "checkpoint", "diffusion-model"

_FLOWS = ("sd3", "flux", "chroma", "klein", "zimage", "qwen", "wan")
"""How the names of architectures that are trained on flows begin, sizes that nothing was measured of among them."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """None of it changes a byte of the weights. `guidance` None: the engine's own. `starts_from_source` is the
    catalogue's word on image to image and `assessed` what came out where it was tried; None: there is none. `flow`: it
    was trained on flows, so that a render of all its steps begins with noise alone."""

    steps: int
    guidance: float | None
    default_size: tuple[int, int]
    sides: SideRange
    starts_from_source: bool | None
    assessed: bool | None
    weights_kind: str
    flow: bool

    @property
    def least_side(self) -> int:
        """The least width or height, in pixels."""
        return min(self.sides.width[0], self.sides.height[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class SdPlan(Plan):
    """A plan of sd-server, with how its model is asked for pictures."""

    rendering: Rendering


def rendering_of(model: Model, profile: Profile, sides: SideRange, architecture: str, *, checkpoint: bool) -> Rendering:
    """How a model is asked for pictures. `checkpoint`: its own file holds every part."""
    return Rendering(
        steps=profile.steps,
        guidance=profile.cfg_scale,
        default_size=tier_size(profile, Tier.STANDARD, sides),
        sides=sides,
        starts_from_source=model.entry.image_to_image if model.entry is not None else None,
        assessed=profile.img2img,
        weights_kind=CHECKPOINT if checkpoint else DIFFUSION_MODEL,
        flow=architecture.startswith(_FLOWS) or profile.related_to.startswith(_FLOWS),
    )

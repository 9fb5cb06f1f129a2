"""How large a picture is: asked for in pixels, by quality tier, or left to the model."""

from dataclasses import dataclass
from enum import Enum
from math import sqrt

from weighbridge_fit.catalog.entry import PixelRange
from weighbridge_fit.laws.sd_shapes import ARCHITECTURES, round_up
from weighbridge_fit.model import Model
from weighbridge_fit.plans.sd.profiles import Profile

UNKNOWN_MULTIPLE_PX = 16
"""Diffusion transformers of today take sides in multiples of 8 to 32; what is not known is rounded up to 16."""
SMALLEST_SIDE_PX, LARGEST_SIDE_PX = 64, 4096
"""The sides that sd-server offers (its /sdcpp/v1/capabilities), where the catalogue says nothing narrower."""


class Tier(Enum):
    """How fine a picture shall be, as a share of the model's default side."""

    DRAFT = 0.5
    STANDARD = 1.0
    HIGH = 1.5


@dataclass(frozen=True, slots=True)
class SideRange:
    """The sides that can be asked for, in pixels, and the multiple that the engine rounds them up to."""

    width: tuple[int, int]
    height: tuple[int, int]
    multiple: int

    @property
    def both(self) -> tuple[int, int]:
        """The sides that are in range as width and as height."""
        return max(self.width[0], self.height[0]), min(self.width[1], self.height[1])


def multiple_of(architecture: str) -> int:
    """What the engine rounds sides up to, in pixels."""
    known = ARCHITECTURES.get(architecture)
    return known.multiple_px if known else UNKNOWN_MULTIPLE_PX


def side_range(model: Model, architecture: str) -> SideRange:
    """The catalogue's ranges, else the engine's; never more than the architecture has positions for."""
    entry, multiple, largest = model.entry, multiple_of(architecture), largest_side(architecture)

    def within(said: PixelRange | None) -> tuple[int, int]:
        return (said.smallest, min(said.largest, largest)) if said else (SMALLEST_SIDE_PX, largest)

    return SideRange(within(entry.width if entry else None), within(entry.height if entry else None), multiple)


def largest_side(architecture: str) -> int:
    """The largest side that an architecture renders, in pixels: SD3 has a table of positions, and the engine's process
    ends (GGML_ASSERT) where a picture has more rows or columns than that."""
    known = ARCHITECTURES.get(architecture)
    rows = known.position_rows * known.token_px if known else 0
    return min(LARGEST_SIDE_PX, rows) if rows else LARGEST_SIDE_PX


def tier_size(profile: Profile, tier: Tier, sides: SideRange, aspect: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """Width and height at a tier: 0.5, 1 or 1.5 times the default side, with its area at the aspect that is asked for,
    clamped to the model's ranges without bending the aspect where that is possible, rounded up to the multiple."""
    side = profile.default_side_px * tier.value
    stretch = sqrt(aspect[0] / aspect[1])
    wide, high = side * stretch, side / stretch
    shrink = min(1.0, sides.width[1] / wide, sides.height[1] / high)
    grow = max(1.0, sides.width[0] / (wide * shrink), sides.height[0] / (high * shrink))
    return (
        _clamped(wide * shrink * grow, sides.width, sides.multiple),
        _clamped(high * shrink * grow, sides.height, sides.multiple),
    )


def _clamped(side: float, bounds: tuple[int, int], multiple: int) -> int:
    """Rounded up, and down again where that would leave the range."""
    # A side that only floating point has lifted above a multiple is that multiple.
    up = round_up(int(min(max(side, bounds[0]), bounds[1]) + 0.999), multiple)
    return up if up <= bounds[1] else max(multiple, bounds[1] // multiple * multiple)

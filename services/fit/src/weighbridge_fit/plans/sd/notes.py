"""What should be known about an sd-server plan, a sentence each."""

from collections.abc import Iterator
from dataclasses import dataclass

from weighbridge_common.sizes import format_gib

from weighbridge_fit.capacity import Pool
from weighbridge_fit.laws.sd_buffers import MASK_STEP_TOKENS, attention_way
from weighbridge_fit.laws.sd_resident import AS_STORED, family_of
from weighbridge_fit.laws.sd_shapes import ARCHITECTURES, attention_tokens, image_tokens
from weighbridge_fit.lines import Source
from weighbridge_fit.model import Model
from weighbridge_fit.plans.plan import Note
from weighbridge_fit.plans.sd.options import SdRequest, SdShape
from weighbridge_fit.plans.sd.parts import LoadedPart
from weighbridge_fit.plans.sd.profiles import Profile
from weighbridge_fit.plans.sd.sizes import SideRange
from weighbridge_fit.plans.sd.weights import Held, held_bytes
from weighbridge_fit.recognise.stable_diffusion import Part as Component

EVEN_TOKENS = 32
"""Tokens along a side that make both levels of a UNet's attention, a token's own and one of 2 x 2, whole blocks of
`MASK_STEP_TOKENS`: 32 x 32 / 4."""


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a note can be about. `card_bytes` 0: none is used; `moved`: weights leave the card because nobody
    chose and it would not hold them."""

    model: Model
    request: SdRequest
    shape: SdShape
    profile: Profile
    sides: SideRange
    parts: tuple[LoadedPart, ...]
    held: tuple[Held, ...]
    architecture: str
    pool: Pool
    card_bytes: int
    moved: bool


def notes_for(situation: Situation, missing: tuple[str, ...]) -> tuple[Note, ...]:
    """Every note that applies, those about the weights first."""
    made = [Note("WEIGHTS", text) for text in situation.model.facts.notes]
    made += [*_about_parts(situation, missing), *_about_size(situation), *_about_options(situation)]
    return tuple(made)


def _about_parts(situation: Situation, missing: tuple[str, ...]) -> Iterator[Note]:
    if missing:
        names = ", ".join(missing)
        message = (
            f"sd-server needs more files to run this model: {names}. Name them as parts, for example "
            f"--set parts={missing[0]}=FILE; what is said here leaves them out."
        )
        yield Note("MISSING_PART", message, {"roles": ",".join(missing)})
    unknown = [part.component for part in situation.held if part.source is Source.ASSUMED]
    if unknown:
        message = (
            f"Priced by the plausible range of file sizes for {', '.join(unknown)}: the headers of these weights are "
            "not known before they are on disk, or pinned in the entry."
        )
        yield Note("PRICED_BY_RANGE", message, {"components": ",".join(unknown)})
    if any(part.component == Component.CONTROL_NET for part in situation.parts):
        message = (
            "A control net's weights are in this price; its working buffer was not measured and is not. It is built "
            "like half of the diffusion model, so expect up to half of that one's buffer."
        )
        yield Note("CONTROL_NET_BUFFER", message)
    if situation.architecture not in ARCHITECTURES:
        what = situation.architecture or "this architecture"
        message = f"The working buffers of {what} were not measured with sd-server: they are given as a range."
        yield Note("UNKNOWN_ARCHITECTURE", message, {"architecture": situation.architecture})


def _about_size(situation: Situation) -> Iterator[Note]:
    request, shape = situation.request, situation.shape
    planned = f"{shape.width_px} x {shape.height_px}"
    asked = (request.width_px or shape.width_px, request.height_px or shape.height_px)
    if request.tier is None and asked != (shape.width_px, shape.height_px):
        message = f"sd-server rounds {asked[0]} x {asked[1]} up to {planned}: multiples of {situation.sides.multiple}."
        yield Note("SIZE_ROUNDED", message, {"width_px": str(shape.width_px), "height_px": str(shape.height_px)})
    within = (_within(shape.width_px, situation.sides.width), _within(shape.height_px, situation.sides.height))
    if not all(within):
        (least_wide, most_wide), (least_high, most_high) = situation.sides.width, situation.sides.height
        message = (
            f"{planned} is outside of what this model renders well: {least_wide} to {most_wide} wide, {least_high} to "
            f"{most_high} high."
        )
        yield Note("SIZE_OUTSIDE_RANGE", message)
    if shape.flash_attention and _masked(shape, situation.architecture):
        even = EVEN_TOKENS * ARCHITECTURES[situation.architecture].token_px
        message = (
            f"{planned} makes a number of tokens that is no multiple of {MASK_STEP_TOKENS}: flash attention then "
            f"materialises a mask that grows with the square of the picture. Sides in multiples of {even} avoid it."
        )
        yield Note("ATTENTION_MASK", message, {"multiple_px": str(even)})


def _about_options(situation: Situation) -> Iterator[Note]:
    shape = situation.shape
    if situation.moved:
        message = (
            "The card does not hold all weights and a render's buffers together, so weights stay in host memory and "
            "come to the card when used (--offload-to-cpu): slower. --set offload_to_cpu=false keeps them there."
        )
        yield Note("OFFLOADED", message)
    largest = max(situation.held, key=lambda part: part.bytes.low, default=None)
    if situation.card_bytes and largest is not None and largest.bytes.low > situation.card_bytes:
        message = (
            f"{largest.component} alone is {format_gib(largest.bytes.low)} and the card has "
            f"{format_gib(situation.card_bytes)}: sd-server can render with it in segments only (--max-vram, with "
            "offloading), or where the driver moves memory by itself."
        )
        yield Note("COMPONENT_EXCEEDS_CARD", message, {"component": largest.component})
    ignored = [name for name, on in _card_choices(shape) if on] if situation.pool is not Pool.DISCRETE else []
    if ignored:
        message = f"{', '.join(ignored)} changes nothing here: sd-server has no card of its own memory on this machine."
        yield Note("NO_CARD", message, {"options": ",".join(ignored)})
    known = ARCHITECTURES.get(situation.architecture)
    if shape.reference_images and known is not None and not known.references:
        message = "This model takes no reference images: they are left out of its price, and of what it draws."
        yield Note("REFERENCES_IGNORED", message)
    if shape.vae_tiling and situation.request.vae_tiling is None and situation.profile.vae_tiling is None:
        message = (
            "It decodes in tiles (--vae-tiling), a little slower: a driver may not give out the buffer of a whole "
            "decode, and a render would fail in its last phase. --set vae_tiling=false decodes in one piece."
        )
        yield Note("TILED", message)
    if shape.vae_tiling and situation.profile.tiling_seams:
        yield Note("TILING_SEAMS", "This model's autoencoder leaves visible seams when it decodes in tiles.")
    if shape.mmap:
        message = (
            "Mapping the files saves nothing: sd-server copies weights out of the mapping. While it loads, the files' "
            "pages are counted as its own; the system can take them back."
        )
        yield Note("MMAP_SAVES_NOTHING", message)
    wider = _widened_bytes(situation)
    if wider > 0:
        message = (
            f"The retyping makes the weights {format_gib(wider)} larger: lookup tables that cannot be kept in that "
            "type, or weights that were stored in fewer bits, grow."
        )
        yield Note("RETYPING_WIDENS", message, {"bytes": str(wider)})
    if shape.flash_attention and situation.pool is Pool.DISCRETE:
        message = (
            "Flash attention was measured on the CPU. On a card it needs a kernel for the model's head size; without "
            "one (40, 80 and 160 in SD 1.5) the buffer is as large as without flash attention."
        )
        yield Note("FLASH_ATTENTION_ON_CARD", message)


def _card_choices(shape: SdShape) -> tuple[tuple[str, bool], ...]:
    return (
        ("offload_to_cpu", shape.offload),
        ("text_encoder_on_cpu", shape.text_encoder_on_cpu),
        ("vae_on_cpu", shape.vae_on_cpu),
    )


def _widened_bytes(situation: Situation) -> int:
    shape = situation.shape
    if not shape.weight_type and not shape.tensor_type_rules:
        return 0
    family = family_of(situation.architecture)
    stored = sum(
        held_bytes(part, family, AS_STORED, situation.pool is Pool.DISCRETE).bytes.expected for part in situation.parts
    )
    known = all(part.weights for part in situation.parts)
    return sum(part.bytes.expected for part in situation.held) - stored if known else 0


def _masked(shape: SdShape, architecture: str) -> bool:
    """Whether a UNet's attention has a ragged number of tokens: transformers' token counts depend on the prompt too."""
    known = ARCHITECTURES.get(architecture)
    if known is None or not known.unet:
        return False
    tokens = attention_tokens(architecture, image_tokens(architecture, shape.render()), 0)
    return attention_way(architecture, tokens, flash=True) != "flash"


def _within(side: int, bounds: tuple[int, int]) -> bool:
    return bounds[0] <= side <= bounds[1]

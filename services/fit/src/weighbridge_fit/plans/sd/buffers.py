"""Working buffers of one render, phase by phase: by law where the architecture was measured, else a range."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median_low

from weighbridge_fit.laws import sd_buffers
from weighbridge_fit.laws.sd_shapes import ARCHITECTURES, BufferOptions, RenderShape
from weighbridge_fit.lines import Phase, Range, Source

Law = Callable[[str, RenderShape, BufferOptions], Range]

_LAWS: dict[Phase, Law] = {
    Phase.TEXT_ENCODE: sd_buffers.text_bytes,
    Phase.IMAGE_ENCODE: sd_buffers.vae_encode_bytes,
    Phase.DENOISE: sd_buffers.diffusion_bytes,
    Phase.IMAGE_DECODE: sd_buffers.vae_decode_bytes,
}
_NAMES = {
    Phase.TEXT_ENCODE: "the prompt's encoders",
    Phase.IMAGE_ENCODE: "the autoencoder, reading",
    Phase.DENOISE: "one step of the diffusion model",
    Phase.IMAGE_DECODE: "the autoencoder, writing",
}


@dataclass(frozen=True, slots=True)
class Scratch:
    """One phase's buffer, allocated for it alone and given back before the next phase."""

    phase: Phase
    bytes: Range
    source: Source
    basis: str


def scratch_of(architecture: str, related: str, shape: RenderShape, options: BufferOptions) -> tuple[Scratch, ...]:
    """The buffers of every phase of a render. `related` is the nearest measured architecture of one that was not."""
    phases = [phase for phase in _LAWS if phase is not Phase.IMAGE_ENCODE or reads_images(shape)]
    return tuple(_scratch(phase, architecture, related, shape, options) for phase in phases)


def reads_images(shape: RenderShape) -> bool:
    """Whether any image is encoded before the first step."""
    return shape.source_image or bool(shape.reference_images)


def _scratch(phase: Phase, architecture: str, related: str, shape: RenderShape, options: BufferOptions) -> Scratch:
    law, name = _LAWS[phase], _NAMES[phase]
    if architecture in ARCHITECTURES:
        basis = f"{name}, by the law of {architecture} at {_asked(shape)}"
        return Scratch(phase, law(architecture, shape, options), Source.MEASURED, basis)
    everywhere = _spread(law(known, shape, options) for known in _comparable(phase, shape.frames))
    if related in ARCHITECTURES:
        nearest = law(related, shape, options)
        high = max(everywhere.high, nearest.high)
        spread = Range(min(everywhere.low, nearest.low), nearest.expected, high)
        basis = f"{name}: this architecture was not measured; {related} is the nearest that was, all of them the range"
        return Scratch(phase, spread, Source.ASSUMED, basis)
    basis = f"{name}: this architecture was not measured; all that were, and their median"
    return Scratch(phase, everywhere, Source.ASSUMED, basis)


def _comparable(phase: Phase, frames: int) -> list[str]:
    """The architectures whose buffer of a phase could be this one's: a picture's is no measure of a video's. Those that
    share an autoencoder share its buffers, so one of them stands for all."""
    known = [name for name, row in ARCHITECTURES.items() if row.frames or frames <= 1]
    if phase not in (Phase.IMAGE_ENCODE, Phase.IMAGE_DECODE):
        return known
    return list({ARCHITECTURES[name].autoencoder: name for name in known}.values())


def _spread(ranges: Iterable[Range]) -> Range:
    found = list(ranges)
    expected = median_low(one.expected for one in found)
    return Range(min(one.low for one in found), expected, max(one.high for one in found))


def _asked(shape: RenderShape) -> str:
    frames = f" x {shape.frames} frames" if shape.frames > 1 else ""
    images = f" with {len(shape.reference_images)} reference image(s)" if shape.reference_images else ""
    return f"{shape.width_px} x {shape.height_px}{frames}{images}"

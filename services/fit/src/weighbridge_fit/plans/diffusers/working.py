"""Working memory of a diffusers run, phase by phase: the laws with the figures filled in."""

from collections.abc import Callable

from weighbridge_fit.calibration import BOUNDS, Figure
from weighbridge_fit.calibration.diffusers import figures
from weighbridge_fit.capacity import Pool
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.laws import diffusers as laws
from weighbridge_fit.lines import Line, Phase, Range, Source
from weighbridge_fit.plans.diffusers.options import LOAD_BYTES, DiffusersShape
from weighbridge_fit.plans.diffusers.pipelines import Decoder, Pipeline, model_width

# diffusers' own tiles: 256 px for Wan, 512 for LTX and the image autoencoders; runs of 16 frames with 8 of overlap.
_TILE_PX = {Decoder.WAN21: 256, Decoder.WAN22: 256}
_OTHER_TILE_PX = 512
_TILE_FRAMES = 24
# What a picture is outside the pipeline: three channels in 32 bits, and in bytes.
_OUTPUT_BYTES_PER_PX = 15

_ENCODE = {Decoder.IMAGE: "image_encode", Decoder.QWEN: "qwen_encode"}


def lines(facts: WeightFacts, pipeline: Pipeline, shape: DiffusersShape, pool: Pool) -> list[Line]:
    """Every phase's working memory, on the card where there is one."""
    on_card = pool is Pool.DISCRETE
    made = [
        _text_line(on_card),
        _denoise_line(facts, pipeline, shape, pool),
        _decode_line(pipeline, shape, pool),
        _output_line(shape),
    ]
    if shape.source_images or shape.reference_images:
        made.append(_encode_line(pipeline, shape, on_card))
    return made


def _text_line(on_card: bool) -> Line:
    figure = figures()["text_working_bytes"]
    return Line("text_working", Phase.TEXT_ENCODE, figure.range, figure.source, figure.basis, on_device=on_card)


def _denoise_line(facts: WeightFacts, pipeline: Pipeline, shape: DiffusersShape, pool: Pool) -> Line:
    # Guidance computes two batches at once, or one after the other; the low bound takes the latter.
    batches = {"low": shape.batch, "expected": shape.batch, "high": shape.batch}
    if pipeline.guided:
        batches |= {"expected": 2 * shape.batch, "high": 2 * shape.batch}
    if pipeline.unet:
        figure = figures()["unet_bytes_per_px"]
        size = _range(lambda bound: int(batches[bound] * shape.area_px * shape.load_bytes * figure.at(bound)))
        basis = f"{shape.area_px:,} pixels; {figure.basis}"
        return Line("denoise_working", Phase.DENOISE, size, figure.source, basis, on_device=pool is Pool.DISCRETE)
    figure = figures()["token_elements"]
    width = _width(facts, pipeline)
    picture = laws.video_tokens(shape.width_px, shape.height_px, shape.frames, pipeline.patch_px, pipeline.temporal)
    reference = (shape.width_px // pipeline.patch_px) * (shape.height_px // pipeline.patch_px)
    tokens = picture + shape.text_tokens + shape.reference_images * reference

    def at(bound: str) -> int:
        size = laws.token_activations(tokens * batches[bound], width, shape.load_bytes, figure.at(bound))
        # Metal's attention is computed in slices where it is not fused.
        return size + (laws.sliced_scores(tokens) if bound == "high" and pool is Pool.UNIFIED else 0)

    source = figure.source if pipeline.known else Source.ASSUMED
    basis = f"{tokens:,} tokens of width {width:,} in {shape.load_dtype}; {figure.basis}"
    return Line("denoise_working", Phase.DENOISE, _range(at), source, basis, on_device=pool is Pool.DISCRETE)


def _width(facts: WeightFacts, pipeline: Pipeline) -> int:
    """The widest denoiser's: a pipeline may have two."""
    names = [total.component for total in facts.components if total.component.startswith(("transformer", "prior"))]
    return max((model_width(facts.component_tensors(name)) for name in names), default=0) or pipeline.width


def _decode_line(pipeline: Pipeline, shape: DiffusersShape, pool: Pool) -> Line:
    decoder = pipeline.decoder
    width, height, frames = shape.width_px, shape.height_px, shape.frames
    overlap: Figure | None = None
    if shape.tiled_decode:
        tile = _TILE_PX.get(decoder, _OTHER_TILE_PX)
        overlap = figures()["tile_overlap"] if max(width, height) > tile else None
        width, height, frames = min(width, tile), min(height, tile), min(frames, _TILE_FRAMES)
    area, wide = width * height, shape.vae_bytes
    compute: Callable[[str], int]
    if decoder in (Decoder.WHOLE_VIDEO, Decoder.UNKNOWN_VIDEO):
        per_frame = "whole_video_decode_unified" if pool is Pool.UNIFIED else "whole_video_decode_cuda"
        figure = figures()[per_frame if decoder is Decoder.WHOLE_VIDEO else "unknown_video_decode"]
        # Unified memory shows the slope alone.
        fixed = figures()["whole_video_fixed_bytes"] if pool is not Pool.UNIFIED else None

        def compute(bound: str) -> int:
            least = fixed.at(bound) if fixed else 0
            return laws.decode_whole_video(area, frames, wide, figure.at(bound), least)

    else:
        figure = figures()[_decode_figure(decoder, frames)]

        def compute(bound: str) -> int:
            # What is documented in 32 bits is also run in 16.
            width = LOAD_BYTES[shape.load_dtype] if bound == "low" else wide
            return laws.decode_by_area(area, width, figure.at(bound))

    # The slopes of whole videos have it in them.
    by_frame = decoder not in (Decoder.WHOLE_VIDEO, Decoder.UNKNOWN_VIDEO)
    kept = figures()["kept_frames"] if by_frame and shape.frames > 1 else None

    def at(bound: str) -> int:
        size = int(compute(bound) * (overlap.at(bound) if overlap else 1))
        if kept is not None:
            size += laws.kept_frames(shape.area_px, shape.frames, wide, kept.at(bound))
        return size * shape.batch

    what = (
        f"{width}x{height}" + (f", {frames} frames" if frames > 1 else "") + (" a tile" if shape.tiled_decode else "")
    )
    basis = f"{what} in {shape.vae_dtype}; {figure.basis}"
    return Line("decode_working", Phase.IMAGE_DECODE, _range(at), figure.source, basis, on_device=pool is Pool.DISCRETE)


def _decode_figure(decoder: Decoder, frames: int) -> str:
    if decoder in (Decoder.IMAGE, Decoder.QWEN):
        return "image_decode" if decoder is Decoder.IMAGE else "qwen_decode"
    if decoder is Decoder.WAN22:
        return "wan22_decode" if frames > 1 else "wan_image_decode"
    return "wan21_decode" if frames > 1 else "wan_image_decode"


def _encode_line(pipeline: Pipeline, shape: DiffusersShape, on_card: bool) -> Line:
    """Images to start from or to refer to, encoded one after the other; a video's first image with its empty frames."""
    name = _ENCODE.get(pipeline.decoder, "wan_encode" if shape.frames > 1 else "wan_image_encode")
    figure = figures()[name]
    size = _range(lambda bound: laws.decode_by_area(shape.area_px, shape.vae_bytes, figure.at(bound)))
    basis = f"{shape.width_px}x{shape.height_px} in {shape.vae_dtype}; {figure.basis}"
    return Line("encode_working", Phase.IMAGE_ENCODE, size, figure.source, basis, on_device=on_card)


def _output_line(shape: DiffusersShape) -> Line:
    size = shape.area_px * shape.frames * shape.batch * _OUTPUT_BYTES_PER_PX
    basis = "finished frames in host memory, as 32-bit numbers and as bytes"
    return Line("output_frames", Phase.IMAGE_DECODE, Range(size // 5, size, size), Source.DERIVED, basis)


def _range(at: Callable[[str], int]) -> Range:
    low, expected, high = (at(bound) for bound in BOUNDS)
    return Range(low, expected, high)

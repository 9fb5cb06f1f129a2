"""What the process holds beside weights and buffers: itself, its CPU scratch, and what loading and drawing add."""

from collections.abc import Callable

from weighbridge_fit.laws.sd_process import (
    cpu_work_bytes,
    load_transient_bytes,
    process_base_bytes,
    render_overhead_bytes,
)
from weighbridge_fit.laws.sd_shapes import ARCHITECTURES, BufferOptions
from weighbridge_fit.lines import Line, Phase, Range, Source
from weighbridge_fit.plans.sd.options import SdShape
from weighbridge_fit.plans.sd.parts import LoadedPart
from weighbridge_fit.plans.sd.weights import Held
from weighbridge_fit.recognise.stable_diffusion import Part as Component

ASSUMED_THREADS = 8
"""Threads that load weights where nobody says how many: sd-server takes the machine's physical cores."""
UNKNOWN_BASE = "klein4b"
"""A process with the largest tokenizer there is, for architectures that were not measured."""
DRIVER_ON_HOST = Range(0, 128 << 20, 400 << 20)
"""What a GPU driver keeps in host memory for a process. Not measured here: CUDA takes 100 to 350 MiB."""
PIXEL_BYTES, FLOAT_PIXEL_BYTES = 3, 12
"""A pixel as it is sent, and as the autoencoder writes it: three channels of one byte, of four."""


def overhead_lines(
    shape: SdShape,
    parts: tuple[LoadedPart, ...],
    held: tuple[Held, ...],
    options: BufferOptions,
    on_card: Callable[[Phase], bool],
) -> list[Line]:
    """Lines of host memory that belong to the process. `on_card` says which phases compute there."""
    known = shape.architecture in ARCHITECTURES
    law = shape.architecture if known else UNKNOWN_BASE
    source = Source.MEASURED if known else Source.ASSUMED
    base = process_base_bytes(law, retyped=bool(shape.weight_type or shape.tensor_type_rules))
    lines = [Line("process", Phase.RESIDENT, base, source, "code, libraries and the tokenizer's tables, after loading")]
    if shape.pool == "cpu" or (not any(on_card(phase) for phase in _COMPUTING) and shape.pool != "unified"):
        lines.append(_work_line(shape, held, options, law, source))
    elif shape.pool == "discrete":
        basis = "what a driver keeps in host memory; not measured with this engine"
        lines.append(Line("driver", Phase.RESIDENT, DRIVER_ON_HOST, Source.ASSUMED, basis))
    lines += _loading_lines(shape, parts, held)
    drawing = render_overhead_bytes()
    lines += [
        Line("heap", phase, drawing, Source.MEASURED, "pixels, latents and the answer, left in the heap")
        for phase in (Phase.DENOISE, Phase.IMAGE_DECODE)
    ]
    pictures = _picture_bytes(shape)
    if pictures.high:
        basis = (
            f"{max(1, shape.frames) * shape.batch} picture(s) until they are sent, one more as the decoder writes it"
        )
        lines.append(Line("pictures", Phase.IMAGE_DECODE, pictures, Source.DERIVED, basis))
    return lines


_COMPUTING = (Phase.TEXT_ENCODE, Phase.DENOISE, Phase.IMAGE_DECODE)


def _work_line(shape: SdShape, held: tuple[Held, ...], options: BufferOptions, law: str, source: Source) -> Line:
    kept = next((part.linear_type for part in held if part.component == Component.DIFFUSION_MODEL), "")
    size = cpu_work_bytes(law, kept or "F16", shape.render(), options)
    basis = f"scratch of the CPU's matrix products with {kept or 'unknown'} weights, kept once it has grown"
    return Line("cpu_work", Phase.RESIDENT, size, source, basis)


def _loading_lines(shape: SdShape, parts: tuple[LoadedPart, ...], held: tuple[Held, ...]) -> list[Line]:
    converted = [size for part in held for size in part.converted]
    threads = shape.threads or ASSUMED_THREADS
    lines = []
    transient = load_transient_bytes(converted, threads)
    if transient.high:
        basis = f"conversion buffers of {threads} loading threads: the largest tensors whose type changes"
        lines.append(Line("conversion", Phase.LOAD, transient, Source.DERIVED, basis))
    if shape.mmap:
        files = sum(part.file_bytes for part in parts)
        basis = "pages of the mapped files, beside the copies made of them; the system can take them back"
        lines.append(Line("file_pages", Phase.LOAD, Range(0, files, files), Source.DERIVED, basis))
    return lines


def _picture_bytes(shape: SdShape) -> Range:
    """Beyond the one small picture that the measured heap already holds: nothing. Frames and batches: their pixels."""
    area = shape.width_px * shape.height_px
    frames = max(1, shape.frames)
    if frames * shape.batch == 1:
        return Range(0, 0, area * FLOAT_PIXEL_BYTES)
    kept = frames * shape.batch * area * PIXEL_BYTES
    written = frames * area * FLOAT_PIXEL_BYTES
    return Range(kept, kept + written, kept + 2 * written)

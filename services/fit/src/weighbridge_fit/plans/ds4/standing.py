"""The lines of a ds4 launch that stand whatever is cached or drafted: weights, context, workspace, slack, process."""

from dataclasses import dataclass

from weighbridge_fit.calibration import BOUNDS
from weighbridge_fit.calibration.ds4 import Compute, Ds4Calibration, Layout
from weighbridge_fit.laws.ds4_context import (
    FLOAT32_BYTES,
    HALF_BYTES,
    ContextBuffers,
    compressor_state_bytes,
    cpu_context,
    gpu_context,
)
from weighbridge_fit.lines import NOTHING, Line, Phase, Range, Source
from weighbridge_fit.plans.ds4.options import Basics
from weighbridge_fit.plans.ds4.shape import Ds4Weights, Family


@dataclass(frozen=True, slots=True)
class Frame:
    """What the standing lines are made from. `on_card`: the model lies on a card of its own memory."""

    weights: Ds4Weights
    basics: Basics
    compute: Compute
    streams: bool
    on_card: bool


def context_buffers(frame: Frame) -> ContextBuffers | None:
    """One session's context as the engine prints it; None for models whose law is another."""
    layers, basics = frame.weights.context, frame.basics
    if layers is None:
        return None
    if frame.compute is Compute.CPU:
        return cpu_context(layers, basics.context_tokens)
    july = basics.layout is Layout.JULY
    half = july and frame.compute is Compute.METAL
    return gpu_context(
        layers,
        basics.context_tokens,
        basics.chunk_tokens,
        row_element_bytes=HALF_BYTES if half else FLOAT32_BYTES,
        staging=july,
    )


def standing_lines(frame: Frame, calibration: Ds4Calibration) -> tuple[Line, ...]:
    """Every standing line, without expert cache, companions and checkpoints."""
    lines = [_model_line(frame), *_session_lines(frame, calibration), *_workspace_lines(frame, calibration)]
    if frame.weights.family is Family.V41:
        reserve = calibration["v41_reserve_bytes"]
        lines.append(Line("engine_reserve", Phase.RESIDENT, reserve.range, reserve.source, reserve.basis))
    lines.append(_slack_line(frame, calibration))
    process = calibration["process_bytes"]
    placed = [_on_card(line) if frame.on_card else line for line in lines if line.bytes.high]
    return (*placed, Line("process", Phase.RESIDENT, process.range, process.source, process.basis))


def times(value: Range, low: int, high: int) -> Range:
    """A session's bytes for at least `low` and surely for `high` sessions."""
    return Range(value.low * low, value.expected * high, value.high * high)


def _on_card(line: Line) -> Line:
    return Line(line.component, line.phase, line.bytes, line.source, line.basis, line.buffer, on_device=True)


def _model_line(frame: Frame) -> Line:
    weights = frame.weights
    kept = "; Engram tables stay on disk" if weights.disk_only_bytes else ""
    if frame.streams:
        basis = f"all that is no routed expert{kept}: {weights.basis}"
        size = weights.non_routed
    elif frame.compute is Compute.CPU:
        basis = (
            f"the whole file mapped{kept}; pages come in as they are used and can be dropped, each token passes "
            f"through all that is no routed expert: {weights.basis}"
        )
        floor = max(0, weights.non_routed.low - weights.embedding_bytes)
        size = Range(min(floor, weights.mapped_bytes), weights.mapped_bytes, weights.mapped_bytes)
    else:
        basis = f"the whole file mapped{kept}, and wired where the GPU uses it: {weights.basis}"
        size = Range.exactly(weights.mapped_bytes)
    buffer = Range.exactly(min(weights.largest_tensor_bytes, size.low))
    return Line("model", Phase.RESIDENT, size, weights.source, basis, buffer)


def _session_lines(frame: Frame, calibration: Ds4Calibration) -> list[Line]:
    weights, basics = frame.weights, frame.basics
    sessions, context = basics.sessions, basics.context_tokens
    count = f"{sessions} x " if sessions > 1 else ""
    buffers = context_buffers(frame)
    if buffers is not None:
        assert weights.context is not None
        state = compressor_state_bytes(weights.context)
        cache_basis = (
            f"{count}{len(weights.context.ratios)} layers: {buffers.raw_rows:,} raw rows each and up to "
            f"{buffers.compressed_rows:,} compressed ones for {context:,} tokens, as ds4 prints it"
        )
        chunk = 1 if frame.compute is Compute.CPU else min(basics.chunk_tokens, context)
        scratch_basis = f"{count}indexer scores of a chunk of {chunk:,} token(s), as ds4 prints it"
        return [
            _exact("kv_cache", buffers.cache_bytes * sessions, cache_basis),
            _exact("context_scratch", buffers.scratch_bytes * sessions, scratch_basis, buffers.scratch_buffer_bytes),
            _exact("compressor_state", state * sessions, f"{count}unfinished windows; not in ds4's printed figure"),
        ]
    if weights.family is Family.V41:
        session = times(calibration.v41_session.session_bytes(context), sessions, sessions)
        source = Source.DERIVED if session.low == session.high else Source.ASSUMED
        basis = f"{count}graph and cache of V4.1 at {context:,} tokens, from ds4's own accounting of September 2026"
        return [Line("session", Phase.RESIDENT, session, source, basis)]
    figure = calibration["glm_kv_bytes_per_token" if weights.family is Family.GLM else "other_kv_bytes_per_token"]
    per_token = times(figure.range, context, context)
    basis = f"{count}{context:,} tokens; {figure.basis}"
    return [Line("kv_cache", Phase.RESIDENT, times(per_token, sessions, sessions), figure.source, basis)]


def _workspace_lines(frame: Frame, calibration: Ds4Calibration) -> list[Line]:
    """Batch buffers: allocated and not in the plan that ds4 prints. V4.1's are in its session, the processor has
    none worth a line."""
    weights, basics = frame.weights, frame.basics
    if weights.family is Family.V41 or frame.compute is Compute.CPU:
        return []
    floats = calibration["workspace_floats_per_token"]
    chunk = min(basics.chunk_tokens, basics.context_tokens)
    one = int(floats.expected) * FLOAT32_BYTES * chunk
    basis = f"{int(floats.expected):,} floats x {chunk:,} tokens of a chunk; {floats.basis}"
    if weights.context is not None and weights.hidden_size == calibration.flash_hidden:
        # Buffers belong to a session; whether builds that hold several share them was not seen.
        return [Line("workspace", Phase.RESIDENT, times(Range.exactly(one), 1, basics.sessions), floats.source, basis)]
    other = calibration["workspace_other_model"]
    wide = (weights.hidden_size or calibration.flash_hidden) / calibration.flash_hidden
    sized = Range(*(int(one * wide * other.at(bound)) for bound in BOUNDS))
    return [
        Line("workspace", Phase.RESIDENT, times(sized, 1, basics.sessions), other.source, f"{basis}; {other.basis}")
    ]


def _slack_line(frame: Frame, calibration: Ds4Calibration) -> Line:
    if frame.compute is Compute.CPU:
        return Line("backend_slack", Phase.RESIDENT, NOTHING, Source.DERIVED, "")
    mode = "streamed" if frame.streams else "resident"
    figure = calibration[f"{frame.compute.value}_{mode}_slack_bytes"]
    return Line("backend_slack", Phase.RESIDENT, figure.range, figure.source, figure.basis)


def _exact(component: str, size: int, basis: str, buffer: int = 0) -> Line:
    held = Range.exactly(buffer)
    return Line(component, Phase.RESIDENT, Range.exactly(size), Source.DERIVED, basis, held)

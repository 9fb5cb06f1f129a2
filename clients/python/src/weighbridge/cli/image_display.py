"""How a render is shown while it goes on: the load as `load` shows it, then a bar for each phase."""

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from weighbridge_proto.engines.v1 import image_service_pb2
from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge.cli.draining import word_of_draining
from weighbridge.cli.load_display import LoadDisplay
from weighbridge.engine_client import Engine

PHASE_WORDS = {"text_encode": "reading the prompt", "encode": "reading the source", "decode": "decoding"}
"""The engine's phases as people are told of them; others as the engine names them."""

Clock = Callable[[], float]


class RenderDisplay:
    """Shows the events of one render on ``to``; an async context manager, so that the bar ends with the render.

    Args:
        to: where lines and the bar go.
        engine: who renders.
        clock: seconds that never go back.
    """

    def __init__(self, to: Console, engine: Engine, clock: Clock = time.monotonic) -> None:
        self._to = to
        self._engine = engine
        self._load = LoadDisplay(to, engine.suite)
        self._stack = AsyncExitStack()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[left]}"),
            TimeElapsedColumn(),
            console=to,
            transient=True,
        )
        self._bar: TaskID | None = None
        self._pace = Pace(clock)
        self._last = ""

    async def __aenter__(self) -> "RenderDisplay":
        self._stack.callback(self._end_bar)
        self._stack.enter_context(self._load)
        self._began = await self._stack.enter_async_context(word_of_draining(self._engine, self.show_line))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def show(self, event: image_service_pb2.GenerateImageResponse) -> None:
        """Show one event."""
        kind = event.WhichOneof("event")
        if kind == "load":
            self._end_bar()  # the model was taken away before the render began
            await self._load.show(event.load)
            return
        self._load.end_bar()
        if kind == "queued":
            self.show_line(f"QUEUED    place {event.queued.position}")
        elif kind == "progress":
            self._began()
            self._show_progress(event.progress)
        else:
            self._end_bar()

    def _show_progress(self, progress: image_service_pb2.ImageProgress) -> None:
        left = self._pace.left_words(progress)
        if not self._to.is_terminal:
            steps = "1 step" if progress.total == 1 else f"{progress.total} steps"
            of = f", {steps}" if progress.phase == "sampling" else ""
            self.show_line(f"RENDERING {phase_words(progress.phase)}{of}")
            return
        if self._bar is None:
            self._bar = self._progress.add_task(f"RENDERING {phase_words(progress.phase)}", total=None, left="")
            self._progress.start()
        of = f" {progress.done}/{progress.total}" if progress.total > 1 else ""
        self._progress.update(
            self._bar,
            description=f"RENDERING {phase_words(progress.phase)}{of}",
            completed=progress.done,
            # A phase without parts has a bar that only moves.
            total=progress.total if progress.total > 1 else None,
            left=left,
            refresh=True,
        )

    def show_line(self, line: str) -> None:
        """Print a line, unless it is the one before."""
        if line != self._last:
            self._to.print(line, soft_wrap=True)  # a line of a log stays one; a terminal folds it
            self._last = line

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._progress.stop()
            self._progress.remove_task(self._bar)
            self._bar = None


class Pace:
    """How long a phase has yet to go, by what its steps took so far."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._phase = ""
        self._since_s = 0.0
        self._before = 0

    def left_words(self, progress: image_service_pb2.ImageProgress) -> str:
        """What is left of the phase, such as ``12 s left``; empty: nothing tells."""
        now_s = self._clock()
        if progress.phase != self._phase or progress.done < self._before:
            self._phase, self._since_s, self._before = progress.phase, now_s, progress.done
        done = progress.done - self._before
        if done <= 0 or progress.done >= progress.total:
            return ""
        left_s = (now_s - self._since_s) / done * (progress.total - progress.done)
        return f"{duration_words(left_s)} left"


def phase_words(phase: str) -> str:
    """A phase for people."""
    return PHASE_WORDS.get(phase, phase.replace("_", " "))


def duration_words(seconds: float) -> str:
    """Seconds, or minutes and seconds: ``12 s``, ``3 min 05 s``."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02} s"


def finished_line(finished: image_service_pb2.ImageFinished, count: int) -> str:
    """What a render was and took, in a line."""
    size = finished.size
    took_s = finished.render_time.ToNanoseconds() / 1e9
    seeds = f"seed {finished.seed}" if count == 1 else f"seeds {finished.seed} to {finished.seed + count - 1}"
    parts = [f"{size.width_px} × {size.height_px}", seeds, f"rendered in {took_s:.1f} s"]
    return "[" + ", ".join(parts) + "]"


def size_line(asked: plan_pb2.ImageWorkload, rendered: plan_pb2.ImageWorkload) -> str:
    """That the size is another one than was asked for; empty: it is not."""
    wanted = (asked.width_px, asked.height_px)
    if not all(wanted) or wanted == (rendered.width_px, rendered.height_px):
        return ""
    return (
        f"Rendered at {rendered.width_px} × {rendered.height_px} instead of {wanted[0]} × {wanted[1]}: the model takes "
        "multiples of a step."
    )

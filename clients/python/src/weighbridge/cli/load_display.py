"""How a load is shown while it goes on: a line for each event, a bar while weights are read."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from weighbridge_proto.engines.v1 import engine_service_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

from weighbridge.sizes import all_bytes, format_size


class LoadDisplay:
    """Shows the events of one load on ``to``; a context manager, so that the bar ends with the load."""

    def __init__(self, to: Console) -> None:
        self._to = to
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=to, transient=True
        )
        self._bar: TaskID | None = None
        self._last = ""

    def __enter__(self) -> "LoadDisplay":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_bar()

    def show(self, event: engine_service_pb2.LoadModelResponse) -> None:
        """Show one event."""
        kind = event.WhichOneof("event")
        if kind == "starting" and self._to.is_terminal:
            self._show_bar(event.starting)
            return
        if kind != "starting":
            self._end_bar()
        line = load_line(event)
        # Queued events repeat four times a second, progress ones with every tensor; only news are worth a line.
        if line and line != self._last:
            self._to.print(line)
            self._last = line

    def _show_bar(self, starting: engine_service_pb2.LoadStarting) -> None:
        if self._bar is None:
            self._bar = self._progress.add_task("", total=1.0)
            self._progress.start()
        known = starting.fraction >= 0
        self._progress.update(
            self._bar,
            description=f"STARTING  {_phase_word(starting.phase)}",
            completed=starting.fraction if known else 0.0,
            total=1.0 if known else None,
        )

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._progress.stop()
            self._progress.remove_task(self._bar)
            self._bar = None


def load_line(event: engine_service_pb2.LoadModelResponse) -> str:
    """One event as a line."""
    kind = event.WhichOneof("event")
    if kind == "planned":
        plan = event.planned.plan
        verdict = requirement_pb2.Verdict.Name(plan.assessment.verdict).removeprefix("VERDICT_")
        total = plan.requirement.total.expected_bytes
        return f"PLANNED   {plan.model_name}: {format_size(total)} expected at the peak, {verdict}"
    if kind == "queued":
        why = "; ".join(reason.message for reason in event.queued.reasons)
        return f"QUEUED    place {event.queued.position}" + (f": {why}" if why else "")
    if kind == "reclaiming":
        count = len(event.reclaiming.victim_lease_ids)
        return f"RECLAIMING  asked {count} idle holder{'s' if count != 1 else ''} to make room"
    if kind == "admitted":
        lease = event.admitted.lease
        return f"ADMITTED  lease {lease.lease_id}: {format_size(all_bytes(lease.charge))}"
    if kind == "starting":
        return f"STARTING  {_phase_word(event.starting.phase)}"
    if kind == "ready":
        engine = event.ready.engine
        took = engine.model.load_time.ToNanoseconds() / 1e9
        return f"READY     {engine.model.model_name} in {engine.runtime_version}, started in {took:.1f} s"
    return ""


def _phase_word(phase: str) -> str:
    return phase.replace("_", " ")

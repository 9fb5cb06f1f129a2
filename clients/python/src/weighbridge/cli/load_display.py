"""How a load is shown while it goes on: a line for each event, a bar while weights are read."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from weighbridge_proto.engines.v1 import chat_service_pb2, engine_service_pb2
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

from weighbridge.client import Suite
from weighbridge.failures import CallError
from weighbridge.happenings import who
from weighbridge.sizes import all_bytes, format_size

NOBODY_KNOWN: Mapping[str, str] = MappingProxyType({})


class LoadDisplay:
    """Shows the events of one load on ``to``; a context manager, so that the bar ends with the load.

    Args:
        to: where lines and the bar go.
        suite: whose ledger is asked for the names of those whom the load waits for.
    """

    def __init__(self, to: Console, suite: Suite) -> None:
        self._to = to
        self._suite = suite
        self._names: dict[str, str] = {}
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
        self.end_bar()

    async def show(self, event: engine_service_pb2.LoadModelResponse) -> None:
        """Show one event."""
        kind = event.WhichOneof("event")
        if kind == "starting" and self._to.is_terminal:
            self._show_bar(event.starting)
            return
        if kind != "starting":
            self.end_bar()
        await self._learn(_lease_ids(event))
        self.show_line(load_line(event, self._names))
        for note in event.planned.plan.notes:
            # What a plan chose, and which wish it could not meet: a drafter that does not fit, say.
            self.show_line(f"NOTE      {note.message}")

    def show_waiting(self, waiting: chat_service_pb2.ChatWaiting) -> None:
        """Show why a loaded model may not be used just now."""
        self.show_line(f"WAITING   {' '.join(reason.message for reason in waiting.reasons)}")

    async def _learn(self, lease_ids: Sequence[str]) -> None:
        """Whose leases those are. A ledger that does not answer now leaves them without names."""
        if all(lease_id in self._names for lease_id in lease_ids):
            return
        try:
            leases = (await self._suite.leases()).leases
        except CallError:
            return
        self._names |= {lease.lease_id: who(lease) for lease in leases}

    def show_line(self, line: str) -> None:
        """Print a line, unless it is the one before or empty."""
        # Queued events repeat four times a second, progress ones with every tensor; only news are worth a line.
        if line and line != self._last:
            self._to.print(line, soft_wrap=True)  # a line of a log stays one; a terminal folds it
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

    def end_bar(self) -> None:
        """The load goes on no more, or what follows has a bar of its own."""
        if self._bar is not None:
            self._progress.stop()
            self._progress.remove_task(self._bar)
            self._bar = None


def load_line(event: engine_service_pb2.LoadModelResponse, names: Mapping[str, str] = NOBODY_KNOWN) -> str:
    """One event as a line; ``names`` has holders and models by their leases."""
    kind = event.WhichOneof("event")
    if kind == "planned":
        plan = event.planned.plan
        verdict = requirement_pb2.Verdict.Name(plan.assessment.verdict).removeprefix("VERDICT_")
        total = plan.requirement.total.expected_bytes
        return f"PLANNED   {plan.model_name}: {format_size(total)} expected at the peak, {verdict}"
    if kind == "queued":
        why = "; ".join(_reason_words(reason, names) for reason in event.queued.reasons)
        return f"QUEUED    place {event.queued.position}" + (f": {why}" if why else "")
    if kind == "reclaiming":
        return f"RECLAIMING  asked {_holder_words(event.reclaiming.victim_lease_ids, names)} to make room"
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


def _lease_ids(event: engine_service_pb2.LoadModelResponse) -> list[str]:
    """The leases that an event names."""
    if event.WhichOneof("event") == "queued":
        return [lease_id for reason in event.queued.reasons for lease_id in reason.lease_ids]
    return list(event.reclaiming.victim_lease_ids)


def _reason_words(reason: lease_pb2.WaitReason, names: Mapping[str, str]) -> str:
    known = [names[lease_id] for lease_id in reason.lease_ids if lease_id in names]
    return f"{reason.message} ({', '.join(known)})" if known else reason.message


def _holder_words(lease_ids: Sequence[str], names: Mapping[str, str]) -> str:
    if all(lease_id in names for lease_id in lease_ids):
        return ", ".join(names[lease_id] for lease_id in lease_ids)
    return f"{len(lease_ids)} holder{'s' if len(lease_ids) != 1 else ''}"


def _phase_word(phase: str) -> str:
    return phase.replace("_", " ")

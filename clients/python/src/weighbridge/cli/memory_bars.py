"""What `top` shows: bytes by holder as bars, a bar for each place, and the queue with its reasons.

A pure picture of two answers of the ledger; it fits itself to whatever it is drawn on.
"""

import string
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge.cli.lease_table import vacating_lines, waiting_lines
from weighbridge.cli.tables import machine_words, plain_table
from weighbridge.happenings import who
from weighbridge.sizes import all_bytes, format_size

MARKS = string.ascii_uppercase + string.ascii_lowercase
"""A letter for each holder, in its bar and beside its name: told apart without colours, and in any encoding."""

MANY = "+"
"""The mark of everybody beyond the letters."""

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")

WIDTH_WITH_OBSERVED = 72
WIDTH_WITH_MODEL = 48
"""Columns from which the table of holders has room for those columns."""


@dataclass(frozen=True)
class MemoryFrame:
    """One picture.

    Attributes:
        capacity: the machine and what is committed.
        leases: oldest first, those that wait among them.
        now_s: seconds since the epoch.
        note: a line for people, such as that the ledger went away.
        draining: how many requests that were cancelled an engine still works on, by its lease.
    """

    capacity: machine_pb2.Capacity
    leases: Sequence[lease_pb2.Lease]
    now_s: float
    note: str = ""
    draining: Mapping[str, int] = field(default_factory=dict)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws it, cut to the height there is with a word about what is missing."""
        whole = Group(*self._parts(options.max_width))
        lines = console.render_lines(whole, options.update(height=None), pad=False)
        room = options.height
        if room is not None and len(lines) > room:
            hidden = len(lines) - room + 1
            lines = lines[: room - 1]
            lines.append([Segment(f"{hidden} more lines: enlarge the terminal."[: options.max_width])])
        for line in lines:
            yield from line
            yield Segment.line()

    def _parts(self, width: int) -> Iterator[RenderableType]:
        held = [lease for lease in self.leases if lease.HasField("charge")]
        marks = {lease.lease_id: MARKS[number] if number < len(MARKS) else MANY for number, lease in enumerate(held)}
        words = machine_words(self.capacity).removeprefix("a ")
        clock = time.strftime("%H:%M:%S", time.localtime(self.now_s))
        yield Text(f"{words[:1].upper()}{words[1:]}, {clock}", style="bold")
        if self.note:
            yield Text(self.note, style="bold red")
        yield Text()
        for name, ceiling, amounts in _places(self.capacity, held):
            yield f"{name}  {_ceiling_words(ceiling)}"
            yield _bar(ceiling, [(marks[lease.lease_id], number, size) for number, lease, size in amounts], width)
        if self.capacity.total.HasField("limit_bytes"):
            total = self.capacity.total
            text = (
                f"limit  {format_size(total.committed_bytes)} of {format_size(total.effective_bytes)} over everything"
            )
            yield Text(text)
        yield Text()
        yield _holders(held, marks, width, self) if held else Text("Nobody holds memory.")
        yield from vacating_lines(held, marks)
        waiting = list(waiting_lines(self.leases, self.now_s, marks))
        if waiting:
            yield Text()
            yield Text(f"Waiting: {len([one for one in self.leases if one.queue_position])}", style="bold")
            yield from waiting


def cells(amounts: Sequence[int], scale: int, width: int) -> list[int]:
    """How many of `width` cells each amount gets on a bar of `scale`: as near as whole cells come, never more than the
    width together, and at least one each while there are enough of them."""
    if scale <= 0 or width <= 0:
        return [0] * len(amounts)
    scale = max(scale, sum(amounts))
    given, sum_before = [], 0
    for amount in amounts:
        start, end = (round(at * width / scale) for at in (sum_before, sum_before + amount))
        given.append(end - start)
        sum_before += amount
    for index, amount in enumerate(amounts):
        if amount > 0 and given[index] == 0:
            largest = max(range(len(given)), key=given.__getitem__)
            if sum(given) >= width:
                if given[largest] <= 1:
                    break
                given[largest] -= 1
            given[index] = 1
    return given


def _places(
    capacity: machine_pb2.Capacity, held: Sequence[lease_pb2.Lease]
) -> Iterator[tuple[str, machine_pb2.Ceiling, list[tuple[int, lease_pb2.Lease, int]]]]:
    """(name, ceiling, what who holds there) of the host and of each card."""
    on_host = [(number, lease, lease.charge.host_bytes) for number, lease in enumerate(held)]
    yield "host", capacity.host, [one for one in on_host if one[2]]
    for card in capacity.devices:
        device = card.device.device_id
        on_card = [
            (number, lease, sum(part.bytes for part in lease.charge.devices if part.device_id == device))
            for number, lease in enumerate(held)
        ]
        yield card.device.name or f"device {device}", card.ceiling, [one for one in on_card if one[2]]


def _ceiling_words(ceiling: machine_pb2.Ceiling) -> str:
    parts = [f"{format_size(ceiling.committed_bytes)} of {format_size(ceiling.effective_bytes)} committed"]
    parts.append(f"{format_size(ceiling.free_bytes)} free" if ceiling.HasField("free_bytes") else "free not measured")
    if ceiling.HasField("external_bytes"):
        parts.append(f"other programs {format_size(ceiling.external_bytes)}")
    return ", ".join(parts)


def _bar(ceiling: machine_pb2.Ceiling, amounts: Sequence[tuple[str, int, int]], width: int) -> Text:
    inner = max(1, width - 2)
    bar = Text("[", no_wrap=True, overflow="crop")
    counts = cells([size for _, _, size in amounts], ceiling.effective_bytes, inner)
    for (mark, number, _), count in zip(amounts, counts, strict=True):
        bar.append(mark * count, style=f"{COLOURS[number % len(COLOURS)]} reverse")
    bar.append("." * (inner - sum(counts)), style="dim")
    return bar.append("]")


def _holders(held: Sequence[lease_pb2.Lease], marks: dict[str, str], width: int, frame: MemoryFrame) -> Table:
    with_model, with_observed = width >= WIDTH_WITH_MODEL, width >= WIDTH_WITH_OBSERVED
    table = plain_table(("", "holder", *(["model"] if with_model else []), "state"), ())
    table.add_column("charged", justify="right")
    charged = table.columns[-1]
    if with_observed:
        table.add_column("in use", justify="right")
    for column in table.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    table.columns[0].min_width = 1
    charged.min_width = len("123.45 GiB")  # what is cut where there is no room, are names
    for number, lease in enumerate(held):
        # Names are strings: the console shows them so that they do not steer the terminal.
        row: list[RenderableType] = [
            Text(marks[lease.lease_id], style=f"{COLOURS[number % len(COLOURS)]} reverse"),
            lease.holder.name if with_model else who(lease),
            *([lease.purpose.model_name] if with_model else []),
            activity(lease, frame.now_s, frame.draining.get(lease.lease_id, 0)),
            format_size(all_bytes(lease.charge)),
        ]
        if with_observed:
            row.append(format_size(all_bytes(lease.observed)) if lease.HasField("observed") else "")
        table.add_row(*row)
    return table


def activity(lease: lease_pb2.Lease, now_s: float, draining: int = 0) -> str:
    """What a holder does, in a word or two; ``draining``: how many cancelled requests it still works on."""
    if lease.suspect:
        return "silent"
    if lease.state != lease_pb2.LEASE_STATE_ACTIVE:
        return lease_pb2.LeaseState.Name(lease.state).removeprefix("LEASE_STATE_").lower()
    if draining:
        return f"busy ({draining} cancelled)"
    if lease.uses:
        return f"busy ({lease.uses})" if lease.uses > 1 else "busy"
    if not lease.HasField("last_use_time"):
        return "idle"
    return f"idle {duration_words(now_s - lease.last_use_time.ToNanoseconds() / 1e9)}"


def duration_words(seconds: float) -> str:
    """``12 s``, ``5 min``, ``3 h``, ``2 d``."""
    left = max(0.0, seconds)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if left >= size:
            return f"{int(left // size)} {unit}"
    return f"{int(left)} s"

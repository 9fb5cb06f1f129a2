"""A requirement as a table that adds up, in exact bytes and in the rounded figures that people see."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weighbridge_proto.memory.v1 import requirement_pb2

from weighbridge.sizes import GIB, MIB

RESIDENT = "resident"
"""The phase of lines that are held all the time."""

COLUMNS = 3
"""low, expected, high."""

Amounts = tuple[int, int, int]


@dataclass(frozen=True)
class Totals:
    """Sums of a requirement's lines, each as (low, expected, high) bytes.

    Attributes:
        resident: what is held all the time.
        phases: what each phase needs on top while it lasts, in the order of the lines.
        largest_phase: in each column the most that any phase needs.
        total: resident plus largest phase: the peak.
    """

    resident: Amounts
    phases: dict[str, Amounts]
    largest_phase: Amounts
    total: Amounts


def amounts(line: requirement_pb2.RequirementLine | requirement_pb2.ByteRange) -> Amounts:
    """The three figures of a line or a total."""
    return line.low_bytes, line.expected_bytes, line.high_bytes


def add_up(lines: Iterable[requirement_pb2.RequirementLine]) -> Totals:
    """Sum lines by the rule of the contract: resident lines together, of the other phases the largest on top."""
    resident: Amounts = (0, 0, 0)
    phases: dict[str, Amounts] = {}
    for line in lines:
        if line.phase == RESIDENT:
            resident = _plus(resident, amounts(line))
        else:
            phases[line.phase] = _plus(phases.get(line.phase, (0, 0, 0)), amounts(line))
    columns = zip(*phases.values(), strict=True) if phases else [(0,)] * COLUMNS
    low, expected, high = (max(column) for column in columns)
    largest: Amounts = (low, expected, high)
    return Totals(resident, phases, largest, _plus(resident, largest))


def apportion(parts: Sequence[int], unit: int, whole_units: int | None = None) -> list[int]:
    """Round ``parts`` to whole multiples of ``unit`` so that they add up to their rounded sum.

    Each figure is its part rounded down or up, and the ones rounded up are those with the largest remainders.

    Args:
        parts: amounts, not negative.
        unit: what is counted in.
        whole_units: the sum to reach, one that rounding each part down or up can reach; None: the rounded sum.
    """
    floors = [part // unit for part in parts]
    target = (sum(parts) + unit // 2) // unit if whole_units is None else whole_units
    missing = target - sum(floors)
    by_remainder = sorted(range(len(parts)), key=lambda index: parts[index] % unit, reverse=True)
    raised = set(by_remainder[: max(0, missing)])
    return [floor + (index in raised) for index, floor in enumerate(floors)]


@dataclass(frozen=True)
class Figures:
    """A requirement's figures as shown: whole hundredths of ``unit_name``, in which every sum comes out exactly.

    Attributes:
        unit_name: GiB or MiB.
        lines: one row for each line, in their order.
        resident, largest_phase, total: the sums.
    """

    unit_name: str
    lines: list[tuple[str, str, str]]
    resident: tuple[str, str, str]
    largest_phase: tuple[str, str, str]
    total: tuple[str, str, str]


def figures(lines: Sequence[requirement_pb2.RequirementLine]) -> Figures:
    """Round a requirement for people. No figure is off by a hundredth of a unit or more."""
    totals = add_up(lines)
    # One unit for the whole table: figures in different units cannot be added by eye.
    unit_name, unit = ("GiB", GIB) if totals.total[2] >= 10 * GIB else ("MiB", MIB)
    # Bytes times 100, divided by the unit: counted in hundredths of it.
    rows: list[list[str]] = [[] for _ in lines]
    sums: dict[str, list[str]] = {"resident": [], "largest": [], "total": []}
    for column in range(COLUMNS):
        resident, largest = apportion([totals.resident[column] * 100, totals.largest_phase[column] * 100], unit)
        phases = {RESIDENT: resident}
        for phase, sum_bytes in totals.phases.items():
            if sum_bytes[column] == totals.largest_phase[column]:
                phases[phase] = largest
        for phase in dict.fromkeys(line.phase for line in lines):
            members = [index for index, line in enumerate(lines) if line.phase == phase]
            parts = [amounts(lines[index])[column] * 100 for index in members]
            for index, shown in zip(members, apportion(parts, unit, phases.get(phase)), strict=True):
                rows[index].append(_hundredths(shown))
        sums["resident"].append(_hundredths(resident))
        sums["largest"].append(_hundredths(largest))
        sums["total"].append(_hundredths(resident + largest))
    return Figures(
        unit_name,
        [_three(row) for row in rows],
        _three(sums["resident"]),
        _three(sums["largest"]),
        _three(sums["total"]),
    )


def _plus(left: Amounts, right: Amounts) -> Amounts:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]


def _hundredths(value: int) -> str:
    return f"{value // 100:,}.{value % 100:02d}"


def _three(texts: Sequence[str]) -> tuple[str, str, str]:
    low, expected, high = texts
    return low, expected, high

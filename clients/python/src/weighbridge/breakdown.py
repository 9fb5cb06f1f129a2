"""A requirement as a table that adds up, in exact bytes and in the rounded figures that people see."""

from collections.abc import Iterable
from dataclasses import dataclass

from weighbridge_proto.memory.v1 import requirement_pb2

from weighbridge.sizes import MIB

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


@dataclass(frozen=True)
class Figures:
    """A requirement's figures as shown, in MiB with two decimals.

    Attributes:
        lines: one row for each line, in their order.
        resident, largest_phase, total: the sums.
        stated: the total that counts, where measurements of earlier launches made it another than the sum; else None.
    """

    lines: list[tuple[str, str, str]]
    resident: tuple[str, str, str]
    largest_phase: tuple[str, str, str]
    total: tuple[str, str, str]
    stated: tuple[str, str, str] | None


def figures(requirement: requirement_pb2.Requirement) -> Figures:
    """Round a requirement for people, so that the figures shown add up exactly.

    Each line is rounded, and the sums are those of the rounded lines: a sum is off by at most half a hundredth of a MiB
    for each of its lines. One unit for all, because figures in different units cannot be added by eye.
    """
    rounded = [
        requirement_pb2.RequirementLine(
            phase=line.phase,
            low_bytes=_to_hundredths(line.low_bytes),
            expected_bytes=_to_hundredths(line.expected_bytes),
            high_bytes=_to_hundredths(line.high_bytes),
        )
        for line in requirement.lines
    ]
    totals = add_up(rounded)
    stated, summed = amounts(requirement.total), add_up(requirement.lines).total
    # A stated amount that one of the sums is too must look like it, however that was rounded.
    rounded_sums = dict(zip(summed, totals.total, strict=True))
    low, expected, high = (rounded_sums.get(amount, _to_hundredths(amount)) for amount in stated)
    return Figures(
        [_shown(amounts(line)) for line in rounded],
        _shown(totals.resident),
        _shown(totals.largest_phase),
        _shown(totals.total),
        None if stated == summed else _shown((low, expected, high)),
    )


def _plus(left: Amounts, right: Amounts) -> Amounts:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]


def _to_hundredths(size_bytes: int) -> int:
    return (size_bytes * 100 + MIB // 2) // MIB


def _shown(hundredths: Amounts) -> tuple[str, str, str]:
    low, expected, high = (f"{value // 100:,}.{value % 100:02d}" for value in hundredths)
    return low, expected, high

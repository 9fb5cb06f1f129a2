"""The requirement table adds up."""

from hypothesis import given
from hypothesis import strategies as st
from weighbridge.breakdown import add_up, apportion, figures
from weighbridge_proto.memory.v1 import requirement_pb2

GIB = 1 << 30

PHASES = ("resident", "prefill", "decode")
AMOUNT = st.integers(min_value=0, max_value=1 << 42)


def line(phase: str, low: int, expected: int, high: int) -> requirement_pb2.RequirementLine:
    return requirement_pb2.RequirementLine(phase=phase, low_bytes=low, expected_bytes=expected, high_bytes=high)


LINES = st.lists(st.builds(line, st.sampled_from(PHASES), AMOUNT, AMOUNT, AMOUNT), max_size=12)


def hundredths(text: str) -> int:
    return int(text.replace(",", "").replace(".", ""))


def test_resident_lines_add_and_of_the_phases_the_largest_counts() -> None:
    totals = add_up(
        [
            line("resident", 10, 20, 30),
            line("resident", 1, 2, 3),
            line("prefill", 5, 6, 7),
            line("prefill", 1, 1, 1),
            line("decode", 2, 9, 4),
        ]
    )
    assert totals.resident == (11, 22, 33)
    assert totals.phases == {"prefill": (6, 7, 8), "decode": (2, 9, 4)}
    assert totals.largest_phase == (6, 9, 8)
    assert totals.total == (17, 31, 41)


def test_nothing_adds_up_to_nothing() -> None:
    assert add_up([]).total == (0, 0, 0)
    assert figures([]).total == ("0.00", "0.00", "0.00")


@given(st.lists(AMOUNT, max_size=12), st.integers(min_value=1, max_value=1 << 31))
def test_rounded_parts_add_up_to_their_rounded_sum(parts: list[int], unit: int) -> None:
    shown = apportion(parts, unit)
    # A rounded sum is within half a unit of the exact one, and no part is off by a unit or more.
    assert abs(sum(shown) * unit - sum(parts)) * 2 <= unit
    for part, whole in zip(parts, shown, strict=True):
        assert abs(whole * unit - part) < unit


@given(LINES)
def test_the_shown_figures_add_up_by_hand(lines: list[requirement_pb2.RequirementLine]) -> None:
    shown = figures(lines)
    exact = add_up(lines)
    unit = GIB if shown.unit_name == "GiB" else 1 << 20
    for column in range(3):
        resident = [
            hundredths(row[column]) for row, of in zip(shown.lines, lines, strict=True) if of.phase == "resident"
        ]
        assert sum(resident) == hundredths(shown.resident[column])
        phases = {
            phase: sum(hundredths(row[column]) for row, of in zip(shown.lines, lines, strict=True) if of.phase == phase)
            for phase in exact.phases
        }
        assert max(phases.values(), default=0) == hundredths(shown.largest_phase[column])
        assert hundredths(shown.resident[column]) + hundredths(shown.largest_phase[column]) == hundredths(
            shown.total[column]
        )
        assert abs(hundredths(shown.total[column]) * unit - exact.total[column] * 100) <= unit


def test_every_figure_is_in_one_unit() -> None:
    assert figures([line("resident", 1, 1, 9 * GIB)]).unit_name == "MiB"
    large = figures([line("resident", GIB, 2 * GIB, 10 * GIB)])
    assert (large.unit_name, large.total) == ("GiB", ("1.00", "2.00", "10.00"))

"""The requirement table adds up."""

from hypothesis import given
from hypothesis import strategies as st
from weighbridge.breakdown import add_up, figures
from weighbridge_proto.memory.v1 import requirement_pb2

MIB = 1 << 20

PHASES = ("resident", "prefill", "decode")
AMOUNT = st.integers(min_value=0, max_value=1 << 42)


def line(phase: str, low: int, expected: int, high: int) -> requirement_pb2.RequirementLine:
    return requirement_pb2.RequirementLine(phase=phase, low_bytes=low, expected_bytes=expected, high_bytes=high)


def requirement(lines: list[requirement_pb2.RequirementLine]) -> requirement_pb2.Requirement:
    low, expected, high = add_up(lines).total
    total = requirement_pb2.ByteRange(low_bytes=low, expected_bytes=expected, high_bytes=high)
    return requirement_pb2.Requirement(lines=lines, total=total)


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
    assert figures(requirement([])).total == ("0.00", "0.00", "0.00")


@given(LINES)
def test_the_shown_figures_add_up_by_hand(lines: list[requirement_pb2.RequirementLine]) -> None:
    shown = figures(requirement(lines))
    exact = add_up(lines)
    for column in range(3):
        rows = [(of.phase, hundredths(row[column])) for row, of in zip(shown.lines, lines, strict=True)]
        resident = sum(figure for phase, figure in rows if phase == "resident")
        phases = [sum(figure for phase, figure in rows if phase == one) for one in exact.phases]
        assert hundredths(shown.resident[column]) == resident
        assert hundredths(shown.largest_phase[column]) == max(phases, default=0)
        assert hundredths(shown.total[column]) == resident + max(phases, default=0)
        # Half a hundredth of a MiB for each line, in bytes times 100.
        assert abs(hundredths(shown.total[column]) * MIB - exact.total[column] * 100) <= len(lines) * MIB / 2


@given(AMOUNT, AMOUNT)
def test_equal_amounts_look_equal_and_smaller_ones_not_larger(left: int, right: int) -> None:
    (shown,) = figures(requirement([line("resident", min(left, right), max(left, right), max(left, right))])).lines
    assert hundredths(shown[0]) <= hundredths(shown[1])
    assert shown[1] == shown[2]


def test_figures_are_mib_with_two_decimals() -> None:
    shown = figures(requirement([line("resident", MIB, 3 * MIB // 2, 10 * 1024 * MIB)]))
    assert shown.total == ("1.00", "1.50", "10,240.00")


def test_a_total_that_the_lines_add_up_to_is_stated_once() -> None:
    assert figures(requirement([line("resident", MIB, MIB, MIB)])).stated is None


def test_a_total_from_measurements_is_shown_beside_the_sum_and_its_bounds_look_like_the_sums() -> None:
    # Three times 0.334 MiB are 1.002: shown as the sum of three times 0.33, not as 1.00.
    third = MIB * 334 // 1000
    needed = requirement([line("resident", third, 2 * MIB, 3 * MIB)] * 3)
    needed.total.expected_bytes = needed.total.low_bytes
    shown = figures(needed)
    assert shown.total == ("0.99", "6.00", "9.00")
    assert shown.stated == ("0.99", "0.99", "9.00")
    needed.total.expected_bytes = 5 * MIB
    assert figures(needed).stated == ("0.99", "5.00", "9.00")

"""Machines and sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge.machines import parse_machine
from weighbridge.sizes import format_size, parse_size
from weighbridge_proto.memory.v1 import machine_pb2

GIB = 1 << 30


def test_unified_and_cpu_have_one_memory() -> None:
    unified = parse_machine("unified:64")
    assert (unified.pool, unified.ram_bytes, len(unified.devices)) == (machine_pb2.POOL_KIND_UNIFIED, 64 * GIB, 0)
    cpu = parse_machine("cpu:32")
    assert (cpu.pool, cpu.ram_bytes, len(cpu.devices)) == (machine_pb2.POOL_KIND_CPU, 32 * GIB, 0)


def test_discrete_has_the_host_first_and_then_each_card() -> None:
    machine = parse_machine("discrete:64+24+16")
    assert machine.pool == machine_pb2.POOL_KIND_DISCRETE
    assert machine.ram_bytes == 64 * GIB
    assert [(card.device_id, card.total_bytes) for card in machine.devices] == [("0", 24 * GIB), ("1", 16 * GIB)]


def test_units_and_fractions() -> None:
    assert parse_machine("CPU: 512MiB").ram_bytes == 512 << 20
    assert parse_machine("discrete:31.5+7.75GiB").devices[0].total_bytes == int(7.75 * GIB)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no kind of machine"),
        ("64", "no kind of machine"),
        ("gpu:24", "no kind of machine"),
        ("unified", "lacks the memory"),
        ("unified:", "lacks the memory"),
        ("unified:64+24", "no cards of its own"),
        ("discrete:64", "no card"),
        ("cpu:0", "not a size that a machine can have"),
        ("cpu:-4", "is no size"),
        ("cpu:lots", "is no size"),
        ("cpu:32GB", "no unit of size"),
        ("discrete:64+", "is no size"),
        ("cpu:99999999999999", "not a size that a machine can have"),
    ],
)
def test_what_is_no_machine_is_said_to_be_none(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_machine(text)


@given(st.text(max_size=40))
def test_any_text_is_a_machine_or_a_clear_error(text: str) -> None:
    try:
        machine = parse_machine(text)
    except ValueError as error:
        assert "Write" in str(error) or "cards" in str(error)
    else:
        assert machine.ram_bytes > 0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (96 << 20, "96.0 MiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (-GIB, "-1.00 GiB"),
    ],
)
def test_sizes_are_written_in_the_unit_that_fits(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(min_value=1, max_value=1 << 50))
def test_a_written_size_is_read_back_within_its_rounding(size: int) -> None:
    # Two decimals of GiB, one of MiB and KiB: at least three digits, so the error stays below half a percent of it.
    text = format_size(size)
    assert abs(parse_size(text) - size) <= max(1, size * 0.051)

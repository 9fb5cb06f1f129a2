"""Ceilings: the worked values of the published formulas, and what must hold for every machine."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_ledger.machine.ceilings import (
    automatic_ceilings,
    ceilings_for,
    fast_bytes,
    host_share,
    sizing_bytes,
)
from weighbridge_ledger.machine.declared import parse_spec
from weighbridge_ledger.machine.model import GIB, Device, Machine, Pool


def gib(amount: str) -> int:
    return math.floor(Fraction(amount) * GIB)


# host, ceiling over everything, fast memory, what slots are sized on (GiB): the reference system's worked budgets.
WORKED = [
    ("unified:8", "4", "4", "4"),
    ("unified:16", "11.2", "11.2", "11.2"),
    ("unified:32", "22.4", "22.4", "22.4"),
    ("unified:64", "48", "48", "44.8"),
    ("unified:96", "80", "80", "76.8"),
    ("unified:128", "112", "112", "96"),
    ("unified:512", "496", "496", "96"),
    ("unified:121", "105", "105", "96"),
    ("cpu:16", "9.6", "9.6", "9.6"),
    ("cpu:64", "38.4", "38.4", "38.4"),
    ("cpu:96", "76.8", "76.8", "76.8"),
    ("cpu:128", "96", "96", "96"),
    ("cpu:512", "96", "96", "96"),
    ("discrete:64+24", "61.2", "22.8", "22.8"),
    ("discrete:64+32", "68.8", "30.4", "30.4"),
    ("discrete:32+16", "34.4", "15.2", "15.2"),
    ("discrete:16+16", "24.8", "15.2", "15.2"),
]


@pytest.mark.parametrize(("spec", "total", "fast", "sizing"), WORKED)
def test_worked_values(spec: str, total: str, fast: str, sizing: str) -> None:
    machine = parse_spec(spec)
    ceilings = automatic_ceilings(machine)
    # A total of two floored parts may be one byte below the floor of the sum.
    assert ceilings.total_bytes == pytest.approx(gib(total), abs=1)
    assert fast_bytes(ceilings) == gib(fast)
    assert sizing_bytes(machine, ceilings) == gib(sizing)


@pytest.mark.parametrize(
    ("spec", "host", "cards"),
    [
        ("discrete:64+24", "38.4", ["22.8"]),
        ("discrete:64+32", "38.4", ["30.4"]),
        ("discrete:32+16", "19.2", ["15.2"]),
        ("discrete:64+24+24", "38.4", ["22.8", "22.8"]),
        ("discrete:128+12", "96", ["11.4"]),
    ],
)
def test_host_share_and_each_card_are_ceilings_of_their_own(spec: str, host: str, cards: list[str]) -> None:
    ceilings = automatic_ceilings(parse_spec(spec))
    assert ceilings.host_bytes == gib(host)
    assert [ceilings.devices[str(index)] for index in range(len(cards))] == [gib(card) for card in cards]


def test_two_cards_are_not_one_fast_memory_of_twice_the_size() -> None:
    assert fast_bytes(automatic_ceilings(parse_spec("discrete:64+24+24"))) == gib("22.8")


@pytest.mark.parametrize(
    ("spec", "limit", "counted", "total"),
    [
        ("unified:16", "14", None, "11.2"),  # a limit never raises a ceiling
        ("unified:16", "10", "10", "10"),
        ("unified:16", "0", None, "11.2"),  # not a limit: unreadable counts as none
        ("discrete:64+24", "12", "12", "12"),
        ("discrete:64+24", "40", "40", "40"),
        ("discrete:64+24", "62", None, "61.2"),
    ],
)
def test_a_limit_counts_only_where_it_is_lower(spec: str, limit: str, counted: str | None, total: str) -> None:
    ceilings = ceilings_for(parse_spec(spec), gib(limit))
    assert ceilings.limit_bytes == (None if counted is None else gib(counted))
    assert ceilings.total_bytes == pytest.approx(gib(total), abs=1)


def test_a_limit_lowers_a_card_and_clearing_it_restores_it() -> None:
    machine = parse_spec("discrete:64+24")
    assert fast_bytes(ceilings_for(machine, gib("12"))) == gib("12")
    assert fast_bytes(ceilings_for(machine, None)) == gib("22.8")


@pytest.mark.parametrize(
    ("spec", "choice", "allowed"),
    [
        ("discrete:32+12", None, False),
        ("discrete:64+24", True, True),
        ("discrete:64+24", False, False),
        ("unified:64", None, True),
        ("cpu:32", None, True),
        ("cpu:32", False, True),  # there is no card to spill from
    ],
)
def test_spill_is_off_on_cards_unless_chosen(spec: str, choice: bool | None, allowed: bool) -> None:
    assert ceilings_for(parse_spec(spec), None, choice).spill_allowed is allowed


@pytest.mark.parametrize(("wired_gib", "share"), [(None, "48"), (40, "40"), (60, "48")])
def test_what_the_system_lets_a_gpu_hold_lowers_but_never_raises(wired_gib: int | None, share: str) -> None:
    wired = None if wired_gib is None else wired_gib * GIB
    assert host_share(Machine("n", Pool.UNIFIED, 64 * GIB, gpu_wired_bytes=wired)) == gib(share)


def test_a_container_of_200_mib_may_hold_120() -> None:
    assert host_share(Machine("n", Pool.CPU, 209_715_200)) == 125_829_120


RAM = st.integers(min_value=1, max_value=2**46)
POOLS = st.sampled_from(list(Pool))


def _machine(pool: Pool, ram: int, card: int) -> Machine:
    devices = (Device("0", "card", card),) if pool is Pool.DISCRETE else ()
    return Machine("n", pool, ram, devices)


@given(POOLS, RAM, RAM, st.integers(min_value=1, max_value=2**40))
def test_more_memory_never_means_a_lower_ceiling(pool: Pool, one: int, other: int, card: int) -> None:
    less, more = sorted((one, other))
    assert host_share(_machine(pool, less, card)) <= host_share(_machine(pool, more, card))


@given(POOLS, RAM, st.integers(min_value=1, max_value=2**40))
def test_no_ceiling_is_above_its_memory_or_below_zero(pool: Pool, ram: int, card: int) -> None:
    machine = _machine(pool, ram, card)
    ceilings = automatic_ceilings(machine)
    assert 0 <= ceilings.host_bytes <= ram
    assert all(0 <= ceiling <= card for ceiling in ceilings.devices.values())
    assert 0 <= sizing_bytes(machine, ceilings) <= fast_bytes(ceilings) <= ceilings.total_bytes


@given(POOLS, RAM, st.integers(min_value=1, max_value=2**40), st.integers(min_value=-(2**50), max_value=2**50))
def test_no_limit_raises_any_ceiling(pool: Pool, ram: int, card: int, limit: int) -> None:
    machine = _machine(pool, ram, card)
    automatic, limited = automatic_ceilings(machine), ceilings_for(machine, limit)
    assert limited.total_bytes <= automatic.total_bytes
    assert limited.pool_bytes("host") <= automatic.host_bytes
    assert all(limited.pool_bytes(name) <= automatic.devices[name] for name in automatic.devices)
    if limit > 0:
        assert limited.total_bytes <= max(limit, 0) or limited.total_bytes == automatic.total_bytes
        assert limited.total_bytes == min(limit, automatic.total_bytes)


@pytest.mark.parametrize(
    ("platform", "pool", "ram", "heeded"),
    [
        ("darwin/arm64", Pool.UNIFIED, 32, False),
        ("darwin/arm64", Pool.UNIFIED, 24, False),
        ("darwin/arm64", Pool.UNIFIED, 16, True),
        ("darwin/x86_64", Pool.CPU, 32, True),
        ("linux/arm64", Pool.UNIFIED, 121, True),
        ("", Pool.UNIFIED, 64, True),
    ],
)
def test_who_wants_a_device_alone_is_heeded_except_on_large_macs(
    platform: str, pool: Pool, ram: int, heeded: bool
) -> None:
    machine = Machine("n", pool, ram * GIB, platform=platform)
    assert ceilings_for(machine).exclusive_heeded is heeded


@pytest.mark.parametrize(
    ("platform", "alone"),
    [("darwin/arm64", True), ("darwin/x86_64", True), ("linux/x86_64", False), ("linux/arm64", False), ("", False)],
)
def test_metal_loads_one_model_at_a_time(platform: str, alone: bool) -> None:
    assert ceilings_for(Machine("n", Pool.UNIFIED, 64 * GIB, platform=platform)).one_start_at_a_time is alone


@pytest.mark.parametrize(("spec", "shared"), [("unified:64", True), ("cpu:64", False), ("discrete:64+24", False)])
def test_a_unified_machine_has_a_gpu_without_memory_of_its_own(spec: str, shared: bool) -> None:
    assert ceilings_for(parse_spec(spec)).has_shared_gpu is shared


@pytest.mark.parametrize("spill", [None, True, False])
def test_wishes_leave_the_machines_nature_alone(spill: bool | None) -> None:
    machine = Machine("n", Pool.UNIFIED, 64 * GIB, platform="darwin/arm64")
    told = ceilings_for(machine, 10 * GIB, spill)
    assert (told.has_shared_gpu, told.exclusive_heeded, told.one_start_at_a_time) == (True, False, True)

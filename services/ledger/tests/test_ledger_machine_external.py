"""External use: what programs outside the ledger hold (rule 3 of the admission rules)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_ledger.machine.ceilings import automatic_ceilings
from weighbridge_ledger.machine.declared import parse_spec
from weighbridge_ledger.machine.external import (
    ExternalUse,
    HeldBytes,
    external_bytes,
    external_use,
    for_book,
    held_bytes,
    host_attribution,
    over_reserve,
    processes_bytes,
)
from weighbridge_ledger.machine.model import (
    GIB,
    Device,
    DeviceProcess,
    LiveDevice,
    LiveMemory,
    Machine,
    Pool,
)

CARDS = Machine("n", Pool.DISCRETE, 64 * GIB, (Device("a", "A", 24 * GIB), Device("b", "B", 24 * GIB)))


@pytest.mark.parametrize(
    ("used", "leases", "outside"),
    [
        (1, [], 1),
        (1, [HeldBytes(0, None, 1)], 1),  # outside 1, a lease of 1 that has not loaded: nothing of the 1 is its
        (2, [HeldBytes(1, None, 1)], 1),  # loaded: counted once, not twice
        (1, [HeldBytes(2, None, 1)], 0),  # mapped files belong to a process but are no used memory
        (5, [HeldBytes(None, 4, 3)], 2),  # reported counts up to the charge
        (5, [HeldBytes(None, None, 3)], 5),  # neither attributed nor reported: not loaded
        (None, [HeldBytes(1, 1, 1)], None),  # unsupported is no figure
    ],
)
def test_measured_less_held(used: int | None, leases: list[HeldBytes], outside: int | None) -> None:
    assert external_bytes(used, leases) == outside


def test_gpu_memory_that_a_footprint_leaves_out_is_not_a_strangers() -> None:
    # 30 GB resident against 103 GB of footprint was seen on a Mac: the holder's own report closes the gap.
    assert held_bytes(HeldBytes(attributed=30, reported=103, charged=105)) == 103


def test_each_place_has_its_own() -> None:
    live = LiveMemory(host_used_bytes=10 * GIB, devices=(LiveDevice("a", 20 * GIB, 4 * GIB), LiveDevice("b")))
    use = external_use(CARDS, live, [HeldBytes(GIB, None, GIB)], {"a": [HeldBytes(3 * GIB, None, 3 * GIB)], "b": []})
    assert (use.host_bytes, use.device_bytes("a"), use.device_bytes("b")) == (9 * GIB, GIB, None)
    book = for_book(use)
    assert (book.host_bytes, book.on("a"), book.on("b")) == (9 * GIB, GIB, 0)


def test_live_memory_does_not_count_on_a_declared_machine() -> None:
    live = LiveMemory(host_used_bytes=10 * GIB)
    assert external_use(parse_spec("cpu:32"), live, [], {}) == ExternalUse()
    assert for_book(ExternalUse()).host_bytes == 0


@pytest.mark.parametrize(("outside", "counted"), [(None, None), (0, 0), (16, 0), (17, 1), (60, 44)])
def test_the_reserve_is_for_everything_else(outside: int | None, counted: int | None) -> None:
    # 64 GiB unified: 48 admitted, 16 left to everything else.
    machine = Machine("n", Pool.UNIFIED, 64 * GIB)
    use = ExternalUse(None if outside is None else outside * GIB)
    over = over_reserve(machine, automatic_ceilings(machine), use)
    assert over.host_bytes == (None if counted is None else counted * GIB)


@given(st.integers(min_value=1, max_value=2**45), st.integers(min_value=0, max_value=2**45))
def test_what_is_admitted_beside_external_use_fits_the_memory(ram: int, outside: int) -> None:
    machine = Machine("n", Pool.UNIFIED, ram)
    ceilings = automatic_ceilings(machine)
    over = over_reserve(machine, ceilings, ExternalUse(outside)).host_bytes
    assert over is not None
    admitted = max(0, ceilings.host_bytes - over)
    assert admitted + outside <= max(ram, outside)


def test_cards_have_a_reserve_too() -> None:
    over = over_reserve(CARDS, automatic_ceilings(CARDS), ExternalUse(0, {"a": 2 * GIB, "b": None}))
    reserve = 24 * GIB - 24 * GIB * 95 // 100
    assert (over.device_bytes("a"), over.device_bytes("b")) == (2 * GIB - reserve, None)


@pytest.mark.parametrize(
    ("processes", "pids", "held"),
    [
        (None, [1], None),  # the driver attributes nothing
        ((), [1], 0),
        (((1, 5), (2, 7)), [1], 5),
        (((1, 5), (2, 7)), [1, 2], 12),
        (((1, None),), [1], None),
        (((9, 5),), [1], None),  # other numbers altogether: another pid namespace, or nobody of ours
    ],
)
def test_attribution_on_a_device(
    processes: tuple[tuple[int, int | None], ...] | None, pids: list[int], held: int | None
) -> None:
    live = LiveDevice("a", processes=None if processes is None else tuple(DeviceProcess(*pair) for pair in processes))
    assert processes_bytes(live, pids) == held


def test_gpu_memory_is_host_memory_on_a_unified_machine_only() -> None:
    live = LiveMemory(devices=(LiveDevice("a", processes=(DeviceProcess(7, 60 * GIB),)),))
    unified = Machine("n", Pool.UNIFIED, 121 * GIB)
    assert host_attribution(unified, live, 2 * GIB, [7]) == 62 * GIB
    assert host_attribution(CARDS, live, 2 * GIB, [7]) == 2 * GIB
    assert host_attribution(unified, live, None, [7]) is None


def test_an_idle_mac_does_not_keep_a_claim_waiting_for_memory_that_is_free() -> None:
    # 16 GiB: 11.2 admitted, 4.8 left to everything else, and the system uses 6. 10 are free, and 10 can be granted;
    # 11.2 − 6 = 5.2 would keep a claim of 8 waiting for ever.
    machine = Machine("n", Pool.UNIFIED, 16 * GIB)
    ceilings = automatic_ceilings(machine)
    beyond = for_book(over_reserve(machine, ceilings, ExternalUse(6 * GIB)))
    assert ceilings.host_bytes - beyond.host_bytes == 10 * GIB


def test_a_model_is_not_refused_for_memory_that_is_free() -> None:
    # Reported elsewhere: 22 GB refused on a 64 GiB Mac with 32 free. 48 admitted, 16 reserved, 32 in use: 32 are left.
    machine = Machine("n", Pool.UNIFIED, 64 * GIB)
    ceilings = automatic_ceilings(machine)
    beyond = for_book(over_reserve(machine, ceilings, ExternalUse(32 * GIB)))
    assert ceilings.host_bytes - beyond.host_bytes == 32 * GIB

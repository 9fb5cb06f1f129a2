"""What machines are and what is in use on them: the rows that the reference system's tests pin, and what was reported
of other programs' probes.

Rows that other tests have with the same figures are not repeated; docs/ledger-reports.md has where each one is.
"""

import math

import pytest
from weighbridge_ledger.machine.ceilings import automatic_ceilings, ceilings_for, fast_bytes
from weighbridge_ledger.machine.declared import parse_spec
from weighbridge_ledger.machine.external import HeldBytes, external_bytes, processes_bytes
from weighbridge_ledger.machine.interpret import interpret
from weighbridge_ledger.machine.model import GIB, DeviceProcess, LiveDevice, Pool
from weighbridge_ledger.machine.readings import CgroupLevel, DeviceReading, Readings

MIB = 2**20
PAGE = 16_384


def meminfo(total_gib: float, available_gib: float) -> str:
    """/proc/meminfo, as far as it is read."""
    return f"MemTotal: {int(total_gib * 2**20)} kB\nMemAvailable: {int(available_gib * 2**20)} kB\n"


def vm_stat(*, free_gib: int, cached_gib: int = 0) -> str:
    """macOS's vm_stat, as far as it is read."""
    return (
        f"Mach Virtual Memory Statistics: (page size of {PAGE} bytes)\n"
        f"Pages free: {free_gib * GIB // PAGE}.\nPages inactive: 0.\nPages speculative: 0.\nPages purgeable: 0.\n"
        f"File-backed pages: {cached_gib * GIB // PAGE}.\n"
    )


# -- the reference system's machines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ram", "name", "card_mib", "unified", "pool", "fast", "total"),
    [
        (64, "NVIDIA GeForce RTX 4080", 16_384, None, Pool.DISCRETE, 15.2, 53.6),
        (128, "NVIDIA GB10", 122_880, None, Pool.UNIFIED, 112, 112),
        (121, "NVIDIA GB10", 119 * 1024, None, Pool.UNIFIED, 105, 105),
        (32, "Intel(R) Iris(R) Xe Graphics", 12 * 1024, None, Pool.UNIFIED, 22.4, 22.4),
        (32, "Intel(R) Arc(TM) A770 Graphics", 12 * 1024, None, Pool.DISCRETE, 11.4, 30.6),
        (16, "Mystery accelerator", 16 * 1024, False, Pool.DISCRETE, 15.2, 24.8),
    ],
)
def test_a_machine_and_its_budget(ram, name, card_mib, unified, pool, fast, total) -> None:
    """Its rows name the kind and a bound (a budget above 19.2, above 16); the figures are those of its formulas."""
    card = DeviceReading("0", name, total_bytes=card_mib * MIB)
    machine = interpret(Readings("linux", ram_bytes=ram * GIB, devices=(card,), unified=unified)).machine
    ceilings = automatic_ceilings(machine)
    assert machine.pool is pool
    assert fast_bytes(ceilings) == math.floor(fast * GIB)
    assert ceilings.total_bytes == pytest.approx(total * GIB, abs=2)  # two parts, each rounded down


@pytest.mark.parametrize(("free", "cached", "used"), [(20, 0, 44), (4, 20, 40)])
def test_what_is_used_of_a_mac_is_neither_free_nor_cache(free: int, cached: int, used: int) -> None:
    """64 GiB: 20 free, 44 used; with 20 of file cache and 4 free, 40."""
    live = interpret(Readings("darwin", vm_stat=vm_stat(free_gib=free, cached_gib=cached), ram_bytes=64 * GIB)).live
    assert live.host_used_bytes == used * GIB


def test_what_was_seen_of_engines_is_not_a_strangers() -> None:
    """44 used, 30 of them seen in engines' processes: others hold 14. A reservation alone is no measurement: where
    nothing was seen or reported, all 44 are others'."""
    assert external_bytes(44 * GIB, [HeldBytes(30 * GIB, None, 30 * GIB)]) == 14 * GIB
    assert external_bytes(44 * GIB, [HeldBytes(None, None, 10 * GIB)]) == 44 * GIB


def test_a_card_s_use_is_attributed_by_its_driver_s_account_of_processes_only() -> None:
    """Aggregate alone: nothing is attributed; one process of 11 GiB: 11."""
    assert processes_bytes(LiveDevice("0", 11 * GIB, 13 * GIB), [7]) is None
    accounted = LiveDevice("0", 11 * GIB, 13 * GIB, processes=(DeviceProcess(7, 11 * GIB),))
    assert processes_bytes(accounted, [7]) == 11 * GIB


# -- the faults -------------------------------------------------------------------------------------------------------


def test_fault_15_two_cards_are_not_one_of_twice_the_size(new_world) -> None:
    """Two cards of 24 counted as 45.6 GiB of fast memory, though a model loads on one: 30 do not fit there."""
    world = new_world(automatic_ceilings(parse_spec("discrete:64+24+24")))
    charge = world.admit(0, devices={"": 30 * GIB}).lease.charge
    assert len(charge.devices) == 1
    assert charge.devices[0][1] == math.floor(22.8 * GIB)
    assert charge.spilled_bytes > 0  # and that it is not all on the card is told


def test_fault_19_free_memory_of_a_mac_is_what_can_be_had_and_not_what_is_free() -> None:
    """6.6 GiB "free" of more than 40 that could be reclaimed: contexts fell to their floor, 11 of 11 trials died."""
    text = vm_stat(free_gib=6, cached_gib=38)
    live = interpret(Readings("darwin", vm_stat=text, ram_bytes=64 * GIB)).live
    assert live.host_free_bytes is not None
    assert live.host_free_bytes >= 40 * GIB


# -- other programs' probes -------------------------------------------------------------------------------------------


def test_dgx_sparks_47_what_the_driver_calls_free_is_not_what_is_available() -> None:
    """121.69 GiB: the driver says 101.5 free, the kernel 111 available."""
    gpu = DeviceReading("0", "NVIDIA GB10", total_bytes=121 * GIB, free_bytes=int(101.5 * GIB))
    live = interpret(Readings("linux", meminfo=meminfo(121.69, 111), devices=(gpu,))).live
    assert live.host_free_bytes == 111 * GIB


def test_ollama_6918_page_cache_in_a_container_without_a_limit_takes_nothing() -> None:
    """330 MiB were seen of 35 GB that were available."""
    files = {"memory.max": "max", "memory.current": str(34 * GIB), "memory.stat": f"inactive_file {33 * GIB}\n"}
    live = interpret(Readings("linux", meminfo=meminfo(64, 35), cgroups=(CgroupLevel(2, "/", files),))).live
    assert live.host_free_bytes == 35 * GIB


def test_ollama_15650_what_others_hold_does_not_add_up_over_measurements() -> None:
    """Free memory drifted from 17.5 to 15.7 GiB over loads and unloads: each measurement stands for itself here."""
    held = [HeldBytes(6 * GIB, None, 6 * GIB)]
    rounds = [external_bytes(used * GIB, leases) for used, leases in ((2, []), (8, held), (2, []), (8, held), (2, []))]
    assert rounds == [2 * GIB] * 5


def test_atomic_llama_77_what_does_not_fit_on_the_card_is_told_and_not_hidden(new_world) -> None:
    """A driver that never refuses, but moves memory to the host at 12 times the time: 7.4 "fit", and 11.8 on a card of
    8. A charge says what is on the card and what is not, and with others there it is not granted."""
    ceilings = ceilings_for(parse_spec("discrete:32+8"))
    world = new_world(ceilings)
    first = world.admit(0, 1, devices={"0": int(7.4 * GIB)}).lease
    assert (first.charge.on("0"), first.charge.spilled_bytes) == (int(7.4 * GIB), 0)
    waiting = world.admit(0, 2, devices={"0": int(4.4 * GIB)}).lease
    assert waiting.state.value == "QUEUED"
    alone = new_world(ceilings).admit(0, 1, devices={"0": int(11.8 * GIB)}).lease.charge
    assert alone.on("0") == math.floor(7.6 * GIB)
    assert alone.spilled_bytes == int(11.8 * GIB) - alone.on("0")


@pytest.mark.parametrize("wired_mib", [40_960, 45_056])
def test_mlx_3186_what_the_system_lets_a_gpu_wire_is_never_exceeded(new_world, wired_mib: int) -> None:
    """Kernel panics from wired memory that grew: the system's own limit lowers the ceiling, and what is seen above a
    grant is stopped."""
    sysctl = {"hw.memsize": str(64 * GIB), "hw.optional.arm64": "1", "iogpu.wired_limit_mb": str(wired_mib)}
    machine = interpret(Readings("darwin", sysctl=sysctl)).machine
    world = new_world(automatic_ceilings(machine))
    assert world.refused(lambda: world.admit(wired_mib * MIB + 1)) == "CLAIM_EXCEEDS_CAPACITY"
    assert world.admit(wired_mib * MIB).lease.state.value == "GRANTED"

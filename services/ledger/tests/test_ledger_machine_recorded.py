"""Machines that nobody here owns, from recorded readings. Expected values are worked by hand from public formulas."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from weighbridge_ledger.machine.ceilings import automatic_ceilings
from weighbridge_ledger.machine.drift import against_start
from weighbridge_ledger.machine.interpret import interpret
from weighbridge_ledger.machine.model import GIB, Interpretation, Pool
from weighbridge_ledger.machine.recorded import from_json, to_json

RECORDED = Path(__file__).parent / "machine_readings"
KIB = 2**10
MIB = 2**20
EVERY_RECORDING = sorted(path.stem for path in RECORDED.glob("*.json"))


def recorded(name: str) -> Interpretation:
    return interpret(from_json((RECORDED / f"{name}.json").read_text()))


def reasons(result: Interpretation) -> set[str]:
    return {finding.reason for finding in (*result.findings, *result.live.findings)}


def notes(result: Interpretation) -> str:
    return " ".join(finding.message for finding in (*result.findings, *result.live.findings))


@dataclass(frozen=True)
class Expected:
    """What a machine must come out as: kind, host ceiling, ceilings of its cards, reasons of its findings."""

    pool: Pool
    host_bytes: int
    cards: tuple[int, ...] = ()
    reasons: frozenset[str] = frozenset()


def said(*names: str) -> frozenset[str]:
    return frozenset(names)


MACHINES = {
    # 24,560 MiB, of which 95 % count; RAM 65,752,588 KiB, of which 60 %.
    "amd-7900-xtx": Expected(Pool.DISCRETE, 65_752_588 * KIB * 6 // 10, (24_560 * MIB * 95 // 100,)),
    # 1.5 TiB of RAM: the share is capped at 96 GiB. 196,592 MiB on each card.
    "amd-mi300x-8": Expected(Pool.DISCRETE, 96 * GIB, (196_592 * MIB * 95 // 100,) * 8),
    # The firmware gave the GPU 96 of 128 GiB: no program of the host can use them, so they are a card.
    "strix-halo-carve-out-96": Expected(
        Pool.DISCRETE, 31_960_848 * KIB * 6 // 10, (96 * GIB * 95 // 100,), said("CARVE_OUT_IS_A_CARD")
    ),
    # The kernel's default: half of the RAM for the GPU (64,077 MiB). From 96 GiB on 0.8 of the RAM, at most 96 GiB, are
    # there for models on the processor in any case.
    "strix-halo-half": Expected(Pool.UNIFIED, 96 * GIB, reasons=said("GPU_MAPPABLE")),
    # Raised to 126,976 MiB: RAM − 16 GiB, as on any unified machine of this size.
    "strix-halo-raised": Expected(Pool.UNIFIED, 131_229_696 * KIB - 16 * GIB),
    # 8 GiB set aside and 124 GiB offered on a machine of 128: 132 would be promised. The pool is the RAM that is there.
    "strix-halo-132-of-128": Expected(
        Pool.UNIFIED, 119 * GIB - 16 * GIB, reasons=said("DEVICE_EXCEEDS_PHYSICAL", "CARVE_OUT_IGNORED")
    ),
    # A console's APU: 12 of 16 GiB belong to the GPU.
    "bc-250-console": Expected(
        Pool.DISCRETE, 3_774_873 * KIB * 6 // 10, (12 * GIB * 95 // 100,), said("CARVE_OUT_IS_A_CARD")
    ),
    # NVML does not know the memory of these, or is not there at all. 0.7 of the RAM, and 4 GiB left.
    "dgx-spark": Expected(Pool.UNIFIED, 127_601_213 * KIB - 16 * GIB),
    "jetson-orin-jetpack-5": Expected(Pool.UNIFIED, 31_308_264 * KIB * 7 // 10),
    "jetson-orin-jetpack-6": Expected(Pool.UNIFIED, 64_349_328 * KIB - 16 * GIB),
    # xe says what is on the card, not what is in use.
    "intel-arc-b580-xe": Expected(
        Pool.DISCRETE, 32_688_136 * KIB * 6 // 10, (12 * GIB * 95 // 100,), said("DEVICE_USE_UNSUPPORTED")
    ),
    # i915 does not say how much memory the card has; the processor's own graphics share the RAM.
    "intel-arc-a770-i915": Expected(Pool.UNIFIED, 32_688_136 * KIB * 7 // 10, reasons=said("DEVICE_NOT_DETECTED")),
    "two-vendors": Expected(
        Pool.DISCRETE,
        65_752_588 * KIB * 6 // 10,
        (25_757_220_864 * 95 // 100, 24_560 * MIB * 95 // 100),
        said("SHARED_DEVICE_IGNORED"),
    ),
    # A wired limit of 120 GiB raises nothing: 128 − 16.
    "mac-m4-max-128-wired-120": Expected(Pool.UNIFIED, 112 * GIB, reasons=said("WIRED_LIMIT")),
    "mac-m3-ultra-96-panicked": Expected(Pool.UNIFIED, 80 * GIB, reasons=said("MEMORY_PRESSURE")),
    "container-cgroup2-nested": Expected(Pool.CPU, 24 * GIB * 6 // 10, reasons=said("CONTAINER_LIMIT")),
    "container-cgroup1-memsw": Expected(Pool.CPU, 8 * GIB * 6 // 10, reasons=said("CONTAINER_LIMIT")),
    "vm-balloon-deflated": Expected(Pool.CPU, 65_863_680 * KIB * 6 // 10),
    "container-without-its-gpu": Expected(Pool.CPU, 65_752_588 * KIB * 6 // 10, reasons=said("DEVICE_NOT_GIVEN")),
    "nvidia-without-driver": Expected(Pool.CPU, 65_752_588 * KIB * 6 // 10, reasons=said("DEVICE_NOT_DETECTED")),
    # One card is left whose size can be believed.
    "amd-impossible": Expected(
        Pool.DISCRETE,
        65_752_588 * KIB * 6 // 10,
        (16_368 * MIB * 95 // 100,),
        said(
            "USED_EXCEEDS_TOTAL",
            "DEVICE_MEMORY_NOT_POSITIVE",
            "DEVICE_MEMORY_IMPOSSIBLE",
            "DEVICE_MEMORY_UNSUPPORTED",
            "TEMPERATURE_IMPOSSIBLE",
        ),
    ),
    # Hopper and Ada servers: the share of 251 GiB of RAM is capped.
    "nvidia-l40s-hot": Expected(Pool.DISCRETE, 96 * GIB, (46_068 * MIB * 95 // 100,)),
}


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_a_machine_comes_out_as_it_is(name: str) -> None:
    result, expected = recorded(name), MACHINES[name]
    ceilings = automatic_ceilings(result.machine)
    assert result.machine.pool is expected.pool
    assert ceilings.host_bytes == expected.host_bytes
    assert tuple(ceilings.devices.values()) == expected.cards
    assert reasons(result) == expected.reasons


@pytest.mark.parametrize("name", EVERY_RECORDING)
def test_every_recording_can_be_recorded_again(name: str) -> None:
    readings = from_json((RECORDED / f"{name}.json").read_text())
    assert from_json(to_json(readings)) == readings


@pytest.mark.parametrize("name", EVERY_RECORDING)
def test_no_unified_pool_is_larger_than_the_memory_and_no_figure_is_zero_for_unknown(name: str) -> None:
    result = recorded(name)
    machine, live = result.machine, result.live
    if machine.pool is Pool.UNIFIED:
        assert automatic_ceilings(machine).total_bytes < machine.ram_bytes
    for device in machine.devices:
        now = live.device(device.device_id)
        assert now.free_bytes is None or 0 <= now.free_bytes <= device.total_bytes
        assert now.used_bytes is None or 0 <= now.used_bytes <= device.total_bytes
        assert (now.free_bytes is None) == (now.used_bytes is None)


def test_an_amd_card_says_what_is_in_use_and_how_warm_it_is() -> None:
    result = recorded("amd-7900-xtx")
    (card,) = result.machine.devices
    assert (card.device_id, card.name) == ("GPU-9e8d7c6b5a493827", "AMD Radeon RX 7900 XTX")
    now = result.live.device(card.device_id)
    assert (now.used_bytes, now.free_bytes) == (1_289_814_016, 24_560 * MIB - 1_289_814_016)
    (sensors,) = result.live.sensors
    # Edge 45 °C; the smallest distance is the memory's: 108 − 58.
    assert (sensors.celsius, sensors.margin_celsius, sensors.slowdowns) == (45, 50, None)


def test_eight_cards_are_eight_devices() -> None:
    ids = [device.device_id for device in recorded("amd-mi300x-8").machine.devices]
    assert len(set(ids)) == 8


def test_nvidia_and_amd_side_by_side_are_counted_once_each() -> None:
    result = recorded("two-vendors")
    assert [device.name for device in result.machine.devices] == [
        "NVIDIA GeForce RTX 4090",
        "AMD Radeon RX 7900 XTX",
    ]
    assert result.live.device("GPU-9e8d7c6b5a493827").used_bytes == 0, "measured as none is not unknown"


def test_a_card_in_use_that_says_nothing_of_it_is_unknown() -> None:
    result = recorded("intel-arc-b580-xe")
    (card,) = result.machine.devices
    assert card.name == "Intel Battlemage G21 [Arc B580]"
    assert result.live.device(card.device_id).used_bytes is None
    assert (result.live.sensors[0].celsius, result.live.sensors[0].margin_celsius) == (47, 50)


def test_what_is_not_detected_says_what_to_do() -> None:
    assert "Arc A770" in notes(recorded("intel-arc-a770-i915"))
    assert "discrete:64+16" in notes(recorded("intel-arc-a770-i915"))
    assert "RTX 3090" in notes(recorded("nvidia-without-driver"))
    assert "/dev/dri" in notes(recorded("container-without-its-gpu"))


def test_the_gpus_half_of_the_memory_is_said_in_gib() -> None:
    # 64,077 MiB of GTT and 512 MiB set aside.
    assert "63.08 GiB" in notes(recorded("strix-halo-half"))


def test_what_a_nested_container_has_left_is_the_least_along_its_hierarchy() -> None:
    live = recorded("container-cgroup2-nested").live
    # The scope: memory.high 24 GiB; 12 charged, of which 6 page cache and 1 reclaimable objects: 19 left.
    # Its parent: memory.max 40; 30 charged, 2 of them cache: 12 left, and that is less.
    assert (live.host_free_bytes, live.host_used_bytes) == (12 * GIB, 12 * GIB)


def test_what_was_swapped_out_takes_room_beneath_a_limit_over_memory_and_swap() -> None:
    live = recorded("container-cgroup1-memsw").live
    # Memory alone: 8 − (4 − 1 of cache) = 5. With the 2 swapped out: 8 − (6 − 1) = 3.
    assert (live.host_free_bytes, live.host_used_bytes) == (3 * GIB, 5 * GIB)


def test_a_mac_under_pressure_says_so() -> None:
    assert "memory pressure" in notes(recorded("mac-m3-ultra-96-panicked"))
    assert recorded("mac-m3-ultra-96-panicked").live.gpu_panic_at == 1_796_034_000.5
    assert recorded("mac-m4-max-128-wired-120").live.gpu_panic_at is None


def test_what_a_balloon_takes_away_counts_as_held_by_others() -> None:
    start, later = recorded("vm-balloon-deflated"), recorded("vm-balloon-inflated")
    live = against_start(start.machine, later)
    # 65,863,680 KiB when it started; 29,360,128 are available now.
    assert live.host_free_bytes == 29_360_128 * KIB
    assert live.host_used_bytes == (65_863_680 - 29_360_128) * KIB
    assert "RAM_SHRANK" in {finding.reason for finding in live.findings}


def test_what_a_balloon_gives_back_is_said_and_not_handed_out() -> None:
    start, later = recorded("vm-balloon-inflated"), recorded("vm-balloon-deflated")
    live = against_start(start.machine, later)
    assert [finding.reason for finding in live.findings] == ["RAM_GREW"]
    assert live.host_used_bytes == (65_863_680 - 62_914_560) * KIB


def test_a_card_that_was_plugged_in_later_is_said_and_not_used() -> None:
    later = recorded("two-cards-24")
    start = replace(later.machine, devices=later.machine.devices[:1])
    (finding,) = against_start(start, later).findings
    assert finding.reason == "DEVICE_APPEARED"
    assert later.machine.devices[1].name in finding.message


def test_memory_that_did_not_change_is_no_finding() -> None:
    start = recorded("vm-balloon-deflated")
    assert against_start(start.machine, start) == start.live

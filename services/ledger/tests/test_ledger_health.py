"""Device health: thresholds with hysteresis, what is held when, rest after a panic. Clocks are numbers here."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_ledger.book.states import GPU, Hold, Moment
from weighbridge_ledger.health.device import DeviceHealth, Verdict, after_sample, at, sentence
from weighbridge_ledger.health.gate import device_holds
from weighbridge_ledger.health.panics import Panic, panic_hold
from weighbridge_ledger.health.policy import HealthPolicy, Mode
from weighbridge_ledger.machine.interpret import interpret
from weighbridge_ledger.machine.model import GIB, Device, Machine, Pool
from weighbridge_ledger.machine.panics import is_gpu_panic, last_gpu_panic
from weighbridge_ledger.machine.readings import CrashReport, DeviceReading, Readings, TemperatureReading
from weighbridge_ledger.machine.recorded import from_json
from weighbridge_ledger.machine.sensors import DeviceSensors, device_sensors

RECORDED = Path(__file__).parent / "machine_readings"
POLICY = HealthPolicy()
SILENT = DeviceSensors("d", "NVIDIA L4")


def warm(celsius: float | None, margin: float | None = None, slowdowns: tuple[str, ...] | None = ()) -> DeviceSensors:
    return DeviceSensors("d", "NVIDIA L4", celsius, margin, slowdowns)


def sampled(*samples: DeviceSensors | float, every: float = 5.0, start: float = 100.0) -> DeviceHealth:
    """The state after samples at equal distances."""
    health: DeviceHealth | None = None
    for number, sample in enumerate(samples):
        sensors = sample if isinstance(sample, DeviceSensors) else warm(sample)
        health = after_sample(health, sensors, start + number * every, POLICY)
    assert health is not None
    return health


# -- one device --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sensors", "verdict"),
    [
        (warm(80), Verdict.HEALTHY),
        (warm(80.1), Verdict.UNHEALTHY),
        (warm(70, margin=8), Verdict.HEALTHY),
        (warm(70, margin=7.9), Verdict.UNHEALTHY),
        (warm(70, slowdowns=("its power supply asks for less",)), Verdict.UNHEALTHY),
        (warm(None, margin=3), Verdict.UNHEALTHY),
        (warm(None, slowdowns=()), Verdict.HEALTHY),
        (warm(104.9), Verdict.UNHEALTHY),
        (warm(105), Verdict.CUT_OFF),
        (SILENT, Verdict.UNKNOWN),
    ],
)
def test_a_first_sample(sensors: DeviceSensors, verdict: Verdict) -> None:
    assert sampled(sensors).verdict is verdict


def test_a_device_that_was_too_warm_must_come_down_further_and_stay() -> None:
    assert sampled(81, 78).verdict is Verdict.UNHEALTHY, "78 °C are enough for a start, not for a resumption"
    assert sampled(81, 75).verdict is Verdict.RECOVERING
    assert sampled(81, 75, 75).verdict is Verdict.RECOVERING
    assert sampled(81, 75, 75, 75).verdict is Verdict.HEALTHY
    assert sampled(81, 75, 75, 76, 75, 75).verdict is Verdict.RECOVERING, "in a row"
    assert sampled(81, 75, 75, 75, 79).verdict is Verdict.HEALTHY, "recovered: the start threshold counts again"


def test_a_device_that_was_cut_off_recovers_like_any_other() -> None:
    assert sampled(106, 75, 75).verdict is Verdict.RECOVERING
    assert sampled(106, 75, 75, 75).verdict is Verdict.HEALTHY


def test_samples_that_come_quickly_count_once() -> None:
    # Somebody asks for the capacity every second: three readings within 3 s are not 15 s of good health.
    assert sampled(81, *[70.0] * 10, every=1.0).verdict is Verdict.RECOVERING
    assert sampled(81, *[70.0] * 11, every=1.0).verdict is Verdict.HEALTHY, "samples at 1, 6 and 11 s"


def test_one_sample_without_a_reading_changes_nothing() -> None:
    assert sampled(81, SILENT).verdict is Verdict.UNHEALTHY
    assert sampled(70, SILENT).verdict is Verdict.HEALTHY


def test_a_device_that_has_been_silent_for_three_samples_is_unknown_and_begins_anew() -> None:
    health = sampled(81)
    assert at(health, 115.0, POLICY).verdict is Verdict.UNHEALTHY
    assert at(health, 115.1, POLICY).verdict is Verdict.UNKNOWN
    assert after_sample(health, warm(78), 200.0, POLICY).verdict is Verdict.HEALTHY


def test_sentences_say_how_warm_and_why() -> None:
    assert sentence(sampled(61)) == "NVIDIA L4: 61 °C, healthy."
    assert sentence(sampled(84)) == "NVIDIA L4: unhealthy (it is 84 °C, limit 80 °C)."
    assert sentence(sampled(84, 78)) == "NVIDIA L4: unhealthy (it is 78 °C, limit 75 °C)."
    assert "2 of 3" in sentence(sampled(84, 70, 70))
    assert sentence(sampled(SILENT)) == "NVIDIA L4: unknown."


@given(st.lists(st.floats(min_value=1, max_value=150), min_size=1, max_size=30))
def test_no_start_above_the_threshold_and_no_recovery_without_samples_in_a_row(temperatures: list[float]) -> None:
    verdicts = [sampled(*temperatures[: count + 1]).verdict for count in range(len(temperatures))]
    for index, (celsius, verdict) in enumerate(zip(temperatures, verdicts, strict=True)):
        if verdict is Verdict.HEALTHY:
            assert celsius <= POLICY.start_celsius
            unwell = [place for place in range(index) if verdicts[place] in (Verdict.UNHEALTHY, Verdict.CUT_OFF)]
            if unwell and Verdict.HEALTHY not in verdicts[unwell[-1] : index]:
                assert index - unwell[-1] == POLICY.healthy_samples
                assert all(before <= POLICY.resume_celsius for before in temperatures[unwell[-1] + 1 : index + 1])


# -- readings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("celsius", [0, -40, 151, 255, 511])
def test_a_temperature_that_cannot_be_is_rejected_by_name(celsius: int) -> None:
    findings: list = []
    reading = DeviceReading("d", "D", temperatures=(TemperatureReading("gpu", celsius, 90),))
    sensors = device_sensors(reading, findings)
    assert not sensors.says_anything
    assert [finding.reason for finding in findings] == ["TEMPERATURE_IMPOSSIBLE"]


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        (None, None),
        (2**64 - 1, None),  # never filled
        (-1, None),
        (0, 0),
        (0x1 | 0x4, 0),  # idle, power cap: every day
        (0x8, 1),
        (0x20 | 0x40, 2),
        (0x80, 1),
    ],
)
def test_why_a_device_slows_itself_down(mask: int | None, count: int | None) -> None:
    slowdowns = device_sensors(DeviceReading("d", "D", slowdown_reasons=mask), []).slowdowns
    assert (None if slowdowns is None else len(slowdowns)) == count


def test_the_hottest_spot_of_an_amd_card_counts_by_its_own_limit() -> None:
    # 95 °C at the junction is everyday work on a card that slows down at 110; 95 at the edge is not.
    spots = (
        TemperatureReading("edge", 72, 100),
        TemperatureReading("junction", 95, 110),
        TemperatureReading("mem", 88, 108),
    )
    sensors = device_sensors(DeviceReading("d", "AMD Radeon RX 7900 XTX", temperatures=spots), [])
    assert (sensors.celsius, sensors.margin_celsius) == (72, 15)
    assert sampled(sensors).verdict is Verdict.HEALTHY
    hotter = replace(spots[1], celsius=103)
    sensors = device_sensors(DeviceReading("d", "X", temperatures=(spots[0], hotter)), [])
    assert sampled(sensors).verdict is Verdict.UNHEALTHY


def test_a_recorded_card_in_trouble() -> None:
    live = interpret(from_json((RECORDED / "nvidia-l40s-hot.json").read_text())).live
    health = sampled(live.sensors[0])
    # 86 °C, slow-down at 91, and bits 0x20 and 0x40.
    assert health.verdict is Verdict.UNHEALTHY
    assert len(health.reasons) == 4


# -- what is held ------------------------------------------------------------------------------------------------------

NOW = 100.0
HOT, CUT_OFF, WELL, UNKNOWN = sampled(90), sampled(110), sampled(60), sampled(SILENT)
CARD = Machine("n", Pool.DISCRETE, 64 * GIB, (Device("d", "NVIDIA L4", 24 * GIB),))


def held(mode: Mode, *states: DeviceHealth, machine: Machine = CARD, now: float = NOW) -> dict[str, Hold]:
    return device_holds(states, machine, now, replace(POLICY, mode=mode))


@pytest.mark.parametrize(
    ("mode", "device", "is_held"),
    [
        (Mode.OFF, CUT_OFF, False),
        (Mode.OBSERVE, HOT, False),
        (Mode.OBSERVE, CUT_OFF, True),
        (Mode.OBSERVE, sampled(110, 70), False),
        (Mode.GUARD, HOT, True),
        (Mode.GUARD, sampled(90, 70, start=95.0), True),
        (Mode.GUARD, CUT_OFF, True),
        (Mode.GUARD, WELL, False),
        (Mode.GUARD, UNKNOWN, False),  # sensors that fail stop nobody
    ],
)
def test_what_a_mode_holds(mode: Mode, device: DeviceHealth, is_held: bool) -> None:
    assert (held(mode, device).keys() == {"d"}) is is_held


def test_a_held_device_is_neither_loaded_nor_used_and_says_why_and_when_to_ask_again() -> None:
    hold = held(Mode.GUARD, HOT)["d"]
    assert (hold.code, hold.refuses_use, hold.retry_after_s) == ("DEVICE_UNHEALTHY", True, 5.0)
    assert hold.message == "NVIDIA L4: unhealthy (it is 90 °C, limit 80 °C)."


def test_a_device_that_falls_silent_is_not_held_any_longer() -> None:
    assert held(Mode.GUARD, HOT, now=NOW + 15)
    assert not held(Mode.GUARD, HOT, now=NOW + 16)


def test_each_card_is_held_for_itself() -> None:
    cards = tuple(Device(name, name, 24 * GIB) for name in ("a", "b"))
    hot = replace(HOT, sensors=replace(HOT.sensors, device_id="b"))
    well = replace(WELL, sensors=replace(WELL.sensors, device_id="a"))
    machine = Machine("n", Pool.DISCRETE, 64 * GIB, cards)
    assert held(Mode.GUARD, well, hot, machine=machine).keys() == {"b"}


def test_the_sensors_of_a_unified_machine_are_its_gpu() -> None:
    # Their id is the driver's; the book knows no such pool.
    hold = held(Mode.GUARD, WELL, HOT, CUT_OFF, machine=Machine("n", Pool.UNIFIED, 64 * GIB))
    assert hold.keys() == {GPU}
    assert hold[GPU].message.count("NVIDIA L4") == 2, "every device that is not well is named"


@pytest.mark.parametrize("pool", [Pool.DISCRETE, Pool.CPU])
def test_what_nothing_is_loaded_on_holds_nobody(pool: Pool) -> None:
    # Integrated graphics beside a card get warm whenever the processor works.
    machine = Machine("n", pool, 64 * GIB, CARD.devices if pool is Pool.DISCRETE else ())
    beside = replace(HOT, sensors=replace(HOT.sensors, device_id="integrated"))
    assert not held(Mode.GUARD, beside, machine=machine)


@pytest.mark.parametrize(
    "wrong",
    [
        {"resume_celsius": 81},
        {"start_celsius": 105},
        {"sample_s": 0.4},
        {"sample_s": 61, "stale_s": 100},
        {"panic_rest_s": 86_401},
        {"panic_rest_s": -1},
        {"healthy_samples": 0},
        {"healthy_samples": 21},
        {"stale_s": 4},
    ],
)
def test_policies_that_contradict_themselves_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="must"):
        HealthPolicy(**wrong)


# -- panics ------------------------------------------------------------------------------------------------------------

METAL_PANIC = (
    'panic(cpu 9 caller 0xfffffe004b8cd288): "completeMemory() prepare count underflow" @IOGPUMemory.cpp:550\n'
    "Debugger message: panic\nOS release type: User\n"
)
FIRMWARE_PANIC = 'panic(cpu 1 caller 0xfffffe00): "AGXArmFirmware: firmware crashed"\n'
BACKTRACE_PANIC = (
    "panic(cpu 2 caller 0xfffffe00): Kernel data abort.\n      Kernel Extensions in backtrace:\n"
    "         com.apple.AGXG14X(326.3.1)[9F2C]@0xfffffe0022e0c000->0xfffffe00231b7fff\n"
)
DISK_PANIC = (
    'panic(cpu 0 caller 0xfffffe00): "apfs_checkpoint failed" @nx.c:1\n'
    "last started kext at 7: com.apple.filesystems.apfs\n"
    "loaded kexts:\ncom.apple.AGXG14X 326.3.1\ncom.apple.iokit.IOGPUFamily 104.4.1\n"
)


@pytest.mark.parametrize(
    ("head", "gpu"),
    [
        (METAL_PANIC, True),
        (FIRMWARE_PANIC, True),
        (BACKTRACE_PANIC, True),
        ('{"bug_type":"210"}\n{"panicString":"' + METAL_PANIC.replace("\n", "\\n") + '"}', True),
        (DISK_PANIC, False),  # every panic lists the GPU's drivers at its end
        ("IOGPUFamily is mentioned, nothing happened", False),
        ("", False),
    ],
)
def test_who_brought_the_system_down(head: str, gpu: bool) -> None:
    assert is_gpu_panic(CrashReport("x.panic", 0, head)) is gpu


def test_the_last_panic_of_the_gpu_counts() -> None:
    reports = (
        CrashReport("a", 100, METAL_PANIC),
        CrashReport("b", 300, DISK_PANIC),
        CrashReport("c", 200, FIRMWARE_PANIC),
    )
    assert last_gpu_panic(reports) == 200
    assert last_gpu_panic(reports[1:2]) is None


WALL = 1_000_000.0


def rests(panic: Panic, monotonic: float, wall: float) -> bool:
    return panic_hold(panic, Moment(monotonic, wall), POLICY) is not None


@pytest.mark.parametrize(
    ("ago", "left_s"),
    # In whole minutes. A clock that was set back since says that the panic is yet to come.
    [(0, 3600), (600, 3000), (629, 3000), (3599, 60), (3600, None), (90_000, None), (-50, 3600), (-90_000, 3600)],
)
def test_after_a_panic_loads_rest_for_an_hour(ago: float, left_s: float | None) -> None:
    hold = panic_hold(Panic(WALL - ago, 7.0), Moment(7.0, WALL), POLICY)
    assert (None if hold is None else hold.retry_after_s) == left_s


def test_a_rest_holds_loads_and_no_use() -> None:
    hold = panic_hold(Panic(WALL - 720, 0.0), Moment(0.0, WALL), POLICY)
    assert hold is not None
    assert (hold.code, hold.refuses_use) == ("GPU_PANIC", False)
    assert hold.message == "The GPU's driver brought this machine down 12 min ago; loads start again in 48 min."


def test_a_panic_of_tomorrow_rests_for_an_hour_from_when_it_was_seen() -> None:
    # The clock was a day ahead when the report was written.
    panic = Panic(WALL + 86_400, seen_at=100.0)
    assert rests(panic, 3_699.0, WALL + 3_599)
    assert not rests(panic, 3_700.0, WALL + 3_600)


def test_a_mac_that_slept_through_its_rest_has_rested() -> None:
    # The monotonic clock of macOS stands still in its sleep.
    panic = Panic(WALL, seen_at=100.0)
    assert rests(panic, 105.0, WALL + 5)
    assert not rests(panic, 110.0, WALL + 4_000)


def test_a_mac_rests_from_its_recorded_panic() -> None:
    panicked_at = interpret(from_json((RECORDED / "mac-m3-ultra-96-panicked.json").read_text())).live.gpu_panic_at
    assert panicked_at is not None
    assert rests(Panic(panicked_at, 0.0), 0.0, panicked_at + 60)


def test_a_machine_without_sensors_has_none() -> None:
    assert interpret(Readings("linux", ram_bytes=2**33)).live.sensors == ()

"""Device health as the ledger's clients and its log see it, and what can be set about it."""

from collections.abc import Callable

import pytest
import structlog
from weighbridge_common.settings import SettingsError, parse
from weighbridge_ledger.book.states import Moment
from weighbridge_ledger.health.policy import HealthPolicy, Mode
from weighbridge_ledger.machine.model import LiveMemory, Machine, Pool, Source
from weighbridge_ledger.machine.sensors import DeviceSensors
from weighbridge_ledger.service.health_desk import EVERY_LOAD, HealthDesk
from weighbridge_ledger.settings import LedgerSettings
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

GIB = 2**30
MACHINE = Machine("node", Pool.UNIFIED, 32 * GIB, source=Source.DETECTED)


def warm(celsius: float, **more) -> LiveMemory:
    return LiveMemory(host_free_bytes=GIB, sensors=(DeviceSensors("d", "NVIDIA L4", celsius),), **more)


class WarmProbe:
    """A detected machine with one device that has a sensor."""

    machine = MACHINE
    findings = ()

    def __init__(self) -> None:
        self.live_memory = warm(61)

    async def live(self) -> LiveMemory:
        return self.live_memory


@pytest.fixture
def warm_ledger(new_ledger: Callable, tmp_path):
    ledger = new_ledger(tmp_path)
    ledger.probe = WarmProbe()
    return ledger


async def notes(ledger) -> list[str]:
    return list((await ledger.stub.GetCapacity(pb.GetCapacityRequest())).capacity.notes)


async def test_the_capacity_shows_how_devices_are(warm_ledger) -> None:
    async with warm_ledger.serve() as ledger:
        assert await notes(ledger) == ["NVIDIA L4: 61 °C, healthy."]
        ledger.probe.live_memory = warm(91)
        await ledger.pass_time(5)
        assert await notes(ledger) == ["NVIDIA L4: unhealthy (it is 91 °C, limit 80 °C)."]
        # Healthy again only after three samples: the state outlives single calls.
        ledger.probe.live_memory = warm(70)
        await ledger.pass_time(5)
        assert "recovering" in (await notes(ledger))[0]


async def test_a_what_if_machine_has_no_temperature(warm_ledger) -> None:
    async with warm_ledger.serve() as ledger:
        request = pb.GetCapacityRequest(machine={"ram_bytes": 8 * GIB})
        assert list((await ledger.stub.GetCapacity(request)).capacity.notes) == []


def test_only_changes_are_logged() -> None:
    desk = HealthDesk(HealthPolicy(), MACHINE)
    with structlog.testing.capture_logs() as logged:
        for number, celsius in enumerate([60, 60, 90, 91, 70, 70, 70, 70]):
            desk.look(warm(celsius), Moment(number * 5.0, 0.0))
    assert [(entry["verdict"], entry["log_level"]) for entry in logged] == [
        ("unhealthy", "warning"),
        ("recovering", "warning"),
        ("healthy", "info"),
    ]


def test_a_device_that_is_no_longer_measured_becomes_unknown() -> None:
    desk = HealthDesk(HealthPolicy(), MACHINE)
    desk.look(warm(60), Moment(0.0, 0.0))
    desk.look(LiveMemory(), Moment(10.0, 0.0))
    assert "healthy" in desk.remarks(Moment(10.0, 0.0))[0]
    assert "unknown" in desk.remarks(Moment(16.0, 0.0))[0]


def test_a_panic_is_told_for_an_hour() -> None:
    desk = HealthDesk(HealthPolicy(), MACHINE)
    desk.look(LiveMemory(gpu_panic_at=1_000.0), Moment(0.0, 1_720.0))
    assert "12 min ago" in desk.remarks(Moment(0.0, 1_720.0))[0]
    desk.look(LiveMemory(), Moment(5.0, 1_725.0))
    assert desk.remarks(Moment(5.0, 1_725.0)), "a probe that fails takes nothing back"
    assert desk.remarks(Moment(2_880.0, 4_600.0)) == ()


def test_a_later_panic_begins_a_rest_of_its_own() -> None:
    desk = HealthDesk(HealthPolicy(), MACHINE)
    desk.look(LiveMemory(gpu_panic_at=1_000.0), Moment(0.0, 1_000.0))
    desk.look(LiveMemory(gpu_panic_at=4_000.0), Moment(3_500.0, 4_500.0))
    assert desk.holds(Moment(6_599.0, 7_599.0)).keys() == {EVERY_LOAD}
    assert desk.holds(Moment(6_600.0, 7_600.0)) == {}


def test_a_panic_is_logged_once() -> None:
    desk = HealthDesk(HealthPolicy(), MACHINE)
    with structlog.testing.capture_logs() as logged:
        for seconds in (0.0, 5.0):
            desk.look(LiveMemory(gpu_panic_at=1_000.0), Moment(seconds, 1_600.0 + seconds))
    assert logged == [{"event": "gpu_panic", "loads_rest_s": 3000.0, "log_level": "warning"}]


def test_off_looks_at_no_device_and_at_panics() -> None:
    desk = HealthDesk(HealthPolicy(mode=Mode.OFF), MACHINE)
    desk.look(warm(149, gpu_panic_at=0.0), Moment(0.0, 1.0))
    assert desk.holds(Moment(0.0, 1.0)).keys() == {EVERY_LOAD}
    assert len(desk.remarks(Moment(0.0, 1.0))) == 1


def test_no_rest_looks_at_no_panic() -> None:
    desk = HealthDesk(HealthPolicy(panic_rest_s=0), MACHINE)
    desk.look(warm(60, gpu_panic_at=0.0), Moment(0.0, 1.0))
    assert desk.holds(Moment(0.0, 1.0)) == {}
    assert desk.remarks(Moment(0.0, 1.0)) == ("NVIDIA L4: 60 °C, healthy.",)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_without_settings_the_numbers_are_the_defaults() -> None:
    assert parse(LedgerSettings, {}).health_policy() == HealthPolicy()


def test_the_settings() -> None:
    policy = parse(
        LedgerSettings,
        {
            "WEIGHBRIDGE_LEDGER_DEVICE_HEALTH": "guard",
            "WEIGHBRIDGE_LEDGER_DEVICE_START_CELSIUS": "85",
            "WEIGHBRIDGE_LEDGER_DEVICE_RESUME_CELSIUS": "82",
            "WEIGHBRIDGE_LEDGER_DEVICE_MARGIN_CELSIUS": "3",
            "WEIGHBRIDGE_LEDGER_PANIC_REST_S": "0",
        },
    ).health_policy()
    assert policy == HealthPolicy(Mode.GUARD, 85, 82, 3, panic_rest_s=0)


def test_temperatures_that_contradict_each_other_are_told_by_their_variables() -> None:
    settings = parse(LedgerSettings, {"WEIGHBRIDGE_LEDGER_DEVICE_START_CELSIUS": "70"})
    with pytest.raises(SettingsError) as refused:
        settings.health_policy()
    assert "WEIGHBRIDGE_LEDGER_DEVICE_RESUME_CELSIUS" in str(refused.value)
    assert "75 and 70 °C" in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DEVICE_HEALTH", "strict"), ("DEVICE_START_CELSIUS", "105"), ("PANIC_REST_S", "86401"), ("PANIC_REST_S", "-1")],
)
def test_figures_out_of_range_are_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=variable):
        parse(LedgerSettings, {f"WEIGHBRIDGE_LEDGER_{variable}": value})

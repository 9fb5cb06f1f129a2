"""Device health as the ledger's clients and its log see it."""

from collections.abc import Callable

import pytest
import structlog
from weighbridge_ledger.book.states import Moment
from weighbridge_ledger.health.policy import Mode
from weighbridge_ledger.machine.model import LiveMemory, Machine, Pool, Source
from weighbridge_ledger.machine.sensors import DeviceSensors
from weighbridge_ledger.service.health_desk import HealthDesk
from weighbridge_ledger.settings import LedgerSettings
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

GIB = 2**30


def warm(celsius: float, **more) -> LiveMemory:
    return LiveMemory(host_free_bytes=GIB, sensors=(DeviceSensors("d", "NVIDIA L4", celsius),), **more)


class WarmProbe:
    """A detected machine with one device that has a sensor."""

    machine = Machine("node", Pool.UNIFIED, 32 * GIB, source=Source.DETECTED)
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
    desk = HealthDesk(Mode.OBSERVE)
    with structlog.testing.capture_logs() as logged:
        for number, celsius in enumerate([60, 60, 90, 91, 70, 70, 70, 70]):
            desk.look(warm(celsius), Moment(number * 5.0, 0.0))
    assert [(entry["verdict"], entry["log_level"]) for entry in logged] == [
        ("unhealthy", "warning"),
        ("recovering", "warning"),
        ("healthy", "info"),
    ]


def test_a_device_that_is_no_longer_measured_becomes_unknown() -> None:
    desk = HealthDesk(Mode.OBSERVE)
    desk.look(warm(60), Moment(0.0, 0.0))
    desk.look(LiveMemory(), Moment(10.0, 0.0))
    assert "healthy" in desk.remarks(Moment(10.0, 0.0))[0]
    assert "unknown" in desk.remarks(Moment(16.0, 0.0))[0]


def test_a_panic_is_told_for_an_hour() -> None:
    desk = HealthDesk(Mode.OBSERVE)
    desk.look(LiveMemory(gpu_panic_at=1_000.0), Moment(0.0, 1_720.0))
    assert "12 min ago" in desk.remarks(Moment(0.0, 1_720.0))[0]
    desk.look(LiveMemory(), Moment(5.0, 1_725.0))
    assert desk.remarks(Moment(5.0, 1_725.0)), "a probe that fails takes nothing back"
    assert desk.remarks(Moment(0.0, 4_600.0)) == ()


def test_off_looks_at_nothing() -> None:
    desk = HealthDesk(Mode.OFF)
    desk.look(warm(200, gpu_panic_at=0.0), Moment(0.0, 1.0))
    assert desk.remarks(Moment(0.0, 1.0)) == ()


def test_the_setting() -> None:
    assert LedgerSettings().health_mode() is Mode.OBSERVE
    assert LedgerSettings(device_health="off").health_mode() is Mode.OFF

"""What the sensors say about devices: kept sample by sample, logged when it changes, shown with the capacity, and made
into what the book holds loads and uses for."""

import structlog

from weighbridge_ledger.book.states import Hold, Moment
from weighbridge_ledger.health.device import DeviceHealth, Verdict, after_sample, at, sentence
from weighbridge_ledger.health.gate import device_holds
from weighbridge_ledger.health.panics import Panic, panic_hold
from weighbridge_ledger.health.policy import HealthPolicy, Mode
from weighbridge_ledger.machine.model import LiveMemory, Machine

EVERY_LOAD = ""
"""The key of a hold that concerns loads on any device."""

_log = structlog.get_logger(__name__)


class HealthDesk:
    """Owns the states of the devices of one machine."""

    def __init__(self, policy: HealthPolicy, machine: Machine) -> None:
        self._policy = policy
        self._machine = machine
        self._devices: dict[str, DeviceHealth] = {}
        self._panic: Panic | None = None

    def look(self, live: LiveMemory, now: Moment) -> None:
        """Take up what a measurement says. One without sensors (a probe that failed) changes nothing."""
        self._look_at_panic(live.gpu_panic_at, now)
        if self._policy.mode is Mode.OFF:
            return
        for sensors in live.sensors:
            before = self._devices.get(sensors.device_id)
            after = after_sample(before, sensors, now.monotonic, self._policy)
            self._devices[sensors.device_id] = after
            if (before.verdict if before else Verdict.HEALTHY) is not after.verdict:
                log = _log.info if after.verdict is Verdict.HEALTHY else _log.warning
                log(
                    "device_health",
                    device=sensors.device_id,
                    name=sensors.name,
                    verdict=after.verdict.value,
                    celsius=sensors.celsius,
                    reasons=after.reasons,
                )

    def holds(self, now: Moment) -> dict[str, Hold]:
        """Where nothing may be loaded at this moment, and why. Changes with time alone too: a rest ends, sensors that
        have fallen silent are no longer believed."""
        holds = device_holds(self._devices.values(), self._machine, now.monotonic, self._policy)
        rest = None if self._panic is None else panic_hold(self._panic, now, self._policy)
        if rest is not None:
            holds[EVERY_LOAD] = rest
        return holds

    def remarks(self, now: Moment) -> tuple[str, ...]:
        """A sentence for each device that has sensors, and one about a rest after a panic."""
        found = [sentence(at(device, now.monotonic, self._policy)) for device in self._devices.values()]
        rest = self.holds(now).get(EVERY_LOAD)
        return tuple(found if rest is None else [*found, rest.message])

    def _look_at_panic(self, panicked_at: float | None, now: Moment) -> None:
        """A report that can no longer be read takes nothing back."""
        if panicked_at is None or not self._policy.panic_rest_s:
            return
        if self._panic is None or self._panic.at != panicked_at:
            self._panic = Panic(panicked_at, now.monotonic)
            rest = panic_hold(self._panic, now, self._policy)
            if rest is not None:
                _log.warning("gpu_panic", loads_rest_s=rest.retry_after_s)

"""What the sensors say about devices: kept sample by sample, logged when it changes, shown with the capacity."""

import structlog

from weighbridge_ledger.book.states import Moment
from weighbridge_ledger.health.device import DeviceHealth, Verdict, after_sample, at, sentence
from weighbridge_ledger.health.policy import HealthPolicy, Mode
from weighbridge_ledger.machine.model import LiveMemory

_log = structlog.get_logger(__name__)


class HealthDesk:
    """Owns the states of the devices."""

    def __init__(self, mode: Mode, policy: HealthPolicy | None = None) -> None:
        self._mode = mode
        self._policy = policy or HealthPolicy()
        self._devices: dict[str, DeviceHealth] = {}
        self._gpu_panic_at: float | None = None

    def look(self, live: LiveMemory, now: Moment) -> None:
        """Take up what a measurement says. One without sensors (a probe that failed) changes nothing."""
        if self._mode is Mode.OFF:
            return
        self._gpu_panic_at = live.gpu_panic_at or self._gpu_panic_at
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

    def remarks(self, now: Moment) -> tuple[str, ...]:
        """A sentence for each device that has sensors, and one about a panic that was not long ago."""
        states = (at(device, now.monotonic, self._policy) for device in self._devices.values())
        found = [sentence(state) for state in states]
        if self._gpu_panic_at is not None and now.wall - self._gpu_panic_at < self._policy.panic_rest_s:
            ago = max(0.0, now.wall - self._gpu_panic_at) / 60
            found.append(
                f"The GPU's driver brought this machine down {ago:.0f} min ago: the load that did it may do it again."
            )
        return tuple(found)

"""How warm devices are and whether they slow themselves down: readings → plain figures. Pure."""

from dataclasses import dataclass

from weighbridge_ledger.machine.findings import Finding
from weighbridge_ledger.machine.readings import DeviceReading, TemperatureReading

HOTTEST_CELSIUS = 150.0
"""Silicon is dead before that; readings above, like the sentinels 255 and 511, are garbage. A reading of 0 °C or less
is what sensors say that are not there: no device that answers is so cold."""

# The sensor that a device's own temperature is read off: NVML has one, amdgpu has the edge of the die beside its
# hottest spot ("junction", which runs up to 110 °C when all is well), xe and i915 the package.
CORE_SENSORS = ("gpu", "edge", "pkg", "temp1")

# NVML's reasons for lowered clocks that say that a device protects itself (nvml.h, nvmlClocksEventReasons). Left out
# are the everyday ones: idle, a power cap, clocks that somebody set.
SLOWDOWNS = {
    0x08: "its hardware slows it down",
    0x20: "its driver slows it down for its temperature",
    0x40: "its hardware slows it down for its temperature",
    0x80: "its power supply asks for less",
}
NO_REASONS = 2**64 - 1
"""All bits: what a field that was never filled holds."""


@dataclass(frozen=True, slots=True)
class DeviceSensors:
    """One device now. None: not said.

    `margin_celsius` is how far the sensor that is nearest to slowing the device down is from that. `slowdowns` are the
    reasons for which the device slows itself down.
    """

    device_id: str
    name: str
    celsius: float | None = None
    margin_celsius: float | None = None
    slowdowns: tuple[str, ...] | None = None

    @property
    def says_anything(self) -> bool:
        """Whether there is any reading."""
        return self.celsius is not None or self.margin_celsius is not None or self.slowdowns is not None


def device_sensors(reading: DeviceReading, findings: list[Finding]) -> DeviceSensors:
    """What a device's sensors say; an impossible temperature is rejected by name."""
    plausible: list[TemperatureReading] = []
    for temperature in reading.temperatures:
        if 0 < temperature.celsius <= HOTTEST_CELSIUS:
            plausible.append(temperature)
        else:
            findings.append(
                Finding(
                    "TEMPERATURE_IMPOSSIBLE",
                    f"{reading.name} reported {temperature.celsius:g} °C ({temperature.sensor}); rejected.",
                )
            )
    margins = [
        temperature.slowdown_celsius - temperature.celsius
        for temperature in plausible
        if temperature.slowdown_celsius is not None and 0 < temperature.slowdown_celsius <= HOTTEST_CELSIUS
    ]
    return DeviceSensors(
        reading.device_id,
        reading.name,
        celsius=_core(plausible),
        margin_celsius=min(margins, default=None),
        slowdowns=_slowdowns(reading.slowdown_reasons),
    )


def _core(temperatures: list[TemperatureReading]) -> float | None:
    by_sensor = {temperature.sensor: temperature.celsius for temperature in temperatures}
    return next((by_sensor[sensor] for sensor in CORE_SENSORS if sensor in by_sensor), None)


def _slowdowns(reasons: int | None) -> tuple[str, ...] | None:
    if reasons is None or not 0 <= reasons < NO_REASONS:
        return None
    return tuple(text for bit, text in SLOWDOWNS.items() if reasons & bit)

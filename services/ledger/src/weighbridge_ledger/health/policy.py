"""The numbers of this package: the defaults of the reference system (gezel, device-health and gpu-panic-guard, August
2026), where they have been in use."""

from dataclasses import dataclass
from enum import Enum

from weighbridge_ledger.machine.probe_darwin import REPORT_AGE_S

LONGEST_REST_S = REPORT_AGE_S
"""Older reports of panics are not read."""


class Mode(Enum):
    """What devices mean that are not well."""

    OFF = "off"
    """Nothing: their sensors are not read."""
    OBSERVE = "observe"
    """It is said; only from the cut-off on are they held."""
    GUARD = "guard"
    """Loads wait for them, and uses are refused, until they have recovered."""


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """Mode and thresholds. Temperatures are in °C, times in seconds."""

    mode: Mode = Mode.OBSERVE
    start_celsius: float = 80.0
    """A load starts up to this temperature."""
    resume_celsius: float = 75.0
    """A device that was too warm must be down to this first."""
    least_margin_celsius: float = 8.0
    """So far a device must be from the temperature at which it slows itself down."""
    cut_off_celsius: float = 105.0
    """From here on nothing is loaded even if unhealthy devices are only to be observed. (The reference's documentation
    says 95, its code, which people ran, 105.)"""
    healthy_samples: int = 3
    """So many healthy samples in a row make an unhealthy device healthy."""
    sample_s: float = 5.0
    """Samples closer together count as one."""
    stale_s: float = 15.0
    """A device that has said nothing for so long is unknown, which keeps nobody from loading: three samples."""
    panic_rest_s: float = 3600.0
    """So long nothing is loaded after the GPU's driver brought the system down, whatever the mode; 0: reports of panics
    are not looked at."""

    def __post_init__(self) -> None:
        """Raises ValueError for thresholds that contradict each other, and for figures out of range."""
        if not self.resume_celsius <= self.start_celsius < self.cut_off_celsius:
            raise ValueError(
                f"temperatures must rise: resume at {self.resume_celsius:g} °C, start up to {self.start_celsius:g} °C, "
                f"cut off at {self.cut_off_celsius:g} °C"
            )
        for name, value, least, most in (
            ("sample_s", self.sample_s, 0.5, 60.0),
            ("panic_rest_s", self.panic_rest_s, 0.0, LONGEST_REST_S),
            ("healthy_samples", self.healthy_samples, 1, 20),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name} must be between {least:g} and {most:g}")
        if self.stale_s < self.sample_s:
            raise ValueError("stale_s must not be shorter than sample_s")

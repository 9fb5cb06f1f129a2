"""One device's health: sample by sample, with hysteresis. Pure; times are seconds of a monotonic clock."""

from dataclasses import dataclass, replace
from enum import Enum

from weighbridge_ledger.health.policy import HealthPolicy
from weighbridge_ledger.machine.sensors import DeviceSensors


class Verdict(Enum):
    """How a device is. UNKNOWN says nothing, or has not for a while."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    RECOVERING = "recovering"
    UNHEALTHY = "unhealthy"
    CUT_OFF = "cut off"


_MUST_RECOVER = (Verdict.RECOVERING, Verdict.UNHEALTHY, Verdict.CUT_OFF)


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """A device's state after its latest sample. `reasons` are sentences about what keeps it from being healthy."""

    sensors: DeviceSensors
    verdict: Verdict
    sampled_at: float
    reasons: tuple[str, ...] = ()
    healthy_samples: int = 0
    """In a row, since it was unhealthy."""
    counted_at: float = 0.0
    """When the last of those was."""


def after_sample(before: DeviceHealth | None, sensors: DeviceSensors, now: float, policy: HealthPolicy) -> DeviceHealth:
    """The state after a sample.

    A device is healthy up to the start threshold until it is beyond it once; from then on it must come down to the
    resume threshold and stay there for several samples, so that loads do not start and stop at one degree. Whether it
    slows itself down counts as much as how warm it is. A sample without any reading changes nothing (see `at`).
    """
    if not sensors.says_anything:
        return before or DeviceHealth(sensors, Verdict.UNKNOWN, now)
    if sensors.celsius is not None and sensors.celsius >= policy.cut_off_celsius:
        reason = f"it is {sensors.celsius:.0f} °C, cut-off {policy.cut_off_celsius:.0f} °C"
        return DeviceHealth(sensors, Verdict.CUT_OFF, now, (reason,))
    known = None if before is None else at(before, now, policy)
    must_recover = known is not None and known.verdict in _MUST_RECOVER
    reasons = _reasons(sensors, policy.resume_celsius if must_recover else policy.start_celsius, policy)
    if reasons:
        return DeviceHealth(sensors, Verdict.UNHEALTHY, now, reasons)
    if known is None or not must_recover:
        return DeviceHealth(sensors, Verdict.HEALTHY, now)
    return _recovering(known, sensors, now, policy)


def _recovering(before: DeviceHealth, sensors: DeviceSensors, now: float, policy: HealthPolicy) -> DeviceHealth:
    if before.healthy_samples and now - before.counted_at < policy.sample_s:
        return replace(before, sensors=sensors, sampled_at=now)
    samples = before.healthy_samples + 1
    if samples >= policy.healthy_samples:
        return DeviceHealth(sensors, Verdict.HEALTHY, now)
    reason = f"it has been well for {samples} of {policy.healthy_samples} samples"
    return DeviceHealth(sensors, Verdict.RECOVERING, now, (reason,), samples, now)


def _reasons(sensors: DeviceSensors, warmest: float, policy: HealthPolicy) -> tuple[str, ...]:
    reasons = list(sensors.slowdowns or ())
    if sensors.celsius is not None and sensors.celsius > warmest:
        reasons.append(f"it is {sensors.celsius:.0f} °C, limit {warmest:.0f} °C")
    if sensors.margin_celsius is not None and sensors.margin_celsius < policy.least_margin_celsius:
        reasons.append(
            f"a sensor is {max(0.0, sensors.margin_celsius):.0f} °C below the device's own slow-down, limit "
            f"{policy.least_margin_celsius:.0f} °C"
        )
    return tuple(reasons)


def at(health: DeviceHealth, now: float, policy: HealthPolicy) -> DeviceHealth:
    """The state at a moment: a device whose latest reading is too old is unknown."""
    if now - health.sampled_at <= policy.stale_s:
        return health
    return DeviceHealth(health.sensors, Verdict.UNKNOWN, health.sampled_at, ("its sensors have not answered lately",))


def sentence(health: DeviceHealth) -> str:
    """The state for people."""
    sensors = health.sensors
    # Where it is too warm, the reasons say how warm.
    told = sensors.celsius is not None and health.verdict in (Verdict.HEALTHY, Verdict.RECOVERING)
    warmth = f" {sensors.celsius:.0f} °C," if told else ""
    reasons = f" ({'; '.join(health.reasons)})" if health.reasons else ""
    return f"{sensors.name}:{warmth} {health.verdict.value}{reasons}."

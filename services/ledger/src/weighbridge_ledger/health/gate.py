"""May a load start on these devices? Pure."""

from collections.abc import Iterable

from weighbridge_ledger.health.decision import Decision, Refuse, Start, Wait
from weighbridge_ledger.health.device import DeviceHealth, Verdict, at, sentence
from weighbridge_ledger.health.policy import HealthPolicy, Mode

_HOLDS = {
    Mode.OFF: (),
    # Observing is not looking on while a device is being destroyed.
    Mode.OBSERVE: (Verdict.CUT_OFF,),
    Mode.GUARD: (Verdict.CUT_OFF, Verdict.UNHEALTHY, Verdict.RECOVERING),
}


def may_start(
    mode: Mode, devices: Iterable[DeviceHealth], workload: str, waited_s: float, now: float, policy: HealthPolicy
) -> Decision:
    """Whether a load may start.

    Args:
        mode: what unhealthy devices mean.
        devices: the states of the devices that the load goes to. Unknown ones keep nobody waiting: sensors that fail
            must not stop a machine that works.
        workload: its name, for messages.
        waited_s: how long it has waited for its devices.
        now: a moment of the clock of the samples.
        policy: the thresholds.
    """
    if mode is Mode.OFF:
        return Start()
    states = [at(device, now, policy) for device in devices]
    held = [sentence(state) for state in states if state.verdict in _HOLDS[mode]]
    if not held:
        unwell = (Verdict.UNHEALTHY, Verdict.RECOVERING)
        return Start(tuple(sentence(state) for state in states if state.verdict in unwell))
    if waited_s >= policy.max_wait_s:
        return Refuse(
            "DEVICE_UNHEALTHY",
            f"{workload} waited {waited_s / 60:.0f} min for a device that is not well: {' '.join(held)}",
        )
    return Wait("DEVICE_UNHEALTHY", f"{workload} waits for a device: {' '.join(held)}", policy.sample_s)

"""Which devices may not be loaded and not be used now. Pure."""

from collections.abc import Iterable

from weighbridge_ledger.book.states import GPU, Hold
from weighbridge_ledger.health.device import DeviceHealth, Verdict, at, sentence
from weighbridge_ledger.health.policy import HealthPolicy, Mode
from weighbridge_ledger.machine.model import Machine, Pool

_HELD: dict[Mode, frozenset[Verdict]] = {
    Mode.OFF: frozenset(),
    # Observing is not looking on while a device is being destroyed.
    Mode.OBSERVE: frozenset({Verdict.CUT_OFF}),
    Mode.GUARD: frozenset({Verdict.CUT_OFF, Verdict.UNHEALTHY, Verdict.RECOVERING}),
}


def is_held(state: DeviceHealth, policy: HealthPolicy) -> bool:
    """Whether a device in this state may be neither loaded nor used. An unknown one may: sensors that fail must not
    stop a machine that works."""
    return state.verdict in _HELD[policy.mode]


def place_of(device_id: str, machine: Machine) -> str | None:
    """Where the book knows a device that has sensors: a card by its id, any other device of a unified machine as its
    GPU. None: nothing is loaded there, as on integrated graphics beside a card."""
    if machine.device(device_id) is not None:
        return device_id
    return GPU if machine.pool is Pool.UNIFIED else None


def device_holds(
    devices: Iterable[DeviceHealth], machine: Machine, now: float, policy: HealthPolicy
) -> dict[str, Hold]:
    """What may be neither loaded nor used, by place.

    Args:
        devices: their states after the latest sample.
        machine: the machine that they are in.
        now: a moment of the clock of the samples.
        policy: mode and thresholds.
    """
    unwell: dict[str, list[str]] = {}
    for state in (at(device, now, policy) for device in devices):
        place = place_of(state.sensors.device_id, machine)
        if place is not None and is_held(state, policy):
            unwell.setdefault(place, []).append(sentence(state))
    return {
        place: Hold("DEVICE_UNHEALTHY", " ".join(sentences), refuses_use=True, retry_after_s=policy.sample_s)
        for place, sentences in unwell.items()
    }

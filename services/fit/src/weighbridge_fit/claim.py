"""From verdict to claim: the bytes that a launch asks the ledger for."""

from dataclasses import dataclass

from weighbridge_fit.capacity import Capacity
from weighbridge_fit.lines import Requirement
from weighbridge_fit.verdict import Verdict, spilled_bytes, uses_card


@dataclass(frozen=True, slots=True)
class DeviceClaim:
    """Bytes on one card ("": the best fitting one): required, and optional on top from what is left over."""

    device_id: str
    required_bytes: int
    optional_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """Host bytes asked for: required, and optional on top from what is left over; and bytes on cards beside them.
    `cpu_only`: it computes on the processor, so that nobody's exclusive use of a shared GPU concerns it."""

    host_bytes: int
    optional_host_bytes: int
    devices: tuple[DeviceClaim, ...] = ()
    cpu_only: bool = False


def claim_for(requirement: Requirement, capacity: Capacity, verdict: Verdict) -> Claim:
    """required = min(expected, ceiling), optional = min(high, ceiling) - required, on the card first and then in host
    memory, which gets what the card cannot hold.

    On a card the claim is the estimated peak, capped at the card: a model that must leave parts in host memory is let
    in when nobody else is on the card. A WONT_RUN claims what it needs, uncut: the ledger must refuse it on the empty
    machine exactly as fit did.
    """
    if uses_card(requirement, capacity):
        return _with_card(requirement, capacity, verdict)
    total = requirement.total
    if verdict is Verdict.WONT_RUN:
        return Claim(total.expected, 0)
    ceiling = capacity.host_ceiling.effective
    required = min(total.expected, ceiling)
    return Claim(required, min(total.high, ceiling) - required)


def _with_card(requirement: Requirement, capacity: Capacity, verdict: Verdict) -> Claim:
    wanted = requirement.device.cover(requirement.device_peak)
    if verdict is Verdict.WONT_RUN:
        return Claim(requirement.host.expected, 0, (DeviceClaim("", wanted.expected),))
    total, host_ceiling = capacity.total.effective, capacity.host_ceiling.effective
    card = min(capacity.largest_card.ceiling.effective, total)
    on_card = min(wanted.expected, card)
    host = requirement.host + spilled_bytes(requirement, capacity)
    on_host = min(host.expected, host_ceiling, total - on_card)
    # Under a person's limit over everything, what host memory must have is no room for more on the card.
    more_on_card = min(wanted.high, card, total - on_host) - on_card
    most_on_host = max(on_host, min(host.high, host_ceiling, total - on_card - more_on_card))
    devices = (DeviceClaim("", on_card, more_on_card),) if on_card else ()
    return Claim(on_host, most_on_host - on_host, devices)

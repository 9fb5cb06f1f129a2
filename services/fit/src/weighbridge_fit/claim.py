"""From verdict to claim: the bytes that a launch asks the ledger for."""

from dataclasses import dataclass

from weighbridge_fit.capacity import Capacity
from weighbridge_fit.lines import Requirement
from weighbridge_fit.verdict import Verdict


@dataclass(frozen=True, slots=True)
class DeviceClaim:
    """Bytes on one card ("": the best fitting one): required, and optional on top from what is left over."""

    device_id: str
    required_bytes: int
    optional_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """Host bytes asked for: required, and optional on top from what is left over; and bytes on cards beside them."""

    host_bytes: int
    optional_host_bytes: int
    devices: tuple[DeviceClaim, ...] = ()


def claim_for(requirement: Requirement, capacity: Capacity, verdict: Verdict) -> Claim:
    """required = min(expected, ceiling), optional = min(high, ceiling) - required.

    A WONT_RUN claims what it needs, uncut: the ledger must refuse it on the empty machine exactly as fit did.
    """
    total = requirement.total
    if verdict is Verdict.WONT_RUN:
        return Claim(total.expected, 0)
    ceiling = capacity.host_ceiling.effective
    required = min(total.expected, ceiling)
    return Claim(required, min(total.high, ceiling) - required)

"""What a claim costs on a machine, and whether it fits: rule 2, as functions over plain values."""

from weighbridge_ledger.book.states import HOST, NO_EXTERNAL, Ceilings, Charge, Claim, DeviceWant, External, Shortage


class Usage:
    """Running sums of charges, so that no admission adds up all leases. O(cards of one charge) per change."""

    __slots__ = ("devices", "holders", "host_bytes", "spilled_from", "total_bytes")

    def __init__(self) -> None:
        self.host_bytes = 0
        self.total_bytes = 0
        self.devices: dict[str, int] = {}
        self.holders: dict[str, int] = {}
        """Leases charged on each card."""
        self.spilled_from: dict[str, int] = {}
        """Leases that wanted more of each card than they were charged there."""

    def add(self, charge: Charge, sign: int = 1) -> None:
        """Count one charge in (sign 1) or out (sign −1)."""
        self.host_bytes += sign * charge.host_bytes
        self.total_bytes += sign * charge.host_bytes
        for device, size in charge.devices:
            self.total_bytes += sign * size
            self.devices[device] = self.devices.get(device, 0) + sign * size
            self.holders[device] = self.holders.get(device, 0) + sign
        for device, _ in charge.spilled:
            self.spilled_from[device] = self.spilled_from.get(device, 0) + sign

    def remove(self, charge: Charge) -> None:
        """Count one charge out."""
        self.add(charge, -1)

    def on(self, pool: str) -> int:
        """Bytes charged in one pool."""
        return self.host_bytes if pool == HOST else self.devices.get(pool, 0)

    def after(self, back: "Usage", joining: Charge) -> "Usage":
        """A copy in which `back` has been returned and `joining` charged."""
        copy = Usage()
        copy.host_bytes = self.host_bytes - back.host_bytes
        copy.total_bytes = self.total_bytes - back.total_bytes
        copy.devices = {device: size - back.devices.get(device, 0) for device, size in self.devices.items()}
        copy.holders = {device: count - back.holders.get(device, 0) for device, count in self.holders.items()}
        copy.spilled_from = {d: count - back.spilled_from.get(d, 0) for d, count in self.spilled_from.items()}
        copy.add(joining)
        return copy


NOTHING_USED = Usage()
"""The empty machine. Never written to."""


def price(claim: Claim, ceilings: Ceilings, external: External, usage: Usage) -> Charge | Shortage:
    """What `claim` is charged beside `usage`, or the first thing that is missing (rule 2).

    One total instead of pools let a 2-byte card take 6 (simulation), and on 64+32 GiB let two CPU-only claims of 30
    pass over a RAM share of 38.4 (arithmetic): so each pool has its own sum, and the total comes last.
    """
    devices: list[tuple[str, int]] = []
    spilled: list[tuple[str, int]] = []
    for want in claim.devices:
        placed = _place(want.device_id, want.required_bytes, ceilings, external, usage, spills_already=False)
        if isinstance(placed, Shortage):
            return placed
        on_card, to_host = placed
        devices.append((want.device_id, on_card))
        if to_host:
            spilled.append((want.device_id, to_host))
    charge = Charge(claim.host_bytes + sum(size for _, size in spilled), tuple(devices), tuple(spilled))
    return _beneath(charge, charge.host_bytes, charge.total_bytes, ceilings, external, usage)


def static_shortage(claim: Claim, ceilings: Ceilings) -> Shortage | None:
    """What `claim` would miss on the empty machine with nothing outside: such a claim is refused at once (rule 2)."""
    priced = price(claim, ceilings, NO_EXTERNAL, NOTHING_USED)
    return priced if isinstance(priced, Shortage) else None


def resize(charge: Charge, wanted: Claim, ceilings: Ceilings, external: External, usage: Usage) -> Charge | Shortage:
    """`charge` changed to `wanted`; `usage` still contains `charge`.

    Shrinking gives back spilled bytes first and always fits. What grows follows rule 2 for the added bytes alone,
    because bytes that were placed at the grant stay where they are.
    """
    had = dict(charge.devices)
    had_spilled = dict(charge.spilled)
    devices: list[tuple[str, int]] = []
    spilled: list[tuple[str, int]] = []
    asked: dict[str, int] = {}
    for want in wanted.devices:
        asked[want.device_id] = asked.get(want.device_id, 0) + want.required_bytes
    for device in sorted(had.keys() | asked.keys()):
        on_card, on_host = had.get(device, 0), had_spilled.get(device, 0)
        target = asked.get(device, 0)
        more = target - on_card - on_host
        if more <= 0:
            on_card = min(on_card, target)
            on_host = target - on_card
        else:
            others = Usage()
            others.devices = usage.devices
            others.holders = {device: usage.holders.get(device, 0) - (1 if device in had else 0)}
            others.spilled_from = {device: usage.spilled_from.get(device, 0) - (1 if on_host else 0)}
            placed = _place(device, more, ceilings, external, others, spills_already=on_host > 0)
            if isinstance(placed, Shortage):
                return placed
            on_card, on_host = on_card + placed[0], on_host + placed[1]
        if target > 0:
            devices.append((device, on_card))
        if on_host:
            spilled.append((device, on_host))
    changed = Charge(wanted.host_bytes + sum(size for _, size in spilled), tuple(devices), tuple(spilled))
    return _beneath(
        changed,
        changed.host_bytes - charge.host_bytes,
        changed.total_bytes - charge.total_bytes,
        ceilings,
        external,
        usage,
    )


def pools_wanted(claim: Claim, ceilings: Ceilings) -> frozenset[str]:
    """The pools a claim may be charged in: its cards, and the host if it wants it or may spill to it."""
    pools = {want.device_id for want in claim.devices if want.required_bytes > 0}
    spills = any(
        ceilings.spill_allowed or want.required_bytes > ceilings.pool_bytes(want.device_id) for want in claim.devices
    )
    if claim.host_bytes > 0 or spills or not pools:
        pools.add(HOST)
    return frozenset(pools)


def best_card(
    claim_bytes: int, ceilings: Ceilings, external: External, usage: Usage, taken: frozenset[str]
) -> str | None:
    """The card on which `claim_bytes` misses least just now; among those that fit, the one with the least room left.

    None when there is no card that is not already taken by the same claim.
    """

    def missing_then_room(device: str) -> tuple[int, int, str]:
        room = ceilings.pool_bytes(device) - external.on(device) - usage.on(device)
        return (max(0, claim_bytes - room), room, device)

    return min((device for device in ceilings.devices if device not in taken), key=missing_then_room, default=None)


def on_cards(claim: Claim, ceilings: Ceilings, external: External, usage: Usage) -> Claim | None:
    """`claim` with every unnamed card decided and several wishes for one card added up; None without enough cards."""
    if not claim.devices:
        return claim
    wants: dict[str, DeviceWant] = {}
    for want in claim.devices:
        device: str | None = want.device_id
        if not device:
            named = frozenset(other.device_id for other in claim.devices) | frozenset(wants)
            device = best_card(want.required_bytes, ceilings, external, usage, named)
            if device is None:
                return None
        before = wants.get(device, DeviceWant(device, 0))
        wants[device] = DeviceWant(
            device, before.required_bytes + want.required_bytes, before.optional_bytes + want.optional_bytes
        )
    kept = tuple(wants[device] for device in sorted(wants) if wants[device].required_bytes > 0)
    return Claim(claim.host_bytes, kept, claim.optional_host_bytes, claim.source)


def _place(
    device: str, size: int, ceilings: Ceilings, external: External, usage: Usage, *, spills_already: bool
) -> tuple[int, int] | Shortage:
    """(bytes on the card, bytes to the host) for `size` more bytes on one card."""
    alone = usage.holders.get(device, 0) == 0
    if not ceilings.spill_allowed and usage.spilled_from.get(device, 0) > 0:
        return Shortage(device, size, "SPILLED_DEVICE")
    own = ceilings.devices.get(device, 0)
    room = min(own - external.on(device), own if ceilings.limit_bytes is None else ceilings.limit_bytes)
    room -= usage.devices.get(device, 0)
    if size <= room:
        return size, 0
    if (ceilings.spill_allowed or alone) and (room > 0 or spills_already):
        on_card = max(0, room)
        return on_card, size - on_card
    without_external = ceilings.pool_bytes(device) - usage.devices.get(device, 0)
    return Shortage(device, size - max(0, room), "EXTERNAL" if size <= without_external else "COMMITTED")


def _beneath(
    charge: Charge, more_on_host: int, more_in_all: int, ceilings: Ceilings, external: External, usage: Usage
) -> Charge | Shortage:
    """`charge` if the bytes it adds stay beneath the host share and the person's limit. What adds nothing, passes:
    after a ceiling fell below the sum, shrinking must stay possible (rule 4)."""
    over_host = usage.host_bytes + more_on_host - (ceilings.host_bytes - external.host_bytes)
    if more_on_host > 0 and over_host > 0:
        outside = over_host <= external.host_bytes
        return Shortage(HOST, over_host, "EXTERNAL" if outside else "COMMITTED")
    over_all = usage.total_bytes + more_in_all - ceilings.total_bytes
    if more_in_all > 0 and over_all > 0:
        return Shortage(HOST, over_all, "LIMIT")
    return charge

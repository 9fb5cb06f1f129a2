"""What a claim costs on a machine, and whether it fits: rules 2 and 26, as functions over plain values."""

import math
from collections.abc import Iterable

from weighbridge_ledger.book.states import (
    GPU,
    HOST,
    NO_EXTERNAL,
    Ceilings,
    Charge,
    Claim,
    External,
    Shortage,
)

HOLDER = "holder"
"""Where a claim is short of its own holder's limit instead of a pool."""


class Usage:
    """Running sums of charges, so that no admission adds up all leases. O(cards of one charge) per change."""

    __slots__ = ("alone", "devices", "holders", "host_bytes", "spilled_from", "total_bytes")

    def __init__(self) -> None:
        self.host_bytes = 0
        self.total_bytes = 0
        self.devices: dict[str, int] = {}
        self.holders: dict[str, int] = {}
        """Leases on each device (rule 26: not only those with bytes there, also those on the GPU of shared memory)."""
        self.alone: dict[str, int] = {}
        """Leases that nobody may join, on each device."""
        self.spilled_from: dict[str, int] = {}
        """Leases that wanted more of each card than they were charged there."""

    def add(self, charge: Charge, sign: int = 1) -> None:
        """Count one charge in (sign 1) or out (sign −1)."""
        self.host_bytes += sign * charge.host_bytes
        self.total_bytes += sign * charge.host_bytes
        for device, size in charge.devices:
            self.total_bytes += sign * size
            self.devices[device] = self.devices.get(device, 0) + sign * size
            self._count(device, charge.exclusive, sign)
        if charge.on_gpu:
            self._count(GPU, charge.exclusive, sign)
        for device, _ in charge.spilled:
            self.spilled_from[device] = self.spilled_from.get(device, 0) + sign

    def remove(self, charge: Charge) -> None:
        """Count one charge out."""
        self.add(charge, -1)

    def add_optional(self, charge: Charge, sign: int = 1) -> None:
        """Count the optional bytes of a charge in or out; whoever is charged stays where it is."""
        self.host_bytes += sign * charge.optional_host_bytes
        self.total_bytes += sign * charge.optional_bytes
        for device, size in charge.optional_devices:
            self.devices[device] = self.devices.get(device, 0) + sign * size

    def on(self, pool: str) -> int:
        """Bytes charged in one pool."""
        return self.host_bytes if pool == HOST else self.devices.get(pool, 0)

    def copy(self) -> "Usage":
        """The same sums, to be changed."""
        return self.less(NOTHING_USED)

    def less(self, back: "Usage") -> "Usage":
        """A copy in which `back` has been returned."""
        copy = Usage()
        copy.host_bytes = self.host_bytes - back.host_bytes
        copy.total_bytes = self.total_bytes - back.total_bytes
        copy.devices = _less(self.devices, back.devices)
        copy.holders = _less(self.holders, back.holders)
        copy.alone = _less(self.alone, back.alone)
        copy.spilled_from = _less(self.spilled_from, back.spilled_from)
        return copy

    def take_out(self, back: "Usage") -> None:
        """Count out what is part of these sums."""
        self.host_bytes -= back.host_bytes
        self.total_bytes -= back.total_bytes
        for mine, theirs in (
            (self.devices, back.devices),
            (self.holders, back.holders),
            (self.alone, back.alone),
            (self.spilled_from, back.spilled_from),
        ):
            for key, value in theirs.items():
                mine[key] = mine.get(key, 0) - value

    def after(self, back: "Usage", joining: Charge) -> "Usage":
        """A copy in which `back` has been returned and `joining` charged."""
        copy = self.less(back)
        copy.add(joining)
        return copy

    def _count(self, device: str, exclusive: bool, sign: int) -> None:
        self.holders[device] = self.holders.get(device, 0) + sign
        if exclusive:
            self.alone[device] = self.alone.get(device, 0) + sign


def _less(sums: dict[str, int], back: dict[str, int]) -> dict[str, int]:
    return {key: value - back.get(key, 0) for key, value in sums.items()} if back else dict(sums)


NOTHING_USED = Usage()
"""The empty machine. Never written to."""


def price(
    claim: Claim,
    ceilings: Ceilings,
    external: External,
    usage: Usage,
    *,
    exclusive: bool = False,
    host_limit_bytes: int = 0,
) -> Charge | Shortage:
    """What `claim` is charged beside `usage`, or the first thing that is missing (rules 2, 26).

    One total instead of pools let a 2-byte card take 6 (simulation), and on 64+32 GiB let two CPU-only claims of 30
    pass over a RAM share of 38.4 (arithmetic): so each pool has its own sum, and the total comes last.

    Args:
        claim: with every card named.
        ceilings: what the machine allows.
        external: what programs outside hold.
        usage: what leases are charged.
        exclusive: nobody else may be on its devices.
        host_limit_bytes: the holder's own limit, also over what spills to the host; 0: none.
    """
    on_gpu = not claim.devices and ceilings.has_shared_gpu and not claim.cpu_only
    if ceilings.exclusive_heeded:
        company = usage.holders if exclusive else usage.alone
        for device in devices_of(claim, ceilings):
            if company.get(device, 0) > 0:
                return Shortage(device, 0, "EXCLUSIVE")
    devices: list[tuple[str, int]] = []
    spilled: list[tuple[str, int]] = []
    for want in claim.devices:
        placed = place(want.device_id, want.required_bytes, ceilings, external, usage, spills_already=False)
        if isinstance(placed, Shortage):
            return placed
        on_card, to_host = placed
        devices.append((want.device_id, on_card))
        if to_host:
            spilled.append((want.device_id, to_host))
    charge = Charge(
        claim.host_bytes + sum(size for _, size in spilled),
        tuple(devices),
        tuple(spilled),
        on_gpu=on_gpu,
        exclusive=exclusive and ceilings.exclusive_heeded and (on_gpu or bool(devices)),
    )
    if 0 < host_limit_bytes < charge.host_bytes:
        return Shortage(HOLDER, charge.host_bytes - host_limit_bytes, "HOLDER")
    return beneath(charge, charge.host_bytes, charge.total_bytes, ceilings, external, usage)


class Rooms:
    """What is left in each pool, to see at a glance who cannot fit. On a full machine that is everyone who waits, and
    each of them is looked at whenever something happens."""

    __slots__ = ("_host_bytes", "_on_cards", "_total_bytes")

    def __init__(self, ceilings: Ceilings, external: External, usage: Usage) -> None:
        self._host_bytes = ceilings.host_bytes - external.host_bytes - usage.host_bytes
        self._total_bytes = ceilings.total_bytes - usage.total_bytes
        self._on_cards: dict[str, float] = {
            # Whoever may spill may find room elsewhere.
            device: math.inf
            if ceilings.spill_allowed or usage.holders.get(device, 0) == 0
            else room_on(device, ceilings, external, usage)
            for device in ceilings.devices
        }
        self._on_cards[""] = max(self._on_cards.values(), default=0)

    def may_hold(self, claim: Claim, total_bytes: int) -> bool:
        """False if `price` would find the claim short of bytes, on whichever cards it does not name. True says nothing.

        Args:
            claim: on its cards, or on any.
            total_bytes: all that it requires.
        """
        if total_bytes > self._total_bytes or 0 < claim.host_bytes > self._host_bytes:
            return False
        on_cards = self._on_cards
        for want in claim.devices:  # noqa: SIM110 - a generator would cost more than all that is looked at
            if 0 < want.required_bytes > on_cards.get(want.device_id, 0):
                return False
        return True


def static_shortage(claim: Claim, ceilings: Ceilings, host_limit_bytes: int = 0) -> Shortage | None:
    """What `claim` would miss on the empty machine with nothing outside: such a claim is refused at once (rule 2)."""
    priced = price(claim, ceilings, NO_EXTERNAL, NOTHING_USED, host_limit_bytes=host_limit_bytes)
    return priced if isinstance(priced, Shortage) else None


def devices_of(claim: Claim, ceilings: Ceilings) -> tuple[str, ...]:
    """The devices a claim would be on: its cards, or the GPU of a unified machine."""
    if claim.devices:
        return tuple(want.device_id for want in claim.devices)
    return (GPU,) if ceilings.has_shared_gpu and not claim.cpu_only else ()


def with_optional(
    charge: Charge,
    claim: Claim,
    ceilings: Ceilings,
    external: External,
    usage: Usage,
    awaited: Usage,
    step_bytes: int,
    host_limit_bytes: int = 0,
) -> Charge:
    """`charge` with what can be had of the claim's optional bytes on top (rule 4).

    Only what is left after the required bytes of all who wait, in steps; nothing of it spills.

    Args:
        charge: the required bytes, placed; not in `usage`.
        claim: with every card named.
        ceilings: what the machine allows.
        external: what programs outside hold.
        usage: what other leases are charged.
        awaited: the required bytes of all who wait.
        step_bytes: the size of a step; all that is asked for is granted whole where it fits.
        host_limit_bytes: the holder's own limit; 0: none.
    """
    if not claim.optional_bytes:
        return charge
    left = ceilings.total_bytes - usage.total_bytes - charge.total_bytes - awaited.total_bytes
    extra: dict[str, int] = {}
    spilled = {device for device, _ in charge.spilled}
    for want in claim.devices:
        if want.optional_bytes and want.device_id not in spilled:
            room = room_on(want.device_id, ceilings, external, usage) - charge.on(want.device_id)
            room = min(room - awaited.on(want.device_id), left)
            extra[want.device_id] = _stepped(want.optional_bytes, room, step_bytes)
            left -= extra[want.device_id]
    room = ceilings.pool_bytes(HOST) - external.host_bytes - usage.host_bytes - charge.host_bytes - awaited.host_bytes
    if host_limit_bytes:
        room = min(room, host_limit_bytes - charge.host_bytes)
    host = _stepped(claim.optional_host_bytes, min(room, left), step_bytes)
    return add_optional(charge, host, extra)


def add_optional(charge: Charge, host_bytes: int, devices: dict[str, int]) -> Charge:
    """`charge` with optional bytes on top of it; those it had are kept."""
    had = dict(charge.optional_devices)
    amounts = {device: had.get(device, 0) + devices.get(device, 0) for device, _ in charge.devices}
    return Charge(
        charge.host_bytes + host_bytes,
        tuple((device, size + devices.get(device, 0)) for device, size in charge.devices),
        charge.spilled,
        charge.optional_host_bytes + host_bytes,
        tuple((device, size) for device, size in amounts.items() if size),
        charge.on_gpu,
        charge.exclusive,
    )


def required_of(charge: Charge) -> Charge:
    """`charge` without its optional bytes."""
    optional = dict(charge.optional_devices)
    return Charge(
        charge.host_bytes - charge.optional_host_bytes,
        tuple((device, size - optional.get(device, 0)) for device, size in charge.devices),
        charge.spilled,
        on_gpu=charge.on_gpu,
        exclusive=charge.exclusive,
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


def short_pools(
    claim: Claim, ceilings: Ceilings, external: External, usage: Usage, *, exclusive: bool
) -> frozenset[str]:
    """The pools in which somebody must go for `claim` to fit, and perhaps one too many; all of them where the sum over
    everything is what is short. Without a limit that takes a pool above its ceiling: else the sum keeps when each does,
    and to look for victims in every pool would be to look at all who hold."""
    pools = (HOST, *ceilings.devices, *usage.devices)
    if usage.total_bytes + claim.total_bytes > ceilings.total_bytes and (
        ceilings.limit_bytes is not None or any(usage.on(pool) > ceilings.pool_bytes(pool) for pool in pools)
    ):
        return frozenset(pools)
    wanted = pools_wanted(claim, ceilings)
    short = {
        want.device_id
        for want in claim.devices
        if want.required_bytes > room_on(want.device_id, ceilings, external, usage)
        or usage.alone.get(want.device_id, 0)
        or usage.spilled_from.get(want.device_id, 0)
        or (exclusive and usage.holders.get(want.device_id, 0))
    }
    # What is larger than its card spills although it is alone there, and then needs room on the host.
    spills = any(
        ceilings.spill_allowed or want.required_bytes > room_on(want.device_id, ceilings, external, NOTHING_USED)
        for want in claim.devices
    )
    left = ceilings.pool_bytes(HOST) - external.host_bytes - usage.host_bytes
    if spills or (claim.host_bytes > 0 and claim.host_bytes > left):
        short.add(HOST)
    return frozenset(short) or wanted


def place(
    device: str, size: int, ceilings: Ceilings, external: External, usage: Usage, *, spills_already: bool
) -> tuple[int, int] | Shortage:
    """(bytes on the card, bytes to the host) for `size` more bytes on one card."""
    alone = usage.holders.get(device, 0) == 0
    if not ceilings.spill_allowed and usage.spilled_from.get(device, 0) > 0:
        return Shortage(device, usage.devices.get(device, 0), "SPILLED_DEVICE")
    room = room_on(device, ceilings, external, usage)
    if size <= room:
        return size, 0
    if (ceilings.spill_allowed or alone) and (room > 0 or spills_already):
        on_card = max(0, room)
        return on_card, size - on_card
    missing, others = size - max(0, room), usage.devices.get(device, 0)
    if size <= ceilings.pool_bytes(device) - others:
        return Shortage(device, missing, "EXTERNAL")
    # Larger than the card, it would be let in alone, and spill: so no more has to go than what others hold.
    return Shortage(device, min(missing, others) if others > 0 and room + others > 0 else missing, "COMMITTED")


def room_on(device: str, ceilings: Ceilings, external: External, usage: Usage) -> int:
    """f of rule 2: min(C_d − E_d, L) − Σ charged on d."""
    own = ceilings.devices.get(device, 0)
    room = min(own - external.on(device), own if ceilings.limit_bytes is None else ceilings.limit_bytes)
    return room - usage.devices.get(device, 0)


def beneath(
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


def _stepped(wanted: int, room: int, step_bytes: int) -> int:
    """All that is wanted if there is room for it, else as many whole steps as there is room for."""
    return wanted if wanted <= room else max(0, room) // step_bytes * step_bytes


def sum_of(charges: Iterable[Charge]) -> Usage:
    """The sums of several charges."""
    usage = Usage()
    for charge in charges:
        usage.add(charge)
    return usage

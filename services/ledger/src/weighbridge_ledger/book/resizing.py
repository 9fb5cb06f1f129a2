"""A charge changed to another claim (rule 23). Pure."""

from dataclasses import replace

from weighbridge_ledger.book.charging import Usage, add_optional, beneath, place, required_of, room_on
from weighbridge_ledger.book.states import HOST, Ceilings, Charge, Claim, External, Shortage


def resize(
    charge: Charge,
    wanted: Claim,
    ceilings: Ceilings,
    external: External,
    usage: Usage,
    *,
    exclusive: bool | None = None,
) -> Charge | Shortage:
    """`charge` changed to `wanted`; `usage` still contains `charge`.

    Shrinking gives back spilled bytes first and always fits. What grows follows rule 2 for the added bytes alone,
    because bytes that were placed at the grant stay where they are. Optional bytes are given back first: required ones
    grow into them, and what is left of them is kept up to what is wanted of them now.

    Args:
        charge: as it is.
        wanted: what it shall be, with every card named.
        ceilings: what the machine allows.
        external: what programs outside hold.
        usage: what all leases are charged.
        exclusive: whether nobody else may be on its devices; None: as it is. It may be dropped at will, and raised
            only when alone (rule 26).
    """
    company = usage.copy()
    company.remove(charge)
    others = usage.copy()
    others.add_optional(charge, -1)
    required = _resized(required_of(charge), wanted, ceilings, external, others)
    if isinstance(required, Shortage):
        return required
    required = replace(required, on_gpu=charge.on_gpu)
    alone = charge.exclusive if exclusive is None else exclusive and ceilings.exclusive_heeded
    for device in required.occupies:
        joins = device not in charge.occupies
        if ceilings.exclusive_heeded and (
            (joins and company.alone.get(device, 0) > 0)
            or (alone and (joins or not charge.exclusive) and company.holders.get(device, 0) > 0)
        ):
            return Shortage(device, 0, "EXCLUSIVE")
    required = replace(required, exclusive=alone and bool(required.occupies))
    return _with_kept_optional(required, charge, wanted, ceilings, external, company)


def growth(before: Charge, after: Charge) -> Charge:
    """The bytes that a resize adds, pool by pool; exclusive where it becomes so."""
    devices = tuple((device, max(0, size - before.on(device))) for device, size in after.devices)
    raised = after.exclusive and not before.exclusive
    return Charge(
        max(0, after.host_bytes - before.host_bytes),
        tuple((device, size) for device, size in devices if size or raised),
        on_gpu=after.on_gpu and raised,
        exclusive=raised,
    )


def _resized(charge: Charge, wanted: Claim, ceilings: Ceilings, external: External, usage: Usage) -> Charge | Shortage:
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
            placed = place(device, more, ceilings, external, others, spills_already=on_host > 0)
            if isinstance(placed, Shortage):
                return placed
            on_card, on_host = on_card + placed[0], on_host + placed[1]
        if target > 0:
            devices.append((device, on_card))
        if on_host:
            spilled.append((device, on_host))
    changed = Charge(wanted.host_bytes + sum(size for _, size in spilled), tuple(devices), tuple(spilled))
    return beneath(
        changed,
        changed.host_bytes - charge.host_bytes,
        changed.total_bytes - charge.total_bytes,
        ceilings,
        external,
        usage,
    )


def _with_kept_optional(
    required: Charge, before: Charge, wanted: Claim, ceilings: Ceilings, external: External, others: Usage
) -> Charge:
    """The optional bytes of `before` that are still wanted, as far as there is room or nothing grows by them."""
    had = dict(before.optional_devices)
    left = max(
        ceilings.total_bytes - others.total_bytes - required.total_bytes, before.total_bytes - required.total_bytes
    )
    kept: dict[str, int] = {}
    for want in wanted.devices:
        device = want.device_id
        room = max(
            room_on(device, ceilings, external, others) - required.on(device), before.on(device) - required.on(device)
        )
        kept[device] = max(0, min(had.get(device, 0), want.optional_bytes, room, left))
        left -= kept[device]
    room = max(
        ceilings.pool_bytes(HOST) - external.host_bytes - others.host_bytes - required.host_bytes,
        before.host_bytes - required.host_bytes,
    )
    host = max(0, min(before.optional_host_bytes, wanted.optional_host_bytes, room, left))
    return add_optional(required, host, kept)

"""The static ceilings of a machine. Pure arithmetic in integers; the constants stand here and nowhere else.

Source of the formulas and constants: the public reference system (gezel, capacity-budget, August 2026), whose worked
values are this module's tests. The host share and each card are ceilings of their own here: one total over both would
let two CPU-only models pass over the RAM share.
"""

from dataclasses import replace
from enum import StrEnum

from weighbridge_ledger.book.states import Ceilings
from weighbridge_ledger.machine.model import GIB, Machine, Pool

HIGH_MEMORY_BYTES = 96 * GIB
"""From this much RAM on, the higher fractions count."""

UNIFIED_PERCENT, UNIFIED_PERCENT_HIGH = 70, 80
RAM_PERCENT, RAM_PERCENT_HIGH = 60, 80
"""Part of the RAM that models may fill, without and with unified memory."""

UNIFIED_RESERVE_FLOOR_BYTES = 4 * GIB
UNIFIED_RESERVE_CAP_BYTES = 16 * GIB
"""A unified machine leaves at least the floor and, however large it is, no more than the cap to everything else."""

RAM_SHARE_CAP_BYTES = 96 * GIB
"""Cap on the RAM share without unified memory, and on what a unified machine's slots are sized on."""

CARD_PERCENT = 95
"""Usable part of a card's memory: the driver, the display and fragmentation have the rest."""

COEXIST_FROM_BYTES = 24 * GIB
"""From this much RAM on, chat, images and video run side by side on Apple silicon; elsewhere and below, a claim for a
device alone is heeded (the reference system's arbiter between chat and media, "auto")."""


class Sharing(StrEnum):
    """Whether engines share a device: what becomes of claims for exclusive use (rule 26)."""

    AUTO = "auto"
    """By machine: COEXIST on Apple silicon with 24 GiB or more, else SWAP."""
    COEXIST = "coexist"
    """They count as any other claim."""
    SWAP = "swap"
    """They are heeded: one engine on a device at a time."""


def unified_share(ram_bytes: int) -> int:
    """max(0, min(max(f·RAM, RAM − 16 GiB), RAM − 4 GiB)), f = 0.7, from 96 GiB on 0.8."""
    percent = UNIFIED_PERCENT_HIGH if ram_bytes >= HIGH_MEMORY_BYTES else UNIFIED_PERCENT
    share = max(ram_bytes * percent // 100, ram_bytes - UNIFIED_RESERVE_CAP_BYTES)
    return max(0, min(share, ram_bytes - UNIFIED_RESERVE_FLOOR_BYTES))


def ram_share(ram_bytes: int) -> int:
    """min(f·RAM, 96 GiB), f = 0.6, from 96 GiB on 0.8: the host share beside cards, and of machines without any."""
    percent = RAM_PERCENT_HIGH if ram_bytes >= HIGH_MEMORY_BYTES else RAM_PERCENT
    return min(ram_bytes * percent // 100, RAM_SHARE_CAP_BYTES)


def usable_card(total_bytes: int) -> int:
    """0.95 of a card."""
    return total_bytes * CARD_PERCENT // 100


def host_share(machine: Machine) -> int:
    """R: what models may hold in host memory, or in all memory on a unified machine.

    A limit that the system was told for the GPU of a unified machine counts where it is lower; a higher one raises
    nothing. What a driver lets a GPU use by its own default counts too, but takes nothing from models that run on the
    processor: the share is no lower than without the GPU.
    """
    if machine.pool is not Pool.UNIFIED:
        return ram_share(machine.ram_bytes)
    share = unified_share(machine.ram_bytes)
    if machine.gpu_mappable_bytes is not None:
        share = min(share, max(machine.gpu_mappable_bytes, ram_share(machine.ram_bytes)))
    return share if machine.gpu_wired_bytes is None else min(share, machine.gpu_wired_bytes)


def automatic_ceilings(machine: Machine) -> Ceilings:
    """The machine's own ceilings, without a person's limit.

    Spilling binds on cards only, where it is off: weights in system memory run an order of magnitude slower. Two models
    that are mapped for Metal at once can make the count of a kernel object go wrong, which panics macOS: there one load
    waits for the other.
    """
    devices = {device.device_id: usable_card(device.total_bytes) for device in machine.devices}
    return Ceilings(
        host_share(machine),
        devices,
        None,
        spill_allowed=machine.pool is not Pool.DISCRETE,
        has_shared_gpu=machine.pool is Pool.UNIFIED,
        exclusive_heeded=not (machine.platform == "darwin/arm64" and machine.ram_bytes >= COEXIST_FROM_BYTES),
        one_start_at_a_time=machine.platform.partition("/")[0] == "darwin",
        ram_bytes=machine.ram_bytes,
    )


def ceilings_for(
    machine: Machine,
    limit_bytes: int | None = None,
    allow_spill: bool | None = None,
    sharing: Sharing = Sharing.AUTO,
    one_load: bool | None = None,
) -> Ceilings:
    """The ceilings that admission uses.

    Args:
        machine: the machine.
        limit_bytes: the person's limit. It counts only where it is lower than the automatic total, and never raises a
            ceiling; one that is not positive is unreadable and counts as none.
        allow_spill: the person's choice for cards; None is automatic.
        sharing: whether engines share a device.
        one_load: whether loads wait for each other; None: where the platform needs it.
    """
    automatic = automatic_ceilings(machine)
    spill = automatic.spill_allowed if allow_spill is None or machine.pool is not Pool.DISCRETE else allow_spill
    return replace(
        automatic,
        limit_bytes=effective_limit(automatic, limit_bytes),
        spill_allowed=spill,
        exclusive_heeded=automatic.exclusive_heeded if sharing is Sharing.AUTO else sharing is Sharing.SWAP,
        one_start_at_a_time=automatic.one_start_at_a_time if one_load is None else one_load,
    )


def effective_limit(automatic: Ceilings, limit_bytes: int | None) -> int | None:
    """The person's limit if it is one (positive) and lower than the automatic total, else None."""
    if limit_bytes is None or limit_bytes <= 0 or limit_bytes >= automatic.total_bytes:
        return None
    return limit_bytes


def under_limit(ceiling_bytes: int, limit_bytes: int | None) -> int:
    """The lower of a ceiling and the limit."""
    return ceiling_bytes if limit_bytes is None else min(ceiling_bytes, limit_bytes)


def fast_bytes(ceilings: Ceilings) -> int:
    """The memory that models run fast in: the largest single card (a model loads on one), else the host share."""
    largest = max(ceilings.devices.values(), default=None)
    return under_limit(ceilings.host_bytes if largest is None else largest, ceilings.limit_bytes)


def sizing_bytes(machine: Machine, ceilings: Ceilings) -> int:
    """What concurrent slots are sized on. Lower than admission on large unified machines, so that a bigger ceiling
    loads more models, not more slots."""
    fast = fast_bytes(ceilings)
    if machine.pool is not Pool.UNIFIED:
        return fast
    ram = machine.ram_bytes
    percent = UNIFIED_PERCENT_HIGH if ram >= HIGH_MEMORY_BYTES else UNIFIED_PERCENT
    share = min(ram * percent // 100, ram - UNIFIED_RESERVE_FLOOR_BYTES, RAM_SHARE_CAP_BYTES)
    return min(fast, max(0, share))

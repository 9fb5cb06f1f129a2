"""How much memory an engine holds against what it was granted, and what follows."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum

import structlog
from weighbridge_common import processes
from weighbridge_common.logs import describe_error
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import process_pb2, requirement_pb2

REFUSE_PERCENT = 110
KILL_PERCENT = 125
"""Design, engines: at 110 % of the grant no new work, at 125 % the engine is killed."""

_MEASURING = ThreadPoolExecutor(max_workers=1, thread_name_prefix="footprint")
"""Not the event loop's own threads: a few large chats that are being checked would keep an engine unmeasured."""

_log = structlog.get_logger(__name__)


class FootprintVerdict(Enum):
    """What a footprint means."""

    WITHIN = "within"
    NO_NEW_WORK = "no new work"
    KILL = "kill"


def judge(footprint_bytes: int, grant_bytes: int, priced_bytes: int = 0) -> FootprintVerdict:
    """What follows from holding ``footprint_bytes`` under a grant; without a grant on the host nothing is bounded.

    ``priced_bytes``: the most that the plan said it may need. A grant is what was expected, and a small model's high
    bound lies above 125 % of that: an engine within its own price is the plan's to answer for, and the ledger charges
    what it sees, or refuses to.
    """
    percent = 100 * footprint_bytes // grant_bytes if grant_bytes > 0 else 0
    if percent < REFUSE_PERCENT or footprint_bytes <= priced_bytes:
        return FootprintVerdict.WITHIN
    return FootprintVerdict.NO_NEW_WORK if percent < KILL_PERCENT else FootprintVerdict.KILL


def shrunk(lease: lease_pb2.Lease, held_bytes: int, asked_bytes: int) -> requirement_pb2.Claim | None:
    """The claim that a lease can shrink to when ``asked_bytes`` of its optional ones are asked back; None: to none.

    What is required stays, and as much that an engine holding ``held_bytes`` may go on working. The engine needs no
    word of it: the limits of a launch are within what is required. On cards nothing is given back, for what an engine
    holds there is not measured here.
    """
    charge = lease.charge
    if charge.devices:
        return None
    required = charge.host_bytes - charge.optional_bytes
    # One byte more than the limit, which itself refuses new work.
    working = held_bytes * REFUSE_PERCENT // 100 + 1
    keep = max(required, working, charge.host_bytes - asked_bytes)
    if keep >= charge.host_bytes:
        return None
    return requirement_pb2.Claim(
        host_bytes=required,
        optional_host_bytes=keep - required,
        source=lease.claim.source,
        cpu_only=lease.claim.cpu_only,
    )


def grown(lease: lease_pb2.Lease, claim: requirement_pb2.Claim) -> requirement_pb2.Claim | None:
    """The claim that a lease must have instead, so that work which would claim ``claim`` is covered; None: it is.

    Nothing that the lease has is given back by it. On cards it names the one that the lease is on: the split is fixed
    at the grant, and what spilled from a card counts for it.
    """
    charge, had = lease.charge, lease.claim
    charged_on_cards = sum(device.bytes for device in charge.devices) + charge.spilled_bytes
    needed_on_cards = sum(device.required_bytes for device in claim.devices)
    if claim.host_bytes <= charge.host_bytes - charge.spilled_bytes and needed_on_cards <= charged_on_cards:
        return None
    wanted = requirement_pb2.Claim(
        host_bytes=max(had.host_bytes, claim.host_bytes),
        optional_host_bytes=had.optional_host_bytes,
        source=claim.source,
        cpu_only=had.cpu_only,
    )
    if had.devices:
        card = charge.devices[0].device_id if charge.devices else had.devices[0].device_id
        wanted.devices.add(
            device_id=card,
            required_bytes=max(needed_on_cards, sum(device.required_bytes for device in had.devices)),
            optional_bytes=sum(device.optional_bytes for device in had.devices),
        )
    return wanted


def raised(lease: lease_pb2.Lease, total_bytes: int) -> requirement_pb2.Claim | None:
    """The claim that a lease must have instead when its engine says that it will hold ``total_bytes``; None: the charge
    covers it.

    They are where the lease has its model: on its device, else on the host. What was optional there is not any more:
    the engine takes it. The rest of the lease stays as it is.
    """
    charge, had = lease.charge, lease.claim
    if total_bytes <= placed_bytes(lease):
        return None
    wanted = requirement_pb2.Claim()
    wanted.CopyFrom(had)
    if had.devices:
        del wanted.devices[:]
        card = charge.devices[0].device_id if charge.devices else had.devices[0].device_id
        wanted.devices.add(device_id=card, required_bytes=total_bytes)
    else:
        wanted.host_bytes, wanted.optional_host_bytes = total_bytes, 0
    return wanted


def placed_bytes(lease: lease_pb2.Lease) -> int:
    """What is charged where the lease has its model: on its device, with what spilled from it, else on the host."""
    charge = lease.charge
    if lease.claim.devices:
        return sum(device.bytes for device in charge.devices) + charge.spilled_bytes
    return charge.host_bytes


@dataclass(frozen=True)
class Probe:
    """How memory is measured; passed in, so that tests say what an engine holds.

    Attributes:
        footprint: bytes that a process and its descendants hold now; None: gone.
        peak: the most that a process has held, as the system counted it; None: not told.
    """

    footprint: Callable[[int], int | None] = processes.tree_footprint
    peak: Callable[[int], int | None] = processes.peak_rss


class Footprint:
    """The memory of one engine process, measured now and then.

    Attributes:
        now_bytes, peak_bytes: as last measured; 0 before.
    """

    def __init__(self, pid: int, probe: Probe) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0
        self._pid = pid
        self._probe = probe

    async def measure(self) -> int:
        """Measure; in a thread, because a large process has many pages to count. Returns the footprint.

        Never raises: where it cannot be measured now (no file descriptor left), what was measured last stands.
        """
        try:
            now, peak = await asyncio.get_running_loop().run_in_executor(_MEASURING, self._read)
        except Exception as error:
            _log.warning("footprint_unmeasured", **describe_error(error))
            return self.now_bytes
        if now is not None:
            self.now_bytes = now
        # The system's own peak is of resident pages, the footprint of the whole tree: whichever is more was held.
        self.peak_bytes = max(self.peak_bytes, self.now_bytes, peak or 0)
        return self.now_bytes

    def message(self) -> process_pb2.ObservedMemory | None:
        """What the ledger is told; None before the first measurement."""
        if not self.now_bytes:
            return None
        return process_pb2.ObservedMemory(host_bytes=self.now_bytes, host_peak_bytes=self.peak_bytes)

    def _read(self) -> tuple[int | None, int | None]:
        return self._probe.footprint(self._pid), self._probe.peak(self._pid)

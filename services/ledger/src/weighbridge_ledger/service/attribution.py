"""What leases hold of the memory that was measured, by their engines' processes: the rest is outsiders' (rule 3)."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weighbridge_common import processes
from weighbridge_common.processes import ProcessIdentity

from weighbridge_ledger.book.book import LeaseView
from weighbridge_ledger.machine import external as externals
from weighbridge_ledger.machine.external import ExternalUse, HeldBytes
from weighbridge_ledger.machine.fdinfo import CardUse, tree_uses
from weighbridge_ledger.machine.footprint import tree_held
from weighbridge_ledger.machine.model import LiveDevice, LiveMemory, Machine
from weighbridge_ledger.machine.probe import LIVE_TIMEOUT_S, in_thread


@dataclass(frozen=True, slots=True)
class EngineUse:
    """What the processes of one lease hold. None: it cannot be measured from here.

    `host_bytes` is used host memory of their own. `cards` is what the kernel accounts to them on graphics cards, by PCI
    address; NVIDIA's cards are asked through their driver instead.
    """

    host_bytes: int | None = None
    cards: Mapping[str, CardUse] | None = None


Measure = Callable[[tuple[ProcessIdentity, ...], LiveMemory], EngineUse]


def measure_engines(engines: tuple[ProcessIdentity, ...], live: LiveMemory) -> EngineUse:
    """Look at the processes of one lease; blocks for as long as the kernel needs to add up their pages."""
    sizes: list[int] = []
    living: list[int] = []
    for engine in engines:
        alive = processes.is_alive(engine)
        size = tree_held(engine.pid) if alive else None
        if alive is None or (alive and size is None):
            return EngineUse()
        sizes.append(size or 0)
        living += [engine.pid] if alive else []
    if not sizes:
        return EngineUse()
    accounted = any(device.pci for device in live.devices)
    return EngineUse(sum(sizes), tree_uses(living) if accounted and living else None)


class EngineLook:
    """Looks at the processes of leases in a thread. Never hangs: the kernel keeps who reads the pages of a process
    waiting for as long as that process waits for a driver."""

    def __init__(self, measure: Measure = measure_engines, timeout_s: float = LIVE_TIMEOUT_S) -> None:
        self._measure = measure
        self._timeout_s = timeout_s
        self._in_flight: asyncio.Future[list[EngineUse]] | None = None

    async def look(self, leases: Sequence[LeaseView], live: LiveMemory) -> list[EngineUse]:
        """What each lease's processes hold; unknown for all where a look does not end in time, and as long as it has
        not, because no second one is started beside it."""
        if self._in_flight is None or self._in_flight.done():
            self._in_flight = in_thread(lambda: [self._measure(view.lease.engines, live) for view in leases])
            self._in_flight.add_done_callback(_take_note)
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(self._in_flight), self._timeout_s)
        return [EngineUse() for _ in leases]


def _take_note(look: "asyncio.Future[list[EngineUse]]") -> None:
    """What a look that nobody waits for any more ran into is nobody's business."""
    if not look.cancelled():
        look.exception()


def attribute(
    machine: Machine, live: LiveMemory, leases: Iterable[LeaseView], uses: Iterable[EngineUse]
) -> ExternalUse:
    """What nobody of these leases holds, at every place of the machine."""
    host: list[HeldBytes] = []
    devices: dict[str, list[HeldBytes]] = {}
    for view, use in zip(leases, uses, strict=True):
        pids = [engine.pid for engine in view.lease.engines]
        reported = view.observed
        given = sum(card.gtt_bytes for card in (use.cards or {}).values())
        host.append(
            HeldBytes(
                externals.host_attribution(
                    machine, live, None if use.host_bytes is None else use.host_bytes + given, pids
                ),
                None if reported is None else reported.host_bytes,
                view.lease.charge.host_bytes,
            )
        )
        for device_id, charged in view.lease.charge.devices:
            held = HeldBytes(
                _on_card(live.device(device_id), use, pids),
                None if reported is None else dict(reported.devices).get(device_id),
                charged,
            )
            devices.setdefault(device_id, []).append(held)
    return externals.external_use(machine, live, host, devices)


def _on_card(device: LiveDevice, use: EngineUse, pids: list[int]) -> int | None:
    if not device.pci:
        return externals.processes_bytes(device, pids)
    return None if use.cards is None else use.cards.get(device.pci, CardUse()).own_bytes

"""The machine beside the book: ceilings under the person's wishes, what is free, what outsiders hold (rule 3)."""

import asyncio
import math
from dataclasses import dataclass
from typing import Protocol

import structlog
from weighbridge_common.logs import describe_error
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge_ledger.book import Ceilings
from weighbridge_ledger.book.book import Book
from weighbridge_ledger.book.states import Moment
from weighbridge_ledger.health.policy import Mode
from weighbridge_ledger.machine import capacity as capacities
from weighbridge_ledger.machine import external as externals
from weighbridge_ledger.machine.ceilings import Sharing, automatic_ceilings, ceilings_for
from weighbridge_ledger.machine.findings import Finding
from weighbridge_ledger.machine.messages import capacity_to_proto
from weighbridge_ledger.machine.model import UNMEASURED, LiveMemory, Machine, Source
from weighbridge_ledger.machine.probe import in_thread
from weighbridge_ledger.service.attribution import attribute, measure_engines
from weighbridge_ledger.service.health_desk import HealthDesk
from weighbridge_ledger.service.keeper import Keeper

PROBE_PERIOD_WAITING_S = 2.0
"""While somebody waits, memory held outside is looked at so often (rule 3)."""

PROBE_PERIOD_S = 5.0
"""Else so often: the price of a grant made on a reading that is at most so old."""

LOOK_PERIOD_S = 0.5
"""How soon a claim that begins to wait shortens the pause."""

FRESH_S = 1.0
"""A measurement so young is not repeated: adding up a large engine's pages takes a good part of a second, and people
may ask for the capacity as often as they like."""

_log = structlog.get_logger(__name__)


class Probe(Protocol):
    """What the machine package's probe offers."""

    @property
    def machine(self) -> Machine:
        """The machine."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What its static readings could not say."""

    async def live(self) -> LiveMemory:
        """Memory now. Never raises."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the person wants. None: automatic."""

    limit_bytes: int | None = None
    allow_spill: bool | None = None


class MachineDesk:
    """Owns the readings; the book is told through the keeper."""

    def __init__(
        self, probe: Probe, wishes: Wishes, health: Mode = Mode.OBSERVE, sharing: Sharing = Sharing.AUTO
    ) -> None:
        self._probe = probe
        self._sharing = sharing
        self._health = HealthDesk(health)
        self._live = UNMEASURED
        self._external = externals.NO_EXTERNAL_USE
        self._measured = -math.inf
        """When, on the monotonic clock."""
        self._measuring = asyncio.Lock()
        self.wishes = wishes

    @property
    def node_id(self) -> str:
        """The machine's id."""
        return self._probe.machine.node_id

    @property
    def measures(self) -> bool:
        """Whether live memory counts: not on a declared machine."""
        return self._probe.machine.source is Source.DETECTED

    def ceilings(self) -> Ceilings:
        """The ceilings that admission uses."""
        return ceilings_for(self._probe.machine, self.wishes.limit_bytes, self.wishes.allow_spill, self._sharing)

    def capacity(self, book: Book, epoch: str, revision: int, now: Moment) -> machine_pb2.Capacity:
        """The capacity of this machine with what is committed now."""
        sums = book.committed()
        capacity = capacities.assemble(
            self._probe.machine,
            limit_bytes=self.wishes.limit_bytes,
            allow_spill=self.wishes.allow_spill,
            committed=capacities.Committed(sums.host_bytes, sums.devices),
            live=self._live,
            external=self._external,
            findings=self._probe.findings,
            remarks=self._health.remarks(now),
            sharing=self._sharing,
        )
        return capacity_to_proto(capacity, epoch=epoch, revision=revision)

    async def measure(self, keeper: Keeper) -> None:
        """Read memory, attribute what leases hold, and tell the book what of the rest is in the way of leases.

        The book gets only what goes beyond the reserve that the ceilings leave to everything else (see
        `externals.over_reserve`); the capacity shows all of it.
        """
        if not self.measures:
            return
        async with self._measuring:
            if keeper.clock().monotonic - self._measured < FRESH_S:
                return
            live = await self._probe.live()
            leases = list(keeper.book.charged())
            uses = await in_thread(lambda: [measure_engines(view.lease.engines, live) for view in leases])
            machine = self._probe.machine
            self._live, self._external = live, attribute(machine, live, leases, uses)
            now = keeper.clock()
            self._measured = now.monotonic
            self._health.look(live, now)
            beyond = externals.for_book(externals.over_reserve(machine, automatic_ceilings(machine), self._external))
            keeper.run(lambda book, now: book.set_external(beyond, now))

    async def measure_for_ever(self, keeper: Keeper) -> None:
        """Measure at once and then again and again; returns at once on a declared machine."""
        while self.measures:
            try:
                await self.measure(keeper)
            except Exception as error:  # whatever the system's files hold: the next look may find them well
                _log.error("measuring_failed", **describe_error(error))
            rested_s = 0.0
            while rested_s < (PROBE_PERIOD_WAITING_S if keeper.book.queue_depth else PROBE_PERIOD_S):
                await asyncio.sleep(LOOK_PERIOD_S)
                rested_s += LOOK_PERIOD_S

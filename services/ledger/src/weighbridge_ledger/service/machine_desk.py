"""The machine beside the book: ceilings under the person's wishes, what is free, what outsiders hold (rule 3)."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog
from weighbridge_common.logs import describe_error
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge_ledger.book import Ceilings
from weighbridge_ledger.book.book import Book
from weighbridge_ledger.book.states import External, Hold, Moment
from weighbridge_ledger.health.policy import HealthPolicy
from weighbridge_ledger.machine import capacity as capacities
from weighbridge_ledger.machine import external as externals
from weighbridge_ledger.machine.ceilings import Sharing, automatic_ceilings, ceilings_for
from weighbridge_ledger.machine.findings import Finding
from weighbridge_ledger.machine.messages import capacity_to_proto
from weighbridge_ledger.machine.model import UNMEASURED, LiveMemory, Machine, Source
from weighbridge_ledger.service.attribution import EngineLook, attribute
from weighbridge_ledger.service.health_desk import HealthDesk
from weighbridge_ledger.service.keeper import Keeper

PROBE_PERIOD_WAITING_S = 2.0
"""While somebody waits, memory held outside is looked at so often (rule 3)."""

PROBE_PERIOD_S = 5.0
"""Else so often: the price of a grant made on a reading that is at most so old."""

LOOK_PERIOD_S = 0.5
"""How soon a claim that begins to wait shortens the pause."""

KEPT_S = 60.0
"""While the probe does not answer, what it last measured counts for so long. It is slowest when memory is short: taking
other programs' memory for free just then would give it away."""

FRESH_S = 1.0
"""A measurement so young is not repeated: adding up a large engine's pages takes a good part of a second, and people
may ask for the capacity as often as they like."""

Sleep = Callable[[float], Awaitable[None]]

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
        self,
        probe: Probe,
        wishes: Wishes,
        health: HealthPolicy | None = None,
        sharing: Sharing = Sharing.AUTO,
        one_load: bool | None = None,
    ) -> None:
        self._probe = probe
        self._sharing = sharing
        self._one_load = one_load
        self._health = HealthDesk(health or HealthPolicy(), probe.machine)
        self._held: dict[str, Hold] = {}
        """What the book was last told to hold."""
        self._live = UNMEASURED
        self._external = externals.NO_EXTERNAL_USE
        self._looked_at = self._measured_at = -math.inf
        """When the probe was last asked, and when it last answered, on the monotonic clock."""
        self._engines = EngineLook()
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
        return ceilings_for(
            self._probe.machine, self.wishes.limit_bytes, self.wishes.allow_spill, self._sharing, self._one_load
        )

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
        """Read memory, attribute what leases hold, and tell the book what of the rest is in the way of leases, and
        which devices are not well.

        The book gets only what goes beyond the reserve that the ceilings leave to everything else (see
        `externals.over_reserve`); the capacity shows all of it. It gets it for each measurement, changed or not: it
        counts how often they agree (rule 3).
        """
        if not self.measures:
            return
        async with self._measuring:
            if keeper.clock().monotonic - self._looked_at < FRESH_S:
                return
            live = await self._probe.live()
            machine = self._probe.machine
            if live.answered:
                leases = list(keeper.book.charged())
                self._external = attribute(machine, live, leases, await self._engines.look(leases, live))
            now = keeper.clock()
            self._looked_at = now.monotonic
            self._live = live
            self._health.look(live, now)
            if live.answered:
                self._measured_at = now.monotonic
            elif now.monotonic - self._measured_at < KEPT_S:
                self._tell(keeper)
                return
            else:
                self._external = externals.NO_EXTERNAL_USE
            beyond = externals.over_reserve(machine, automatic_ceilings(machine), self._external)
            self._tell(keeper, externals.for_book(beyond))

    async def try_to_measure(self, keeper: Keeper) -> None:
        """Measure; whatever the system's files hold, the next look may find them well."""
        try:
            await self.measure(keeper)
        except Exception as error:
            _log.error("measuring_failed", **describe_error(error))

    async def measure_for_ever(self, keeper: Keeper, sleep: Sleep = asyncio.sleep) -> None:
        """Measure at once and then again and again; returns at once on a declared machine."""
        while self.measures:
            await self.try_to_measure(keeper)
            rested_s = 0.0
            while rested_s < (PROBE_PERIOD_WAITING_S if keeper.book.queue_depth else PROBE_PERIOD_S):
                await sleep(LOOK_PERIOD_S)
                rested_s += LOOK_PERIOD_S

    async def watch_holds_for_ever(self, keeper: Keeper) -> None:
        """Tell the book of holds that end by time alone, whether or not a measurement comes; returns at once on a
        declared machine."""
        while self.measures:
            await asyncio.sleep(LOOK_PERIOD_S)
            try:
                self._tell(keeper)
            except Exception as error:
                _log.error("telling_holds_failed", **describe_error(error))

    def _tell(self, keeper: Keeper, external: External | None = None) -> None:
        """Tell the book what is held now if that has changed, and what was measured if it was.

        A device that has just become unwell is held before memory that came free is given out, and one that is well
        again is let go only when what was measured counts.
        """
        before, holds = self._held, self._health.holds(keeper.clock())
        if external is None and holds == before:
            return

        def tell(book: Book, now: Moment) -> None:
            if holds != before:
                book.set_holds({**before, **holds}, now)
            if external is not None:
                book.set_external(external, now)
            if holds != before:
                book.set_holds(holds, now)

        keeper.run(tell)
        self._held = holds

"""When the machine is measured, and what the book is told of it (rule 3). A clock that only the test moves."""

import asyncio
import threading
from collections.abc import Callable

import grpc
import pytest
from weighbridge_common.processes import ProcessIdentity
from weighbridge_ledger.book import Ask, Book, Ceilings, Claim, Home, Moment, Policy
from weighbridge_ledger.book.book import LeaseView
from weighbridge_ledger.book.states import Lease, LeaseState
from weighbridge_ledger.machine.interpret import interpret
from weighbridge_ledger.machine.model import UNMEASURED, LiveMemory, Machine, Pool, Source
from weighbridge_ledger.machine.probe import MachineProbe
from weighbridge_ledger.machine.readings import Readings
from weighbridge_ledger.service.app import assemble
from weighbridge_ledger.service.attribution import EngineLook, EngineUse
from weighbridge_ledger.service.keeper import Keeper
from weighbridge_ledger.service.machine_desk import MachineDesk, Wishes
from weighbridge_ledger.store import MemoryStore
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

GIB = 2**30
HOLDER = ProcessIdentity(1, 1, "boot", "pid:[1]")
RAM_GIB = 40
"""Of which models may hold 24; 16 are left to everything else."""


class MeasuredHost:
    """A machine without a GPU under a ledger, on which others hold what the test says."""

    def __init__(self, ledger) -> None:
        self.ledger = ledger
        self.used_gib = 10
        self.fails = False
        ledger.probe = MachineProbe(
            interpret(self.read(), node_id="node", source=Source.DETECTED), self.read, clock=lambda: ledger.time
        )

    def read(self) -> Readings:
        if self.fails:
            raise OSError("the driver is gone")
        available = (RAM_GIB - self.used_gib) * GIB
        return Readings("linux", processor="x86_64", ram_bytes=RAM_GIB * GIB, ram_available_bytes=available)

    async def look(self, after_s: float):
        """The capacity, measured anew, so much later."""
        await self.ledger.pass_time(after_s)
        return await self.capacity()

    async def capacity(self):
        return (await self.ledger.stub.GetCapacity(pb.GetCapacityRequest())).capacity


@pytest.fixture
def host(new_ledger: Callable, tmp_path) -> MeasuredHost:
    return MeasuredHost(new_ledger(tmp_path))


async def outcome(call) -> str:
    """What a call of Admit is told first: "granted", or the code of what it waits for."""
    response = await call.read()
    return response.queued.reasons[0].code if response.HasField("queued") else "granted"


async def ends_granted(call) -> None:
    while True:
        response = await call.read()
        assert response is not grpc.aio.EOF
        if response.HasField("granted"):
            return


async def idle_lease(ledger, gib: int) -> str:
    """A lease that has been loaded and idle for long enough to be asked to vacate."""
    request = ledger.request(gib, 1)
    request.term.FromSeconds(600)
    call = ledger.stub.Admit(request)
    grant = (await call.read()).granted
    credential = {"lease_id": grant.lease.lease_id, "secret": grant.secret}
    await ledger.stub.ActivateLease(pb.ActivateLeaseRequest(**credential, process=ledger.process(1)))
    use = await ledger.stub.BeginUse(pb.BeginUseRequest(**credential))
    await ledger.stub.EndUse(pb.EndUseRequest(**credential, use_id=use.use_id))
    await ledger.pass_time(ledger.policy.max_residency_s)
    return grant.lease.lease_id


async def is_asked(ledger, lease_id: str) -> bool:
    lease = (await ledger.stub.GetLease(pb.GetLeaseRequest(lease_id=lease_id))).lease
    return lease.state == lease_pb2.LEASE_STATE_VACATING


# -- what the book is told ---------------------------------------------------------------------------------------------


async def test_a_ledger_has_measured_before_it_serves(host: MeasuredHost) -> None:
    # One that is started again must not grant what others took meanwhile.
    host.used_gib = 20
    servicer = await assemble(host.ledger.probe, MemoryStore(), Policy(), clock=lambda: Moment(0.0, 0.0))
    assert servicer._keeper.book.external.host_bytes == 4 * GIB
    await servicer.aclose()


async def test_a_rise_blocks_grants_at_once(host: MeasuredHost) -> None:
    async with host.ledger.serve() as ledger:
        assert await outcome(ledger.admit(20)) == "granted"
        host.used_gib = 18
        await host.look(after_s=2)
        assert await outcome(ledger.admit(4, 2)) == "EXTERNAL_USE"


async def test_holders_are_asked_for_it_after_three_measurements_that_agree(host: MeasuredHost) -> None:
    async with host.ledger.serve() as ledger:
        holder = await idle_lease(ledger, 20)
        host.used_gib = 18
        await host.look(after_s=2)
        assert await outcome(ledger.admit(4, 2)) == "EXTERNAL_USE"
        await host.look(after_s=2)
        assert not await is_asked(ledger, holder), "it may have been a peak"
        await host.look(after_s=2)
        assert await is_asked(ledger, holder)


async def test_a_capacity_that_is_asked_for_in_between_is_no_measurement(host: MeasuredHost) -> None:
    async with host.ledger.serve() as ledger:
        holder = await idle_lease(ledger, 20)
        host.used_gib = 18
        await host.look(after_s=2)
        assert await outcome(ledger.admit(4, 2)) == "EXTERNAL_USE"
        for _ in range(10):
            await host.capacity()
        assert not await is_asked(ledger, holder)


async def test_a_peak_that_passes_costs_no_holder_its_memory(host: MeasuredHost) -> None:
    async with host.ledger.serve() as ledger:
        holder = await idle_lease(ledger, 20)
        host.used_gib = 18
        await host.look(after_s=2)
        call = ledger.admit(4, 2)
        assert await outcome(call) == "EXTERNAL_USE"
        host.used_gib = 23
        await host.look(after_s=2)
        host.used_gib = 16
        await host.look(after_s=2)
        await ends_granted(call)
        assert not await is_asked(ledger, holder)


async def test_what_a_loading_engine_takes_makes_nobody_vacate(host: MeasuredHost) -> None:
    # Its holder reports late what it has taken; until then that looks like others'.
    async with host.ledger.serve() as ledger:
        holder = await idle_lease(ledger, 18)
        await ledger.active(2, 2)
        host.used_gib = 18
        await host.look(after_s=2)
        assert await outcome(ledger.admit(4, 3)) == "EXTERNAL_USE"
        for _ in range(3):
            await host.look(after_s=2)
        assert not await is_asked(ledger, holder)


# -- a probe that fails ------------------------------------------------------------------------------------------------


async def test_what_was_measured_last_counts_for_a_minute(host: MeasuredHost) -> None:
    # Memory is shortest when the probe is slowest: taking others' memory for free then would give it away.
    host.used_gib = 20
    async with host.ledger.serve() as ledger:
        call = ledger.admit(24)
        assert await outcome(call) == "EXTERNAL_USE"
        host.fails = True
        capacity = await host.look(after_s=59)
        assert not capacity.host.HasField("free_bytes")
        assert capacity.host.external_bytes == 20 * GIB
        assert any("cannot be measured" in note for note in capacity.notes)
        assert [lease_pb2.LeaseState.Name(lease.state) for lease in await ledger.leases()] == ["LEASE_STATE_QUEUED"]
        capacity = await host.look(after_s=1)
        assert not capacity.host.HasField("external_bytes")
        await ends_granted(call)


async def test_a_probe_that_never_answered_counts_as_nothing_and_says_so(host: MeasuredHost) -> None:
    host.used_gib, host.fails = 20, True
    async with host.ledger.serve() as ledger:
        assert await outcome(ledger.admit(24)) == "granted"
        assert any("cannot be measured" in note for note in (await host.capacity()).notes)


VIEW = LeaseView(Lease("a", "", 1, 1, LeaseState.ACTIVE, Claim(1), HOLDER))


async def test_a_look_at_engines_that_hangs_is_given_up_and_not_started_twice() -> None:
    # A process that waits for its driver keeps everybody waiting who reads its pages.
    goes_on, started = threading.Event(), []

    def measure(engines: object, live: LiveMemory) -> EngineUse:
        started.append(engines)
        goes_on.wait(30)
        return EngineUse(7)

    look = EngineLook(measure, timeout_s=0.05)
    for _ in range(3):
        assert await look.look([VIEW], UNMEASURED) == [EngineUse()], "unknown, not zero"
    assert len(started) == 1
    goes_on.set()
    assert look._in_flight is not None
    await look._in_flight
    assert await look.look([VIEW], UNMEASURED) == [EngineUse(7)]


async def test_after_a_look_at_engines_that_broke_there_is_another() -> None:
    outcomes = iter([OSError("gone"), None])

    def measure(engines: object, live: LiveMemory) -> EngineUse:
        error = next(outcomes)
        if error is not None:
            raise error
        return EngineUse(7)

    look = EngineLook(measure)
    with pytest.raises(OSError, match="gone"):
        await look.look([VIEW], UNMEASURED)
    assert await look.look([VIEW], UNMEASURED) == [EngineUse(7)]


# -- how often ---------------------------------------------------------------------------------------------------------


class Rhythm:
    """A desk whose pauses pass at once on a clock of their own, and the moments at which its probe was asked."""

    machine = Machine("node", Pool.CPU, RAM_GIB * GIB, source=Source.DETECTED)
    findings = ()

    def __init__(self, until: float) -> None:
        self.time = 0.0
        self.until = until
        self.asked: list[float] = []
        self.events: dict[float, Callable[[], object]] = {}
        book = Book(
            Ceilings(24 * GIB),
            Policy(),
            Home("boot", "pid:[1]"),
            new_id=lambda: f"id-{self.time}",
            new_secret=lambda: "secret",
            spread=lambda: 0.5,
            now=self.clock(),
        )
        self.keeper = Keeper(book, MemoryStore(), self.clock)
        self.desk = MachineDesk(self, Wishes())

    def clock(self) -> Moment:
        return Moment(self.time, self.time)

    async def live(self) -> LiveMemory:
        self.asked.append(self.time)
        return LiveMemory(host_free_bytes=0, host_used_bytes=RAM_GIB * GIB)

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        if self.time > self.until:
            raise asyncio.CancelledError
        self.events.get(self.time, lambda: None)()

    def wait_for_memory(self) -> None:
        """A claim begins to wait: others hold everything."""
        self.keeper.run(lambda book, now: book.admit(Ask("", HOLDER, Claim(GIB)), now))

    async def run(self) -> list[float]:
        with pytest.raises(asyncio.CancelledError):
            await self.desk.measure_for_ever(self.keeper, self.sleep)
        await self.keeper.aclose()
        return self.asked


async def test_the_machine_is_measured_every_5_s() -> None:
    assert await Rhythm(until=20).run() == [0, 5, 10, 15, 20]


async def test_while_a_claim_waits_it_is_measured_every_2_s_from_then_on() -> None:
    rhythm = Rhythm(until=12)
    rhythm.events[6.0] = rhythm.wait_for_memory
    assert await rhythm.run() == [0, 5, 7, 9, 11]


async def test_a_claim_that_begins_to_wait_late_in_a_pause_ends_it() -> None:
    rhythm = Rhythm(until=6)
    rhythm.events[4.0] = rhythm.wait_for_memory
    assert await rhythm.run() == [0, 4, 6]

"""One model in one engine process under one lease, from the activated lease to the burial."""

import asyncio
import contextlib
import contextvars
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import structlog
from weighbridge_common.logs import describe_error
from weighbridge_common.sizes import format_gib
from weighbridge_common.tasks import TaskOwner
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.errors import RequestError, RpcFailure
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb
from weighbridge_proto.fit.v1 import weights_pb2

from weighbridge_engines.host import failures
from weighbridge_engines.host.clock import Clock
from weighbridge_engines.host.footprint import (
    Footprint,
    FootprintVerdict,
    Probe,
    grown,
    judge,
    placed_bytes,
    raised,
    shrunk,
)
from weighbridge_engines.host.kind import EngineLostError, Kind, MemoryAnnounced, Runtime
from weighbridge_engines.host.lease import LeaseHold
from weighbridge_engines.host.ledger import ClaimTerms
from weighbridge_engines.host.occupancy import Occupancy
from weighbridge_engines.host.plans import PlanKey, RequestKey, key_of, planned_bytes
from weighbridge_engines.host.refusals import LeaseEndingError
from weighbridge_engines.host.requests import RequestQueue
from weighbridge_engines.host.states import ResidencyState, advance
from weighbridge_engines.host.waiting import first_of
from weighbridge_engines.supervisor.child import Child, SpawnError, spawn
from weighbridge_engines.supervisor.exits import ExitFacts, explain
from weighbridge_engines.supervisor.output import RingLog
from weighbridge_engines.supervisor.readiness import LivenessPolicy, ReadinessPolicy, until_dead, until_ready
from weighbridge_engines.supervisor.records import ProcessRecord

LAST_WORD_S = 0.25
"""An engine that printed a fatal line is given this long to end by itself, so that its end can be explained too."""

LOST_GRACE_S = 10.0
"""An engine whose lease is lost is not waited for longer between TERM and KILL: its bytes are given away 20 s after the
term in which nothing was renewed (ledger rule 12), and up to 4 of those pass until that is known."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Trouble:
    """Why a residency must end at once.

    Attributes:
        reason: for the ledger's log.
        failure: what requests in flight are told.
        is_crash: whether it counts against the restart budget.
    """

    reason: str
    failure: RpcFailure
    is_crash: bool = False


@dataclass(frozen=True)
class ResidencyPolicy:
    """Figures of a residency; see :class:`weighbridge_engines.settings.EngineSettings`."""

    start_timeout_s: float = 600.0
    stop_grace_s: float = 3.0
    queue_limit: int = 64
    footprint_period_s: float = 1.0
    liveness: LivenessPolicy = field(default_factory=LivenessPolicy)


@dataclass(frozen=True)
class Surroundings:
    """What every residency of a host shares."""

    kind: Kind
    run_dir: Path
    log: RingLog
    record: ProcessRecord
    policy: ResidencyPolicy
    clock: Clock
    probe: Probe


class Residency:
    """See the module.

    Attributes:
        model: as it was named first.
        plan: the plan it is loaded by.
        terms: what its claim said beside the bytes.
        aliases: requests that mean it.
        hold: its lease.
        use: who uses it.
        measured_as: the plan that its peak is to be held against; None: it was put to no use that was planned. A
            renderer's peak is that of its largest render, and of a loaded one that rendered nothing it says nothing.
        state: where it stands.
        trouble: set when it must end at once.
        on_idle: called when it has been idle for long enough.
    """

    def __init__(
        self,
        model: weights_pb2.ModelRef,
        plan: fit_pb.PlanModelResponse,
        terms: ClaimTerms,
        aliases: set[RequestKey],
        hold: LeaseHold,
        around: Surroundings,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.model = model
        self.plan = plan
        self.terms = terms
        self.key: PlanKey = key_of(plan)
        self.aliases = aliases
        self.hold = hold
        self.use = Occupancy(around.clock)
        self.measured_as = None if around.kind.does_images else plan
        self.state = ResidencyState.STARTING
        self.trouble: asyncio.Future[Trouble] = loop.create_future()
        self.on_idle: Callable[[], object] = lambda: None
        self.forced: asyncio.Future[RpcFailure] = loop.create_future()
        self.child: Child | None = None
        self.footprint: Footprint | None = None
        self.queue = RequestQueue(around.kind.slots(plan), around.policy.queue_limit)
        self.load_time_s = 0.0
        self.ready_wall_s = 0.0
        self._last_sign_s = 0.0
        self._sized_by = plan
        self._around = around
        self._runtime: Runtime | None = None
        self._watchers = TaskOwner()
        self._workspace: Path | None = None

    # -- use --

    @property
    def runtime(self) -> Runtime:
        """The engine's client; there once ready."""
        assert self._runtime is not None, "asked for only when ready"
        return self._runtime

    @property
    def was_ready(self) -> bool:
        """Whether it has ever been ready."""
        return self.child is not None and self.child.was_ready

    def advance(self, to: ResidencyState) -> None:
        """Take a step of its life; see :func:`weighbridge_engines.host.states.advance`."""
        self.state = advance(self.state, to)

    def sign_of_life(self) -> None:
        """The engine just produced something."""
        self._last_sign_s = self._around.clock.monotonic()

    @property
    def over_grant(self) -> bool:
        """Whether it holds so much more than was granted, as last measured, that it takes no new work."""
        held = 0 if self.footprint is None else self.footprint.now_bytes
        return judge(held, self.hold.charged_host_bytes, self._priced_host_bytes) is not FootprintVerdict.WITHIN

    @property
    def _priced_host_bytes(self) -> int:
        """The most that the plan said it may need of host memory."""
        needed = self._sized_by.requirement
        return max(0, needed.total.high_bytes - needed.device_peak.high_bytes)

    async def cover(self, plan: fit_pb.PlanModelResponse) -> None:
        """Make the lease large enough for work that was planned as ``plan``. It stays so: such work comes again.

        Raises:
            RequestError: RESOURCE_EXHAUSTED CANNOT_GROW and the ledger's other refusals; the lease is as it was.
            LeaseEndingError: the lease is vacating or over.
        """
        if (claim := grown(self.hold.lease, plan.claim)) is not None:
            await self.hold.resize(claim)
            self.hold.granted_bytes = max(self.hold.granted_bytes, self.hold.charged_bytes)
        if planned_bytes(plan) > planned_bytes(self._sized_by):
            self._sized_by = plan

    def has_done(self, plan: fit_pb.PlanModelResponse) -> None:
        """Work that was planned as ``plan`` is done."""
        if self.measured_as is None or planned_bytes(plan) > planned_bytes(self.measured_as):
            self.measured_as = plan

    def set_trouble(self, trouble: Trouble) -> None:
        """It must end at once; the first trouble tells why."""
        if not self.trouble.done():
            self.trouble.set_result(trouble)

    async def until_free(self) -> None:
        """Return when nobody uses it, or when it must not be waited for."""
        await self.use.until_free(unless=self.forced)

    async def force(self, failure: RpcFailure) -> None:
        """End the requests in flight with ``failure``."""
        if not self.forced.done():
            self.forced.set_result(failure)
            if self._runtime is not None:
                await self._runtime.aclose()

    # -- start --

    async def start(self, tell: Callable[[engine_pb.LoadModelResponse], None]) -> None:
        """Start the process, held until its identity is on the lease, and load the model.

        Raises:
            RequestError: why it could not be done. :meth:`stop` must be called in any case.
        """
        around = self._around
        # The lease outlives the request that loads the model; what the watchers do belongs to no request's trace.
        self.hold.keep(lambda: self.footprint.message() if self.footprint is not None else None)
        self._watch(self._watch_lease(), "lease")
        tell(_starting("process"))
        try:
            self._workspace = _make_workspace(around.run_dir, around.kind.name, self.hold.lease_id)
            # Beside the event loop: it may read of the model's file, from a disk that has to wake up first.
            launch = await asyncio.to_thread(around.kind.launch, self.plan, self._workspace)
        except OSError as error:
            raise failures.run_dir_unusable("has no room for the engine's files", error) from error
        started_s = around.clock.monotonic()
        try:
            child = await spawn(launch.child, around.log)
        except SpawnError as error:
            raise RequestError(grpc.StatusCode.INTERNAL, "ENGINE_START_FAILED", str(error)) from error
        self.child = child
        self.footprint = Footprint(child.engine.pid, around.probe)
        self._watch(self._watch_child(child), "child")
        self._watch(self._watch_output(child), "output")
        try:
            await around.record.write(child.identities)
        except OSError as error:
            raise failures.run_dir_unusable("cannot record the engine's process", error) from error
        try:
            await self.hold.record_processes([identity.to_message() for identity in child.identities])
        except LeaseEndingError:
            raise _lease_over() from None
        self._watch(self._watch_footprint(self.footprint), "footprint")
        self._watch(self._watch_shrink(self.footprint), "shrink")
        child.open_gate()
        self._runtime = launch.connect()
        try:
            async with asyncio.timeout(around.policy.start_timeout_s):
                await self._unless_trouble(self._become_ready(child, self._runtime, tell))
        except TimeoutError:
            raise RequestError.from_failure(
                failures.start_timed_out(around.kind.title, around.policy.start_timeout_s)
            ) from None
        self.load_time_s = around.clock.monotonic() - started_s
        child.was_ready = True
        await self.footprint.measure()
        self.advance(ResidencyState.READY)
        self.ready_wall_s = around.clock.wall()
        self._last_sign_s = around.clock.monotonic()
        self.use.open()
        self.hold.load_is_complete()
        self._watch(self._watch_liveness(self._runtime), "liveness")
        self._watch(self._watch_idle(), "idle")

    async def _become_ready(
        self, child: Child, runtime: Runtime, tell: Callable[[engine_pb.LoadModelResponse], None]
    ) -> None:
        await until_ready(child, runtime.is_ready, ReadinessPolicy(timeout_s=self._around.policy.start_timeout_s))
        async with contextlib.aclosing(runtime.load(self.plan)) as progress:
            async for step in progress:
                if isinstance(step, MemoryAnnounced):
                    await self._raise_to(step.total_bytes)
                else:
                    tell(engine_pb.LoadModelResponse(starting=step))

    async def _raise_to(self, total_bytes: int) -> None:
        """Make the lease cover what the engine says that it will hold; else it must end, before it holds it."""
        if (claim := raised(self.hold.lease, total_bytes)) is None:
            return
        granted = placed_bytes(self.hold.lease)
        try:
            await self.hold.resize(claim)
        except LeaseEndingError:
            raise _lease_over() from None
        except RequestError as error:
            if error.failure.code is grpc.StatusCode.UNAVAILABLE:
                raise  # nobody has said that there is no room
            failure = failures.announced_too_much(self._around.kind.title, total_bytes, granted, error.failure.message)
            self.set_trouble(Trouble("OUT_OF_GRANT", failure))
            raise RequestError.from_failure(failure) from error
        self.hold.granted_bytes = max(self.hold.granted_bytes, self.hold.charged_bytes)
        _log.info("lease_raised", lease_id=self.hold.lease_id, announced_bytes=total_bytes, granted_bytes=granted)

    async def _unless_trouble(self, work: Awaitable[None]) -> None:
        working = asyncio.ensure_future(work)
        try:
            await first_of(working, self.trouble)
            if working.done() and not self.trouble.done() and _is_unexplained(working):
                # A dead engine is noticed first by the call that it breaks; why it died is known a moment later.
                await first_of(self.trouble, timeout_s=4 * LAST_WORD_S)
            if self.trouble.done():
                raise RequestError.from_failure(self.trouble.result().failure)
            working.result()
        except EngineLostError as error:
            raise RequestError(
                grpc.StatusCode.INTERNAL,
                "ENGINE_START_FAILED",
                f"{self._around.kind.title} broke off the load ({error}).",
            ) from error
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    # -- end --

    async def stop(self) -> None:
        """End the process for certain. The lease is still held after this: release it, :attr:`hold`."""
        await self._watchers.aclose()
        try:
            if self.footprint is not None and self.child is not None and not self.child.has_ended:
                await self.footprint.measure()
            if self._runtime is not None:
                await self._runtime.aclose()
        finally:
            # Whatever failed above: no engine outlives its residency.
            if self.child is not None:
                await self._stop_child(self.child)
                self._around.record.clear()
            if self._workspace is not None:
                shutil.rmtree(self._workspace, ignore_errors=True)
            self.advance(ResidencyState.GONE)

    async def _stop_child(self, child: Child) -> None:
        """Within its grace. Where its lease is lost, also meanwhile, within :data:`LOST_GRACE_S` from then on."""
        lost, now = self.hold.lost, self._around.clock.monotonic
        grace_s = self._around.policy.stop_grace_s
        if not lost.done():
            ends_s = now() + grace_s
            stopping = asyncio.ensure_future(child.stop(grace_s))
            try:
                await first_of(stopping, lost)
                if stopping.done():
                    stopping.result()
                    return
            finally:
                stopping.cancel()
                await asyncio.gather(stopping, return_exceptions=True)
            grace_s = max(0.0, ends_s - now())
        await child.stop(min(grace_s, LOST_GRACE_S))

    # -- watchers: each sets a future, none acts --

    def _watch(self, work: Awaitable[None], name: str) -> None:
        async def run() -> None:
            await work

        contextvars.Context().run(self._watchers.start, run(), f"watch-{name}-{self.hold.lease_id}")

    async def _watch_lease(self) -> None:
        failure = await asyncio.shield(self.hold.lost)
        if failure.reason == "OUT_OF_GRANT":
            self.set_trouble(Trouble("OUT_OF_GRANT", failure))
        else:
            _log.error("lease_lost", lease_id=self.hold.lease_id, reason=failure.reason)
            self.set_trouble(Trouble("LEASE_LOST", _lease_over().failure))

    async def _watch_child(self, child: Child) -> None:
        self._ended_by(child, await child.wait())

    async def _watch_output(self, child: Child) -> None:
        line = await child.wait_fatal()
        await first_of(asyncio.ensure_future(child.wait()), timeout_s=LAST_WORD_S)
        if not child.has_ended:
            self._ended_by(child, ExitFacts(fatal=line, was_ready=child.was_ready))

    def _ended_by(self, child: Child, facts: ExitFacts) -> None:
        if facts.asked:
            return
        why = (
            explain(facts, self._around.kind.title, child.spec.exit_meanings)
            if child.spec.explain is None
            else child.spec.explain(facts)
        )
        _log.warning("engine_ended", lease_id=self.hold.lease_id, **why.metadata)
        failure = failures.engine_died(why) if facts.was_ready else failures.start_failed(why)
        self.set_trouble(Trouble("CRASHED", failure, is_crash=failure.reason != failures.ENGINE_LOCKED))

    async def _watch_footprint(self, footprint: Footprint) -> None:
        while True:
            held = await footprint.measure()
            grant = self.hold.charged_host_bytes
            if judge(held, grant, self._priced_host_bytes) is FootprintVerdict.KILL:
                self.set_trouble(
                    Trouble("OUT_OF_GRANT", failures.out_of_grant(format_gib(held), format_gib(grant), held, grant))
                )
                return
            if held > grant:
                self.hold.renew_soon()  # the ledger may grant the difference, or say that it cannot
            await self._around.clock.sleep(self._around.policy.footprint_period_s)

    async def _watch_shrink(self, footprint: Footprint) -> None:
        """Optional bytes are given back as far as they are free; the rest is left undone, and others are asked then."""
        while True:
            await self.hold.shrink_asked.wait()
            self.hold.shrink_asked.clear()
            claim = shrunk(self.hold.lease, await footprint.measure(), self.hold.shrink_bytes)
            if claim is None:
                _log.info("shrink_left_undone", lease_id=self.hold.lease_id, held_bytes=footprint.now_bytes)
                continue
            try:
                await self.hold.resize(claim)
            except (LeaseEndingError, RequestError) as error:
                _log.info("shrink_failed", lease_id=self.hold.lease_id, **describe_error(error))

    async def _watch_liveness(self, runtime: Runtime) -> None:
        policy = self._around.policy.liveness
        await until_dead(
            runtime.is_alive,
            policy,
            excused=lambda: self._around.clock.monotonic() - self._last_sign_s < policy.interval_s,
        )
        failure = RpcFailure(
            grpc.StatusCode.UNAVAILABLE,
            "ENGINE_DIED",
            f"{self._around.kind.title} no longer answers and was ended.",
            {"cause": "HANGS"},
            retry_after_s=0.5,
        )
        self.set_trouble(Trouble("HANGS", failure, is_crash=True))

    async def _watch_idle(self) -> None:
        await self.use.until_idle()
        self.on_idle()  # at once, so that no call comes in between


def _make_workspace(run_dir: Path, kind: str, lease_id: str) -> Path:
    # Short, because a socket's path may have 100 bytes in all.
    folder = run_dir / f"{kind}-{abs(hash(lease_id)) % 16**6:06x}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


def _is_unexplained(work: "asyncio.Future[None]") -> bool:
    if work.cancelled():
        return True
    error = work.exception()
    return error is not None and not (isinstance(error, RequestError) and error.failure.is_ours)


def _starting(phase: str) -> engine_pb.LoadModelResponse:
    return engine_pb.LoadModelResponse(starting=engine_pb.LoadStarting(phase=phase, fraction=-1.0))


def _lease_over() -> RequestError:
    return RequestError(
        grpc.StatusCode.UNAVAILABLE,
        "LEASE_LOST",
        "The ledger has given this engine's memory away, so the engine was ended. Ask again for a new claim.",
        retry_after_s=0.5,
    )

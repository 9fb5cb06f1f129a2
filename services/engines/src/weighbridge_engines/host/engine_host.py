"""The order of it all: one owner of one engine, who loads, shares, replaces and ends."""

import asyncio
import contextvars
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

import grpc
import structlog
from weighbridge_common.tasks import TaskOwner
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.errors import RequestError, RpcFailure
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as ledger_pb
from weighbridge_proto.memory.v1 import requirement_pb2

from weighbridge_engines.host import failures
from weighbridge_engines.host.kind import EngineBrokenError, KindDescription
from weighbridge_engines.host.lease import LeaseHold
from weighbridge_engines.host.ledger import ClaimTerms, LedgerGateway
from weighbridge_engines.host.loads import LoadJob
from weighbridge_engines.host.metrics import HostMetrics
from weighbridge_engines.host.plans import Planner, RequestKey, claimed_bytes, key_of, planned_bytes, purpose_of
from weighbridge_engines.host.residency import Residency, Surroundings, Trouble
from weighbridge_engines.host.states import ResidencyState, engine_state
from weighbridge_engines.host.waiting import first_of
from weighbridge_engines.host.wish import Wish
from weighbridge_engines.supervisor.budget import RestartBudget

RELEASE_WAIT_S = 2.0
"""How long an end waits for the ledger to hear of it; after that the release is repeated in the background."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Ending:
    """Why a model ends.

    Attributes:
        reason: for the ledger's log.
        failure: what requests in flight are told; None: they are waited for.
    """

    reason: str
    failure: RpcFailure | None = None


class EngineHost:
    """Owns what is loaded.

    Attributes:
        description: what the engine is here.
        last_failure: why the last load or model ended unasked.
    """

    def __init__(
        self,
        around: Surroundings,
        description: KindDescription,
        planner: Planner,
        ledger: LedgerGateway,
        budget: RestartBudget,
        default_idle_timeout_s: float | None,
    ) -> None:
        self.around = around
        self.description = description
        self.last_failure: RpcFailure | None = None
        self.stopping = False
        self.node_id = ""
        self._planner = planner
        self._ledger = ledger
        self._budget = budget
        self._default_idle_timeout_s = default_idle_timeout_s
        self._last_end = ""
        self._metrics = HostMetrics(around.kind.name)
        self._current: Residency | None = None
        self._replaced: Residency | None = None
        """The loaded model, while a claim waits to take the place of its lease."""
        self._endings: dict[Residency, asyncio.Task[None]] = {}
        self._overseers: dict[Residency, asyncio.Task[None]] = {}
        self._jobs: list[LoadJob] = []
        self._turn = asyncio.Lock()
        self._tasks = TaskOwner()
        self._releases = TaskOwner()
        self._changed = asyncio.Event()

    # -- what others see --

    @property
    def current(self) -> Residency | None:
        """What holds the engine now, in whatever state."""
        return self._current

    @property
    def metrics(self) -> HostMetrics:
        """The engine's instruments."""
        return self._metrics

    @property
    def state(self) -> "engine_pb.EngineState.ValueType":
        """What the engine is doing."""
        current = None if self._current is None else self._current.state
        return engine_state(self.stopping, current, bool(self._jobs))

    @property
    def next_change(self) -> asyncio.Event:
        """Set at the next change of what others see; another one stands for the change after that."""
        return self._changed

    def tell_change(self) -> None:
        """Something that others see has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    # -- loading --

    def find_ready(self, wish: Wish, key: RequestKey | None) -> Residency | None:
        """The loaded model, if it is what is wished for."""
        current = self._current
        if current is None or current.state is not ResidencyState.READY or not current.terms.cover(wish.terms):
            return None
        if key is None:
            return current
        matches = any(
            alias.model == key.model and (wish.any_shape or alias.details == key.details) for alias in current.aliases
        )
        return current if matches else None

    def find_job(self, wish: Wish, key: RequestKey | None) -> LoadJob | None:
        """A load in progress of what is wished for; without a model, the latest."""
        for job in reversed(self._jobs):
            matches = key is None or any(
                alias.model == key.model and (wish.any_shape or alias.details == key.details) for alias in job.aliases
            )
            if matches and job.can_be_joined and job.terms.cover(wish.terms):
                return job
        return None

    def find_same(self, wish: Wish, plan: fit_pb.PlanModelResponse, key: RequestKey) -> Residency | LoadJob | None:
        """What is loaded or being loaded by the same plan, though asked for in other words; remembers the words."""
        plan_key, current = key_of(plan), self._current
        there: list[Residency | LoadJob] = [job for job in self._jobs if job.can_be_joined]
        if current is not None and current.state is ResidencyState.READY:
            there.insert(0, current)
        for found in there:
            if not found.terms.cover(wish.terms):
                continue
            if found.key == plan_key:
                found.aliases.add(key)
                return found
            if wish.any_shape and found.key.is_same_model(plan_key):
                # The words mean this model, but the shape in them is not the one that it has.
                found.aliases.add(RequestKey(key.model, next(iter(found.aliases)).details))
                return found
        return None

    async def plan(self, wish: Wish) -> fit_pb.PlanModelResponse:
        """The plan of a wish.

        Raises:
            RequestError: fit's refusal, MODEL_WONT_RUN, CATALOG_MODEL_NOT_ON_DISK, or an option of another engine.
        """
        assert wish.model is not None
        if self.description.unavailable_reason:
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION, "ENGINE_UNAVAILABLE", self.description.unavailable_reason
            )
        self.around.kind.check_options(wish.options)
        plan = await self._planner.plan(wish.model, wish.workload, wish.options, self.description.engine_build)
        self.node_id = plan.capacity.node_id or self.node_id
        wont_run = plan.assessment.verdict == requirement_pb2.VERDICT_WONT_RUN
        if wish.model.HasField("catalog_id") and not plan.resolved_path:
            # Nobody should get the files of what would be refused then.
            raise failures.wont_run(plan) if wont_run else failures.not_on_disk(plan)
        self.around.kind.check_plan(plan)
        if wont_run:
            raise failures.wont_run(plan)
        if wish.options.sd.parts:
            # The other options come back as planned. With these, the plan can be made again for other work.
            plan.options.sd.parts.update(wish.options.sd.parts)
        return plan

    def start_load(self, wish: Wish, key: RequestKey, plan: fit_pb.PlanModelResponse) -> LoadJob:
        """Begin to load; the work belongs to the caller's trace."""
        self.refuse_if_stopping()
        exhausted_s = self._budget.exhausted_for_s(self.around.clock.monotonic())
        if exhausted_s is not None:
            raise failures.budget_exhausted(self.around.kind.title, exhausted_s, self._last_end)
        assert wish.model is not None
        job = LoadJob(wish.model, plan, key, self._terms_of(wish))
        job.tell(engine_pb.LoadModelResponse(planned=engine_pb.LoadPlanned(plan=plan)))
        self._jobs.append(job)
        job.run_as(asyncio.create_task(self._run(job, wish), name=f"load-{plan.model_name}"))
        self.tell_change()
        return job

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> "asyncio.Task[Any]":
        """Do something that outlives the call which began it; it ends with the host at the latest."""
        return self._tasks.start(work, name)

    def refuse_if_stopping(self) -> None:
        """Raise ENGINE_STOPPING once the service ends."""
        if self.stopping:
            raise failures.engine_stopping(self.around.kind.title)

    async def _run(self, job: LoadJob, wish: Wish) -> Residency:
        try:
            async with self._turn:
                residency = await self._load(job, wish)
                residency.aliases |= job.aliases
                for stake in job.users:
                    residency.use.take(stake)
                return residency
        except RequestError as error:
            self.last_failure = error.failure
            raise
        finally:
            self._jobs.remove(job)
            self.tell_change()

    async def _load(self, job: LoadJob, wish: Wish) -> Residency:
        if (same := self._loaded_as(job)) is not None:
            return same
        if self._current is not None and self._current.state is ResidencyState.READY:
            await self._current.use.until_begun()
        self.refuse_if_stopping()
        await self.around.clock.sleep(self._budget.delay_s(self.around.clock.monotonic()))
        hold = await self._claim(job)
        residency = Residency(job.model, job.plan, job.terms, job.aliases, hold, self.around)
        self._current = residency
        self.tell_change()
        try:
            await residency.start(job.tell)
        except BaseException as error:
            # In a task of its own: being cancelled once more must not leave the process behind.
            await asyncio.shield(self.end(residency, self._after_failed_start(residency, error)))
            raise
        timeout_s = self._default_idle_timeout_s if wish.idle_timeout_s is None else wish.idle_timeout_s
        residency.use.change_idle_terms(job.terms.pinned, timeout_s or None)
        residency.on_idle = lambda: self.end(residency, Ending("IDLE"))
        self.last_failure = None
        self._metrics.loaded(job.plan.model_name, residency.load_time_s)
        # What becomes of it later belongs to no request's trace.
        self._overseers[residency] = contextvars.Context().run(
            self._tasks.start, self._oversee(residency), f"oversee-{hold.lease_id}"
        )
        return residency

    def _terms_of(self, wish: Wish) -> ClaimTerms:
        """The terms of a claim for ``wish``: where it does not say, those of this kind of engine."""
        exclusive = self.around.kind.exclusive if wish.terms.exclusive is None else wish.terms.exclusive
        return replace(wish.terms, exclusive=exclusive)

    def _loaded_as(self, job: LoadJob) -> Residency | None:
        """The loaded model, if it is what ``job`` would load: the load before it may have."""
        current = self._current
        if current is None or current.state is not ResidencyState.READY or current.key != job.key:
            return None
        return current if current.terms.cover(job.terms) else None

    async def _claim(self, job: LoadJob) -> LeaseHold:
        """An active lease for ``job``, and nothing in the engine any more.

        What is loaded stays, and serves, while the claim waits: it is asked to vacate when nothing else is missing, and
        not at all if the claim is refused, cancelled, or waits for too long.
        """
        current = self._current
        if current is not None and current.state is not ResidencyState.READY:
            await asyncio.shield(self.end(current, Ending("REPLACED")))
            current = None
        self._replaced = current
        try:
            hold = await self._ledger.admit(
                job.plan,
                purpose_of(job.plan, self.around.kind.name, self.description.engine_build),
                job.terms,
                lambda response: self._tell_admission(job, response),
                lambda owed: self._release_later(owed, "LOAD_CANCELLED"),
                None if current is None else current.hold,
            )
        finally:
            self._replaced = None
        try:
            if self._current is not None:  # its lease is gone, and it is about to be
                await asyncio.shield(self.end(self._current, Ending("REPLACED")))
        except BaseException:
            self._release_later(hold, "LOAD_CANCELLED")
            raise
        return hold

    def _after_failed_start(self, residency: Residency, error: BaseException) -> Ending:
        if isinstance(error, asyncio.CancelledError):
            return Ending("LOAD_CANCELLED", failures.superseded().failure)
        failure = error.failure if isinstance(error, RequestError) else None
        trouble = residency.trouble.result() if residency.trouble.done() else None
        refused = failure is not None and failure.code is grpc.StatusCode.INVALID_ARGUMENT
        of_the_ledger = failure is not None and failure.reason in ("LEDGER_UNREACHABLE", "LEASE_LOST")
        failed = not of_the_ledger if trouble is None else trouble.is_crash
        if failed and not refused:
            # A model that the engine refuses says nothing about the engine, nor does a ledger that refuses or is away.
            self._count_end(failure.message if failure else f"{self.around.kind.title} could not be started.")
        return Ending(trouble.reason if trouble else "LOAD_FAILED", failure or failures.model_unloaded())

    def _tell_admission(self, job: LoadJob, response: ledger_pb.AdmitResponse) -> None:
        event = response.WhichOneof("event")
        if event == "queued":
            queued = response.queued
            job.tell(
                engine_pb.LoadModelResponse(
                    queued=engine_pb.LoadQueued(position=queued.position, reasons=queued.reasons, waited=queued.waited)
                )
            )
        elif event == "reclaiming":
            job.tell(
                engine_pb.LoadModelResponse(
                    reclaiming=engine_pb.LoadReclaiming(
                        victim_lease_ids=response.reclaiming.victim_lease_ids, deadline=response.reclaiming.deadline
                    )
                )
            )
        elif event == "granted":
            self.node_id = response.granted.lease.node_id or self.node_id
            job.tell(engine_pb.LoadModelResponse(admitted=engine_pb.LoadAdmitted(lease=response.granted.lease)))

    # -- ending --

    def end(self, residency: Residency, ending: Ending) -> "asyncio.Task[None]":
        """End a model: once, however often asked; a later call can only make it quicker."""
        task = self._endings.get(residency)
        if task is None:
            residency.advance(ResidencyState.ENDING)
            task = self._tasks.start(self._end(residency, ending), f"end-{residency.hold.lease_id}")
            self._endings[residency] = task
            self.tell_change()
        if ending.failure is not None and not residency.forced.done():
            self._tasks.start(residency.force(ending.failure), f"force-{residency.hold.lease_id}")
        return task

    async def _end(self, residency: Residency, ending: Ending) -> None:
        try:
            if ending.failure is None:
                await residency.until_free()
            await residency.stop()
            if residency.was_ready:
                await self._observe(residency)
        finally:
            # Whatever went wrong above: the ledger keeps the bytes charged for as long as it sees the process.
            releasing = self._release_later(residency.hold, ending.reason)
            await first_of(releasing, timeout_s=RELEASE_WAIT_S)
            if self._current is residency:
                self._current = None
            self._endings.pop(residency, None)
            if (overseer := self._overseers.pop(residency, None)) is not None:
                overseer.cancel()
            self.tell_change()

    async def _observe(self, residency: Residency) -> None:
        plan, footprint = residency.measured_as, residency.footprint
        if plan is None or footprint is None or footprint.peak_bytes <= 0:
            return
        self._metrics.peaked(plan.model_name, planned_bytes(plan), footprint.peak_bytes)
        observation = lease_pb2.Observation(
            model_digest=plan.model_digest,
            engine_build=self.description.engine_build,
            shape=plan.shape,
            planned_bytes=planned_bytes(plan),
            claimed_bytes=claimed_bytes(plan),
            granted_bytes=residency.hold.granted_bytes,
            peak_bytes=footprint.peak_bytes,
            lease_id=residency.hold.lease_id,
        )
        observation.load_time.FromNanoseconds(round(residency.load_time_s * 1e9))
        await self._ledger.record(observation)

    def _release_later(self, hold: LeaseHold, reason: str) -> "asyncio.Task[None]":
        return self._releases.start(hold.release(reason), f"release-{hold.lease_id}")

    async def _oversee(self, residency: Residency) -> None:
        trouble, vacate = residency.trouble, residency.hold.vacate
        await first_of(trouble, vacate)
        if vacate.done() and not trouble.done():
            _log.info("vacating", lease_id=residency.hold.lease_id, reason=vacate.result().reason)
            self._end_vacated(residency)
        await first_of(trouble)
        self._end_in_trouble(residency, trouble.result())

    def _end_vacated(self, residency: Residency) -> "asyncio.Task[None]":
        return self.end(residency, Ending("REPLACED" if residency is self._replaced else "VACATED"))

    def _end_in_trouble(self, residency: Residency, trouble: Trouble) -> None:
        if trouble.is_crash:
            self._count_end(trouble.failure.message)
        self.last_failure = trouble.failure
        self.end(residency, Ending(trouble.reason, trouble.failure))

    def recycle(self, residency: Residency, error: EngineBrokenError) -> RequestError:
        """End an engine that answers and can serve no more; returns what its callers are told.

        At once: whoever is next in its queue is to have it loaded again, and must find it ending for this reason.
        """
        if residency.trouble.done():
            return RequestError.from_failure(residency.trouble.result().failure)
        if residency.forced.done():
            return RequestError.from_failure(residency.forced.result())
        _log.warning("engine_recycled", lease_id=residency.hold.lease_id, seen=str(error))
        failure = failures.engine_recycled(self.around.kind.title, str(error))
        trouble = Trouble(failures.ENGINE_RECYCLED, failure, is_crash=True)
        residency.set_trouble(trouble)
        if (overseer := self._overseers.pop(residency, None)) is not None:
            overseer.cancel()
        self._end_in_trouble(residency, trouble)
        return RequestError.from_failure(failure)

    def _count_end(self, how: str) -> None:
        """It ended unasked: too often so, and it is left alone for a while. Who kills it by hand counts too, for that
        may be the kernel; what callers are told says which it was."""
        self._budget.record_failure(self.around.clock.monotonic())
        self._last_end = how

    async def leave_ending(self, residency: Residency) -> None:
        """End a model whose lease takes no new use, and return when it has ended."""
        if self._current is residency:  # else it ended while the ledger was asked
            await asyncio.shield(self._end_vacated(residency))

    async def unload(self, force: bool) -> Residency | None:
        """Stop loads in progress and end what is loaded; returns what that was."""
        loads = list(self._jobs)
        for job in loads:
            job.stop(failures.superseded())
        for job in loads:
            await job.ended()
        current = self._current
        if current is None:
            return None
        await asyncio.shield(self.end(current, Ending("UNLOADED", failures.model_unloaded() if force else None)))
        return current if current.was_ready else None

    def begin_stop(self) -> None:
        """The service ends: loads are stopped and nothing new begins; answers in flight go on."""
        self.stopping = True
        for job in list(self._jobs):
            job.stop(failures.engine_stopping(self.around.kind.title))
        self.tell_change()

    async def aclose(self) -> None:
        """End everything: process, lease, tasks."""
        self.begin_stop()
        try:
            for job in list(self._jobs):
                await job.ended()
            if self._current is not None:
                stopping = failures.engine_stopping(self.around.kind.title).failure
                await self.end(self._current, Ending("SERVICE_STOPPED", stopping))
        finally:
            await self._tasks.aclose()
            await self._releases.aclose()

"""One render from its place in the queue to its end, whoever still waits for it.

Nothing but the end of its process stops a render that has begun. So a cancelled one is finished and discarded if that
is expected to take no longer than :data:`DISCARD_S`, by the steps that it took so far; else the engine is ended, and
loaded again for whoever is next. Until either has happened the lease is in use, and nobody else has a turn.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator

import structlog
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb

from weighbridge_engines.host import failures
from weighbridge_engines.host.engine_host import Ending, EngineHost
from weighbridge_engines.host.kind import EngineLostError
from weighbridge_engines.host.pace import RenderPace
from weighbridge_engines.host.refusals import LeaseEndingError
from weighbridge_engines.host.residency import Residency
from weighbridge_engines.host.troubles import broken_off, explained
from weighbridge_engines.host.waiting import first_of
from weighbridge_engines.sd_server.jobs import ImageRuntime, Rendered, RenderJob, RenderProgress

DISCARD_S = 10.0
"""A cancelled render that is not over by then is ended with its engine. To load a model again takes about as long."""

_log = structlog.get_logger(__name__)


class RenderTurn:
    """See the module. It has a stake in the model from its making on until the render is over. Whoever made it and
    waits no more must :meth:`leave`.

    Args:
        host: the engine.
        residency: the loaded model.
        runtime: its engine's client.
        plan: what the render was planned as; the lease is made to cover it.
        job: what to render.
        number: its place among those who wait, see :meth:`weighbridge_engines.host.requests.RequestQueue.slot`.
    """

    def __init__(
        self,
        host: EngineHost,
        residency: Residency,
        runtime: ImageRuntime,
        plan: fit_pb.PlanModelResponse,
        job: RenderJob,
        number: int,
    ) -> None:
        self._host = host
        self._residency = residency
        self._runtime = runtime
        self._plan = plan
        self._job = job
        self._number = number
        self._use_id = uuid.uuid4().hex
        self._pace = RenderPace(job.batch)
        self._begun = False
        self._left = False
        self._failure: Exception | None = None
        self._events: asyncio.Queue[int | RenderProgress | Rendered | None] = asyncio.Queue()
        residency.use.take(self)
        self._task = host.start(self._run(), f"render-{residency.hold.lease_id}")
        # A task that is cancelled before its first step runs none of its own code.
        self._task.add_done_callback(lambda task: self._over())

    async def events(self) -> AsyncGenerator[int | RenderProgress | Rendered, None]:
        """Places in the queue, from 1; then progress; last the images.

        Raises:
            LeaseEndingError: the model is ending and did not come to this render. It is to be loaded again.
            RequestError: why there are no images.
        """
        while (event := await self._events.get()) is not None:
            yield event
        if self._failure is not None:
            raise self._failure

    def leave(self) -> None:
        """Nobody waits for it any more: it is dropped from the queue, or ends as the module says."""
        if self._left or self._task.done():
            return
        self._left = True
        if not self._begun:
            self._task.cancel()
        else:
            self._residency.use.give_up(self)
            self._host.tell_change()
            self._host.start(self._discard(), f"discard-{self._residency.hold.lease_id}")

    # -- inside --

    async def _run(self) -> None:
        residency, hold = self._residency, self._residency.hold
        try:
            async with residency.queue.slot(self._events.put_nowait, self._number):
                try:
                    self._refuse_broken_off()
                    await self._cover()
                    async with contextlib.aclosing(hold.begin_use(self._use_id, residency.forced)) as rests:
                        async for _ in rests:
                            self._events.put_nowait(1)  # first in line, and its device must rest
                    residency.use.begun(self)
                    self._host.tell_change()
                    await self._render()
                except LeaseEndingError:
                    self._refuse_broken_off()
                    raise
                finally:
                    hold.end_use(self._use_id)
        except Exception as error:
            self._failure = error

    async def _cover(self) -> None:
        """Have the lease large enough for it. Raises as :meth:`Residency.cover`."""
        try:
            await self._residency.cover(self._plan)
        except RequestError as refused:
            if refused.failure.reason != "CANNOT_GROW":
                raise
            raise failures.no_room_to_render(refused.failure) from refused

    def _over(self) -> None:
        self._residency.use.drop(self)
        self._host.tell_change()
        if self._failure is None and self._task.cancelled():
            self._failure = failures.engine_stopping(self._host.around.kind.title)
        self._events.put_nowait(None)

    def _refuse_broken_off(self) -> None:
        """A model that was ended at once is not loaded again for those who waited, unless it was ended only for a
        render that somebody else had cancelled."""
        failure = broken_off(self._residency)
        if failure is not None:
            raise LeaseEndingError if failure.failure.reason == failures.RENDER_CANCELLED else failure

    async def _render(self) -> None:
        residency, now = self._residency, self._host.around.clock.monotonic
        began_s, self._begun = now(), True
        try:
            async with contextlib.aclosing(self._runtime.render(self._job)) as events:
                async for event in events:
                    residency.sign_of_life()
                    if isinstance(event, RenderProgress):
                        self._pace.heard(event, now())
                    if not self._left:
                        self._events.put_nowait(event)
        except EngineLostError as error:
            raise await explained(residency, error) from error
        residency.has_done(self._plan)
        residency.queue.note_duration(now() - began_s)

    async def _discard(self) -> None:
        clock, residency = self._host.around.clock, self._residency
        left_s = self._pace.seconds_left(clock.monotonic())
        if left_s is not None and left_s <= DISCARD_S:
            pause = asyncio.ensure_future(clock.sleep(DISCARD_S))
            try:
                await first_of(self._task, pause)
            finally:
                pause.cancel()
        if not self._task.done():
            _log.info("render_stopped", lease_id=residency.hold.lease_id, seconds_left=left_s)
            await asyncio.shield(self._host.end(residency, Ending("RENDER_CANCELLED", failures.render_cancelled())))
        elif isinstance(self._failure, RequestError):
            _log.info("discarded_render_failed", lease_id=residency.hold.lease_id, reason=self._failure.failure.reason)

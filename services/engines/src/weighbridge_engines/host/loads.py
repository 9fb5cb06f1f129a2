"""One load, wanted by one call or by several: what happened so far is told to each, and the last to leave stops it."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb
from weighbridge_proto.fit.v1 import weights_pb2

from weighbridge_engines.host.ledger import ClaimTerms
from weighbridge_engines.host.plans import PlanKey, RequestKey, key_of

if TYPE_CHECKING:
    from weighbridge_engines.host.residency import Residency


class LoadJob:
    """A load in progress.

    Attributes:
        model: as it was named first.
        key: which load it is.
        plan: its plan.
        terms: of its claim.
        aliases: the requests that mean it.
        users: stakes of calls that want to use the model when it is loaded: until they have, it is not replaced.
    """

    def __init__(
        self, model: weights_pb2.ModelRef, plan: fit_pb.PlanModelResponse, alias: RequestKey, terms: ClaimTerms
    ) -> None:
        self.model = model
        self.key: PlanKey = key_of(plan)
        self.plan = plan
        self.terms = terms
        self.aliases: set[RequestKey] = {alias}
        self.users: set[object] = set()
        self.stop_reason: RequestError | None = None
        self._waiters: set[object] = set()
        self._events: list[tuple[int, engine_pb.LoadModelResponse]] = []
        self._told = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[Residency] | None = None

    def run_as(self, task: "asyncio.Task[Residency]") -> None:
        """``task`` does the work; it is started in the context of the first caller, whose trace the load belongs to."""
        self._task = task
        task.add_done_callback(self._finished)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._task is not None and self._task.done()

    @property
    def can_be_joined(self) -> bool:
        """Whether it goes on: neither ended nor being stopped."""
        return self._task is not None and not self._task.done() and not self._task.cancelling()

    def tell(self, event: engine_pb.LoadModelResponse) -> None:
        """Tell all who follow. Of consecutive events of one kind only the latest is kept for those who come later."""
        kind = event.WhichOneof("event")
        if self._events and self._events[-1][1].WhichOneof("event") == kind:
            self._events.pop()
        self._told += 1
        self._events.append((self._told, event))
        self._wake()

    def join(self, stake: object, wants_use: bool) -> None:
        """A call wants this load."""
        self._waiters.add(stake)
        if wants_use:
            self.users.add(stake)

    def leave(self, stake: object) -> None:
        """A call wants it no more. The last one stops the load."""
        self._waiters.discard(stake)
        self.users.discard(stake)
        if not self._waiters:
            self.stop(None)

    def stop(self, reason: RequestError | None) -> None:
        """Stop it; those who still follow get ``reason``."""
        if self._task is not None and not self._task.done() and not self._task.cancelling():
            self.stop_reason = reason
            self._task.cancel()

    async def follow(self) -> AsyncIterator[engine_pb.LoadModelResponse]:
        """What happened and what happens, until it has ended."""
        seen = 0
        while True:
            for number, event in list(self._events):
                if number > seen:
                    seen = number
                    yield event
            if self._told > seen:
                continue
            if self.done:
                return
            await self._changed.wait()

    def result(self) -> "Residency":
        """The loaded model, once it has ended.

        Raises:
            RequestError: why it failed.
        """
        assert self._task is not None
        if self._task.cancelled():
            assert self.stop_reason is not None, "without a reason it is stopped only when nobody follows"
            raise self.stop_reason
        return self._task.result()

    async def ended(self) -> None:
        """Return when it has ended and left nothing behind."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _finished(self, task: "asyncio.Task[Residency]") -> None:
        if not task.cancelled():
            task.exception()  # looked at: with nobody left to hear it, it is no defect
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

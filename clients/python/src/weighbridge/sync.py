"""The suite for programs without asyncio."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from weighbridge_proto.engines.v1 import chat_service_pb2, engine_service_pb2
from weighbridge_proto.fit.v1 import fit_service_pb2, weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge.client import Suite

T = TypeVar("T")


class SyncSuite:
    """:class:`weighbridge.Suite` with methods that block; arguments and failures are the same.

    Use it as ``with SyncSuite() as suite``. Calls may come from any thread. Interrupting a blocked call (Ctrl-C)
    cancels it on the server; leaving a stream early does too.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        services: Mapping[str, str] | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weighbridge-suite", daemon=True)
        self._thread.start()
        self._suite = Suite(environ, services=services, patience_s=patience_s)

    def __enter__(self) -> "SyncSuite":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection and end the thread behind this object. Closing twice is closing once."""
        if self._loop.is_closed():
            return
        self._wait(self._suite.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def resolve_model(self, text: str) -> weights_pb2.ModelRef:
        """See :meth:`weighbridge.Suite.resolve_model`."""
        return self._wait(self._suite.resolve_model(text))

    def describe_weights(self, model: weights_pb2.ModelRef) -> fit_service_pb2.DescribeWeightsResponse:
        """See :meth:`weighbridge.Suite.describe_weights`."""
        return self._wait(self._suite.describe_weights(model))

    def plan_model(self, model: weights_pb2.ModelRef, **choices: Any) -> fit_service_pb2.PlanModelResponse:
        """See :meth:`weighbridge.Suite.plan_model`."""
        return self._wait(self._suite.plan_model(model, **choices))

    def capacity(self, machine: machine_pb2.Machine | None = None) -> ledger_service_pb2.GetCapacityResponse:
        """See :meth:`weighbridge.Suite.capacity`."""
        return self._wait(self._suite.capacity(machine))

    def leases(self, *, include_released: bool = False) -> ledger_service_pb2.ListLeasesResponse:
        """See :meth:`weighbridge.Suite.leases`."""
        return self._wait(self._suite.leases(include_released=include_released))

    def observations(self, **which: Any) -> Sequence[lease_pb2.Observation]:
        """See :meth:`weighbridge.Suite.observations`."""
        return self._wait(self._suite.observations(**which))

    def engine(self, kind: str) -> engine_service_pb2.GetEngineResponse:
        """What the engine ``kind`` is, has and does."""
        return self._wait(self._suite.engine(kind).describe())

    def load(
        self, kind: str, model: weights_pb2.ModelRef, **choices: Any
    ) -> Generator[engine_service_pb2.LoadModelResponse, None, None]:
        """See :meth:`weighbridge.Engine.load`."""
        return self._iterate(lambda: self._suite.engine(kind).load(model, **choices))

    def unload(self, kind: str, *, force: bool = False) -> engine_service_pb2.UnloadModelResponse:
        """See :meth:`weighbridge.Engine.unload`."""
        return self._wait(self._suite.engine(kind).unload(force=force))

    def chat(
        self, kind: str, request: chat_service_pb2.ChatRequest
    ) -> Generator[chat_service_pb2.ChatResponse, None, None]:
        """See :meth:`weighbridge.Engine.chat`."""
        return self._iterate(lambda: self._suite.engine(kind).chat(request))

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return running.result()
        except BaseException:
            if running.cancel():
                # Its task ends some steps of the loop later, and a stream cannot be closed before.
                asyncio.run_coroutine_threadsafe(_ended(call), self._loop).result()
            raise

    def _iterate(self, start: Callable[[], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
        stream = start()
        try:
            while True:
                try:
                    yield self._wait(_next(stream))
                except StopAsyncIteration:
                    return
        finally:
            self._wait(stream.aclose())


async def _ended(call: Coroutine[Any, Any, Any]) -> None:
    """Return when the task that runs ``call`` has ended."""
    tasks = [task for task in asyncio.all_tasks() if task.get_coro() is call]
    if tasks:
        await asyncio.wait(tasks)


async def _next(stream: AsyncGenerator[T, None]) -> T:
    return await anext(stream)

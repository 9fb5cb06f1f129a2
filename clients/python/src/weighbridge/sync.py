"""The suite for programs without asyncio."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent import futures
from types import TracebackType
from typing import Any, Generic, TypeVar

from weighbridge_proto.engines.v1 import chat_service_pb2, engine_service_pb2, image_service_pb2
from weighbridge_proto.fit.v1 import fit_service_pb2, weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

from weighbridge.admitting import admit
from weighbridge.answers import Answer
from weighbridge.client import Suite
from weighbridge.following import Interruption, follow
from weighbridge.pictures import Rendering

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

    def describe_weights(
        self, model: weights_pb2.ModelRef, *, include_tensors: bool = False
    ) -> fit_service_pb2.DescribeWeightsResponse:
        """See :meth:`weighbridge.Suite.describe_weights`."""
        return self._wait(self._suite.describe_weights(model, include_tensors=include_tensors))

    def plan_model(self, model: weights_pb2.ModelRef, **choices: Any) -> fit_service_pb2.PlanModelResponse:
        """See :meth:`weighbridge.Suite.plan_model`."""
        return self._wait(self._suite.plan_model(model, **choices))

    def solve_context(self, model: weights_pb2.ModelRef, **choices: Any) -> fit_service_pb2.SolveContextResponse:
        """See :meth:`weighbridge.Suite.solve_context`."""
        return self._wait(self._suite.solve_context(model, **choices))

    def solve_size(self, model: weights_pb2.ModelRef, **choices: Any) -> fit_service_pb2.SolveSizeResponse:
        """See :meth:`weighbridge.Suite.solve_size`."""
        return self._wait(self._suite.solve_size(model, **choices))

    def get_model(self, catalog_id: str) -> fit_service_pb2.GetModelResponse:
        """See :meth:`weighbridge.Suite.get_model`."""
        return self._wait(self._suite.get_model(catalog_id))

    def list_models(
        self, use: "fit_service_pb2.ModelUse.ValueType" = fit_service_pb2.MODEL_USE_UNSPECIFIED
    ) -> fit_service_pb2.ListModelsResponse:
        """See :meth:`weighbridge.Suite.list_models`."""
        return self._wait(self._suite.list_models(use))

    def check_pull(
        self, catalog_id: str, machine: machine_pb2.Machine | None = None
    ) -> fit_service_pb2.CheckPullResponse:
        """See :meth:`weighbridge.Suite.check_pull`."""
        return self._wait(self._suite.check_pull(catalog_id, machine))

    def list_fits(self, **which: Any) -> fit_service_pb2.ListFitsResponse:
        """See :meth:`weighbridge.Suite.list_fits`."""
        return self._wait(self._suite.list_fits(**which))

    def capacity(self, machine: machine_pb2.Machine | None = None) -> ledger_service_pb2.GetCapacityResponse:
        """See :meth:`weighbridge.Suite.capacity`."""
        return self._wait(self._suite.capacity(machine))

    def set_limit(
        self, limit_bytes: int | None, spill_allowed: bool | None = None
    ) -> ledger_service_pb2.SetLimitResponse:
        """See :meth:`weighbridge.Suite.set_limit`."""
        return self._wait(self._suite.set_limit(limit_bytes, spill_allowed))

    def free(self, lease_id: str) -> ledger_service_pb2.ReleaseLeaseResponse:
        """See :meth:`weighbridge.Suite.free`."""
        return self._wait(self._suite.free(lease_id))

    def leases(self, *, include_released: bool = False) -> ledger_service_pb2.ListLeasesResponse:
        """See :meth:`weighbridge.Suite.leases`."""
        return self._wait(self._suite.leases(include_released=include_released))

    def follow(
        self, epoch: str = "", revision: int = 0
    ) -> Generator[ledger_service_pb2.WatchResponse | Interruption, None, None]:
        """See :func:`weighbridge.follow`."""
        return self._iterate(lambda: follow(self._suite, epoch, revision))

    def admit(
        self, holder: lease_pb2.Holder, claim: requirement_pb2.Claim, **terms: Any
    ) -> Generator[ledger_service_pb2.AdmitResponse, None, None]:
        """See :func:`weighbridge.admit`."""
        return self._iterate(lambda: admit(self._suite, holder, claim, **terms))

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

    def answer(self, kind: str, request: chat_service_pb2.ChatRequest) -> Answer:
        """See :meth:`weighbridge.Engine.answer`."""
        return self._wait(self._suite.engine(kind).answer(request))

    def generate_image(
        self, kind: str, request: image_service_pb2.GenerateImageRequest
    ) -> Generator[image_service_pb2.GenerateImageResponse, None, None]:
        """See :meth:`weighbridge.Engine.generate_image`; :class:`weighbridge.pictures.PictureAssembler` takes the
        pieces."""
        return self._iterate(lambda: self._suite.engine(kind).generate_image(request))

    def render(self, kind: str, request: image_service_pb2.GenerateImageRequest) -> Rendering:
        """See :meth:`weighbridge.Engine.render`."""
        return self._wait(self._suite.engine(kind).render(request))

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        step = _Step(call)
        try:
            self._loop.call_soon_threadsafe(step.start)
            return step.outcome.result()
        except BaseException:
            if not step.outcome.done():
                # An interrupt. The call ends before it goes on: a stream cannot be closed while a step of it runs.
                self._loop.call_soon_threadsafe(step.stop)
                futures.wait([step.outcome])
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


class _Step(Generic[T]):
    """A coroutine on the loop of another thread. It can be stopped wherever an interrupt cut short who started it.

    asyncio.run_coroutine_threadsafe cannot: interrupted inside it, its caller never learns of what is running.

    Attributes:
        outcome: what became of it, once it has ended.
    """

    def __init__(self, call: Coroutine[Any, Any, T]) -> None:
        self.outcome: futures.Future[T] = futures.Future()
        self._call = call
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        """Begin. Runs on the loop."""
        self._task = asyncio.get_running_loop().create_task(self._call)
        self._task.add_done_callback(self._finish)

    def stop(self) -> None:
        """Cancel. Runs on the loop, after start if that was ever asked for."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._call.close()
            self.outcome.set_exception(futures.CancelledError())

    def _finish(self, task: "asyncio.Task[T]") -> None:
        if task.cancelled():
            self.outcome.set_exception(futures.CancelledError())
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


async def _next(stream: AsyncGenerator[T, None]) -> T:
    return await anext(stream)

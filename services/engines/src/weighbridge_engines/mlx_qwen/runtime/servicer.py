"""RuntimeService: turns calls into jobs for the owner thread and its results into messages."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from weighbridge_proto.engines.v1 import runtime_service_pb2 as pb2
from weighbridge_proto.engines.v1 import runtime_service_pb2_grpc as pb2_grpc

from weighbridge_engines.mlx_qwen.runtime import checkpoint, refusals, requests
from weighbridge_engines.mlx_qwen.runtime.answer import Delta
from weighbridge_engines.mlx_qwen.runtime.engine import Engine
from weighbridge_engines.mlx_qwen.runtime.generation import Event, Request
from weighbridge_engines.mlx_qwen.runtime.loading import LoadProgress
from weighbridge_engines.mlx_qwen.runtime.memory import process_memory
from weighbridge_engines.mlx_qwen.runtime.mlx import Mlx, import_mlx
from weighbridge_engines.mlx_qwen.runtime.outbox import Outbox
from weighbridge_engines.mlx_qwen.runtime.owner import Cancellation, OwnerThread

_Context = grpc.aio.ServicerContext[Any, Any]

MAX_REQUESTS = 64
"""Answers waiting or being computed. The host queues with more insight; this only bounds what a defect there can do."""


class Runtime(pb2_grpc.RuntimeServiceServicer):
    """The service and the owner thread behind it.

    Answers are computed one at a time, in the order in which they came; more than one slot in the plan means room, not
    concurrency. The loop never waits for the owner thread and never touches MLX.
    """

    def __init__(self, on_fatal: Callable[[BaseException], None]) -> None:
        """on_fatal: called on the owner thread with the exception that ended it."""
        self._engine = Engine()
        self._mlx: Mlx | None = None
        self._imported = asyncio.Event()
        self._in_progress: set[Cancellation] = set()
        self._answers = 0
        self._loop = asyncio.get_running_loop()
        self._owner = OwnerThread(set_up=self._set_up, tear_down=self._engine.close, on_fatal=on_fatal)

    async def start(self) -> None:
        """Starts the owner thread and returns when MLX is imported there."""
        self._owner.start()
        await self._imported.wait()

    async def aclose(self) -> None:
        """Cancels what runs, drops the model and returns when the owner thread has ended."""
        for cancellation in self._in_progress:
            cancellation.request()
        await asyncio.to_thread(self._owner.stop)

    def _set_up(self) -> None:
        mlx = import_mlx()
        self._engine.open(mlx)
        self._mlx = mlx
        self._loop.call_soon_threadsafe(self._imported.set)

    async def Describe(self, request: pb2.DescribeRequest, context: _Context) -> pb2.DescribeResponse:  # noqa: N802
        """What the runtime is."""
        assert self._mlx is not None
        return pb2.DescribeResponse(
            name="mlx-lm",
            version=f"{self._mlx.lm_version} (MLX {self._mlx.version})",
            device=self._mlx.device_name,
            model_types=checkpoint.MODEL_TYPES,
        )

    async def Load(self, request: pb2.LoadRequest, context: _Context) -> AsyncIterator[pb2.LoadResponse]:  # noqa: N802
        """Opens the weights and tells how far it is."""
        spec = requests.load_spec(request)
        out: Outbox[LoadProgress] = Outbox(self._loop)
        with self._job() as cancellation:
            self._owner.submit(lambda: self._engine.load(spec, cancellation, out))
            try:
                async for batch in out.batches():
                    for progress in batch:
                        yield pb2.LoadResponse(phase=progress.phase, fraction=progress.fraction)
            except (asyncio.CancelledError, GeneratorExit):
                # The load may have been completed between the cancellation and now.
                self._owner.submit(lambda: self._engine.abandon(cancellation))
                raise

    async def Generate(self, request: pb2.GenerateRequest, context: _Context) -> AsyncIterator[pb2.GenerateResponse]:  # noqa: N802
        """Streams one answer."""
        asked_at = time.monotonic()
        spec = requests.chat_spec(request.chat)
        if self._answers >= MAX_REQUESTS:
            raise refusals.too_many_requests(self._answers)
        self._answers += 1
        try:
            out: Outbox[Event] = Outbox(self._loop)
            with self._job() as cancellation:
                work = Request(spec, asked_at, cancellation)
                self._owner.submit(lambda: self._engine.generate(work, out))
                async for batch in out.batches():
                    for event in _merged(batch):
                        yield requests.response(event)
        finally:
            self._answers -= 1

    async def GetMemory(self, request: pb2.GetMemoryRequest, context: _Context) -> pb2.GetMemoryResponse:  # noqa: N802
        """What is allocated, as the owner thread last published it, and what the process holds now."""
        state, process = self._engine.memory_state, process_memory()
        return pb2.GetMemoryResponse(
            active_bytes=state.mlx.active_bytes,
            allocator_cache_bytes=state.mlx.cache_bytes,
            peak_active_bytes=state.mlx.peak_bytes,
            kv_cache_bytes=state.kv_bytes,
            process_bytes=process.resident_bytes,
            process_peak_bytes=process.peak_bytes,
        )

    async def Unload(self, request: pb2.UnloadRequest, context: _Context) -> pb2.UnloadResponse:  # noqa: N802
        """Drops the model, after the work that was asked for before."""
        out: Outbox[None] = Outbox(self._loop)
        self._owner.submit(lambda: self._engine.unload(out))
        async for _ in out.batches():
            pass
        return pb2.UnloadResponse()

    @contextmanager
    def _job(self) -> Iterator[Cancellation]:
        """A flag for one call's job, raised when the call ends in any way (to a job that is done it means nothing)."""
        cancellation = Cancellation()
        self._in_progress.add(cancellation)
        try:
            yield cancellation
        finally:
            self._in_progress.discard(cancellation)
            cancellation.request()


def _merged(batch: list[Event]) -> Iterator[Event]:
    """The batch with neighbouring pieces of text as one: fewer messages when the reader is slower than the engine."""
    pending: Delta | None = None
    for event in batch:
        if isinstance(event, Delta):
            pending = event if pending is None else pending + event
            continue
        if pending is not None:
            yield pending
            pending = None
        yield event
    if pending is not None:
        yield pending

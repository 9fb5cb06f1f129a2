"""Messages into calls: the three services of an engine."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
from weighbridge_proto.engines.v1 import (
    chat_service_pb2,
    chat_service_pb2_grpc,
    engine_service_pb2_grpc,
    image_service_pb2,
    image_service_pb2_grpc,
)
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.errors import RequestError, invalid_argument

from weighbridge_engines.host.chat import chat
from weighbridge_engines.host.describe import describe_engine, describe_model
from weighbridge_engines.host.engine_host import EngineHost
from weighbridge_engines.host.ledger import ClaimTerms
from weighbridge_engines.host.visit import Visit
from weighbridge_engines.host.waiting import first_of
from weighbridge_engines.host.wish import Wish
from weighbridge_engines.supervisor.output import LogLine

DEFAULT_TAIL_LINES = 100

Context = grpc.aio.ServicerContext[Any, Any]


class EngineServicer(engine_service_pb2_grpc.EngineServiceServicer):
    """See the contract.

    Args:
        stopping: set when the service ends; streams without an end of their own end then.
    """

    def __init__(self, host: EngineHost, stopping: asyncio.Event) -> None:
        self._host = host
        self._stopping = stopping

    async def GetEngine(  # noqa: N802
        self, request: engine_pb.GetEngineRequest, context: Context
    ) -> engine_pb.GetEngineResponse:
        """What the engine is."""
        return engine_pb.GetEngineResponse(engine=describe_engine(self._host))

    async def LoadModel(  # noqa: N802
        self, request: engine_pb.LoadModelRequest, context: Context
    ) -> AsyncIterator[engine_pb.LoadModelResponse]:
        """Loads a model, or joins the load."""
        visit = Visit(self._host, _wish_of(request), wants_use=False)
        try:
            async with contextlib.aclosing(visit.events()) as events:
                async for event in events:
                    yield event
            yield engine_pb.LoadModelResponse(ready=engine_pb.LoadReady(engine=describe_engine(self._host)))
        finally:
            visit.close()

    async def UnloadModel(  # noqa: N802
        self, request: engine_pb.UnloadModelRequest, context: Context
    ) -> engine_pb.UnloadModelResponse:
        """Unloads the model; goes on if the caller leaves."""
        unloaded = await asyncio.shield(asyncio.ensure_future(self._host.unload(request.force)))
        response = engine_pb.UnloadModelResponse()
        if unloaded is not None:
            response.unloaded.CopyFrom(describe_model(unloaded))
        return response

    async def Watch(  # noqa: N802
        self, request: engine_pb.WatchRequest, context: Context
    ) -> AsyncIterator[engine_pb.WatchResponse]:
        """The engine, now and at each change; changes that come faster than they are read are told as one."""
        told = None
        while True:
            engine, change = describe_engine(self._host), self._host.next_change
            if engine != told:
                told = engine
                yield engine_pb.WatchResponse(engine=engine)
            if not await _before(change, self._stopping):
                yield engine_pb.WatchResponse(engine=describe_engine(self._host))
                return

    async def TailLog(  # noqa: N802
        self, request: engine_pb.TailLogRequest, context: Context
    ) -> AsyncIterator[engine_pb.TailLogResponse]:
        """What the engine printed."""
        if request.max_lines < 0:
            raise invalid_argument("max_lines", "must not be negative")
        log = self._host.around.log
        last = log.last_number
        for line in log.tail(request.max_lines or DEFAULT_TAIL_LINES):
            yield _log_message(line)
        while request.follow:
            more = log.next_change
            for line in log.after(last):
                last = line.number
                yield _log_message(line)
            if not await _before(more, self._stopping):
                return


class ChatServicer(chat_service_pb2_grpc.ChatServiceServicer):
    """See the contract."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    async def Chat(  # noqa: N802
        self, request: chat_service_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[chat_service_pb2.ChatResponse]:
        """Streams one answer."""
        if not self._host.around.kind.does_chat:
            raise RequestError(
                grpc.StatusCode.UNIMPLEMENTED,
                "ENGINE_DOES_NOT_CHAT",
                f"{self._host.around.kind.title} makes images and does not chat. With a model that makes images, use "
                "`weighbridge image`; a model for chat needs another engine.",
            )
        async with contextlib.aclosing(chat(self._host, request)) as responses:
            async for response in responses:
                yield response


class ImageServicer(image_service_pb2_grpc.ImageServiceServicer):
    """See the contract.

    Args:
        generate: serves one request.
    """

    def __init__(
        self,
        generate: Callable[
            [image_service_pb2.GenerateImageRequest], AsyncGenerator[image_service_pb2.GenerateImageResponse, None]
        ],
    ) -> None:
        self._generate = generate

    async def GenerateImage(  # noqa: N802
        self, request: image_service_pb2.GenerateImageRequest, context: Context
    ) -> AsyncIterator[image_service_pb2.GenerateImageResponse]:
        """Streams the images of one request."""
        async with contextlib.aclosing(self._generate(request)) as responses:
            async for response in responses:
                yield response


class NoImages(image_service_pb2_grpc.ImageServiceServicer):
    """ImageService of an engine that makes none, so that a caller learns why."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    async def GenerateImage(  # noqa: N802
        self, request: image_service_pb2.GenerateImageRequest, context: Context
    ) -> AsyncIterator[image_service_pb2.GenerateImageResponse]:
        """Refuses."""
        raise RequestError(
            grpc.StatusCode.UNIMPLEMENTED,
            "ENGINE_DOES_NOT_DO_IMAGES",
            f"{self._host.around.kind.title} chats and makes no images. With a model for chat, use `weighbridge chat`; "
            "a model that makes images needs another engine.",
        )
        yield  # makes this a stream, as the contract has it


def _wish_of(request: engine_pb.LoadModelRequest) -> Wish:
    if not request.model.WhichOneof("model"):
        raise invalid_argument("model", "name a catalogue id or a path")
    max_wait_s = request.max_wait.ToNanoseconds() / 1e9 if request.HasField("max_wait") else None
    if max_wait_s is not None and max_wait_s < 0:
        raise invalid_argument("max_wait", "must not be negative")
    idle_s = request.idle_timeout.ToNanoseconds() / 1e9 if request.HasField("idle_timeout") else None
    if idle_s is not None and idle_s < 0:
        raise invalid_argument("idle_timeout", "must not be negative; zero means never")
    return Wish(
        model=request.model,
        workload=request.workload,
        options=request.options,
        terms=ClaimTerms(
            request.priority,
            request.pinned,
            max_wait_s,
            request.exclusive if request.HasField("exclusive") else None,
        ),
        idle_timeout_s=idle_s,
    )


def _log_message(line: LogLine) -> engine_pb.TailLogResponse:
    message = engine_pb.TailLogResponse(line=line.text, from_stderr=line.from_stderr)
    message.print_time.FromNanoseconds(round(line.time_s * 1e9))
    return message


async def _before(event: asyncio.Event, stopping: asyncio.Event) -> bool:
    """Wait for ``event``; False if the service stopped first."""
    happened, stopped = asyncio.ensure_future(event.wait()), asyncio.ensure_future(stopping.wait())
    try:
        await first_of(happened, stopped)
        return not stopping.is_set()
    finally:
        happened.cancel()
        stopped.cancel()

"""The engine services as an asyncio program calls them."""

from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf import duration_pb2
from weighbridge_proto import targets
from weighbridge_proto.engines.v1 import (
    chat_service_pb2,
    chat_service_pb2_grpc,
    engine_service_pb2,
    engine_service_pb2_grpc,
    image_service_pb2,
    image_service_pb2_grpc,
)
from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2

from weighbridge.answers import Answer, collected_answer
from weighbridge.failures import CallError, answered
from weighbridge.pictures import Rendering, collected
from weighbridge.reach import CALL_TIMEOUT_S

if TYPE_CHECKING:
    from weighbridge_proto.engines.v1.chat_service_pb2_grpc import ChatServiceAsyncStub
    from weighbridge_proto.engines.v1.engine_service_pb2_grpc import EngineServiceAsyncStub
    from weighbridge_proto.engines.v1.image_service_pb2_grpc import ImageServiceAsyncStub

    from weighbridge.client import Suite

UNLOAD_TIMEOUT_S = 600.0
"""Deadline of an unload, which waits for the requests in flight."""

R = TypeVar("R")


class Engine:
    """One engine service of a :class:`weighbridge.Suite`.

    Attributes:
        kind: which engine.
        service: the name that its socket carries.
        suite: the suite that it belongs to.
    """

    def __init__(self, suite: "Suite", kind: str) -> None:
        self.kind = kind
        self.service = f"engine-{kind}"
        if self.service not in targets.SERVICES:
            known = ", ".join(name.removeprefix("engine-") for name in targets.SERVICES if name.startswith("engine-"))
            raise ValueError(f"There is no engine {kind!r}. The engines are {known}.")
        self.suite = suite

    @property
    def engines(self) -> "EngineServiceAsyncStub":
        """Every rpc of EngineService."""
        return engine_service_pb2_grpc.EngineServiceStub(self.suite.channel(self.service))

    @property
    def chats(self) -> "ChatServiceAsyncStub":
        """Every rpc of ChatService."""
        return chat_service_pb2_grpc.ChatServiceStub(self.suite.channel(self.service))

    @property
    def images(self) -> "ImageServiceAsyncStub":
        """Every rpc of ImageService."""
        return image_service_pb2_grpc.ImageServiceStub(self.suite.channel(self.service))

    async def describe(self) -> engine_service_pb2.GetEngineResponse:
        """What the engine is, has and does."""
        await self.suite.reach(self.service)
        request = engine_service_pb2.GetEngineRequest()
        return await answered(self.engines.GetEngine(request, timeout=CALL_TIMEOUT_S), self.service)

    def load(
        self,
        model: weights_pb2.ModelRef,
        *,
        workload: plan_pb2.Workload | None = None,
        options: plan_pb2.EngineOptions | None = None,
        priority: "lease_pb2.Priority.ValueType" = lease_pb2.PRIORITY_UNSPECIFIED,
        pinned: bool = False,
        exclusive: bool | None = None,
        idle_timeout_s: float | None = None,
        max_wait_s: float | None = None,
    ) -> AsyncGenerator[engine_service_pb2.LoadModelResponse, None]:
        """Load ``model``, yielding each event; the last one is ``ready``.

        Args:
            model: which model.
            workload: what it shall be able to do; None: the engine's default.
            options: choices of the engine.
            priority: how urgent it is.
            pinned: never asked to vacate unless by a load that replaces it, never unloaded for idleness.
            exclusive: whether nobody else may be on its devices while it is loaded; None: as engines of this kind do.
            idle_timeout_s: unload after this long without a request; None: the service's default.
            max_wait_s: give up waiting for memory after this long; None: 10 minutes.
        """
        request = engine_service_pb2.LoadModelRequest(
            model=model,
            workload=workload,
            options=options,
            priority=priority,
            pinned=pinned,
            exclusive=exclusive,
            idle_timeout=_duration(idle_timeout_s),
            max_wait=_duration(max_wait_s),
        )
        return self._stream(lambda: self.engines.LoadModel(request))

    async def unload(self, *, force: bool = False) -> engine_service_pb2.UnloadModelResponse:
        """Unload the model after the requests in flight, or with ``force`` at once. Unloading nothing is no error."""
        await self.suite.reach(self.service)
        request = engine_service_pb2.UnloadModelRequest(force=force)
        return await answered(self.engines.UnloadModel(request, timeout=UNLOAD_TIMEOUT_S), self.service)

    def watch(self) -> AsyncGenerator[engine_service_pb2.WatchResponse, None]:
        """The engine's state, now and at every change."""
        return self._stream(lambda: self.engines.Watch(engine_service_pb2.WatchRequest()))

    def tail_log(
        self, max_lines: int = 100, *, follow: bool = False
    ) -> AsyncGenerator[engine_service_pb2.TailLogResponse, None]:
        """The last lines that the engine's process printed, and with ``follow`` further ones as they come."""
        request = engine_service_pb2.TailLogRequest(max_lines=max_lines, follow=follow)
        return self._stream(lambda: self.engines.TailLog(request))

    def chat(self, request: chat_service_pb2.ChatRequest) -> AsyncGenerator[chat_service_pb2.ChatResponse, None]:
        """Stream one answer. A model that is not loaded is loaded first; the load's events come first then."""
        return self._stream(lambda: self.chats.Chat(request))

    async def answer(self, request: chat_service_pb2.ChatRequest) -> Answer:
        """Ask for one answer and return it when it is done."""
        return await collected_answer(self.chat(request))

    def generate_image(
        self, request: image_service_pb2.GenerateImageRequest
    ) -> AsyncGenerator[image_service_pb2.GenerateImageResponse, None]:
        """Render images, yielding each event as it comes: a load's if the model is not loaded, the place in the queue,
        progress, the images in pieces, and the end.

        :func:`weighbridge.pictures.with_pictures` puts the pieces together. Leaving early cancels the render.
        """
        return self._stream(lambda: self.images.GenerateImage(request))

    async def render(self, request: image_service_pb2.GenerateImageRequest) -> Rendering:
        """Render images and return them when they are done."""
        return await collected(self.generate_image(request))

    async def _stream(self, start: Callable[[], grpc.aio.UnaryStreamCall[Any, R]]) -> AsyncGenerator[R, None]:
        await self.suite.reach(self.service)
        call = start()
        try:
            async for event in call:
                yield event
        except grpc.RpcError as error:
            raise CallError.from_rpc_error(error, self.service) from error
        finally:
            # Without it a caller that stops early would leave the server working for nobody.
            call.cancel()


def chat_message(role: "chat_service_pb2.Role.ValueType", text: str) -> chat_service_pb2.ChatMessage:
    """One turn of text."""
    return chat_service_pb2.ChatMessage(role=role, parts=[chat_service_pb2.ContentPart(text=text)])


def _duration(seconds: float | None) -> duration_pb2.Duration | None:
    if seconds is None:
        return None
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration

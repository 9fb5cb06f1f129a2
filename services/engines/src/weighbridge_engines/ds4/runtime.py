"""One started ds4-server, as the host talks to it: what it prints tells how far it is, HTTP makes it answer."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import httpx2
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb

from weighbridge_engines.ds4.client import Ds4Client, OtherServerError
from weighbridge_engines.ds4.conversation import Conversations
from weighbridge_engines.ds4.events import BackendReady, LoadProgress, Warmed, Warming
from weighbridge_engines.ds4.feed import OutputFeed
from weighbridge_engines.host.kind import MemoryAnnounced

POLL_S = 0.05
"""How often a load is looked at, and how often it is asked whether it answers once it has said that it listens."""

UNKNOWN = -1.0
"""The fraction of a phase that it tells nothing of."""


class Ds4Runtime:
    """See :class:`weighbridge_engines.host.kind.Runtime`.

    Args:
        client: the connection.
        feed: what the process prints.
        conversations: its chats.
    """

    def __init__(self, client: Ds4Client, feed: OutputFeed, conversations: Conversations) -> None:
        self._client = client
        self._feed = feed
        self._conversations = conversations

    async def is_ready(self) -> bool:
        """At once: it loads by itself from its start on, and :meth:`load` looks on."""
        return True

    async def is_alive(self) -> bool:
        """Whether it still answers. Its list of models is answered while it computes, so this shows no hanging."""
        return await self._client.is_ours()

    async def load(
        self, plan: fit_pb.PlanModelResponse
    ) -> AsyncGenerator[engine_pb.LoadStarting | MemoryAnnounced, None]:
        """Look on while it loads, until it is ours that answers.

        It says only at the end of its load what it will hold; that is told once, before it is said to be ready.
        """
        launch, reader = plan.launch.ds4, self._feed.reader
        told: tuple[str, float] | None = None
        announced = False
        while not reader.is_listening:
            if not announced and (launch.sessions <= 1 or reader.session_buffers is not None):
                announced = reader.announced_bytes is not None
                if reader.announced_bytes is not None:
                    yield MemoryAnnounced(reader.announced_bytes)
            if (step := self._step(launch.loaded_bytes, told)) != told:
                told = step
                yield engine_pb.LoadStarting(phase=step[0], fraction=step[1])
            await asyncio.sleep(POLL_S)
        if not announced and reader.announced_bytes is not None:
            yield MemoryAnnounced(reader.announced_bytes)
        yield engine_pb.LoadStarting(phase="listening", fraction=1.0)
        while True:
            # It listens only once the port is its own, but a connection may still be refused for want of files.
            with contextlib.suppress(httpx2.HTTPError, OtherServerError):
                await self._client.is_ours()
                return
            await asyncio.sleep(POLL_S)

    def _step(self, weight_bytes: int, told: tuple[str, float] | None) -> tuple[str, float]:
        """Phase and fraction. Bytes are counted anew for a drafter's file: what was told is never taken back."""
        match self._feed.load:
            case LoadProgress(done_bytes, total_bytes) if total_bytes or weight_bytes:
                fraction = min(1.0, done_bytes / (total_bytes or weight_bytes))
                return "weights", max(fraction, told[1] if told is not None and told[0] == "weights" else 0.0)
            case Warming():
                return "warm-up", UNKNOWN
            case Warmed():
                return "warm-up", 1.0
            case BackendReady():
                return "sessions", UNKNOWN
            case _:
                return "weights", UNKNOWN

    def chat(self, request: chat_pb.ChatRequest) -> AsyncGenerator[chat_pb.ChatResponse, None]:
        """One answer; see :class:`weighbridge_engines.ds4.conversation.Conversations`."""
        return self._conversations.answer(request)

    async def settle(self) -> None:
        """Return when nothing that was given up is computed any more."""
        await self._conversations.settle()

    async def aclose(self) -> None:
        """Close the connections; answers in progress break off."""
        await self._client.aclose()

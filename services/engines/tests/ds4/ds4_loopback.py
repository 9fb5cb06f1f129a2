"""A server on loopback that answers chats as a test says, byte by byte, and one time that a test moves."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from weighbridge_engines.ds4.client import Ds4Client
from weighbridge_engines.ds4.conversation import Conversations
from weighbridge_engines.ds4.events import PromptStarted, RequestEnded, RequestEvent, Span
from weighbridge_engines.ds4.served import Served
from weighbridge_engines.host.clock import Clock
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb

CONTEXT = 4096


class Exchange:
    """One request for an answer, as the server has it."""

    def __init__(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.body = body
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def refuse(self, status: int, body: bytes) -> None:
        """An answer that is no stream."""
        head = f"HTTP/1.1 {status} Error\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        await self.send(head.encode() + body)

    async def begin(self) -> None:
        """The head of a stream, as ds4 sends it."""
        await self.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")

    async def tell(self, delta: dict[str, Any] | None = None, finish: str | None = None) -> None:
        """One chunk."""
        choices = [{"index": 0, "delta": delta or {}, "finish_reason": finish}]
        await self.send(f"data: {json.dumps({'choices': choices})}\n\n".encode())

    async def end(self, finish: str = "stop", prompt: int = 7, output: int = 5, cached: int = 3) -> None:
        """Why it ended, what it took, and the last line."""
        await self.tell(finish=finish)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        await self.send(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())

    async def until_client_left(self) -> None:
        """Returns when the other side has closed its socket."""
        with contextlib.suppress(ConnectionError):
            await self._reader.read()


Script = Callable[[Exchange], Awaitable[None]]


async def plain(exchange: Exchange) -> None:
    """A short answer."""
    await exchange.begin()
    await exchange.tell({"role": "assistant"})
    await exchange.tell({"content": "Yes"})
    await exchange.end()


class Loopback:
    """Answers each request with the next script, the last one again and again.

    Attributes:
        bodies: of the requests so far.
        context: that its list of models tells.
    """

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts) or [plain]
        self.bodies: list[dict[str, Any]] = []
        self.context = CONTEXT
        self.server: asyncio.Server | None = None

    async def start(self) -> int:
        """Its port."""
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self.server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET /v1/models "):
                models = json.dumps({"object": "list", "data": [{"id": "any", "context_length": self.context}]})
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(models)}\r\n\r\n{models}".encode())
                return
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = json.loads(await reader.readexactly(int(fields["content-length"])))
            self.bodies.append(body)
            script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
            await script(Exchange(body, reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def stop_listening(self) -> None:
        """As a server does that is about to end."""
        assert self.server is not None
        self.server.close()


class HandClock:
    """A clock that stands still until it is moved.

    Attributes:
        stamps: how often something that came through a socket was stamped with it.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.stamps = 0
        self._moved = asyncio.Event()

    def clock(self) -> Clock:
        """As it is passed in."""
        return Clock(monotonic=lambda: self.now, wall=lambda: self.now, sleep=self._sleep)

    def stamp(self) -> float:
        """As the client reads it."""
        self.stamps += 1
        return self.now

    async def _sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            await self._moved.wait()

    async def move(self, seconds: float) -> None:
        """Later, and whoever waited for it has had a turn."""
        self.now += seconds
        self._moved.set()
        self._moved = asyncio.Event()
        await turns()


async def turns(count: int = 20) -> None:
    """Let every task that can run do so, some steps."""
    for _ in range(count):
        await asyncio.sleep(0)


class Output:
    """What the process prints, as a test says."""

    def __init__(self) -> None:
        self.tell: Callable[[RequestEvent], None] | None = None

    def print(self, event: RequestEvent) -> None:
        """One line."""
        assert self.tell is not None
        self.tell(event)

    def start(self, cached: int = 0, prompt: int = 7) -> None:
        """A prompt begins."""
        self.print(PromptStarted(Span(cached, prompt, prompt - cached)))

    def end(self, cached: int = 0, prompt: int = 7, finish: str = "stop", error: str = "") -> None:
        """A request is over."""
        self.print(RequestEnded(Span(cached, prompt, prompt - cached), 0, finish, error))


class Talk:
    """The host's side of one server."""

    def __init__(self, server: Loopback, conversations: Conversations, output: Output, clock: HandClock) -> None:
        self.server = server
        self.conversations = conversations
        self.output = output
        self.clock = clock

    async def ask(self, request: chat_pb.ChatRequest | None = None) -> list[chat_pb.ChatResponse]:
        """A whole answer."""
        return [response async for response in self.conversations.answer(request or hello())]


def hello(**fields: Any) -> chat_pb.ChatRequest:
    """The shortest request."""
    parts = [chat_pb.ContentPart(text="Hi")]
    return chat_pb.ChatRequest(messages=[chat_pb.ChatMessage(role=chat_pb.ROLE_USER, parts=parts)], **fields)


@contextlib.asynccontextmanager
async def talking(
    *scripts: Script, idle_limit_s: float = 600.0, most_unread_bytes: int | None = None, **served: Any
) -> AsyncIterator[Talk]:
    """A server with these scripts, and conversations with it."""
    server, output, clock = Loopback(*scripts), Output(), HandClock()
    port = await server.start()
    limit = {} if most_unread_bytes is None else {"most_unread_bytes": most_unread_bytes}
    client = Ds4Client(port, CONTEXT, now=clock.stamp, **limit)
    what = Served(model_name="flash", context_tokens=CONTEXT, **served)
    try:
        yield Talk(server, Conversations(client, output, what, idle_limit_s, clock.clock()), output, clock)
    finally:
        await client.aclose()
        server.stop_listening()


async def until(is_so: Callable[[], bool]) -> None:
    """Returns when something is so that comes through sockets; the test's own time limit ends it."""
    while not is_so():  # noqa: ASYNC110 # nothing tells of it
        await asyncio.sleep(0.001)

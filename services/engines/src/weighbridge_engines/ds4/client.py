"""HTTP to one ds4-server.

An answer's socket is read as fast as it fills, by a task of its own, whoever reads the answer: ds4 drops a stream that
takes nothing for 2 seconds. It sends an answer over a connection of its own and closes that behind it.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx2
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from weighbridge_engines.ds4.sse import ServerEvent, SseParser

PROBE_TIMEOUT_S = 5.0
"""Its list of models is answered in milliseconds, also while it computes (11 ms, May 2026)."""

CHAT_PATH = "/v1/chat/completions"

MOST_UNREAD_BYTES = 16 * 2**20
"""How much memory one answer takes until its reader takes it: some 36,000 tokens at about 200 bytes of text and
EVENT_BYTES each, minutes of the fastest engine and an hour of a common one. A reader that is so far behind is gone or
stuck, and memory is not endless."""

EVENT_BYTES = 256
"""What an event takes beside its text, so that those without text count too (250 on 64-bit CPython 3.11, measured
November 2026)."""

MOST_REFUSAL_BYTES = 64 * 2**10
"""How much of an error's body is read. Those of ds4 are a few hundred bytes."""

_tracer = trace.get_tracer("weighbridge.engines.ds4")


class OtherServerError(Exception):
    """What answers on the port is not the server that was started."""


class ChatRefusedError(Exception):
    """ds4 answered a chat with an error before it began to answer.

    Attributes:
        status: of HTTP.
        body: as it came.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.body = body


class ConnectionLostError(Exception):
    """The connection could not be made, or broke. The text names the cause and quotes nothing."""


class UnreadError(Exception):
    """The answer's reader is too far behind.

    Attributes:
        limit_bytes: how far it may be.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"more than {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


@dataclass(frozen=True)
class Heard:
    """An event, when it came by the stream's clock, and the bytes that it counts for while it is unread."""

    event: ServerEvent
    at_s: float
    size: int


class ChatStream:
    """One answer on its way, drained by a task for as long as it is entered.

    Leaving it closes the socket at once: that is how ds4 is told to stop.

    Attributes:
        ended: whether nothing more comes.
        failure: why, where that was no regular end of the stream: ChatRefusedError, ConnectionLostError,
            :class:`weighbridge_engines.ds4.sse.SseError`, UnreadError, or what :meth:`fail` was given.
        heard_at_s: when anything came last, a comment too; before that, when it was asked.
    """

    def __init__(self, http: httpx2.AsyncClient, body: bytes, now: Callable[[], float], most_unread_bytes: int) -> None:
        self.ended = False
        self.failure: Exception | None = None
        self.heard_at_s = now()
        self._http = http
        self._body = body
        self._now = now
        self._most_unread_bytes = most_unread_bytes
        self._unread: deque[Heard] = deque()
        self._unread_bytes = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._drain(), name="ds4-answer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        # Its own end is awaited, so that the socket is closed when this returns.
        await asyncio.gather(self._task, return_exceptions=True)

    def take(self) -> Heard | None:
        """The next event; None: there is none yet, or (``ended``) no more."""
        if not self._unread:
            return None
        heard = self._unread.popleft()
        self._unread_bytes -= heard.size
        return heard

    async def changed(self) -> None:
        """Return when something may have changed since the last return: events, the end, or a :meth:`wake`."""
        await self._changed.wait()
        self._changed.clear()

    def wake(self) -> None:
        """Let :meth:`changed` return, for something that is not the stream's."""
        self._changed.set()

    def fail(self, failure: Exception) -> None:
        """Give the answer up, with its socket: nothing more comes after what is already here."""
        if not self.ended and self._task is not None:
            self.failure = failure
            self._task.cancel()

    async def _drain(self) -> None:
        attributes = {"http.request.method": "POST", "url.path": CHAT_PATH, "server.address": "127.0.0.1"}
        with _tracer.start_as_current_span(f"POST {CHAT_PATH}", kind=SpanKind.CLIENT, attributes=attributes) as span:
            try:
                await self._read(span)
            except httpx2.HTTPError as error:
                self.failure = ConnectionLostError(type(error).__name__)
            except Exception as error:  # told to whoever reads the answer
                self.failure = error
            finally:
                if self.failure is not None:
                    span.set_status(Status(StatusCode.ERROR, type(self.failure).__name__))
                self.ended = True
                self.wake()

    async def _read(self, span: trace.Span) -> None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        _check_open(self._http)
        async with self._http.stream("POST", CHAT_PATH, content=self._body, headers=headers) as response:
            self.heard_at_s = self._now()
            span.set_attribute("http.response.status_code", response.status_code)
            if response.status_code != httpx2.codes.OK:
                raise ChatRefusedError(response.status_code, await _beginning(response))
            parser = SseParser()
            async for chunk in response.aiter_raw():
                self.heard_at_s = self._now()
                for found in parser.feed(chunk):
                    if isinstance(found, ServerEvent):
                        self._keep(found)

    def _keep(self, event: ServerEvent) -> None:
        heard = Heard(event, self.heard_at_s, EVENT_BYTES + len(event.data) + len(event.name))
        if self._unread_bytes + heard.size > self._most_unread_bytes:
            raise UnreadError(self._most_unread_bytes)
        self._unread.append(heard)
        self._unread_bytes += heard.size
        self.wake()


class Ds4Client:
    """See the module.

    Args:
        port: where it listens, on 127.0.0.1.
        context_tokens: that it was started with, by which it is known among others.
        now: the clock by which events are stamped.
        most_unread_bytes: see :data:`MOST_UNREAD_BYTES`.
    """

    def __init__(
        self,
        port: int,
        context_tokens: int,
        now: Callable[[], float] = time.monotonic,
        most_unread_bytes: int = MOST_UNREAD_BYTES,
    ) -> None:
        self._port = port
        self._context_tokens = context_tokens
        self._now = now
        self._most_unread_bytes = most_unread_bytes
        self._http = httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            # A proxy of the environment has no business between us and loopback.
            trust_env=False,
            # An answer's first byte may take minutes: whoever waits for it watches over that.
            timeout=httpx2.Timeout(PROBE_TIMEOUT_S, read=None, write=None),
            # ds4 closes behind each answer.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def is_ours(self) -> bool:
        """Whether our server answers.

        Raises:
            OtherServerError: another one does: it has another context.
            httpx2.HTTPError: none does.
        """
        _check_open(self._http)
        response = await self._http.get("/v1/models", timeout=PROBE_TIMEOUT_S)
        response.raise_for_status()
        if _context_of(response) != self._context_tokens:
            raise OtherServerError(f"another server answers on port {self._port}")
        return True

    def chat(self, body: bytes) -> ChatStream:
        """Ask for an answer: it is asked for when the stream is entered."""
        return ChatStream(self._http, body, self._now, self._most_unread_bytes)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def _check_open(http: httpx2.AsyncClient) -> None:
    """A model that is unloaded by force takes its connections along; whoever asks then is told as by a lost one."""
    if http.is_closed:
        raise httpx2.ConnectError("the connections to it were closed")


def _context_of(response: httpx2.Response) -> int | None:
    """The context that a list of models tells. Its names are aliases and tell nothing of what is loaded."""
    listed: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        listed = response.json()
    entries = listed.get("data") if isinstance(listed, dict) else None
    first = entries[0] if isinstance(entries, list) and entries else None
    context = first.get("context_length") if isinstance(first, dict) else None
    return context if isinstance(context, int) else None


async def _beginning(response: httpx2.Response) -> bytes:
    body = b""
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MOST_REFUSAL_BYTES:
            break
    return body[:MOST_REFUSAL_BYTES]

"""Chats with one ds4, each from its request to its end."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import httpx2
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.errors import RequestError

from weighbridge_engines.ds4 import refusals, requests
from weighbridge_engines.ds4.answer import MOST_SAID_CHARS, AnswerFailedError, AnswerReader, said_in
from weighbridge_engines.ds4.client import (
    ChatRefusedError,
    ChatStream,
    ConnectionLostError,
    Ds4Client,
    OtherServerError,
    UnreadError,
)
from weighbridge_engines.ds4.events import RequestEvent
from weighbridge_engines.ds4.leftovers import Leftovers
from weighbridge_engines.ds4.served import Served
from weighbridge_engines.ds4.sse import SseError
from weighbridge_engines.ds4.turns import Turn, TurnLog
from weighbridge_engines.host.chat_limits import look_through
from weighbridge_engines.host.clock import Clock
from weighbridge_engines.host.kind import EngineBrokenError, EngineLostError
from weighbridge_engines.host.waiting import first_of_two

IDLE_LIMIT_S = 600.0
"""One chunk of a prompt takes minutes where experts are streamed from a slow disk, and nothing is sent meanwhile. As
the reference system's limit for tools (October 2026)."""

OUTPUT_LAG_S = 0.25
"""How long a line that ds4 printed about an answer may take to be read after the answer."""

MOST_FAILURES = 3
"""So many requests in a row that failed inside ds4 mean that it can serve no more: after an error of the device it
lives on and fails every request (ds4 issue 759, 2026)."""

UNFINISHED_CALL = "unterminated tool call"
"""What ds4 says where the longest answer was reached inside a tool call: the model's doing, or the caller's."""

STOPPING = "shutdown requested"
"""What ds4 says of an answer that it ends because it was asked to stop."""


class Feed(Protocol):
    """What one process printed, as it comes."""

    tell: Callable[[RequestEvent], None] | None
    """Called with what each line says about requests, in order."""


class SilentError(Exception):
    """Nothing came of ds4 within the idle limit."""


class _LengthRefusedError(Exception):
    """This build takes no request for an answer of no tokens."""


@dataclass
class _Timing:
    """When the tokens of an answer came."""

    asked_s: float
    first_s: float | None = None
    last_s: float = 0.0

    def note(self, at_s: float) -> None:
        self.first_s = at_s if self.first_s is None else self.first_s
        self.last_s = at_s

    def tell(self, usage: chat_pb.Usage) -> None:
        if self.first_s is not None:
            usage.time_to_first_token.FromNanoseconds(round((self.first_s - self.asked_s) * 1e9))
            usage.generation_time.FromNanoseconds(round((self.last_s - self.first_s) * 1e9))


class Conversations:
    """See the module.

    Args:
        client: the connection.
        feed: what the process prints; it is listened to from now on.
        served: what the process is.
        idle_limit_s: without a sign of life for so long, a request is given up. Comments of the stream are signs of
            life, and so are lines of the log.
        clock: reads and waits.
    """

    def __init__(
        self,
        client: Ds4Client,
        feed: Feed,
        served: Served,
        idle_limit_s: float = IDLE_LIMIT_S,
        clock: Clock | None = None,
    ) -> None:
        self._client = client
        self._served = served
        self._idle_limit_s = idle_limit_s
        self._clock = clock or Clock()
        self._log = TurnLog(served.sessions, self._clock.monotonic)
        self._leftovers = Leftovers(client, self._log, served, idle_limit_s, self._clock)
        self._failures = 0
        feed.tell = self._log.take

    async def answer(self, request: chat_pb.ChatRequest) -> AsyncGenerator[chat_pb.ChatResponse, None]:
        """One answer. Closing the iterator closes the socket at once; :meth:`settle` tells when ds4 has noticed.

        A ChatStarted comes first: with the prompt's tokens as soon as ds4 has printed them, else, where the answer's
        first piece came before that line, without them. The usage at the end has them in any case.

        Raises:
            RequestError: INVALID_ARGUMENT as :func:`weighbridge_engines.ds4.requests.render` and CONTEXT_OVERFLOW,
                INTERNAL ENGINE_ERROR, UNAVAILABLE STREAM_LOST, DEADLINE_EXCEEDED ENGINE_SILENT, RESOURCE_EXHAUSTED
                ANSWER_NOT_READ.
            EngineLostError: ds4 is gone, or going.
            EngineBrokenError: it failed :data:`MOST_FAILURES` requests in a row.
        """
        # An answer of no tokens leaves exactly the prompt in ds4's memory, so that a longer one can go on from there;
        # builds that demand a token of every answer keep one more, and go on less often.
        lengths = (0, 1) if request.warm_up else (None,)
        for length in lengths:
            body = await look_through(request, partial(requests.render, request, self._served, length))
            try:
                async with contextlib.aclosing(self._answer(request, body, length)) as responses:
                    async for response in responses:
                        yield response
                return
            except _LengthRefusedError:
                continue

    async def settle(self) -> None:
        """Return when ds4 computes nothing any more that was given up.

        Raises:
            EngineLostError: ds4 is gone.
            EngineBrokenError: nothing came of it within the idle limit.
        """
        await self._leftovers.settle()

    async def _answer(
        self, request: chat_pb.ChatRequest, body: bytes, length: int | None
    ) -> AsyncGenerator[chat_pb.ChatResponse, None]:
        timing, reader = _Timing(self._clock.monotonic()), AnswerReader()
        stream, turn = self._client.chat(body), self._log.begin()
        turn.on_change = stream.wake
        has_started = False
        try:
            async with stream, self._watched(stream, turn):
                while not reader.is_done:
                    if not has_started and turn.span is not None:
                        has_started = True
                        yield self._started(turn.span.prompt, turn.span.cached)
                    heard = stream.take()
                    if heard is None:
                        if stream.ended:
                            raise await self._why_ended(request, stream, turn, length)
                        await stream.changed()
                        continue
                    for delta in reader.take(heard.event):
                        timing.note(heard.at_s)
                        if not has_started:
                            has_started = True
                            yield self._started(0, 0)
                        if not request.warm_up:
                            yield chat_pb.ChatResponse(delta=delta)
        except AnswerFailedError as error:
            if error.is_over:
                self._log.close(turn)
            raise self._failed(str(error), error.said or await self._logged(turn)) from error
        finally:
            if reader.is_done:
                self._log.close(turn)
            elif not turn.is_over:
                self._leftovers.add(turn, request)
        self._failures = 0
        finished = reader.finished()
        if not has_started:
            yield self._started(finished.usage.prompt_tokens, finished.usage.cached_tokens)
        timing.tell(finished.usage)
        if request.warm_up:
            finished = chat_pb.ChatFinished(usage=finished.usage)
        yield chat_pb.ChatResponse(finished=finished)

    def _started(self, prompt_tokens: int, cached_tokens: int) -> chat_pb.ChatResponse:
        started = chat_pb.ChatStarted(
            model_name=self._served.model_name, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens
        )
        return chat_pb.ChatResponse(started=started)

    @contextlib.asynccontextmanager
    async def _watched(self, stream: ChatStream, turn: Turn) -> AsyncIterator[None]:
        """Gives the answer up when nothing came of it for too long."""
        watching = asyncio.create_task(self._watch(stream, turn), name="ds4-watch")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, stream: ChatStream, turn: Turn) -> None:
        while True:
            heard_at_s = max(stream.heard_at_s, self._log.heard_of(turn))
            left_s = heard_at_s + self._idle_limit_s - self._clock.monotonic()
            if left_s <= 0:
                stream.fail(SilentError())
                return
            await self._clock.sleep(left_s)

    async def _why_ended(
        self, request: chat_pb.ChatRequest, stream: ChatStream, turn: Turn, length: int | None
    ) -> Exception:
        """Why a stream ended without its answer's end, as what is to be raised."""
        failure = stream.failure
        if isinstance(failure, ChatRefusedError):
            return self._refusal(request, failure, turn, length)
        if isinstance(failure, SilentError):
            return refusals.engine_silent(self._idle_limit_s)
        if isinstance(failure, UnreadError):
            return refusals.answer_not_read(failure.limit_bytes)
        if isinstance(failure, SseError):
            return self._failed(f"ds4's answer cannot be read: {failure}", "")
        if failure is not None and not isinstance(failure, ConnectionLostError):
            return failure
        self._log.close(turn)
        try:
            await self._client.is_ours()
        except (httpx2.HTTPError, OtherServerError) as error:
            lost = EngineLostError(f"its answer broke off ({failure or 'the stream ended'})")
            lost.__cause__ = error
            return lost
        return self._counted(refusals.stream_lost(), "its answer broke off")

    def _refusal(
        self, request: chat_pb.ChatRequest, refused: ChatRefusedError, turn: Turn, length: int | None
    ) -> Exception:
        content: object = None
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(refused.body)
        error = content.get("error") if isinstance(content, dict) else None
        said = said_in(content)
        if refused.status >= 500 and refused.status != httpx2.codes.SERVICE_UNAVAILABLE:
            # Its prompt was begun and failed. The line of its beginning may still come.
            self._log.close(turn)
            return self._failed("ds4 failed while it read the prompt", said)
        self._log.forget(turn)
        if refused.status == httpx2.codes.SERVICE_UNAVAILABLE:
            return EngineLostError("it is stopping")
        if isinstance(error, dict) and error.get("code") == "context_length_exceeded":
            prompt_tokens, context_tokens = (_number(error.get(name)) for name in ("n_prompt_tokens", "n_ctx"))
            return refusals.context_overflow(
                prompt_tokens, request.max_output_tokens, context_tokens or self._served.context_tokens
            )
        if length == 0:
            return _LengthRefusedError()
        return refusals.engine_error(f"ds4 refuses this request with HTTP {refused.status}", said)

    def _failed(self, what: str, said: str) -> Exception:
        """A failure inside ds4. One that would end every request after it, too, is one of the whole engine's."""
        if said == STOPPING:
            return EngineLostError("it is stopping")
        refusal = refusals.engine_error(what, said)
        return refusal if said == UNFINISHED_CALL else self._counted(refusal, said or what)

    def _counted(self, refusal: RequestError, seen: str) -> Exception:
        self._failures += 1
        if self._failures < MOST_FAILURES:
            return refusal
        return EngineBrokenError(f"{self._failures} requests in a row failed, the last with: {seen}")

    async def _logged(self, turn: Turn) -> str:
        """What ds4 printed of a failure that its answer does not explain; empty: nothing."""
        heard = asyncio.Event()
        turn.on_change = heard.set
        if turn.ended is None:
            await first_of_two(heard.wait(), self._clock.sleep(OUTPUT_LAG_S))
        return turn.ended.error[:MOST_SAID_CHARS] if turn.ended is not None else ""


def _number(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0

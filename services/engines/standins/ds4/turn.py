"""One request on one session: the prompt is read, then answered, exactly as slowly and as wrongly as was asked for."""

import asyncio
import itertools
import time
from dataclasses import dataclass, field

from services.engines.standins.ds4 import log
from services.engines.standins.ds4.behaviour import Behaviour
from services.engines.standins.ds4.checkpoints import Checkpoints
from services.engines.standins.ds4.client import Client
from services.engines.standins.ds4.prompt import ASSISTANT, THINK, THOUGHT, Request, count_tokens
from services.engines.standins.ds4.reply import Reply, send_failure, usage_of
from services.engines.standins.ds4.script import Answer, tokens_of
from services.engines.standins.ds4.startup import end_by
from services.engines.standins.ds4.stopping import Stopping
from services.engines.standins.ds4.turn_log import LOGGED_TOKENS, TurnLog

_LAYERS = 43
_BROKEN = "CUDA prefill failed: an illegal memory access was encountered"
_LEFT = "client disconnected"


@dataclass
class Session:
    """What one session's cache holds. ``visible`` is its text as a request without reasoning shows it."""

    text: str = ""
    tokens: int = 0
    visible: str = ""

    def continued(self, prompt: str) -> int:
        """How many of its tokens a prompt goes on from; 0 where it does not."""
        if self.text and prompt.startswith(self.text):
            return self.tokens
        return self.tokens if self.visible and prompt.startswith(self.visible) else 0


@dataclass
class Model:
    """What every request on it shares. ``context`` and ``chunk`` in tokens."""

    behaviour: Behaviour
    stopping: Stopping
    checkpoints: Checkpoints
    context: int
    chunk: int
    on_cpu: bool
    requests: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    answers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))


class Turn:
    """One request."""

    def __init__(self, model: Model, request: Request, client: Client, session: Session) -> None:
        self._model, self._behaviour = model, model.behaviour
        self._request, self._client, self._session = request, client, session
        self._log = TurnLog(has_tools=request.has_tools)
        self._cached, self._prompt = 0, request.prompt_tokens
        self._headers_sent = self._closed = self._faulty = False
        self._error = ""

    async def run(self) -> None:
        """Until it is over, well or not."""
        self._find_cached()
        self._log.prompt_start(self._cached, self._prompt)
        number = next(self._model.requests)
        self._faulty = self._behaviour.faulty_requests < 0 or number <= self._behaviour.faulty_requests
        if 0 <= self._behaviour.breaks_after < number:
            self._error = _BROKEN
        if self._error or not await self._read_prompt():
            await self._fail_prompt()
            return
        self._log.prompt_done()
        if self._cached == 0:
            self._model.checkpoints.save_cold(self._request.prompt, self._prompt)
        session = self._session
        session.text, session.tokens, session.visible = self._request.prompt, self._prompt, ""
        reply = Reply(self._client, self._request, next(self._model.answers))
        if self._request.stream and not await self._begin_stream(reply):
            return
        answer = Answer(self._request.stops, self._request.has_tools, self._request.thinks)
        finish = await self._decode(answer, reply)
        if finish != "cut":
            await self._finish(answer, reply, finish)

    def _find_cached(self) -> None:
        session, request, checkpoints = self._session, self._request, self._model.checkpoints
        self._cached = session.continued(request.prompt)
        if self._cached and not request.prompt.startswith(session.text):
            self._prompt = self._cached + count_tokens(request.prompt[len(session.visible) :])
            cached = f"cached={self._cached} prompt={self._prompt}"
            log.server(f"thinking live continuation match=visible-prefix {cached}")
        if self._cached:
            return
        if session.text:
            log.server(
                f"live kv cache miss live={session.tokens} prompt={request.prompt_tokens} "
                f"common={_common(session.text, request.prompt)} reason=token-mismatch"
            )
            checkpoints.save(session.text, "evict")
        self._cached = count_tokens(checkpoints.longest_prefix(request.prompt))

    async def _read_prompt(self) -> bool:
        """Chunk by chunk. Nothing ends it early, but a client that has left where that is noticed."""
        behaviour, done, kept_alive = self._behaviour, self._cached, 0.0
        while done < self._prompt:
            size = min(self._model.chunk, self._prompt - done)
            if behaviour.prefill_rate and not await self._stays(size / behaviour.prefill_rate):
                self._error = _LEFT
                return False
            done += size
            if self._faulty and behaviour.prefill_fault and done >= self._prompt:
                if behaviour.prefill_fault != "error":
                    end_by(behaviour.prefill_fault)
                self._error = "prefill failed"
                return False
            if self._model.on_cpu and not self._cached:
                # A prompt that is read from its beginning is silent there until it is done.
                for layer in range(1, _LAYERS + 1):
                    log.repaint(f"prefill layer {layer}/{_LAYERS}")
                continue
            now = self._log.elapsed()
            if self._request.stream and not self._closed:
                if not self._headers_sent:
                    self._headers_sent, kept_alive = True, now
                    self._closed = not await self._client.begin_stream()
                elif now - kept_alive >= behaviour.keepalive_s:
                    kept_alive = now
                    self._closed = not await self._client.send(b": prefill\n\n")
            self._log.chunk(done, size)
        return True

    async def _stays(self, seconds: float) -> bool:
        """False as soon as the client is known to have left."""
        try:
            await asyncio.wait_for(self._client.left.wait(), seconds)
        except TimeoutError:
            return True
        return False

    async def _fail_prompt(self) -> None:
        if self._error == _LEFT:
            self._log.line(f"request cancelled: {self._error}")
        elif not (self._request.stream and self._headers_sent):
            await self._client.refuse(500, self._error)
        elif self._closed:
            self._log.line(f"prefill failed after stream closed: {self._error}")
        else:
            await send_failure(self._client, self._error)

    async def _begin_stream(self, reply: Reply) -> bool:
        if self._closed:
            self._log.line("stream closed during prefill")
        elif not self._headers_sent and not await self._client.begin_stream():
            self._log.line("sse headers failed")
        elif not await reply.role():
            self._log.line("openai role chunk failed")
        else:
            return True
        return False

    async def _decode(self, answer: Answer, reply: Reply) -> str:
        """The reason why it ended; "cut" where nobody is told."""
        behaviour, stopping = self._behaviour, self._model.stopping
        room = min(self._request.max_tokens, self._model.context - self._prompt)
        began, finish = time.monotonic(), "length"
        tokens = tokens_of(self._request, behaviour)
        while answer.tokens < room and not stopping.asked:
            token = next(tokens, None)
            if token is None:
                finish = "stop"
                break
            # Each token on its own time, so that what sending takes does not slow the next one.
            due = began + (answer.tokens + 1) / behaviour.rate if behaviour.rate else 0.0
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if self._faulty and behaviour.decode_fault and answer.tokens >= behaviour.decode_fault_after:
                finish = await self._fault(behaviour.decode_fault)
                break
            if self._client.left.is_set():
                finish, self._error = "error", _LEFT
                break
            for delta in answer.add(token):
                if self._request.stream and not await reply.delta(delta):
                    finish, self._error = "error", "client stream write failed"
            if self._error:
                break
            if answer.tokens % LOGGED_TOKENS == 0:
                self._log.decoded(answer)
            if answer.stopped or answer.closed_calls:
                finish = "stop" if answer.stopped else "tool_calls"
                break
        if stopping.asked and finish != "error":
            finish, self._error = "error", "shutdown requested"
        elif answer.open_call and finish not in ("error", "cut"):
            finish, self._error = "error", "unterminated tool call"
        self._log.decoded(answer)
        return finish

    async def _fault(self, fault: str) -> str:
        if fault == "stall":
            await self._client.left.wait()
        elif fault in ("error", "cut"):
            self._error = "decode failed"
            return fault
        else:
            end_by(fault)
        return "error"

    async def _finish(self, answer: Answer, reply: Reply, finish: str) -> None:
        request, session = self._request, self._session
        usage = usage_of(self._prompt, self._cached, answer.tokens)
        if request.stream:
            if not await reply.end_stream(answer, finish, usage):
                self._log.line("final stream failed")
        else:
            await reply.whole(answer, finish, usage)
        session.text = request.prompt + answer.raw
        session.tokens = self._prompt + count_tokens(answer.raw)
        if answer.stopped:
            session.text, session.tokens = "", 0
        elif request.thinks and not request.keeps_reasoning and finish == "stop":
            shown = request.prompt.removesuffix(ASSISTANT + THINK) + ASSISTANT + THOUGHT
            session.visible = shown + "".join(answer.content)
        self._log.calls(answer)
        self._log.finish(answer, finish, self._error)


def _common(one: str, other: str) -> int:
    """Tokens that two texts begin with alike."""
    for at, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return count_tokens(one[:at])
    return count_tokens(min(one, other, key=len))

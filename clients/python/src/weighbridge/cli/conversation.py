"""`chat` without a prompt: a conversation at a terminal."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any

from weighbridge_proto.engines.v1 import chat_service_pb2

from weighbridge.answers import Answer, tool_result
from weighbridge.cli.output import print_failure, printable, say
from weighbridge.engine_client import Engine, chat_message
from weighbridge.failures import CallError, ExitCode

Ask = Callable[[Engine, chat_service_pb2.ChatRequest], Awaitable[Answer]]
"""Streams one answer to the person."""


async def converse(engine: Engine, request: chat_service_pb2.ChatRequest, ask: Ask, *, json_output: bool) -> ExitCode:
    """Talk, until the person has enough.

    Ctrl-C stops an answer, and at the prompt the conversation; Ctrl-D ends it too.
    What the model asks its tools for, the person is asked for.
    """
    say("Ctrl-C stops an answer, Ctrl-D ends the conversation.")
    with AnswerInterrupts() as interrupts:
        while True:
            try:
                text = _read_line("> ").strip()
            except EOFError:
                say("")
                return ExitCode.DONE
            except KeyboardInterrupt:
                say("")
                return ExitCode.INTERRUPTED
            if not text:
                continue
            before = len(request.messages)
            request.messages.append(chat_message(chat_service_pb2.ROLE_USER, text))
            while True:
                answer = await interrupts.run(_answer_or_none(engine, request, ask, json_output=json_output))
                if answer is None or answer.finished.ended_in_thinking:
                    del request.messages[before:]  # a question without an answer would confuse what follows
                    break
                request.messages.append(answer.message)
                if not answer.tool_calls:
                    break
                results = _ask_for_results(answer)
                if results is None:
                    del request.messages[before:]
                    break
                request.messages.extend(results)


def _ask_for_results(answer: Answer) -> list[chat_service_pb2.ChatMessage] | None:
    """What the person says that each tool returned; None: they would rather not."""
    try:
        return [tool_result(call, _read_line(printable(f"result of {call.name}> "))) for call in answer.tool_calls]
    except (EOFError, KeyboardInterrupt):
        say("(dropped)")
        return None


def _read_line(prompt: str) -> str:
    # Blocks the loop on purpose: nothing else is going on, and in a thread it could not be interrupted.
    return input(prompt)


async def _answer_or_none(
    engine: Engine, request: chat_service_pb2.ChatRequest, ask: Ask, *, json_output: bool
) -> Answer | None:
    try:
        return await ask(engine, request)
    except CallError as failed:
        print_failure(failed.failure, json_output=json_output)
        return None


class AnswerInterrupts:
    """Ctrl-C while it is open: cancels the answer that runs, and is a KeyboardInterrupt where none does.

    asyncio's own handling cancels the whole command at the first Ctrl-C, and cannot interrupt a blocking ``input``.
    """

    def __init__(self) -> None:
        self._answering: asyncio.Task[Answer | None] | None = None
        self._before: Any = None

    def __enter__(self) -> "AnswerInterrupts":
        self._loop = asyncio.get_running_loop()
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    async def run(self, answering: Coroutine[Any, Any, Answer | None]) -> Answer | None:
        """Run one answer; None if Ctrl-C stopped it."""
        self._answering = asyncio.create_task(answering)
        try:
            await asyncio.wait({self._answering})
            if self._answering.cancelled():
                say("(stopped)")
                return None
            return self._answering.result()
        finally:
            self._answering.cancel()
            self._answering = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._answering is None:
            raise KeyboardInterrupt
        # Thread-safe, because only that wakes a loop that waits for its sockets.
        self._loop.call_soon_threadsafe(self._answering.cancel)

"""How an answer is shown while it comes: its text, its thinking apart, the tools that it asks for, what it took."""

import sys
from contextlib import AsyncExitStack
from types import TracebackType

import click
from weighbridge_proto.engines.v1 import chat_service_pb2

from weighbridge.answers import AnswerAssembler
from weighbridge.cli.chat_options import lower_thinking
from weighbridge.cli.draining import word_of_draining
from weighbridge.cli.load_display import LoadDisplay
from weighbridge.cli.output import console, printable, say
from weighbridge.engine_client import Engine


class AnswerDisplay:
    """Shows one answer: the load that it takes, what it waits for, itself, and what it took.

    An async context manager, so that no bar and no half line is left, however the answer ends.

    Args:
        engine: who answers.
        request: what it was asked.
    """

    def __init__(self, engine: Engine, request: chat_service_pb2.ChatRequest) -> None:
        self._engine = engine
        self._request = request
        self._load = LoadDisplay(console(stderr=True), engine.suite)
        self._printer = AnswerPrinter()
        self._assembler = AnswerAssembler()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "AnswerDisplay":
        # The shell's prompt, or the reason of a failure, must not follow half a line.
        self._stack.callback(self._printer.end_line)
        self._stack.enter_context(self._load)
        self._began = await self._stack.enter_async_context(word_of_draining(self._engine, self._load.show_line))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def show(self, event: chat_service_pb2.ChatResponse) -> None:
        """Show one event."""
        kind = event.WhichOneof("event")
        if kind == "load":
            await self._load.show(event.load)
        elif kind == "waiting":
            self._load.show_waiting(event.waiting)
        elif kind == "delta":
            self._began()
            self._assembler.take(event.delta)
            self._printer.delta(event.delta)
        elif kind == "finished":
            self._printer.calls(tuple(self._assembler.message().tool_calls))
            say_how_it_ended(self._request, event.finished)


class AnswerPrinter:
    """Prints the pieces of an answer as they come.

    Text and calls of tools are the answer and go to standard output; thinking is beside it, dimmed, on standard error.
    """

    def __init__(self) -> None:
        self._text_open = False
        self._thinking_open = False
        self._to_terminal = sys.stdout.isatty()

    def delta(self, delta: chat_service_pb2.ChatDelta) -> None:
        """Print one piece. Calls of tools are printed whole, by :meth:`calls`."""
        if delta.reasoning:
            self._end_text()
            self._thinking_open = True
            click.echo(click.style(printable(delta.reasoning), dim=True), nl=False, err=True)
        if delta.text:
            self._end_thinking()
            self._text_open = not delta.text.endswith("\n")
            # What a model says must not steer the terminal. A file or a program gets it as it is.
            click.echo(printable(delta.text) if self._to_terminal else delta.text, nl=False)
            sys.stdout.flush()

    def calls(self, calls: tuple[chat_service_pb2.ToolCall, ...]) -> None:
        """Print the tools that the model asks for, a line each."""
        self.end_line()
        for call in calls:
            click.echo(printable(f"CALL      {call.name} {call.arguments_json or '{}'}"))

    def end_line(self) -> None:
        """Close the last line, if it is open."""
        self._end_thinking()
        self._end_text()

    def _end_text(self) -> None:
        if self._text_open:
            self._text_open = False
            click.echo()

    def _end_thinking(self) -> None:
        if self._thinking_open:
            self._thinking_open = False
            click.echo(err=True)


def say_how_it_ended(request: chat_service_pb2.ChatRequest, finished: chat_service_pb2.ChatFinished) -> None:
    """What an answer took, and what to do where it came to nothing."""
    if request.warm_up:
        say(warm_up_line(finished.usage))
        return
    if finished.ended_in_thinking:
        say(thinking_line(request))
    say(stats_line(finished))


def thinking_line(request: chat_service_pb2.ChatRequest) -> str:
    """What to do about an answer that ended before it began."""
    lower = lower_thinking(request.thinking)
    less = f", or lower --thinking ({' or '.join(lower[:2])})" if lower else ""
    if request.max_output_tokens:
        cause = f"The longest answer, {request.max_output_tokens:,} tokens, was reached while the model still thought"
        more = "Raise --max-tokens"
    else:
        cause, more = "The context was full while the model still thought", "Load it with a larger --context"
    return f"{cause}: there is no answer. {more}{less}."


def warm_up_line(usage: chat_service_pb2.Usage) -> str:
    """What a warm-up read, in a line."""
    cached = f", {usage.cached_tokens} of them it had read before" if usage.cached_tokens else ""
    return f"Read {usage.prompt_tokens} tokens{cached}. What begins like this starts sooner now."


def stats_line(finished: chat_service_pb2.ChatFinished) -> str:
    """What an answer took, in a line."""
    usage = finished.usage
    first_s = usage.time_to_first_token.ToNanoseconds() / 1e9
    generation_s = usage.generation_time.ToNanoseconds() / 1e9
    reason = (
        chat_service_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower().replace("_", " ")
    )
    parts = [f"{usage.prompt_tokens} prompt tokens"]
    if usage.cached_tokens:
        parts[0] += f" ({usage.cached_tokens} cached)"
    parts.append(f"{usage.output_tokens} answer tokens")
    if usage.reasoning_tokens:
        parts[-1] += f" ({usage.reasoning_tokens} of thinking)"
    if generation_s > 0 and usage.output_tokens > 1:
        # The first token belongs to the time before it, which is told on its own.
        parts.append(f"{(usage.output_tokens - 1) / generation_s:.1f} tokens/s")
    parts.append(f"first token after {first_s:.2f} s")
    parts.append(f"ended by {reason}")
    return "[" + ", ".join(parts) + "]"

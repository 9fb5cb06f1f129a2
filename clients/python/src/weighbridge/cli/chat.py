"""`chat`: one answer, or a conversation."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from types import FrameType, TracebackType
from typing import Any

import click
from weighbridge_proto.engines.v1 import chat_service_pb2

from weighbridge.cli.arguments import chat_workload, engine_option, engine_options, json_option, workload_options
from weighbridge.cli.engine import choose_engine
from weighbridge.cli.load_display import LoadDisplay
from weighbridge.cli.output import console, print_failure, print_json, say
from weighbridge.cli.running import open_suite, run_command
from weighbridge.engine_client import Engine, chat_message
from weighbridge.failures import CallError, ExitCode

THINKING = {
    "off": chat_service_pb2.THINKING_OFF,
    "low": chat_service_pb2.THINKING_LOW,
    "medium": chat_service_pb2.THINKING_MEDIUM,
    "high": chat_service_pb2.THINKING_HIGH,
}


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--system", help="Instructions that go before the conversation.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer in tokens.")
@click.option("--temperature", type=click.FloatRange(0, 10), help="Randomness; 0 takes the likeliest token.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Only tokens within this probability mass.")
@click.option("--top-k", type=click.IntRange(min=0), help="Only this many likeliest tokens; 0: all.")
@click.option("--min-p", type=click.FloatRange(0, 1), help="Only tokens this likely relative to the likeliest.")
@click.option("--seed", type=int, help="Same seed, same question: same answer.")
@click.option("--stop", multiple=True, help="End the answer before this text. Repeatable.")
@click.option("--thinking", type=click.Choice(list(THINKING)), help="How much the model may think first.")
@workload_options
@engine_option
@json_option
def chat(
    model: str,
    prompt: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    thinking: str | None,
    context: int | None,
    slots: int | None,
    settings: tuple[str, ...],
    engine: str | None,
    json_output: bool,
) -> None:
    """Ask MODEL one PROMPT, or talk to it.

    Without PROMPT it is read from standard input if that is piped, else a conversation begins. The answer goes to
    standard output, everything else to standard error. A model that is not loaded is loaded first.
    """
    sampling = chat_service_pb2.Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    template = chat_service_pb2.ChatRequest(
        sampling=sampling,
        max_output_tokens=max_tokens or 0,
        stop_sequences=stop,
        thinking=THINKING[thinking] if thinking else chat_service_pb2.THINKING_UNSPECIFIED,
        workload=chat_workload(context, slots),
        options=engine_options(settings, engine),
        messages=[chat_message(chat_service_pb2.ROLE_SYSTEM, system)] if system else [],
    )
    if prompt is None and sys.stdin.isatty():
        run_command("chat", lambda: converse(model, engine, template, json_output), json_output=json_output)
    text = prompt if prompt is not None else sys.stdin.read().strip()
    if not text:
        raise click.UsageError("There is no prompt: give PROMPT, or pipe it in.")
    template.messages.append(chat_message(chat_service_pb2.ROLE_USER, text))

    async def body() -> None:
        async with open_suite() as suite:
            template.model.CopyFrom(await suite.resolve_model(model))
            await answer(await choose_engine(suite, engine, template.model, template.options), template, json_output)

    run_command("chat", body, json_output=json_output)


async def answer(engine: Engine, request: chat_service_pb2.ChatRequest, json_output: bool) -> str:
    """Stream one answer to the person: its text to standard output, load and statistics to standard error."""
    printer = AnswerPrinter()
    with LoadDisplay(console(stderr=True), engine.suite) as display:
        try:
            async for event in engine.chat(request):
                kind = event.WhichOneof("event")
                if json_output:
                    print_json(event, one_line=True)
                elif kind == "load":
                    await display.show(event.load)
                elif kind == "waiting":
                    display.show_waiting(event.waiting)
                elif kind == "delta":
                    printer.delta(event.delta)
                elif kind == "finished":
                    printer.end_line()
                    say(stats_line(event.finished))
        finally:
            # The shell's prompt, or the reason of a failure, must not follow half a line.
            printer.end_line()
    return printer.text


class AnswerPrinter:
    """Prints the pieces of an answer as they come. Thinking goes to standard error."""

    def __init__(self) -> None:
        self.text = ""
        self._at_line_start = True
        self._thinking = False

    def delta(self, delta: chat_service_pb2.ChatDelta) -> None:
        """Print one piece."""
        if delta.reasoning:
            self._thinking = True
            click.echo(delta.reasoning, nl=False, err=True)
        if delta.text:
            if self._thinking:
                self._thinking = False
                click.echo(err=True)
            self.text += delta.text
            self._at_line_start = delta.text.endswith("\n")
            click.echo(delta.text, nl=False)
            sys.stdout.flush()

    def end_line(self) -> None:
        """Close the last line, if it is open."""
        if not self._at_line_start:
            self._at_line_start = True
            click.echo()


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
    if generation_s > 0 and usage.output_tokens > 1:
        # The first token belongs to the time before it, which is told on its own.
        parts.append(f"{(usage.output_tokens - 1) / generation_s:.1f} tokens/s")
    parts.append(f"first token after {first_s:.2f} s")
    parts.append(f"ended by {reason}")
    return "[" + ", ".join(parts) + "]"


async def converse(
    model: str, asked_engine: str | None, template: chat_service_pb2.ChatRequest, json_output: bool
) -> ExitCode:
    """A conversation at a terminal. Ctrl-C stops an answer, and at the prompt the conversation; Ctrl-D ends it too."""
    async with open_suite() as suite:
        template.model.CopyFrom(await suite.resolve_model(model))
        engine = await choose_engine(suite, asked_engine, template.model, template.options)
        say("Ctrl-C stops an answer, Ctrl-D ends the conversation.")
        with AnswerInterrupts() as interrupts:
            while True:
                try:
                    text = _read_line().strip()
                except EOFError:
                    say("")
                    return ExitCode.DONE
                except KeyboardInterrupt:
                    say("")
                    return ExitCode.INTERRUPTED
                if not text:
                    continue
                template.messages.append(chat_message(chat_service_pb2.ROLE_USER, text))
                said = await interrupts.run(_answer_or_none(engine, template, json_output))
                if said is None:
                    template.messages.pop()  # a question without an answer would confuse what follows
                else:
                    template.messages.append(chat_message(chat_service_pb2.ROLE_ASSISTANT, said))


def _read_line() -> str:
    # Blocks the loop on purpose: nothing else is going on, and in a thread it could not be interrupted.
    return input("> ")


async def _answer_or_none(engine: Engine, request: chat_service_pb2.ChatRequest, json_output: bool) -> str | None:
    try:
        return await answer(engine, request, json_output)
    except CallError as failed:
        print_failure(failed.failure, json_output=json_output)
        return None


class AnswerInterrupts:
    """Ctrl-C while it is open: cancels the answer that runs, and is a KeyboardInterrupt where none does.

    asyncio's own handling cancels the whole command at the first Ctrl-C, and cannot interrupt a blocking ``input``.
    """

    def __init__(self) -> None:
        self._answering: asyncio.Task[str | None] | None = None
        self._before: Any = None

    def __enter__(self) -> "AnswerInterrupts":
        self._loop = asyncio.get_running_loop()
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    async def run(self, answering: Coroutine[Any, Any, str | None]) -> str | None:
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

"""`chat`: one answer, or a conversation."""

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from functools import partial
from pathlib import Path

import click
from weighbridge_proto.engines.v1 import chat_service_pb2

from weighbridge.answers import Answer, collected_answer
from weighbridge.cli.answer_display import AnswerDisplay
from weighbridge.cli.arguments import chat_workload, engine_option, engine_options, json_option, workload_options
from weighbridge.cli.chat_options import THINKING, response_format, set_tools
from weighbridge.cli.conversation import converse
from weighbridge.cli.engine import choose_engine
from weighbridge.cli.output import print_json
from weighbridge.cli.running import open_suite, run_command
from weighbridge.engine_client import Engine, chat_message
from weighbridge.failures import ExitCode

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--system", help="Instructions that go before the conversation.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer in tokens, thinking included.")
@click.option("--temperature", type=click.FloatRange(0, 10), help="Randomness; 0 takes the likeliest token.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Only tokens within this probability mass.")
@click.option("--top-k", type=click.IntRange(min=0), help="Only this many likeliest tokens; 0: all.")
@click.option("--min-p", type=click.FloatRange(0, 1), help="Only tokens this likely relative to the likeliest.")
@click.option("--seed", type=int, help="Same seed, same question: same answer.")
@click.option("--stop", multiple=True, help="End the answer before this text. Repeatable.")
@click.option("--thinking", type=click.Choice(list(THINKING)), help="How much the model may think first.")
@click.option("--tools", type=_FILE, help="JSON list of tools that the model may call, as OpenAI's chat API has them.")
@click.option("--tool-choice", metavar="auto|none|required|NAME", help="Whether it may, or must, call them.")
@click.option("--json-object", is_flag=True, help="The answer shall be a JSON object.")
@click.option("--json-schema", type=_FILE, help="The answer shall be JSON that this schema describes.")
@click.option("--warm-up", is_flag=True, help="Read what is given and answer nothing: what begins alike starts sooner.")
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
    tools: Path | None,
    tool_choice: str | None,
    json_object: bool,
    json_schema: Path | None,
    warm_up: bool,
    context: int | None,
    slots: int | None,
    settings: tuple[str, ...],
    engine: str | None,
    json_output: bool,
) -> None:
    """Ask MODEL one PROMPT, or talk to it.

    Without PROMPT it is read from standard input if that is piped, else a conversation begins. The answer goes to
    standard output, everything else to standard error. A model that is not loaded is loaded first, as --context,
    --slots and --set say; one that is loaded answers as it is.
    """
    sampling = chat_service_pb2.Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    request = chat_service_pb2.ChatRequest(
        sampling=sampling,
        max_output_tokens=max_tokens or 0,
        stop_sequences=stop,
        thinking=THINKING[thinking] if thinking else chat_service_pb2.THINKING_UNSPECIFIED,
        response_format=response_format(json_object, json_schema),
        warm_up=warm_up,
        workload=chat_workload(context, slots),
        options=engine_options(settings, engine),
        messages=[chat_message(chat_service_pb2.ROLE_SYSTEM, system)] if system else [],
    )
    set_tools(request, tools, tool_choice)
    talks = prompt is None and sys.stdin.isatty()
    if not talks:
        text = prompt if prompt is not None else sys.stdin.read().strip()
        if text:
            request.messages.append(chat_message(chat_service_pb2.ROLE_USER, text))
        elif not (warm_up and system):
            raise click.UsageError("There is no prompt: give PROMPT, or pipe it in.")
    elif warm_up and not system:
        raise click.UsageError("There is nothing to read: give --system or PROMPT.")

    async def body() -> ExitCode:
        ask = partial(answer, json_output=json_output)
        async with open_suite() as suite:
            request.model.CopyFrom(await suite.resolve_model(model))
            chosen = await choose_engine(suite, engine, request.model, request.options, to_chat=True)
            if talks and not warm_up:
                return await converse(chosen, request, ask, json_output=json_output)
            await ask(chosen, request)
        return ExitCode.DONE

    run_command("chat", body, json_output=json_output)


async def answer(engine: Engine, request: chat_service_pb2.ChatRequest, *, json_output: bool) -> Answer:
    """Stream one answer to the person: it itself to standard output, load and statistics to standard error.

    Raises:
        CallError: there is none, or not all of it.
    """

    async def shown() -> AsyncGenerator[chat_service_pb2.ChatResponse, None]:
        async with (
            nullcontext() if json_output else AnswerDisplay(engine, request) as display,
            aclosing(engine.chat(request)) as events,
        ):
            async for event in events:
                if display is None:
                    print_json(event, one_line=True)
                else:
                    await display.show(event)
                yield event

    async with aclosing(shown()) as events:
        return await collected_answer(events)

"""`load`, `unload` and `ps`: what the engines hold."""

import asyncio

import click
from weighbridge_proto import targets
from weighbridge_proto.engines.v1 import engine_service_pb2
from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2

from weighbridge.cli.arguments import (
    ENGINE_CHOICE,
    PRIORITY_OF_NAME,
    chat_workload,
    engine_option,
    engine_options,
    image_options,
    image_workload,
    json_option,
    one_workload,
    workload_options,
)
from weighbridge.cli.load_display import LoadDisplay
from weighbridge.cli.output import as_json, console, print_json
from weighbridge.cli.running import CommandError, engine_kinds_here, open_suite, run_command
from weighbridge.cli.tables import enum_word, print_engines
from weighbridge.client import Suite
from weighbridge.engine_client import Engine
from weighbridge.failures import CallError, ExitCode, unreachable
from weighbridge.sizes import all_bytes, format_size

DEFAULT_ENGINE = "mlx"


async def choose_engine(
    suite: Suite,
    asked: str | None,
    model: weights_pb2.ModelRef | None,
    options: plan_pb2.EngineOptions | None = None,
    *,
    to_chat: bool = False,
) -> Engine:
    """The engine that serves ``model``: the one asked for, the only one there is, else the one that its plan with
    ``options`` names. ``to_chat``: it is for a chat, and so is the model.

    Raises:
        CommandError: the engine asked for is none of those here, the model's plan names none that can load it, or the
            model makes images and shall chat.
    """
    here = engine_kinds_here()
    if asked:
        if here and asked not in here:
            raise CommandError(
                f"The engine {asked} does not run here. What runs: {', '.join(here)}.", ExitCode.UNREACHABLE
            )
        return suite.engine(asked)
    if len(here) <= 1 or model is None:
        return suite.engine(here[0] if here else DEFAULT_ENGINE)
    plan = await suite.plan_model(model, options=options)
    kind = enum_word(plan_pb2.EngineKind, plan.engine_kind, "ENGINE_KIND_")
    if f"engine-{kind}" not in targets.SERVICES:
        raise CommandError(f"No engine here can load {plan.model_name}: it can be priced, not run.")
    if to_chat and plan.workload.WhichOneof("kind") == "image":
        raise CommandError(f"{plan.model_name} makes images and does not chat. Use `weighbridge image`.")
    if kind not in here:
        raise CommandError(
            f"{plan.model_name} is for the engine {kind}, which does not run here. What runs: {', '.join(here)}. Start "
            f"the suite with `weighbridge up --engines {','.join((*here, kind))}`.",
            ExitCode.UNREACHABLE,
        )
    return suite.engine(kind)


@click.command()
@click.argument("model")
@workload_options
@image_options
@engine_option
@click.option("--priority", type=click.Choice(list(PRIORITY_OF_NAME)), help="How urgent it is. Default: normal.")
@click.option("--pin", "--pinned", is_flag=True, help="Never make room for others, never unload for idleness.")
@click.option(
    "--exclusive/--not-exclusive",
    default=None,
    help="Whether nobody else may be on its device. Default: as engines of its kind have it.",
)
@click.option(
    "--idle-timeout", type=click.FloatRange(min=0, min_open=True), help="Unload after this many idle seconds."
)
@click.option(
    "--max-wait", type=click.FloatRange(min=0, min_open=True), help="Wait for memory at most this many seconds."
)
@json_option
def load(
    model: str,
    context: int | None,
    slots: int | None,
    settings: tuple[str, ...],
    size: tuple[int, int] | None,
    quality: str | None,
    frames: int | None,
    batch: int | None,
    references: int | None,
    sources: int | None,
    prompt_tokens: int | None,
    engine: str | None,
    priority: str | None,
    pin: bool,
    exclusive: bool | None,
    idle_timeout: float | None,
    max_wait: float | None,
    json_output: bool,
) -> None:
    """Load MODEL: plan it, admit it, start it. Ctrl-C stops the load and leaves nothing behind."""
    image = image_workload(size, quality, frames, batch, references, sources, prompt_tokens)
    workload = one_workload(image, chat_workload(context, slots))
    options = engine_options(settings, engine)

    async def body() -> None:
        async with open_suite() as suite:
            ref = await suite.resolve_model(model)
            chosen = await choose_engine(suite, engine, ref, options)
            events = chosen.load(
                ref,
                workload=workload,
                options=options,
                priority=PRIORITY_OF_NAME[priority] if priority else lease_pb2.PRIORITY_UNSPECIFIED,
                pinned=pin,
                exclusive=exclusive,
                idle_timeout_s=idle_timeout,
                max_wait_s=max_wait,
            )
            with LoadDisplay(console(stderr=True), suite) as display:
                async for event in events:
                    if json_output:
                        print_json(event, one_line=True)
                    else:
                        await display.show(event)

    run_command("load", body, json_output=json_output)


@click.command()
@click.argument("engine", required=False, type=ENGINE_CHOICE)
@click.option("--force", is_flag=True, help="Do not wait for the requests in flight: they fail.")
@json_option
def unload(engine: str | None, force: bool, json_output: bool) -> None:
    """Unload the model of ENGINE and give its memory back. Without ENGINE: of the only engine there is."""

    async def body() -> None:
        async with open_suite() as suite:
            here = engine_kinds_here()
            if engine is None and len(here) > 1:
                raise CommandError(f"Several engines run here. Say which: weighbridge unload {'|'.join(here)}")
            chosen = await choose_engine(suite, engine, None)
            response = await chosen.unload(force=force)
        if json_output:
            print_json(response)
        elif response.HasField("unloaded"):
            held = all_bytes(response.unloaded.lease.charge)
            click.echo(f"Unloaded {response.unloaded.model_name}, {format_size(held)} given back.")
        else:
            click.echo("Nothing was loaded.")

    run_command("unload", body, json_output=json_output)


@click.command()
@json_option
def ps(json_output: bool) -> None:
    """The engines and what each has loaded. With --json one object, its `engines` as of GetEngine."""

    async def body() -> None:
        async with open_suite() as suite:
            here = engine_kinds_here() or [DEFAULT_ENGINE]
            answers = await asyncio.gather(*(_describe(suite.engine(kind)) for kind in here))
            engines = [answer for answer in answers if isinstance(answer, engine_service_pb2.GetEngineResponse)]
            failures = [answer for answer in answers if isinstance(answer, CallError)]
            if not engines:
                raise failures[0] if failures else unreachable(DEFAULT_ENGINE, suite.target(f"engine-{DEFAULT_ENGINE}"))
        if json_output:
            print_json({"engines": [as_json(response.engine) for response in engines]})
        else:
            print_engines(console(), [response.engine for response in engines])
        for failed in failures:
            click.echo(failed.failure.message, err=True)

    run_command("ps", body, json_output=json_output)


async def _describe(engine: Engine) -> engine_service_pb2.GetEngineResponse | CallError:
    try:
        return await engine.describe()
    except CallError as failed:
        return failed

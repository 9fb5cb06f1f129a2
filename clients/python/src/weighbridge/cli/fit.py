"""`facts` and `fit`: what weights hold, and whether they run. Both work without a running suite."""

import click
from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge.cli.arguments import (
    ENGINE_KIND_OF_NAME,
    PixelsParam,
    chat_workload,
    engine_options,
    json_option,
    machine_option,
    workload_options,
)
from weighbridge.cli.output import console, print_json
from weighbridge.cli.running import run_command
from weighbridge.cli.standalone import fit_suite
from weighbridge.cli.tables import print_facts, print_plan
from weighbridge.failures import ExitCode, verdict_exit_code


@click.command()
@click.argument("model", metavar="FILE|DIR")
@json_option
def facts(model: str, json_output: bool) -> None:
    """What weight files hold, read from their headers alone."""

    async def body() -> None:
        async with fit_suite() as suite:
            response = await suite.describe_weights(await suite.resolve_model(model))
        if json_output:
            print_json(response)
        else:
            print_facts(console(), response.facts)

    run_command("facts", body, json_output=json_output)


@click.command(short_help="Will MODEL run here, and what does it cost?")
@click.argument("model")
@workload_options
@click.option("--size", type=PixelsParam(), help="Width and height of an image in pixels, such as 1024x1024.")
@click.option("--engine", type=click.Choice(list(ENGINE_KIND_OF_NAME)), help="The engine. Default: as the model needs.")
@machine_option
@click.option("--now", is_flag=True, help="Also say how it stands against what is loaded at this moment.")
@json_option
def fit(
    model: str,
    context: int | None,
    slots: int | None,
    size: tuple[int, int] | None,
    settings: tuple[str, ...],
    engine: str | None,
    machine: machine_pb2.Machine | None,
    now: bool,
    json_output: bool,
) -> None:
    """Will MODEL run on this machine, and what does each part of it cost?

    MODEL is a file or folder. Exit code 3 if it won't run.
    """
    if size is not None and (context or slots):
        raise click.UsageError("--size is for images, --context and --slots are for chat: give one kind.")
    if size is not None:
        workload: plan_pb2.Workload | None = plan_pb2.Workload(
            image=plan_pb2.ImageWorkload(width_px=size[0], height_px=size[1])
        )
    else:
        workload = chat_workload(context, slots)
    options = engine_options(settings, engine)

    async def body() -> ExitCode:
        async with fit_suite() as suite:
            plan = await suite.plan_model(
                await suite.resolve_model(model),
                workload=workload,
                options=options,
                machine=machine,
                engine_kind=ENGINE_KIND_OF_NAME[engine] if engine else plan_pb2.ENGINE_KIND_UNSPECIFIED,
                check_current_leases=now,
            )
        if json_output:
            print_json(plan)
        else:
            print_plan(console(), plan)
        return verdict_exit_code(plan.assessment.verdict)

    run_command("fit", body, json_output=json_output)

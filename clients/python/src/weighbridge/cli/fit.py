"""`facts` and `fit`: what weights hold, and whether they run. Both work without a running suite."""

from pathlib import Path

import click
from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge.cli.arguments import (
    ENGINE_KIND_OF_NAME,
    RowsParam,
    chat_workload,
    engine_options,
    image_options,
    image_workload,
    json_option,
    machine_option,
    one_workload,
    workload_options,
)
from weighbridge.cli.grid_table import grid_json, print_grid
from weighbridge.cli.output import console, print_json, say
from weighbridge.cli.plot import FORMATS, write_plot
from weighbridge.cli.running import CommandError, run_command
from weighbridge.cli.standalone import fit_suite
from weighbridge.cli.tables import print_facts, print_plan
from weighbridge.client import Suite
from weighbridge.failures import ExitCode, verdict_exit_code
from weighbridge.grid import Ask, GridError, make_grid


@click.command()
@click.argument("model", metavar="MODEL|FILE|DIR")
@click.option("--tensors", is_flag=True, help="Also list every tensor.")
@json_option
def facts(model: str, tensors: bool, json_output: bool) -> None:
    """What weight files hold, read from their headers alone."""

    async def body() -> None:
        async with fit_suite() as suite:
            response = await suite.describe_weights(await suite.resolve_model(model), include_tensors=tensors)
        if json_output:
            print_json(response)
        else:
            print_facts(console(), response.facts)

    run_command("facts", body, json_output=json_output)


@click.command(short_help="Will MODEL run here, and what does it cost?")
@click.argument("model")
@workload_options
@image_options
@click.option("--engine", type=click.Choice(list(ENGINE_KIND_OF_NAME)), help="The engine. Default: as the model needs.")
@machine_option
@click.option("--now", is_flag=True, help="Also say how it stands against what is loaded at this moment.")
@click.option("--grid", "as_grid", is_flag=True, help="A table over context x slots, or size x precision.")
@click.option("--rows", type=RowsParam(), help="Contexts, or sizes in pixels, with commas between them.")
@click.option("--columns", help="Slots, precisions or NAME=VALUE, with commas between them, + joins several.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the grid into this file: .png or .svg. Implies --grid.",
)
@json_option
def fit(
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
    machine: machine_pb2.Machine | None,
    now: bool,
    as_grid: bool,
    rows: tuple[str, ...] | None,
    columns: str | None,
    plot: Path | None,
    json_output: bool,
) -> None:
    """Will MODEL run on this machine, and what does each part of it cost?

    MODEL is a catalogue id, a file or a folder. Exit code 3 if it won't run.
    """
    image = image_workload(size, quality, frames, batch, references, sources, prompt_tokens)
    workload = one_workload(image, chat_workload(context, slots))
    as_grid = as_grid or plot is not None
    if (rows or columns) and not as_grid:
        raise click.UsageError("--rows and --columns are those of a grid: add --grid or --plot.")
    if as_grid and now:
        raise click.UsageError("A grid is about the machine, --now about this moment: give one of them.")
    if plot is not None and plot.suffix.lower() not in FORMATS:
        raise click.UsageError(f"{plot.name} is no picture that can be drawn. Its name ends in {' or '.join(FORMATS)}.")
    kind = ENGINE_KIND_OF_NAME[engine] if engine else plan_pb2.ENGINE_KIND_UNSPECIFIED
    options = engine_options(settings, engine)

    async def body() -> ExitCode:
        async with fit_suite() as suite:
            reference = await suite.resolve_model(model)
            if as_grid:
                asked = Ask(reference, kind, workload, options, machine)
                await _grid(suite, asked, rows, columns, plot, json_output)
                return ExitCode.DONE
            plan = await suite.plan_model(
                reference,
                workload=workload,
                options=options,
                machine=machine,
                engine_kind=kind,
                check_current_leases=now,
            )
        if json_output:
            print_json(plan)
        else:
            print_plan(console(), plan)
        return verdict_exit_code(plan.assessment.verdict)

    run_command("fit", body, json_output=json_output)


async def _grid(
    suite: Suite,
    asked: Ask,
    rows: tuple[str, ...] | None,
    columns: str | None,
    plot: Path | None,
    json_output: bool,
) -> None:
    """Raises CommandError, CallError."""
    chosen = [column.strip() for column in columns.split(",") if column.strip()] if columns else None
    try:
        grid = await make_grid(suite, asked, rows, chosen)
    except GridError as wrong:
        raise CommandError(str(wrong), ExitCode.USAGE) from None
    if plot is not None:
        try:
            write_plot(grid, plot)
        except ImportError:
            raise CommandError("Pictures need matplotlib. Install it: pip install 'weighbridge[plot]'.") from None
        except OSError as failed:
            raise CommandError(f"The picture {plot} cannot be written: {failed.strerror or failed}.") from None
        say(f"Drawn: {plot}")
    if json_output:
        print_json(grid_json(grid))
    else:
        print_grid(console(), grid)

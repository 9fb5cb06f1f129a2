"""`fits`: the catalogue on this machine."""

import click
from rich.console import Console
from rich.text import Text
from weighbridge_proto.fit.v1 import fit_service_pb2, plan_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

from weighbridge.cli.arguments import QUALITY_OF_NAME, json_option, machine_option
from weighbridge.cli.grid_table import STYLES
from weighbridge.cli.output import console, print_json
from weighbridge.cli.running import run_command
from weighbridge.cli.standalone import fit_suite
from weighbridge.cli.tables import enum_word, machine_words, plain_table
from weighbridge.sizes import format_size

USE_OF_NAME = {
    "image": fit_service_pb2.MODEL_USE_IMAGE,
    "video": fit_service_pb2.MODEL_USE_VIDEO,
    "chat": fit_service_pb2.MODEL_USE_CHAT,
}


@click.command(short_help="The catalogue on this machine.")
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--kind", type=click.Choice(list(USE_OF_NAME)), help="Only models for this use.")
@click.option("--quality", type=click.Choice(list(QUALITY_OF_NAME)), help="Price images at this tier.")
@click.option("--runs", is_flag=True, help="Only models that run here.")
@machine_option
@json_option
def fits(
    models: tuple[str, ...],
    kind: str | None,
    quality: str | None,
    runs: bool,
    machine: machine_pb2.Machine | None,
    json_output: bool,
) -> None:
    """Which models of the catalogue run on this machine, and what they would need."""

    async def body() -> None:
        async with fit_suite() as suite:
            response = await suite.list_fits(
                use=USE_OF_NAME[kind] if kind else fit_service_pb2.MODEL_USE_UNSPECIFIED,
                quality=QUALITY_OF_NAME[quality] if quality else plan_pb2.QUALITY_TIER_UNSPECIFIED,
                machine=machine,
                catalog_ids=models,
            )
        listed = len(response.fits)
        if runs:
            kept = [fit for fit in response.fits if fit.assessment.verdict == requirement_pb2.VERDICT_RUNS]
            del response.fits[:]
            response.fits.extend(kept)
        if json_output:
            print_json(response)
        else:
            print_fits(console(), response, listed)

    run_command("fits", body, json_output=json_output, only_ids=True)


def print_fits(to: Console, response: fit_service_pb2.ListFitsResponse, listed: int) -> None:
    """One row for each model that is shown; ``listed``: how many there were before some were left out."""
    words = machine_words(response.capacity).removeprefix("a ")
    to.print(f"{words[:1].upper()}{words[1:]}, {format_size(response.capacity.total.effective_bytes)} for models")
    to.print()
    table = plain_table(("model", "engine", "verdict"), ("low", "expected", "high"))
    table.add_column("priced by")
    table.add_column("here")
    for fit in response.fits:
        verdict = fit.assessment.verdict
        table.add_row(
            fit.catalog_id,
            enum_word(plan_pb2.EngineKind, fit.engine_kind, "ENGINE_KIND_"),
            Text(requirement_pb2.Verdict.Name(verdict).removeprefix("VERDICT_"), style=STYLES.get(verdict, "dim")),
            format_size(fit.total.low_bytes),
            format_size(fit.total.expected_bytes),
            format_size(fit.total.high_bytes),
            "its tensors" if fit.priced_by_facts else "file sizes",
            "yes" if fit.on_disk else "",
        )
    to.print(table)
    count = sum(fit.assessment.verdict == requirement_pb2.VERDICT_RUNS for fit in response.fits)
    to.print()
    to.print(f"{count} of {listed} run here. weighbridge fit MODEL says why, weighbridge pull MODEL gets it.")
    for note in response.notes:
        to.print(Text(f"Left out: {note}"))

"""`pin`: facts about weights, written into a manifest of the catalogue."""

from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from weighbridge_proto.fit.v1 import weights_pb2

from weighbridge.cli.output import console, say
from weighbridge.cli.running import CommandError, run_command
from weighbridge.cli.standalone import fit_suite
from weighbridge.client import Suite
from weighbridge.models import model_at, path_here
from weighbridge.pinning import (
    PinError,
    add_digests,
    as_text,
    folder_of,
    new_manifest,
    part_of,
    pin_into,
    read_manifest,
    weight_files,
    write_json,
)

UNKNOWN_LICENSE = "LicenseRef-unknown"


@click.command(short_help="Write MODEL's facts into a manifest.")
@click.argument("model", metavar="MODEL|FILE|DIR")
@click.option(
    "--into",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The manifest (ID.json) that the facts go into. One that is not there is made, for a chat model.",
)
@click.option("--repository", default="", help="For a new manifest: where the files come from, as OWNER/NAME.")
@click.option("--revision", default="", help="For a new manifest: the commit of the repository.")
@click.option("--license", "license_name", default=UNKNOWN_LICENSE, show_default=True, help="For a new manifest: SPDX.")
@click.option("--digests", is_flag=True, help="Also write the SHA-256 of every file: reads all of them.")
def pin(model: str, into: Path | None, repository: str, revision: str, license_name: str, digests: bool) -> None:
    """Write what MODEL's weights hold into a manifest of the catalogue.

    With its facts pinned, a model is priced to the byte on machines that do not have it. Without --into the facts are
    printed, as a manifest holds them.
    """
    if into is None and (repository or revision or digests):
        raise click.UsageError("--repository, --revision and --digests are for a manifest: add --into ID.json.")

    async def body() -> None:
        async with fit_suite() as suite:
            try:
                if into is None:
                    reference = await suite.resolve_model(model)
                    described = await suite.describe_weights(reference, include_tensors=True)
                    click.echo(as_text(part_of(described.facts)), nl=False)
                    return
                path = _path(model)
                manifest = read_manifest(into)
                if manifest is None:
                    manifest = await _made(suite, path, into, repository, revision, license_name)
                pinned = await pin_into(manifest, path, _describing(suite))
                if digests:
                    _digest(manifest, folder_of(path))
                write_json(into, manifest)
            except PinError as wrong:
                raise CommandError(str(wrong)) from None
        for what in pinned:
            say(f"Pinned: {what}")
        click.echo(str(into))

    run_command("pin", body, json_output=False)


def _path(model: str) -> Path:
    """The file or folder that is meant. Raises PinError."""
    path = path_here(model)
    if path is None:
        raise PinError(f"{model} is no file or folder here: facts go into a manifest from the files.")
    return path


def _describing(suite: Suite) -> Any:
    async def describe(path: Path) -> weights_pb2.WeightFacts:
        return (await suite.describe_weights(model_at(path), include_tensors=True)).facts

    return describe


async def _made(
    suite: Suite, path: Path, into: Path, repository: str, revision: str, license_name: str
) -> dict[str, Any]:
    """A manifest for a model that has none. Raises PinError, CallError."""
    if into.suffix != ".json":
        raise PinError(f"A manifest's name is its id and .json, not {into.name}.")
    facts = (await suite.describe_weights(model_at(path))).facts
    plan = await suite.plan_model(model_at(path))
    return new_manifest(
        into.stem,
        facts,
        plan.engine_kind,
        repository=repository,
        revision=revision,
        license_name=license_name,
        max_context_tokens=facts.geometry.max_context_tokens,
    )


def _digest(manifest: dict[str, Any], folder: Path) -> None:
    total = sum(file["size_bytes"] for file in weight_files(manifest))
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        add_digests(manifest, folder, lambda count: progress.advance(task, count))

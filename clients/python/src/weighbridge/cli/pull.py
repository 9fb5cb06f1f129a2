"""`pull`: a model of the catalogue, checked before it comes and verified before it counts."""

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path

import click
from weighbridge_proto.fit.v1 import fit_service_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

from weighbridge.cli.arguments import json_option, machine_option
from weighbridge.cli.output import console, print_json, say
from weighbridge.cli.pull_display import JsonPullDisplay, PullDisplay
from weighbridge.cli.running import CommandError, cancelled_by_signals, run_command
from weighbridge.cli.standalone import fit_suite
from weighbridge.failures import ExitCode
from weighbridge.pull.errors import PullError, PullReason, PullStoppedError
from weighbridge.pull.http import Http
from weighbridge.pull.hub import HubRepository
from weighbridge.pull.pulling import Order, Pulled, pull
from weighbridge.pull.settings import PullSettings, PullSettingsError, pull_settings
from weighbridge.pull.transfer import Transfer
from weighbridge.pull.wanted import WantedFile
from weighbridge.sizes import format_size

STOP_PATIENCE_S = 2.0
"""How long a stopped download may take to notice. What has come is safe in any case: it is only ever appended to."""


@click.command("pull", short_help="Get MODEL of the catalogue.")
@click.argument("model")
@machine_option
@click.option("--check", "check_only", is_flag=True, help="Only say whether it would run here and what would come.")
@json_option
def pull_command(model: str, machine: machine_pb2.Machine | None, check_only: bool, json_output: bool) -> None:
    """Get MODEL of the catalogue: checked first, resumed after any interruption, verified by its digests.

    A model that could not run on this machine is not downloaded (exit code 3); --machine asks for another machine.

    \b
    WEIGHBRIDGE_PULL_TOKEN       token for the hub, sent to no other host (or _TOKEN_FILE: a file that holds it)
    WEIGHBRIDGE_PULL_HUB         mirror that takes the hub's place
    WEIGHBRIDGE_PULL_STALL_S     seconds that a host may say nothing (30)
    """
    try:
        settings = pull_settings(os.environ)
    except PullSettingsError as wrong:
        raise click.UsageError(str(wrong)) from None

    async def body() -> ExitCode | None:
        async with fit_suite() as suite:
            checked = await suite.check_pull(model, machine)
        if check_only:
            _show_check(checked, json_output=json_output)
            return None
        if not checked.assessed:
            say(f"{checked.assessment.reason} It is downloaded anyway.")
        display = JsonPullDisplay(console()) if json_output else PullDisplay(console(stderr=True))
        try:
            with cancelled_by_signals(), display:
                pulled = await _in_thread(order_of(checked.model), settings, display)
        except PullError as failed:
            display.on_failed(failed)
            unreachable = failed.reason is PullReason.UNREACHABLE
            code = ExitCode.UNREACHABLE if unreachable else ExitCode.FAILED
            raise CommandError(f"{failed.message} [{failed.reason}]", code) from None
        except asyncio.CancelledError:
            display.on_stopped()
            raise
        if not json_output:
            done = "is there already" if not pulled.downloaded_bytes else "is here, whole and verified"
            click.echo(f"{checked.model.display_name or model} {done}: {pulled.folder}")
        display.on_pulled(pulled)
        return None

    run_command("pull", body, json_output=json_output, only_ids=True)


def order_of(entry: fit_service_pb2.CatalogModel) -> Order:
    """What the catalogue's entry means for a pull.

    Raises:
        CommandError: the service does not say where its files belong.
    """
    folder = Path(entry.folder)
    if not folder.is_absolute():
        raise CommandError(f"The fit service does not say where the files of {entry.catalog_id} belong.")
    files = tuple(
        WantedFile(file.path or file.name, file.size_bytes, sha256=file.sha256, url=file.url) for file in entry.files
    )
    return Order(entry.catalog_id, entry.version, folder, files, entry.repository, entry.revision)


async def _in_thread(order: Order, settings: PullSettings, display: PullDisplay) -> Pulled:
    """The pull, in a thread of its own: a host that does not answer must not keep the command from ending."""
    loop = asyncio.get_running_loop()
    stop = threading.Event()
    outcome: asyncio.Future[Pulled] = loop.create_future()

    def settle(pulled: Pulled | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        elif pulled is not None:
            outcome.set_result(pulled)

    def sleep(seconds: float) -> None:
        if stop.wait(seconds):
            raise PullStoppedError

    def repository(folder: Path) -> HubRepository:
        name, revision, route = order.repository, order.revision, settings.route
        return HubRepository(name, revision, route, folder, stall_s=settings.stall_s, sleep=sleep)

    def work() -> None:
        pulled: Pulled | None = None
        error: BaseException | None = None
        try:
            pulled = pull(
                order,
                lambda folder: Transfer(http, folder, sleep=sleep, clock=time.monotonic),
                repository,
                display.listener(stop.is_set),
            )
        except Exception as failed:  # whatever it is, the command must hear of it and end
            error = failed
        with contextlib.suppress(RuntimeError):  # the command has ended without us
            loop.call_soon_threadsafe(settle, pulled, error)

    http = Http(settings.route, settings.stall_s)
    thread = threading.Thread(target=work, name="pull", daemon=True)
    thread.start()
    try:
        return await asyncio.shield(outcome)
    except asyncio.CancelledError:
        stop.set()
        http.cut()
        await asyncio.wait({outcome}, timeout=STOP_PATIENCE_S)
        if outcome.done():
            outcome.exception()  # it is told below
        raise
    except PullStoppedError:
        raise asyncio.CancelledError from None
    finally:
        http.close()


def _show_check(checked: fit_service_pb2.CheckPullResponse, *, json_output: bool) -> None:
    if json_output:
        print_json(checked)
        return
    verdict = requirement_pb2.Verdict.Name(checked.assessment.verdict).removeprefix("VERDICT_")
    click.echo(f"{checked.model.display_name or checked.model.catalog_id}: {verdict}. {checked.assessment.reason}")
    entry = checked.model
    count = "1 weight file" if len(entry.files) == 1 else f"{len(entry.files)} weight files"
    more = f", and what {entry.repository} has beside them" if entry.repository else ""
    click.echo(f"{count}{more}, {format_size(entry.file_bytes)} together, to {entry.folder}")
    if entry.on_disk:
        click.echo("It is there already.")

"""`up`: the whole suite on this machine."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from weighbridge_proto import targets

from weighbridge import interrupts
from weighbridge.cli.output import print_json, say
from weighbridge.cli.running import CommandError, run_command
from weighbridge.failures import ExitCode
from weighbridge.supervision.lock import SuiteRunningError
from weighbridge.supervision.process import WRONG_SETTINGS, StartFailedError
from weighbridge.supervision.services import ENGINE_KINDS, MissingServiceError, ServiceSpec, suite_services
from weighbridge.supervision.suite import RunningSuite, ServiceEvent, ServiceReady, SuiteBrokenError

MODELS_ROOT_VARIABLE = "WEIGHBRIDGE_FIT_MODELS_ROOT"


@click.command()
@click.option("--engines", default="mlx", show_default=True, help="Engines to start: mlx, sd, ds4, or several: mlx,sd.")
@click.option(
    "--models-root",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="Folder that models must be under. Default: everything that you may read.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show what the services print, instead of keeping it in log files.")
@click.option("--json", "json_output", is_flag=True, help="Print what happens as JSON, one object per line.")
def up(engines: str, models_root: Path | None, verbose: bool, json_output: bool) -> None:
    """Start the whole suite and keep it up. Ctrl-C stops it, a second Ctrl-C at once."""
    kinds = [kind.strip() for kind in engines.split(",") if kind.strip()]
    for kind in kinds:
        if kind not in ENGINE_KINDS:
            raise click.BadParameter(
                f"there is no engine {kind!r}. The engines are {', '.join(ENGINE_KINDS)}.", param_hint="'--engines'"
            )

    async def body() -> ExitCode:
        try:
            services = suite_services(kinds)
        except MissingServiceError as missing:
            raise CommandError(str(missing)) from None
        environ = suite_environment(os.environ, models_root)
        return await keep_up(services, targets.run_dir(), environ, verbose=verbose, json_output=json_output)

    # No span: it would last as long as the suite.
    run_command("up", body, json_output=json_output, traced=False)


def suite_environment(environ: Mapping[str, str], models_root: Path | None = None) -> dict[str, str]:
    """The environment of a suite of this user alone.

    Its sockets are private to the user, so it may open whatever the user may: the models root is ``/`` unless chosen.
    """
    changed = dict(environ)
    if models_root is not None:
        changed[MODELS_ROOT_VARIABLE] = str(models_root)
    else:
        changed.setdefault(MODELS_ROOT_VARIABLE, "/")
    return changed


async def keep_up(
    services: Sequence[ServiceSpec],
    run_dir: Path,
    environ: Mapping[str, str],
    *,
    verbose: bool = False,
    json_output: bool = False,
) -> ExitCode:
    """Run ``services`` until a signal, and stop them; a second signal kills what still runs.

    ``json_output``: what happens goes to standard output, one JSON object per line, instead of to people.
    """
    on_event = _print_event if json_output else None
    try:
        suite = RunningSuite(services, run_dir, environ, say, on_event=on_event, verbose=verbose)
    except ValueError as wrong:  # the run folder's path is too long for sockets
        raise CommandError(str(wrong)) from None
    running = asyncio.create_task(_start_and_supervise(suite, json_output=json_output))
    signals = 0
    reason = ""

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            say("Stopping. Once more to stop at once.")
            running.cancel()
        else:
            suite.stop_at_once()

    loop = asyncio.get_running_loop()
    watched = interrupts.stop_signals()
    for number in watched:
        loop.add_signal_handler(number, on_signal)
    try:
        await asyncio.wait({running})
        if not running.cancelled():
            running.result()
    except StartFailedError as failed:
        reason = str(failed)
        code = ExitCode.USAGE if failed.status == WRONG_SETTINGS else ExitCode.FAILED
        raise CommandError(str(failed), code) from None
    except SuiteBrokenError as failed:
        reason = str(failed)
        raise CommandError(reason) from None
    except BrokenPipeError:
        raise  # who read the events is gone: so is the suite that was started for them
    except SuiteRunningError as failed:
        raise CommandError(str(failed)) from None
    except OSError as failed:
        raise CommandError(f"The suite cannot run in {run_dir}: {_in_words(failed, run_dir)}") from None
    finally:
        await suite.stop()
        for number in watched:
            loop.remove_signal_handler(number)
        if json_output and reason:
            print_json({"state": "stopped", "reason": reason}, one_line=True)
    if json_output:
        print_json({"state": "stopped"}, one_line=True)
    else:
        say("Stopped.")
    return ExitCode.DONE


def _in_words(failed: OSError, run_dir: Path) -> str:
    """What the system says of the run folder, and what to do; any other failure as it says itself."""
    named = Path(failed.filename) if isinstance(failed.filename, str) else None
    if named is None or not (named.is_relative_to(run_dir) or run_dir.is_relative_to(named)):
        return str(failed)
    return f"{failed.strerror}. Choose another folder with WEIGHBRIDGE_RUN_DIR."


def _print_event(event: ServiceEvent) -> None:
    if isinstance(event, ServiceReady):
        print_json({"service": event.service, "state": "ready", "target": event.target}, one_line=True)
    else:
        ended = {"service": event.service, "state": "ended", "reason": event.reason}
        print_json({**ended, "restart_in_s": round(event.restart_in_s, 3)}, one_line=True)


async def _start_and_supervise(suite: RunningSuite, *, json_output: bool) -> None:
    await suite.start()
    if json_output:
        print_json({"state": "up", "run_dir": str(suite.run_dir)}, one_line=True)
    else:
        say(f"The suite is up in {suite.run_dir}. Ctrl-C stops it.")
    await suite.supervise()

"""`up`: the whole suite on this machine."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from weighbridge_proto import targets

from weighbridge import interrupts
from weighbridge.cli.output import say
from weighbridge.cli.running import CommandError, run_command
from weighbridge.failures import ExitCode
from weighbridge.supervision.lock import SuiteRunningError
from weighbridge.supervision.process import WRONG_SETTINGS, StartFailedError
from weighbridge.supervision.services import ENGINE_KINDS, MissingServiceError, ServiceSpec, suite_services
from weighbridge.supervision.suite import RunningSuite, SuiteBrokenError

MODELS_ROOT_VARIABLE = "WEIGHBRIDGE_FIT_MODELS_ROOT"


@click.command()
@click.option("--engines", default="mlx", show_default=True, help="Engines to start, with commas between them.")
@click.option(
    "--models-root",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="Folder that models must be under. Default: everything that you may read.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show what the services print, instead of keeping it in log files.")
def up(engines: str, models_root: Path | None, verbose: bool) -> None:
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
        return await keep_up(services, targets.run_dir(), environ, verbose=verbose)

    # No span: it would last as long as the suite.
    run_command("up", body, json_output=False, traced=False)


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
    services: Sequence[ServiceSpec], run_dir: Path, environ: Mapping[str, str], *, verbose: bool = False
) -> ExitCode:
    """Run ``services`` until a signal, and stop them; a second signal kills what still runs."""
    try:
        suite = RunningSuite(services, run_dir, environ, say, verbose=verbose)
    except ValueError as wrong:  # the run folder's path is too long for sockets
        raise CommandError(str(wrong)) from None
    running = asyncio.create_task(_start_and_supervise(suite, run_dir))
    signals = 0

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
        code = ExitCode.USAGE if failed.status == WRONG_SETTINGS else ExitCode.FAILED
        raise CommandError(str(failed), code) from None
    except (SuiteRunningError, SuiteBrokenError) as failed:
        raise CommandError(str(failed)) from None
    except OSError as failed:
        raise CommandError(f"The suite cannot run in {run_dir}: {failed}") from None
    finally:
        await suite.stop()
        for number in watched:
            loop.remove_signal_handler(number)
    say("Stopped.")
    return ExitCode.DONE


async def _start_and_supervise(suite: RunningSuite, run_dir: Path) -> None:
    await suite.start()
    say(f"The suite is up in {run_dir}. Ctrl-C stops it.")
    await suite.supervise()

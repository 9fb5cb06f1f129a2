"""`demo`: the whole way of one model, scripted and checked."""

import os
from pathlib import Path

import click

from weighbridge.cli.output import console, say
from weighbridge.cli.running import CommandError, cancelled_by_signals, run_command
from weighbridge.failures import ExitCode
from weighbridge.supervision.process import StartFailedError
from weighbridge.supervision.services import MissingServiceError, suite_services
from weighbridge.telemetry import sdk_installed

MODEL_FOLDER = Path(".demo/models/smollm2-135m-instruct")


@click.command(short_help="Show the whole way of one small real model.")
@click.option(
    "--model-folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=MODEL_FOLDER,
    show_default=True,
    help="Where the demo model is, or is made.",
)
def demo(model_folder: Path) -> None:
    """Weigh a small real model, load it, ask it, unload it, and show the trace of it all.

    Runs a suite of its own in a temporary folder. Exit code 1 if anything does not hold.
    """

    async def body() -> ExitCode:
        # Imported here: OTLP messages and services are installed with the demo extra alone.
        if not sdk_installed():
            raise CommandError("The demo needs more than is installed: pip install 'weighbridge[demo]'.")
        from weighbridge.demo.model import DemoModelError
        from weighbridge.demo.script import Demo

        try:
            run = Demo(model_folder, dict(os.environ), suite_services(["mlx"]), console())
            with cancelled_by_signals():
                await run.run()
        except (DemoModelError, MissingServiceError, StartFailedError) as failed:
            raise CommandError(str(failed)) from None
        click.echo()
        for problem in run.problems:
            say(f"FAILED: {problem}")
        if run.problems:
            return ExitCode.FAILED
        click.echo("All of it held: weighed, admitted, answered, given back, and traced without a gap.")
        return ExitCode.DONE

    run_command("demo", body, json_output=False, traced=False)

"""`ledger`: what an operator does with the ledger's own database. The tools are the ledger's; this only finds them."""

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from weighbridge.cli.output import say
from weighbridge.failures import ExitCode
from weighbridge.supervision.services import is_installed

F = TypeVar("F", bound=Callable[..., Any])

MODULE = "weighbridge_ledger"


@click.group(short_help="Back up, check and replay the ledger's database.")
def ledger() -> None:
    """Back up, check and replay the ledger's database, also while the ledger runs.

    Exit codes: 0 done and sound, 1 failed or a fault was found, 2 it could not be tried.
    """


@ledger.command()
@click.argument("file", type=click.Path())
@click.option("--database", type=click.Path(), help="The database. Default: the one of this machine's ledger.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.option("--json", "json_output", is_flag=True, help="Print JSON instead of text.")
def backup(file: str, database: str | None, force: bool, json_output: bool) -> None:
    """Copy the database to FILE as it stands at one moment, whole or not at all. The ledger is not stopped."""
    options = [*(["--database", database] if database else []), *(["--force"] if force else [])]
    run_tool("backup", file, options, json_output=json_output)


def _looking(command: F) -> F:
    for option in (
        click.option("--json", "json_output", is_flag=True, help="Print JSON instead of text."),
        click.option("--machine", metavar="SPEC", help="The machine of that ledger, if not this one: unified:64."),
        click.argument("file", type=click.Path(), required=False),
    ):
        command = option(command)
    return command


@ledger.command()
@_looking
def check(file: str | None, machine: str | None, json_output: bool) -> None:
    """Check the database, or the backup FILE: its pages, its records, and the book that they make up.

    Changes nothing.
    """
    run_tool("check", file, ["--machine", machine] if machine else [], json_output=json_output)


@ledger.command()
@_looking
@click.option(
    "--events", type=click.Path(), metavar="RECORDING", help="Play what `weighbridge watch --json` printed instead."
)
def replay(file: str | None, machine: str | None, json_output: bool, events: str | None) -> None:
    """Show what the database, or the backup FILE, holds and what a ledger that starts on it now would do.

    With --events, hold every recorded change to the rules of the book. Changes nothing.
    """
    options = [*(["--machine", machine] if machine else []), *(["--events", events] if events else [])]
    run_tool("replay", file, options, json_output=json_output)


def run_tool(name: str, file: str | None, options: list[str], *, json_output: bool) -> NoReturn:
    """Become the ledger's tool: its output, its exit code and what Ctrl-C does to it are those of this command."""
    if not is_installed(MODULE):
        say("This installation has no ledger. Install it where the database is: pip install 'weighbridge[local]'.")
        raise click.exceptions.Exit(int(ExitCode.USAGE))
    argv = [sys.executable, "-m", MODULE, name, *options, *(["--json"] if json_output else [])]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*argv, *(["--", file] if file is not None else [])])  # noqa: S606 # no shell by design

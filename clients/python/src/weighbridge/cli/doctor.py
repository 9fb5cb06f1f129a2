"""`doctor`: what is found, what is missing, and the one next step."""

import os
from dataclasses import asdict

import click
from rich.text import Text
from weighbridge_proto import targets

from weighbridge.cli.output import console, print_json
from weighbridge.cli.running import CommandError, run_command
from weighbridge.cli.standalone import own_suite
from weighbridge.cli.tables import plain_table
from weighbridge.client import Suite
from weighbridge.diagnosis import check_catalogue, check_machine, diagnose
from weighbridge.failures import CallError, ExitCode
from weighbridge.findings import Check, State, next_step
from weighbridge.reach import HEALTH_SERVICES
from weighbridge.supervision.services import is_installed

STYLES = {State.OK: "green", State.ABSENT: "yellow", State.BROKEN: "bold red"}


@click.command(short_help="What is found, what is missing, and the next step.")
@click.option("--json", "json_output", is_flag=True, help="Print JSON instead of text.")
def doctor(json_output: bool) -> None:
    """What is found of the suite here, what is missing, and the one next step.

    Exit code 1 if something that is needed is broken.
    """

    async def body() -> ExitCode:
        async with Suite() as suite:
            checks = await diagnose(suite, os.environ)
        checks = await _with_own_services(checks)
        step = next_step(checks)
        if json_output:
            print_json({"checks": [asdict(check) for check in checks], "next_step": step})
        else:
            _print(checks, step)
        return ExitCode.FAILED if any(check.state is State.BROKEN for check in checks) else ExitCode.DONE

    run_command("doctor", body, json_output=json_output, traced=False)


async def _with_own_services(checks: list[Check]) -> list[Check]:
    """Let a ledger and a fit of this process's own look, where none runs and the services are installed."""
    absent = {check.name for check in checks if check.state is State.ABSENT}
    unread = absent & {"machine", "catalogue"}
    meant = os.environ.get(targets.target_variable("ledger")) or os.environ.get(targets.target_variable("fit"))
    if not unread or meant or not (is_installed("weighbridge_fit") and is_installed("weighbridge_ledger")):
        return checks
    others = [check for check in checks if check.name not in unread]
    try:
        async with own_suite() as suite:
            if "machine" in unread:
                others += check_machine((await suite.capacity()).capacity)
            if "catalogue" in unread:
                others += await check_catalogue(suite)
    except (CommandError, CallError) as failed:
        return [*others, Check("machine", State.BROKEN, str(failed), "correct what is said of the machine")]
    return others


def _print(checks: list[Check], step: str) -> None:
    table = plain_table(("", "what", "found"))
    for check in checks:
        table.add_row(Text(check.state, style=STYLES[check.state]), check.name, check.detail)
    out = console()
    out.print(table)
    out.print()
    running = all(
        any(check.name == name and check.state is State.OK for check in checks)
        for name in HEALTH_SERVICES
        if name in ("ledger", "fit")
    )
    if step:
        out.print(f"Next step: {step}")
    elif running:
        out.print("All is well. Next step: weighbridge chat MODEL")

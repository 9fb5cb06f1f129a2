"""`watch`: every change of the ledger as it happens."""

import asyncio
import time
from contextlib import aclosing

import click
from weighbridge_proto.ledger.v1 import ledger_service_pb2

from weighbridge.cli.arguments import PositionParam, json_option
from weighbridge.cli.output import print_json, printable, say
from weighbridge.cli.running import open_suite, run_command
from weighbridge.following import Interruption, follow
from weighbridge.happenings import Happenings


@click.command()
@click.option(
    "--from",
    "position",
    type=PositionParam(),
    help="Go on after this point, as an earlier watch told it; without it, what stands now comes first.",
)
@json_option
def watch(position: tuple[str, int] | None, json_output: bool) -> None:
    """Every change of who holds memory, a line each. Ctrl-C ends it.

    Goes on over a restart of the ledger. Where changes were missed, a note says so and what stands is listed anew.
    With --json each line is one object: a response of the ledger, or a note with its reason.
    """

    async def body() -> None:
        happenings, seen = Happenings(), position
        try:
            async with open_suite() as suite, aclosing(follow(suite, *(position or ()))) as changes:
                async for change in changes:
                    if isinstance(change, ledger_service_pb2.WatchResponse):
                        seen = (change.epoch, change.revision)
                    _print(change, happenings, json_output=json_output)
        except asyncio.CancelledError:
            if seen is not None and not json_output:
                say(f"To go on from here: weighbridge watch --from {seen[0]}:{seen[1]}")
            raise

    # No span: it would last as long as somebody looks.
    run_command("watch", body, json_output=json_output, traced=False)


def _print(
    change: ledger_service_pb2.WatchResponse | Interruption, happenings: Happenings, *, json_output: bool
) -> None:
    if isinstance(change, Interruption):
        if json_output:
            print_json({"note": {"reason": change.reason, "message": change.message}}, one_line=True)
        else:
            click.echo(f"{_clock(time.time())}  Note: {change.message} [{change.reason}]")
    elif json_output:
        print_json(change, one_line=True)
    else:
        for happening in happenings.read(change):
            about = f"{happening.who}: " if happening.who else ""
            when = _clock(change.event_time.ToNanoseconds() / 1e9)
            line = f"{when} {change.revision:>6}  {happening.word:<10}  {about}{happening.text}"
            click.echo(printable(line).replace("\n", "\\n"))  # one line, whatever a holder calls itself


def _clock(wall_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s))

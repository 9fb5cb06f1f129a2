"""`top`: who holds memory and who waits for it, live."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress

import click
import grpc
from rich.console import Console
from rich.live import Live
from weighbridge_proto.ledger.v1 import ledger_service_pb2

from weighbridge.cli.arguments import json_option
from weighbridge.cli.memory_bars import MemoryFrame
from weighbridge.cli.output import console, print_json
from weighbridge.cli.running import cancelled_by_signals, engine_kinds_here, open_suite, run_command
from weighbridge.client import Suite
from weighbridge.failures import CallError, ExitCode
from weighbridge.following import LEDGER_AWAY, Interruption, follow

LEAST_PAUSE_S = 0.25
"""Between two pictures: many changes at once are one picture, four times a second at most."""

PERIOD_S = 5.0
"""Without any change it looks so often, for what is measured and no change of the book: the ledger does every 5 s."""


LOOK_PATIENCE_S = 10.0
"""After so long without an answer the picture says so, and the next look begins anew."""

ENGINE_PATIENCE_S = 1.0
"""For an engine's word, which comes from memory."""

NO_ANSWER = "The ledger does not answer. What it said last:"

_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@click.command(short_help="Who holds memory and who waits for it, live.")
@click.option("--once", is_flag=True, help="Print one picture and end. So it is without a terminal, too.")
@json_option
def top(once: bool, json_output: bool) -> None:
    """Who holds memory, as bars for each place, and who waits for what. Live; Ctrl-C ends it."""
    out = console()

    async def body() -> ExitCode:
        async with open_suite() as suite:
            if json_output:
                print_json(await look(suite))
            elif once or not out.is_terminal or out.is_dumb_terminal:
                out.print(picture(await look(suite), drains=await draining(suite)))
            else:
                async with open_suite() as watching:
                    await live(suite, watching, out)
        return ExitCode.DONE

    # No span: it would last as long as somebody looks.
    run_command("top", body, json_output=json_output, traced=False)


async def look(suite: Suite) -> ledger_service_pb2.WatchSnapshot:
    """The leases and the capacity as they stand."""
    capacity = await suite.capacity()
    leases = await suite.leases()
    return ledger_service_pb2.WatchSnapshot(capacity=capacity.capacity, leases=leases.leases)


async def draining(suite: Suite) -> Mapping[str, int]:
    """How many requests that were cancelled each engine of this machine still works on, by its lease.

    An engine that does not answer soon is left out: the picture is the ledger's.
    """

    async def of(kind: str) -> tuple[str, int]:
        with suppress(CallError, TimeoutError):
            async with asyncio.timeout(ENGINE_PATIENCE_S):
                engine = (await suite.engine(kind).describe()).engine
                return engine.model.lease.lease_id, engine.requests_draining
        return "", 0

    told = await asyncio.gather(*map(of, engine_kinds_here()))
    return {lease_id: count for lease_id, count in told if count}


def picture(
    snapshot: ledger_service_pb2.WatchSnapshot,
    note: str = "",
    now_s: float | None = None,
    drains: Mapping[str, int] | None = None,
) -> MemoryFrame:
    """A snapshot as it is shown."""
    return MemoryFrame(snapshot.capacity, snapshot.leases, time.time() if now_s is None else now_s, note, drains or {})


async def live(suite: Suite, watching: Suite, out: Console) -> None:
    """Show pictures, a new one at every change, until a signal.

    Args:
        suite: where it looks.
        watching: the same ledger, by connections of its own: each of the two makes new ones as it needs them.
        out: the terminal.

    Raises:
        CallError: the ledger was never reached, or refuses.
    """
    seen = await look(suite)  # a ledger that is not there is a failure of the command, not an empty screen
    drains: Mapping[str, int] = {}
    changes = Changes()
    listening = asyncio.create_task(changes.listen(watching))
    try:
        with (
            suppress(asyncio.CancelledError),  # a signal is how it ends
            cancelled_by_signals(),
            _told_of_resizes(changes.news.set),
            Live(picture(seen), console=out, screen=True, auto_refresh=False) as shown,
        ):
            while not listening.done():
                with suppress(TimeoutError):
                    await asyncio.wait_for(changes.news.wait(), PERIOD_S)
                changes.news.clear()
                note = changes.away
                if not note:
                    try:
                        # A picture that does not change must not be taken for the present.
                        async with asyncio.timeout(LOOK_PATIENCE_S):
                            seen, drains = await look(suite), await draining(suite)
                    except TimeoutError:
                        note = NO_ANSWER
                    except CallError as failed:
                        if failed.failure.code not in _SILENT:
                            raise
                        note = NO_ANSWER
                shown.update(picture(seen, note, drains=drains), refresh=True)
                await asyncio.sleep(LEAST_PAUSE_S)
        if listening.done():
            await listening
    finally:
        listening.cancel()
        with suppress(asyncio.CancelledError, CallError):
            await listening


class Changes:
    """Says that there is something new to look at.

    Attributes:
        news: set at every change, until somebody clears it.
        away: a sentence while the ledger is away, else empty.
    """

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.away = ""

    async def listen(self, suite: Suite) -> None:
        """Listen for ever.

        Raises:
            CallError: the ledger was never reached, or refuses.
        """
        async with aclosing(follow(suite)) as changes:
            async for change in changes:
                self.away = change.message if isinstance(change, Interruption) and change.reason == LEDGER_AWAY else ""
                self.news.set()


@contextmanager
def _told_of_resizes(tell: Callable[[], None]) -> Iterator[None]:
    """While open, call ``tell`` when the terminal is resized."""
    number = getattr(signal, "SIGWINCH", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(number, tell)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)

"""`accuracy`: how well launches were planned, by what they took."""

import re
from collections.abc import Iterator

import click
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

from weighbridge.accuracy import Accuracy, names_of, summarise
from weighbridge.cli.arguments import json_option
from weighbridge.cli.output import console, print_json
from weighbridge.cli.running import open_suite, run_command
from weighbridge.cli.tables import name_value_table, plain_table
from weighbridge.client import Suite
from weighbridge.sizes import GIB

WIDTH_WITH_LAUNCHES = 130
"""Columns from which the table has room for what was launched; below, that is listed under it by number."""

SHORT_DIGEST = 12
"""Digits of a digest or a build's hash for people; --json has them whole."""

FIGURES = ("launches", "planned", "claimed", "granted", "median", "p95", "max", "error")


@click.command(short_help="How well launches were planned.")
@click.option("--model", metavar="MODEL", help="Only this model: a catalogue id, a path, a name or a digest.")
@json_option
def accuracy(model: str | None, json_output: bool) -> None:
    """What was planned, claimed and granted for the launches on this machine, and what they took at their peak.

    Each row is one model, engine build and shape, the worst planned first.
    """

    async def body() -> None:
        async with open_suite() as suite:
            leases = await suite.leases(include_released=True)
            names = names_of(leases.leases)
            found = summarise(await suite.observations(limit=None))
            if model is not None:
                wanted = await _digests(suite, model, found, names)
                found = [one for one in found if one.model_digest in wanted]
        if json_output:
            print_json({"launches": [one.as_json(names) for one in found]})
        else:
            print_accuracy(console(), found, names, model)

    run_command("accuracy", body, json_output=json_output)


async def _digests(suite: Suite, text: str, found: list[Accuracy], names: dict[str, str]) -> set[str]:
    """The weights that a person means. What was launched here is known without its files."""
    known = {
        one.model_digest
        for one in found
        if text == names.get(one.model_digest)
        or (len(text) >= SHORT_DIGEST and one.model_digest.removeprefix("sha256:").startswith(text))
        or text == one.model_digest
    }
    if known:
        return known
    described = await suite.describe_weights(await suite.resolve_model(text))
    return {described.facts.model_digest}


def print_accuracy(to: Console, found: list[Accuracy], names: dict[str, str], model: str | None = None) -> None:
    """One row for each launch, sizes in GiB."""
    if not found:
        of = f" of {model}" if model is not None else ""
        to.print(f"Nothing was measured{of} yet. A model is measured once it is loaded and ends.")
        return
    wide = to.width >= WIDTH_WITH_LAUNCHES
    table = plain_table(("model", "build", "shape") if wide else ("",), FIGURES)
    if wide:
        table.columns[0].no_wrap = table.columns[1].no_wrap = True
    launched = name_value_table()
    row: tuple[str | Launched, ...]
    for number, one in enumerate(found, 1):
        words = (names.get(one.model_digest, _short(one.model_digest)), _short(one.engine_build))
        row = (*words, Launched(one.shape)) if wide else (f"{number}.",)
        table.add_row(*row, *_figures(one))
        launched.add_row(f"{number}.", Launched(f"{words[0]}, build {words[1] or 'unknown'}: {one.shape}"))
    to.print(table)
    if not wide:
        to.print()
        to.print(launched)
    to.print()
    to.print("Sizes in GiB; median, p95 and max of the measured peaks. The error is the plan's, against the median:")
    to.print("+ more was planned than taken, − less. Plans, claims and grants are those of the latest launch.")


class Launched:
    """What was launched, in lines that end where a setting or a part of one does: a shape is one word of hundreds of
    letters, which a table would break anywhere."""

    def __init__(self, text: str) -> None:
        self._pieces = re.findall(r"[^;, ]*[;, ]+|[^;, ]+", text)

    def __rich_console__(self, to: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Called by rich."""
        lines = [""]
        for piece in self._pieces:
            if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > options.max_width:
                lines.append("")
            lines[-1] += piece
        yield Text("\n".join(line.rstrip() for line in lines), overflow="fold")

    def __rich_measure__(self, to: Console, options: ConsoleOptions) -> Measurement:
        """Called by rich."""
        longest = max((len(piece.rstrip()) for piece in self._pieces), default=0)
        return Measurement(longest, sum(map(len, self._pieces))).with_maximum(options.max_width)


def _figures(one: Accuracy) -> tuple[str, ...]:
    sizes = (
        one.planned_bytes,
        one.claimed_bytes,
        one.granted_bytes,
        one.median_peak_bytes,
        one.p95_peak_bytes,
        one.max_peak_bytes,
    )
    error = "-" if one.error is None else f"{100 * one.error:+.1f} %".replace("-", "−")
    return (f"{one.count:,}", *(f"{size / GIB:.2f}" if size else "-" for size in sizes), error)


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:SHORT_DIGEST]

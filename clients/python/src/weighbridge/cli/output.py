"""What the command prints: tables for people, protobuf JSON for programs."""

import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.text import Text
from weighbridge_proto.errors import RpcFailure

PIPED_WIDTH = 160
"""Columns when nobody watches: a table in a file or a log must not be folded to a guessed terminal."""

MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
"""Reason of a model that is not there; the service says only that, so that it tells nobody what files there are."""


# Control characters but for tabs and line feeds, and those that turn the direction of text: names and messages come out
# of files that nobody vouches for, and a terminal obeys what it is told to show.
_NOT_SHOWN = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


def printable(text: str) -> str:
    """``text`` as a terminal may be told to show it: what would steer the terminal comes as an escape to be read."""
    return text.translate(_NOT_SHOWN)


class _PlainConsole(Console):
    """Shows every text that it is given as text, and nothing as a command to the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """See rich: every string of a line or a table comes through here."""
        return super().render_str(printable(text), **options)


def prepare_streams() -> None:
    """Let every command write and read, whatever it was started with."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started the command
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 # for as long as the process lives
        elif isinstance(stream, io.TextIOWrapper):
            # In a locale without Unicode a name or a × becomes a question mark instead of the end of the command.
            stream.reconfigure(errors="replace")


def console(*, stderr: bool = False) -> Console:
    """Where tables and lines for people go."""
    stream = sys.stderr if stderr else sys.stdout
    return _PlainConsole(
        file=stream, width=None if stream.isatty() else PIPED_WIDTH, highlight=False, markup=False, emoji=False
    )


def say(text: str) -> None:
    """One line for people, beside the output proper: on standard error."""
    click.echo(printable(text), err=True)


def as_json(message: Message) -> dict[str, Any]:
    """A response as protobuf JSON: proto field names, 64-bit integers as strings, zeros written out."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def print_json(value: Message | Mapping[str, Any], *, one_line: bool = False) -> None:
    """Print one JSON object; ``one_line`` for the events of a stream."""
    data = as_json(value) if isinstance(value, Message) else dict(value)
    click.echo(json.dumps(data, ensure_ascii=False, indent=None if one_line else 2))


def print_failure(failure: RpcFailure, *, json_output: bool, only_ids: bool = False) -> None:
    """Say on standard error why a call failed; ``only_ids``: models are named by their ids in the catalogue."""
    if json_output:
        say(json.dumps({"failure": as_json(failure.to_message())}, ensure_ascii=False))
        return
    say(f"{failure.message or failure.code.name} [{failure.reason}]")
    if failure.reason == MODEL_NOT_FOUND and only_ids:
        say("  `weighbridge fits` lists the models of the catalogue.")
    elif failure.reason == MODEL_NOT_FOUND:
        say("  MODEL is a file or folder as seen from here, or a path below the folder that the suite's models are in.")
    for _, text in failure.quota_violations:
        if text and text not in failure.message:
            say(f"  {text}")
    if failure.retry_after_s is not None and failure.retry_after_s >= 1:
        say(f"  Try again in {failure.retry_after_s:.0f} s.")

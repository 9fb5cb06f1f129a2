"""``python -m weighbridge_ledger backup|check|replay``.

Exit codes: 0 done, and all is well; 1 it failed, or a fault was found; 2 it could not be tried: wrong usage or
settings, no such database, another program's or a newer version's.
"""

import argparse
import asyncio
import io
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from weighbridge_common import processes
from weighbridge_common.settings import USAGE_EXIT_CODE, load

from weighbridge_ledger.book import Home
from weighbridge_ledger.machine.ceilings import ceilings_for
from weighbridge_ledger.machine.declared import MachineSpecError
from weighbridge_ledger.machine.model import Machine
from weighbridge_ledger.machine.probe import open_probe
from weighbridge_ledger.service.clock import system_clock
from weighbridge_ledger.settings import LedgerSettings
from weighbridge_ledger.store.backup import BackupError, back_up
from weighbridge_ledger.store.database_file import DamagedError
from weighbridge_ledger.store.interface import StoreRefusedError
from weighbridge_ledger.store.sqlite import DATABASE
from weighbridge_ledger.tools import telling
from weighbridge_ledger.tools.check import check
from weighbridge_ledger.tools.recording import RecordingError, play
from weighbridge_ledger.tools.replay import replay

DONE, FAILED = 0, 1


class UsageError(Exception):
    """It could not be tried. The text says why and what to do."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Run one tool; ends the process by `SystemExit`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # In a locale without Unicode a name becomes a question mark instead of the end of the tool.
            stream.reconfigure(errors="replace")
    asked = parser().parse_args(arguments)
    settings = load(LedgerSettings)
    # So that an unfinished copy is removed then, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    run: Callable[[argparse.Namespace, LedgerSettings], int] = asked.run
    try:
        code = run(asked, settings)
    except UsageError as wrong:
        code = _fail(asked, str(wrong), USAGE_EXIT_CODE)
    except (BackupError, DamagedError) as failed:
        code = _fail(asked, str(failed), FAILED)
    except StoreRefusedError as refused:
        code = _fail(asked, str(refused), USAGE_EXIT_CODE)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    raise SystemExit(code)


def parser() -> argparse.ArgumentParser:
    """What can be asked."""
    whole = argparse.ArgumentParser(
        prog="python -m weighbridge_ledger",
        description="Without a tool: run the ledger. The tools look at its database, also while it runs.",
    )
    tools = whole.add_subparsers(title="tools", required=True)

    def tool(name: str, run: Callable[[argparse.Namespace, LedgerSettings], int], text: str) -> argparse.ArgumentParser:
        made = tools.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        made.add_argument("--json", action="store_true", help="print JSON instead of text")
        return made

    backup = tool("backup", _backup, "Copy the database to FILE as it stands at one moment, whole or not at all.")
    backup.add_argument("file", type=Path, metavar="FILE")
    backup.add_argument("--database", type=Path, help="the database; default: the one of this ledger's data folder")
    backup.add_argument("--force", action="store_true", help="replace FILE if it is there")
    text = "Check a database or a backup: its pages, its records, and the book that they make up. Changes nothing."
    checking = tool("check", _check, text)
    text = "Show what a database holds, and what a ledger that is started on it now would do. Changes nothing."
    replaying = tool("replay", _replay, text)
    replaying.add_argument(
        "--events",
        type=Path,
        metavar="RECORDING",
        help="instead of a database: what `weighbridge watch --json` printed, each change held to the book's rules",
    )
    for made in (checking, replaying):
        made.add_argument("file", type=Path, nargs="?", metavar="FILE", help="default: this ledger's own database")
        made.add_argument(
            "--machine", metavar="SPEC", help="the machine of that ledger, if not this one: unified:64, discrete:64+24"
        )
    return whole


def _backup(asked: argparse.Namespace, settings: LedgerSettings) -> int:
    source = _database(asked.database, settings)
    made = back_up(source, asked.file.expanduser(), time.time(), force=asked.force)
    _tell(asked, telling.backup_json(made), telling.backup_lines(made))
    return DONE


def _check(asked: argparse.Namespace, settings: LedgerSettings) -> int:
    machine = _machine(asked, settings)
    ceilings = ceilings_for(machine, sharing=settings.sharing())
    report = check(_database(asked.file, settings), ceilings, settings.policy())
    _tell(asked, telling.report_json(report), telling.report_lines(report, machine))
    return DONE if report.sound else FAILED


def _replay(asked: argparse.Namespace, settings: LedgerSettings) -> int:
    if asked.events is not None:
        return _replay_events(asked)
    machine = _machine(asked, settings)
    here = processes.current()
    start = replay(
        _database(asked.file, settings),
        lambda limit, spill: ceilings_for(machine, limit, spill, settings.sharing(), settings.one_load()),
        settings.policy(),
        Home(here.boot_id, here.pid_namespace),
        system_clock(),
        processes.is_alive,
    )
    _tell(asked, telling.start_json(start), telling.start_lines(start, machine))
    return DONE


def _replay_events(asked: argparse.Namespace) -> int:
    if asked.file is not None or asked.machine is not None:
        raise UsageError("--events plays a recording, which has its own machine: give neither FILE nor --machine.")
    try:
        with asked.events.expanduser().open(encoding="utf-8", errors="replace") as lines:
            played = play(lines)
    except OSError as error:
        raise UsageError(f"{asked.events} cannot be read: {error.strerror}.") from error
    except RecordingError as wrong:
        raise UsageError(f"{asked.events}: {wrong}") from None
    _tell(asked, telling.playback_json(played), telling.playback_lines(played))
    return DONE if played.sound else FAILED


def _database(named: Path | None, settings: LedgerSettings) -> Path:
    path = named.expanduser() if named is not None else settings.data_dir.expanduser() / DATABASE
    if path.is_dir():
        path /= DATABASE
    if not path.exists():
        advice = "" if named is not None else " No ledger has been started with this data folder yet."
        raise UsageError(f"There is no database {path}.{advice}")
    if path.stat().st_size == 0:
        raise UsageError(f"{path} is empty: no ledger has been started on it.")
    return path


def _machine(asked: argparse.Namespace, settings: LedgerSettings) -> Machine:
    try:
        probe = asyncio.run(open_probe(asked.machine or settings.machine, node_id=settings.node_id))
    except MachineSpecError as wrong:
        where = "--machine" if asked.machine else LedgerSettings.variable("machine")
        raise UsageError(f"{where}: {wrong}") from None
    except Exception as error:
        raise UsageError(f"This machine's memory cannot be read: {error}. Say which it is: --machine.") from error
    return probe.machine


def _tell(asked: argparse.Namespace, data: dict[str, Any], lines: Sequence[str]) -> None:
    if asked.json:
        print(json.dumps(data, indent=2))
    else:
        # Holders name themselves and their models: none of that steers the terminal.
        print("\n".join("".join(one if one.isprintable() else "?" for one in line) for line in lines))


def _fail(asked: argparse.Namespace, text: str, code: int) -> int:
    print(json.dumps({"failure": text}) if asked.json else text, file=sys.stderr)
    return code

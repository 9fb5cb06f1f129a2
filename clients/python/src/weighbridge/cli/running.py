"""How every command runs: inside a trace, with failures as exit codes and Ctrl-C as a clean end."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import click
from weighbridge_proto import targets

from weighbridge import interrupts
from weighbridge.cli.output import print_failure, say
from weighbridge.client import Suite
from weighbridge.failures import CallError, ExitCode, exit_code
from weighbridge.supervision.lock import is_supervised, supervised_services
from weighbridge.telemetry import traced_command

RESTART_PATIENCE_S = 30.0
"""How long a command waits for a service that `weighbridge up` is starting again: its delay (5 s at most) and start."""


class CommandError(Exception):
    """The command cannot be done, and why: one sentence for the person who gave it."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code


def run_command(
    name: str,
    body: Callable[[], Coroutine[Any, Any, ExitCode | None]],
    *,
    json_output: bool,
    traced: bool = True,
    only_ids: bool = False,
) -> NoReturn:
    """Run ``body`` to its end and leave with its exit code; the end of every command.

    ``traced``: inside a root span of its own, where telemetry is on. ``only_ids``: models are named by their ids in the
    catalogue, and not by paths.
    """
    code = ExitCode.DONE
    with interrupts.raised():
        try:
            with traced_command(f"weighbridge {name}") if traced else nullcontext():
                code = asyncio.run(body()) or ExitCode.DONE
        except CallError as failed:
            print_failure(failed.failure, json_output=json_output, only_ids=only_ids)
            code = exit_code(failed.failure)
        except CommandError as failed:
            say(str(failed))
            code = failed.code
        except UnicodeEncodeError:  # Python carries other bytes in a name as surrogates, protobuf's texts cannot
            say("A name given here is not UTF-8 text, and no service can be told it. Rename it, or name its folder.")
            code = ExitCode.USAGE
        except BrokenPipeError:
            raise  # whoever read has seen enough: click ends the command for it, in silence
        except OSError as failed:  # such as a full disk under a redirected output
            say(str(failed))
            code = ExitCode.FAILED
        except (KeyboardInterrupt, asyncio.CancelledError):  # a signal
            code = ExitCode.INTERRUPTED
    raise click.exceptions.Exit(int(code))


@contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """While open, each signal that asks to end cancels the current task, and does nothing else.

    For a command that leaves files or processes behind unless its clean-up runs to its end: asyncio by itself cancels
    at the first Ctrl-C, breaks the clean-up off at the second, and lets SIGTERM and SIGHUP end the process.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "entered inside a task"
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    watched = interrupts.stop_signals()
    for number in watched:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in watched:
            loop.remove_signal_handler(number)


def open_suite(environ: Mapping[str, str] | None = None) -> Suite:
    """The suite of this user; patient with a service that is just being restarted.

    Raises:
        CommandError: the run folder cannot hold sockets.
    """
    env = os.environ if environ is None else environ
    try:
        for name in targets.SERVICES:
            targets.target(name, env)
    except ValueError as wrong:
        raise CommandError(str(wrong)) from None
    return Suite(env, patience_s=RESTART_PATIENCE_S if is_supervised(targets.run_dir(env)) else 0.0)


def engine_kinds_here(environ: Mapping[str, str] | None = None) -> list[str]:
    """The engines of this user: their socket is there, their target is set, or the suite that runs here keeps them up.

    One that the suite is starting, for the first time or again, is among them: a call to it waits until it serves.
    """
    env = os.environ if environ is None else environ
    kept_up = supervised_services(targets.run_dir(env))
    return [
        name.removeprefix("engine-")
        for name in targets.SERVICES
        if name.startswith("engine-")
        and (targets.target_variable(name) in env or name in kept_up or targets.socket_path(name, env).exists())
    ]

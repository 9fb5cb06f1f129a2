"""One engine process behind its guard: held, started, watched, stopped for certain."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from weighbridge_common import processes
from weighbridge_common.processes import ProcessIdentity

from weighbridge_engines.supervisor import cgroup
from weighbridge_engines.supervisor.exits import ExitExplanation, ExitFacts, FatalLine
from weighbridge_engines.supervisor.guard import GATE_BYTE
from weighbridge_engines.supervisor.output import LineSplitter, RingLog

STOP_GRACE_S = 3.0
"""From SIGTERM to SIGKILL (reference system, supervisor, October 2026)."""

HELD_TIMEOUT_S = 20.0
"""How long the guard may take to hold the engine at the gate. Usually some 30 ms; longer where the machine swaps."""

GUARD_KILL_TIMEOUT_S = 2.0
"""How long the guard may take to kill the engine once its lifeline is closed; then it is killed itself."""

OUTPUT_DRAIN_S = 0.25
"""After the end, output still in the pipes is waited for this long: the reason of a crash is often the last line."""

GONE_POLL_S = 0.01
READ_BYTES = 64 * 1024

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ChildSpec:
    """How an engine is started.

    Attributes:
        name: what it is called in logs and messages.
        argv: absolute path of the program and its arguments; no shell, no secrets.
        environ: its whole environment.
        cwd: its working directory.
        classify: looks at each line of output, and whether it came on standard error, and says whether the engine
            cannot go on after it.
        exit_meanings: what it means by its exit codes.
        second_term_after_s: a second SIGTERM follows the first by this much, within the grace, for an engine that gives
            up what it is at only then; None: there is one.
        explain: says why it ended, where its own output tells more than an exit does; None: the exit and a fatal line
            tell.
    """

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    cwd: Path
    classify: Callable[[str, bool], FatalLine | None] | None = None
    exit_meanings: Mapping[int, str] = field(default_factory=dict)
    explain: Callable[[ExitFacts], ExitExplanation] | None = None
    second_term_after_s: float | None = None


class SpawnError(Exception):
    """The guard could not be started or did not come to hold the engine."""


class Child:
    """An engine process from the gate to its end. Made by :func:`spawn`.

    Attributes:
        guard: identity of the guard.
        engine: identity of the engine, known while it is still held.
        fatal_line: set when output showed that the engine cannot go on.
    """

    def __init__(self, spec: ChildSpec, log: RingLog, guard: "subprocess.Popen[bytes]", lifeline: int) -> None:
        self.spec = spec
        self.guard: ProcessIdentity
        self.engine: ProcessIdentity
        self.fatal_line: FatalLine | None = None
        self.was_ready = False
        self._ring = log
        self._popen = guard
        self._lifeline: int | None = lifeline
        self._loop = asyncio.get_running_loop()
        self._held: asyncio.Future[int] = self._loop.create_future()
        self._ended: asyncio.Future[ExitFacts] = self._loop.create_future()
        self._fatal_seen = asyncio.Event()
        self._asked = False
        self._asked_twice = False
        self._report: dict[str, Any] = {}
        self._opened_s = time.monotonic()
        self._oom_kills_before = cgroup.oom_kills()
        self._pumps: list[asyncio.Task[None]] = []
        self._pipes: list[asyncio.ReadTransport] = []
        self._finishing: asyncio.Task[None] | None = None

    @property
    def identities(self) -> tuple[ProcessIdentity, ProcessIdentity]:
        """Guard and engine: the processes that a lease records."""
        return self.guard, self.engine

    @property
    def has_ended(self) -> bool:
        """Whether engine and guard are gone."""
        return self._ended.done()

    def open_gate(self) -> None:
        """Let the held engine start."""
        if self._lifeline is not None:
            self._opened_s = time.monotonic()
            with contextlib.suppress(BrokenPipeError):  # it ended while held; wait() tells
                os.write(self._lifeline, GATE_BYTE)

    async def wait(self) -> ExitFacts:
        """What was seen of the end, once engine and guard are gone for certain."""
        return await asyncio.shield(self._ended)

    async def wait_fatal(self) -> FatalLine:
        """Return when a line of output shows that the engine cannot go on."""
        await self._fatal_seen.wait()
        assert self.fatal_line is not None, "set before the event"
        return self.fatal_line

    async def stop(self, grace_s: float = STOP_GRACE_S) -> ExitFacts:
        """End the engine: SIGTERM, ``grace_s``, SIGKILL. Returns when it is gone; may be called again and at once.

        Where the spec asks for a second SIGTERM, it comes within ``grace_s``, or not at all if that is too short. The
        guard passes each of them on.

        Cancelling this does not bring the engine back: the next call goes on.
        """
        if not self._ended.done() and not self._asked:
            self._asked = True
            if grace_s > 0:
                self._popen.send_signal(signal.SIGTERM)
        second_s = self.spec.second_term_after_s
        if second_s is not None and second_s < grace_s and not self._asked_twice:
            if await self._ends_within(second_s):
                return self._ended.result()
            self._asked_twice = True
            self._popen.send_signal(signal.SIGTERM)
            grace_s -= second_s
        if grace_s > 0 and await self._ends_within(grace_s):
            return self._ended.result()
        self._cut_lifeline()
        if not await self._ends_within(GUARD_KILL_TIMEOUT_S):
            # A guard that is itself stopped (SIGSTOP) or swapped out cannot kill for us.
            _log.warning("guard_does_not_answer", engine=self.spec.name, guard_pid=self._popen.pid)
            self._popen.kill()
            self._kill_engine()
        return await self.wait()

    def kill(self) -> None:
        """End the engine at once, without waiting for it; :meth:`wait` tells when it is gone."""
        self._asked = True
        self._cut_lifeline()

    # -- inside --

    async def _start(self, streams: Mapping[str, Any]) -> None:
        threading.Thread(target=self._wait_for_guard, name=f"wait-{self.spec.name}", daemon=True).start()
        for name, stream in streams.items():
            reader = asyncio.StreamReader()
            protocol = functools.partial(asyncio.StreamReaderProtocol, reader)
            transport, _ = await self._loop.connect_read_pipe(protocol, stream)
            self._pipes.append(transport)
            pump = self._pump_report(reader) if name == "report" else self._pump_output(reader, name == "stderr")
            self._pumps.append(asyncio.create_task(pump, name=f"{self.spec.name}-{name}"))
        guard = processes.identify(self._popen.pid)
        try:
            async with asyncio.timeout(HELD_TIMEOUT_S):
                pid = await asyncio.shield(self._held)
        except TimeoutError:
            raise SpawnError(f"{self.spec.name} did not come to its gate within {HELD_TIMEOUT_S:.0f} s.") from None
        engine = processes.identify(pid)
        if guard is None or engine is None:
            raise SpawnError(f"{self.spec.name} ended while it was held at its gate.")
        self.guard, self.engine = guard, engine

    def _wait_for_guard(self) -> None:
        code = self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._guard_ended, code)

    def _guard_ended(self, code: int) -> None:
        self._finishing = asyncio.create_task(self._finish(code), name=f"{self.spec.name}-finish")

    async def _finish(self, guard_code: int) -> None:
        ended_s = time.monotonic()
        told: dict[str, Any] | None = None
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=OUTPUT_DRAIN_S)
        told = self._report.get("ended")
        if told is None:
            # The guard was killed. The engine's parent-death signal or the end of its input ends it; we make sure.
            self._kill_engine()
            while (engine := getattr(self, "engine", None)) is not None and _may_live(engine):
                await asyncio.sleep(GONE_POLL_S)
                self._kill_engine()
        for pump in self._pumps:
            pump.cancel()
        for pipe in self._pipes:
            pipe.close()  # a stray that outlived a killed guard may hold the other end for ever
        self._cut_lifeline()
        if not self._held.done():
            self._held.set_exception(SpawnError(f"The guard of {self.spec.name} ended with {guard_code}."))
            self._held.exception()  # looked at: spawn may have given up already
        self._ended.set_result(self._facts(told, ended_s))

    def _facts(self, told: dict[str, Any] | None, ended_s: float) -> ExitFacts:
        oom_kills = cgroup.oom_kills()
        if oom_kills is not None and self._oom_kills_before is not None:
            oom_kills -= self._oom_kills_before
        return ExitFacts(
            exit_code=None if told is None else told.get("exit_code"),
            signal_number=None if told is None else told.get("signal"),
            asked=self._asked,
            guard_lost=told is None,
            start_errno=self._report.get("cannot_start"),
            oom_kills=oom_kills,
            fatal=self.fatal_line,
            was_ready=self.was_ready,
            uptime_s=ended_s - self._opened_s,
        )

    async def _ends_within(self, seconds: float) -> bool:
        await asyncio.wait([self._ended], timeout=seconds)
        return self._ended.done()

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def _kill_engine(self) -> None:
        """Kill the engine's group from here, for when the guard cannot: while it lives, or a moment after."""
        engine = getattr(self, "engine", None)
        if engine is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(engine.pid, signal.SIGKILL)

    async def _pump_report(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            event = json.loads(line)
            self._report.update(event)
            if "held" in event and not self._held.done():
                self._held.set_result(event["held"])

    async def _pump_output(self, reader: asyncio.StreamReader, from_stderr: bool) -> None:
        splitter = LineSplitter()
        while chunk := await reader.read(READ_BYTES):
            self._take(splitter.feed(chunk), from_stderr)
        self._take(splitter.end(), from_stderr)

    def _take(self, lines: list[str], from_stderr: bool) -> None:
        for line in lines:
            self._ring.append(line, from_stderr)
            fatal = self._classify(line, from_stderr)
            if fatal is not None and (self.fatal_line is None or (fatal.specific and not self.fatal_line.specific)):
                self.fatal_line = fatal
                self._fatal_seen.set()

    def _classify(self, line: str, from_stderr: bool) -> FatalLine | None:
        if self.spec.classify is None:
            return None
        try:
            return self.spec.classify(line, from_stderr)
        except Exception as error:
            # A classifier that stumbles over odd output must not stop the output from being read: a full pipe would
            # stop the engine.
            _log.error("classifier_failed", engine=self.spec.name, error=type(error).__qualname__)
            return None


async def spawn(spec: ChildSpec, log: RingLog) -> Child:
    """Start guard and engine, the engine held at its gate.

    Raises:
        SpawnError: it could not be brought to the gate; nothing of it is left.
    """
    guard = Path(__file__).with_name("guard.py")
    ours: list[int] = []
    theirs: list[int] = []
    try:
        lifeline_read, lifeline = os.pipe()
        theirs.append(lifeline_read)
        ours.append(lifeline)
        report, report_write = os.pipe()
        theirs.append(report_write)
        ours.append(report)
        command = [sys.executable, "-I", "-S", str(guard), str(lifeline_read), str(report_write), "--", *spec.argv]
        popen = subprocess.Popen(  # noqa: ASYNC220 # returns after exec, some milliseconds
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(spec.environ),
            cwd=spec.cwd,
            pass_fds=(lifeline_read, report_write),
            start_new_session=True,
        )
    except OSError as error:
        for descriptor in ours:
            os.close(descriptor)
        raise SpawnError(f"The guard of {spec.name} cannot be started: {error.strerror}.") from error
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    child = Child(spec, log, popen, lifeline)
    try:
        await child._start({"stdout": popen.stdout, "stderr": popen.stderr, "report": os.fdopen(report, "rb", 0)})
    except BaseException:
        child.kill()
        await asyncio.shield(child.wait())
        raise
    return child


def _may_live(engine: ProcessIdentity) -> bool:
    """Whether the engine was not seen to be gone: one that cannot be looked at (no descriptor left) may live."""
    try:
        return processes.is_alive(engine) is True
    except OSError:
        return True

"""The suite as processes: started in order, kept up, stopped in reverse."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType

from weighbridge_proto import targets

from weighbridge.supervision.budget import RestartBudget
from weighbridge.supervision.lock import RunLock
from weighbridge.supervision.process import (
    START_TIMEOUT_S,
    ServiceProcess,
    StartFailedError,
    explain_exit,
)
from weighbridge.supervision.services import ServiceSpec

LOG_FOLDER = "logs"


class SuiteBrokenError(Exception):
    """A service died again and again; the suite cannot go on."""


@dataclass(frozen=True)
class ServiceReady:
    """A service serves at ``target``, for the first time or again."""

    service: str
    target: str

    def __str__(self) -> str:
        return f"{self.service:<11} ready  {self.target}"


@dataclass(frozen=True)
class ServiceEnded:
    """A service ended by itself, ``reason`` in words that follow its name. It is started again in ``restart_in_s``."""

    service: str
    reason: str
    restart_in_s: float

    def __str__(self) -> str:
        return f"{self.service:<11} {self.reason}; starting it again in {self.restart_in_s:.1f} s"


ServiceEvent = ServiceReady | ServiceEnded


class RunningSuite:
    """The processes of one suite in one run folder.

    Use it as ``async with RunningSuite(...) as suite``: entering starts every service and returns when all serve,
    leaving stops them, engines first. :meth:`supervise` restarts a service that dies.

    Args:
        services: what to start, in this order.
        run_dir: the run folder; made with access for this user alone.
        environ: environment of the services; the run folder is put into it.
        print_line: where lines for people go.
        on_event: where what happens to the services goes; by default to ``print_line``, in words.
        verbose: services print to ``print_line`` instead of to files in the run folder.
        start_timeout_s: how long each service may take to serve.
        clock: a steady clock in seconds.
        budget: makes the restart budget of one service.
    """

    def __init__(
        self,
        services: Sequence[ServiceSpec],
        run_dir: Path,
        environ: Mapping[str, str],
        print_line: Callable[[str], None],
        *,
        on_event: Callable[[ServiceEvent], None] | None = None,
        verbose: bool = False,
        start_timeout_s: float = START_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        budget: Callable[[], RestartBudget] = RestartBudget,
    ) -> None:
        self.run_dir = run_dir
        self.environ = {**environ, "WEIGHBRIDGE_RUN_DIR": str(run_dir), "PYTHONUNBUFFERED": "1"}
        self._on_event = on_event or (lambda event: print_line(str(event)))
        self._start_timeout_s = start_timeout_s
        self._clock = clock
        self._budget = budget
        self._lock = RunLock(run_dir, [spec.name for spec in services])
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self.processes = [
            ServiceProcess(
                spec,
                targets.target(spec.name, self.environ),
                self.environ,
                None if verbose else run_dir / LOG_FOLDER / f"{spec.name}.log",
                print_line,
            )
            for spec in services
        ]

    async def __aenter__(self) -> "RunningSuite":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopping = asyncio.create_task(self.stop())
        interrupted = False
        while not stopping.done():
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:  # a Ctrl-C during the stop must not leave half of it running
                interrupted = True
        stopping.result()
        if interrupted and error is None:
            raise asyncio.CancelledError

    async def start(self) -> None:
        """Start every service and return when all serve.

        Raises:
            SuiteRunningError: another suite holds the run folder.
            StartFailedError: a service did not come up; those already started are stopped.
            OSError: the run folder cannot be made.
        """
        make_private(self.run_dir)
        self._lock.acquire()
        try:
            for process in self.processes:
                await self._start_one(process)
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def supervise(self) -> None:
        """Restart each service that dies, until the suite is stopped.

        Raises:
            SuiteBrokenError: a service died too often.
        """
        keepers = [asyncio.create_task(self._keep_up(process)) for process in self.processes]
        try:
            await asyncio.gather(*keepers)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def stop(self) -> None:
        """Stop every service, engines first, and leave no process, socket or lock. Repeating it changes nothing."""
        self._stopping.set()
        ordered = sorted(self.processes, key=lambda process: process.spec.stop_rank)
        for _, together in groupby(ordered, key=lambda process: process.spec.stop_rank):
            await asyncio.gather(*(self._stop_one(process) for process in together))
        self._lock.release()

    def stop_at_once(self) -> None:
        """Kill what still runs; a stop under way then ends without further waiting."""
        self._stopping.set()
        self._forced.set()
        for process in self.processes:
            process.kill()

    async def _start_one(self, process: ServiceProcess) -> None:
        # An engine holds the lifelines of fit and ledger: should this process be killed, they outlive the engine by
        # as long as it needs them to give its memory back.
        later = (other for other in self.processes if other.spec.stop_rank > process.spec.stop_rank)
        await process.start(self._start_timeout_s, [other.lifeline for other in later if other.lifeline is not None])
        self._on_event(ServiceReady(process.spec.name, process.target))

    async def _stop_one(self, process: ServiceProcess) -> None:
        await process.stop(at_once=self._forced.is_set())

    async def _keep_up(self, process: ServiceProcess) -> None:
        budget = self._budget()
        name = process.spec.name
        while True:
            why = explain_exit(await process.wait())
            while not self._stopping.is_set():
                delay_s = budget.delay_after_death(self._clock())
                if delay_s is None:
                    raise SuiteBrokenError(f"The service {name} {why}, too often within a minute. The suite stops.")
                self._on_event(ServiceEnded(name, why, delay_s))
                await asyncio.sleep(delay_s)
                try:
                    await self._start_one(process)
                except StartFailedError as failed:
                    why = str(failed).removeprefix(f"The service {name} ").rstrip(".")
                    continue
                break
            if self._stopping.is_set():
                return


def make_private(folder: Path) -> None:
    """Make ``folder`` for this user alone.

    Raises:
        PermissionError: it exists and belongs to somebody else, or is open to others.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(f"The run folder {folder} belongs to another user.")
    if status.st_mode & 0o077:
        raise PermissionError(f"The run folder {folder} is open to other users. Run: chmod 700 {folder}")

"""One service process: started with a lifeline, asked for its health, stopped."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import grpc
from weighbridge_proto.channel import open_channel

from weighbridge.failures import CallError
from weighbridge.reach import reach, serving
from weighbridge.supervision.services import ServiceSpec

START_TIMEOUT_S = 60.0
"""How long a service may take to serve: seconds of imports on a slow disk, the ledger's reading of the machine."""

HEALTH_PERIOD_S = 0.1
LOG_TAIL_BYTES = 4096
LOG_LIMIT_BYTES = 16 << 20
"""A log that has grown beyond this is put aside (one generation) before the next start of its service."""


WRONG_SETTINGS = 2
"""Exit code of a service that was started with wrong settings (weighbridge_common.settings)."""


class StartFailedError(Exception):
    """A service did not come up. The text says which, why, and what it printed last.

    ``status`` is the exit status of a service that ended by itself, else None.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServiceProcess:
    """The process of one service, one life after another.

    Args:
        spec: which service.
        target: where it will listen.
        environ: its environment.
        log: the file its output goes to; None: to ``print_line``, line by line.
        print_line: where lines for people go.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        target: str,
        environ: Mapping[str, str],
        log: Path | None,
        print_line: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self.target = target
        self._environ = dict(environ)
        self._log = log
        self._print_line = print_line
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None
        self._last_lines: list[str] = []
        self._lifeline: int | None = None
        self._log_start = 0

    @property
    def lifeline(self) -> int | None:
        """Our end of the living process's lifeline; it stops once nobody holds that end open. None: not running."""
        return self._lifeline

    @property
    def pid(self) -> int | None:
        """The living process; None before its start and after its end."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self, timeout_s: float = START_TIMEOUT_S, holds: Sequence[int] = ()) -> None:
        """Start the service and return when it serves.

        ``holds``: lifelines of other services that this one shall hold too: they stop after it, not with it, when
        this process is gone.

        Raises:
            StartFailedError: it ended, or did not serve in time; it is gone then.
        """
        self._last_lines.clear()
        self._cut_lifeline()
        its_end, our_end = os.pipe()
        self._lifeline = our_end
        try:
            with _open_log(self._log) as output:
                self._log_start = output.tell() if output is not None else 0
                # Its own session: a Ctrl-C at the terminal reaches `up` alone, which then stops the services in order.
                # Standard input is the lifeline: its other end closes when this process dies in any way.
                process = await asyncio.create_subprocess_exec(
                    *self.spec.argv,
                    stdin=its_end,
                    stdout=output if self._log else asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    env=self._environ,
                    start_new_session=True,
                    pass_fds=holds,
                )
        finally:
            os.close(its_end)
        self._process = process
        if process.stdout is not None:
            self._pump = asyncio.create_task(self._forward(process.stdout))
        ended = asyncio.create_task(process.wait())
        healthy = asyncio.create_task(self._until_serving(timeout_s))
        try:
            await asyncio.wait({ended, healthy}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                status = ended.result()
                raise StartFailedError(f"The service {self.spec.name} {explain_exit(status)}.{self._tail()}", status)
            if not healthy.done():
                raise StartFailedError(
                    f"The service {self.spec.name} did not serve within {timeout_s:.0f} s.{self._tail()}"
                )
            healthy.result()
        except BaseException:
            await asyncio.shield(self.stop(at_once=True))
            raise
        finally:
            for task in (ended, healthy):
                task.cancel()
            await asyncio.gather(ended, healthy, return_exceptions=True)

    async def wait(self) -> int:
        """Wait for the process to end; its exit status, negative for a signal."""
        assert self._process is not None, "waited for a service that was not started"
        return await self._process.wait()

    async def stop(self, *, at_once: bool = False) -> None:
        """Stop the process: SIGTERM, and after the grace of its service, or ``at_once``, SIGKILL. Returns when it is
        gone."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            if not at_once:
                _signal(process.pid, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), self.spec.stop_grace_s)
            self.kill()
            await process.wait()
        if self._pump is not None:
            # A grandchild may hold the pipe open for a moment longer; what it prints then is lost.
            await asyncio.wait({self._pump}, timeout=1.0)
            self._pump.cancel()
            self._pump = None
        self._cut_lifeline()
        self.remove_socket()

    def kill(self) -> None:
        """End the process and what it started in its own group, at once."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def remove_socket(self) -> None:
        """Remove the socket that a killed service left behind."""
        if self.target.startswith("unix:"):
            with contextlib.suppress(OSError):
                Path(self.target.removeprefix("unix:")).unlink(missing_ok=True)

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    async def _until_serving(self, timeout_s: float) -> None:
        channel = open_channel(self.target, telemetry=False)
        try:
            await reach(channel, self.spec.name, self.target, patience_s=timeout_s)
            for service in self.spec.health_services:
                while True:
                    if await _is_serving(channel, service):
                        break
                    await asyncio.sleep(HEALTH_PERIOD_S)
        finally:
            await channel.close()

    async def _forward(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line longer than the reader's limit: its beginning is dropped
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            self._last_lines = [*self._last_lines[-19:], text]
            self._print_line(f"{self.spec.name} | {text}")

    def _tail(self) -> str:
        if self._log is None:
            lines = self._last_lines
        else:
            try:
                with self._log.open("rb") as log:
                    # Of this life only: what an earlier one printed explains nothing.
                    log.seek(max(self._log_start, self._log.stat().st_size - LOG_TAIL_BYTES))
                    lines = log.read().decode("utf-8", "replace").splitlines()[-10:]
            except OSError:
                lines = []
        return "".join(f"\n  {line}" for line in lines)


def explain_exit(status: int) -> str:
    """How a process ended, in words that follow its name: ``was killed by SIGKILL``, ``ended with exit code 2``."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


async def _is_serving(channel: grpc.aio.Channel, service: str) -> bool:
    try:
        return await serving(channel, service)
    except CallError:
        return False  # still starting: the process's end and the time limit are watched elsewhere


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextlib.contextmanager
def _open_log(log: Path | None) -> Iterator[IO[bytes] | None]:
    if log is None:
        yield None
        return
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
        log.replace(log.with_name(log.name + ".1"))
    output: IO[bytes]
    with log.open("ab", buffering=0) as output:
        os.fchmod(output.fileno(), 0o600)
        with contextlib.suppress(OSError):  # a full disk has no room for it, and must not keep the service down
            output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {log.stem} starts\n".encode())
        yield output

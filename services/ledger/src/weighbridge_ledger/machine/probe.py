"""Reads this machine: the static part once, the live part on demand, at most once a second, in a thread."""

import asyncio
import contextlib
import hashlib
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import psutil

from weighbridge_ledger.machine.declared import load_declared
from weighbridge_ledger.machine.drift import against_start
from weighbridge_ledger.machine.findings import Finding
from weighbridge_ledger.machine.interpret import interpret
from weighbridge_ledger.machine.model import UNMEASURED, Interpretation, LiveMemory, Machine, Source
from weighbridge_ledger.machine.probe_darwin import PRESSURE_NAME, read_panics, read_sysctl, read_vm_stat
from weighbridge_ledger.machine.probe_drm import DrmFolder
from weighbridge_ledger.machine.probe_linux import find_directories, read_board, read_cgroups, read_meminfo
from weighbridge_ledger.machine.probe_nvml import NvmlSession
from weighbridge_ledger.machine.readings import Readings

T = TypeVar("T")

MIN_INTERVAL_S = 1.0
"""Readings younger than this are used again."""

FIRST_TIMEOUT_S = 20.0
"""The first reading may have to wake a GPU driver up, which takes several seconds without its persistence daemon."""

LIVE_TIMEOUT_S = 5.0
"""A live reading that takes longer is not waited for any more, and no second one is started beside it."""


_KEPT = "what other programs were last seen to hold counts for a minute, then nothing."
TIMED_OUT = LiveMemory(
    findings=(Finding("PROBE_TIMED_OUT", f"Measuring free memory took too long: {_KEPT}"),), answered=False
)
FAILED = LiveMemory(findings=(Finding("PROBE_FAILED", f"Free memory cannot be measured: {_KEPT}"),), answered=False)


# One name per processor: kernels and Python disagree.
_PROCESSORS = {"aarch64": "arm64", "amd64": "x86_64"}


class ThisMachine:
    """Collects the readings of the machine this process runs on. What never changes is read once. Never raises."""

    def __init__(
        self,
        system: str = sys.platform,
        open_nvml: Callable[[], NvmlSession | None] = NvmlSession.open,
        *,
        sensors: bool = True,
        panics: bool = True,
    ) -> None:
        """`sensors`: also temperatures and slow-downs. `panics`: also reports of kernel panics."""
        self._system = system
        self._sensors = sensors
        self._panics = panics
        self._nvml = open_nvml()
        self._sysctl = read_sysctl() if system == "darwin" else {}
        self._directories = find_directories() if system == "linux" else ()
        self._drm = DrmFolder() if system == "linux" else None
        self._board = read_board() if system == "linux" else ""

    def read(self) -> Readings:
        """All readings, now."""
        failures: list[str] = []
        ram = available = None
        try:
            memory = psutil.virtual_memory()
            ram, available = int(memory.total), int(memory.available)
        except Exception as error:  # psutil parses system files and raises whatever that leads to.
            failures.append(f"The system's memory figures cannot be read: {error}")
        return Readings(
            platform=self._system,
            processor=_PROCESSORS.get(platform.machine().lower(), platform.machine().lower()),
            meminfo=read_meminfo() if self._system == "linux" else None,
            cgroups=read_cgroups(self._directories),
            vm_stat=read_vm_stat() if self._system == "darwin" else None,
            sysctl=self._read_sysctl(),
            ram_bytes=ram,
            ram_available_bytes=available,
            devices=() if self._nvml is None else self._nvml.read(self._sensors),
            failures=tuple(failures),
            drm=() if self._drm is None else self._drm.read(self._sensors),
            board=self._board,
            crash_reports=read_panics(time.time()) if self._system == "darwin" and self._panics else (),
        )

    def _read_sysctl(self) -> dict[str, str]:
        return {**self._sysctl, **read_sysctl(names=(PRESSURE_NAME,))} if self._system == "darwin" else {}


class MachineProbe:
    """One machine for as long as the ledger runs: what it is, and what is free on it now."""

    def __init__(
        self,
        first: Interpretation,
        read: Callable[[], Readings] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        timeout_s: float = LIVE_TIMEOUT_S,
    ) -> None:
        """`first` says what the machine is; without `read` (a declared machine) nothing is ever measured."""
        self._first = first
        self._read = read
        self._clock = clock
        self._wall_clock = wall_clock
        self._timeout_s = timeout_s
        self._latest: tuple[float, LiveMemory] | None = None
        self._in_flight: asyncio.Future[LiveMemory] | None = None
        self._started = 0.0

    @property
    def machine(self) -> Machine:
        """The machine. A card that stops answering stays: losing sight of a card takes no lease away."""
        return self._first.machine

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the first readings could not say."""
        return self._first.findings

    async def live(self) -> LiveMemory:
        """Memory now: a reading at most a second old, or all None where none comes in time. Never raises."""
        if self._read is None:
            return UNMEASURED
        if self._latest is not None and self._clock() - self._latest[0] < MIN_INTERVAL_S:
            return self._latest[1]
        if self._in_flight is None or self._in_flight.done():
            self._in_flight, self._started = in_thread(self._measure), self._clock()
        # One that hangs has used its time up for every later call: wait_for then answers at once.
        patience = self._timeout_s - (self._clock() - self._started)
        try:
            # Shielded, because several callers wait for the one reading.
            live = await asyncio.wait_for(asyncio.shield(self._in_flight), patience)
        except TimeoutError:
            return TIMED_OUT
        except Exception:  # Whatever a driver's bindings raise: free memory is unknown, and nothing else fails.
            live = FAILED
        self._latest = (self._clock(), live)
        return live

    def _measure(self) -> LiveMemory:
        assert self._read is not None
        now = interpret(self._read(), node_id=self.machine.node_id, now=self._wall_clock())
        return against_start(self.machine, now)


async def open_probe(
    declared: str = "", *, node_id: str = "", sensors: bool = True, panics: bool = True
) -> MachineProbe:
    """The machine of a setting (a spec or a file of recorded readings), or, where it is empty, this one.

    `sensors`: with temperatures and slow-downs. `panics`: with reports of kernel panics.

    Raises:
        MachineSpecError: a setting that declares no machine.
        UnreadableMachineError: this machine does not say how much memory it has.
        TimeoutError: this machine's drivers did not answer.
    """
    node = node_id or this_node()
    if declared.strip():
        return MachineProbe(load_declared(declared, node_id=node))

    def first() -> tuple[ThisMachine, Readings]:
        collector = ThisMachine(sensors=sensors, panics=panics)
        return collector, collector.read()

    try:
        collector, readings = await asyncio.wait_for(in_thread(first), FIRST_TIMEOUT_S)
    except TimeoutError as error:
        raise TimeoutError(
            f"reading this machine's memory took longer than {FIRST_TIMEOUT_S:.0f} s: a GPU driver does not answer; "
            "declare the machine instead (WEIGHBRIDGE_LEDGER_MACHINE)"
        ) from error
    return MachineProbe(interpret(readings, node_id=node, source=Source.DETECTED), collector.read)


def in_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Run blocking work in a daemon thread of its own.

    The event loop's executor would not do: a driver that hangs would hold one of its few threads for ever and keep the
    process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # The loop was closed meanwhile: nobody waits any more.
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="machine-probe", daemon=True).start()
    return future


def this_node(machine_id_file: Path = Path("/etc/machine-id")) -> str:
    """A name of this machine that stays: derived from its machine id where it has one, else the host name.

    The id itself is confidential by its own documentation, so only a hash that belongs to this program is shown.
    """
    try:
        machine_id = machine_id_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        machine_id = ""
    if not machine_id:
        return platform.node() or "localhost"
    return "node-" + hashlib.sha256(f"weighbridge:{machine_id}".encode()).hexdigest()[:16]

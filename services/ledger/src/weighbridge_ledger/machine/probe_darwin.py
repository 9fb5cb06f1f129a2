"""Readings of a Mac: sysctl values, vm_stat, reports of kernel panics. Never raises."""

import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from weighbridge_ledger.machine.readings import CrashReport

SYSCTL_NAMES = ("hw.memsize", "hw.optional.arm64", "iogpu.wired_limit_mb")
PRESSURE_NAME = "kern.memorystatus_vm_pressure_level"
"""1 normal, 2 warning, 4 critical: the levels of dispatch's memory pressure source."""

REPORT_FOLDERS = (Path("/Library/Logs/DiagnosticReports"), Path("~/Library/Logs/DiagnosticReports"))

REPORT_AGE_S = 86_400.0
"""Older reports are of no interest: no rest after a panic can be set to be longer."""

MOST_REPORTS = 16
HEAD_BYTES = 16 * 1024
"""What panicked stands in the first lines; the rest lists threads and kernel extensions."""

# vm_stat answers in milliseconds; under heavy swapping it takes seconds (the reference system waits 3 s too).
COMMAND_TIMEOUT_S = 3.0

Run = Callable[[Sequence[str]], str | None]


def run_command(arguments: Sequence[str]) -> str | None:
    """Standard output of a command, or None if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            arguments, capture_output=True, stdin=subprocess.DEVNULL, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def read_sysctl(run: Run = run_command, names: Sequence[str] = SYSCTL_NAMES) -> dict[str, str]:
    """The values that exist on this Mac. Each is asked for alone: one unknown name fails a whole call."""
    values = {name: run(["/usr/sbin/sysctl", "-n", name]) for name in names}
    return {name: value.strip() for name, value in values.items() if value is not None}


def read_vm_stat(run: Run = run_command) -> str | None:
    """The output of vm_stat, or None."""
    return run(["/usr/bin/vm_stat"])


def read_panics(now: float, folders: Iterable[Path] = REPORT_FOLDERS) -> tuple[CrashReport, ...]:
    """The beginnings of the latest reports of kernel panics, newest first. `now`: seconds since the epoch.

    Reports of programs that crashed are in the same folders; those of panics are told by their names
    (panic-full-2026-03-31-094300.0002.panic, Kernel-....panic, panic-full-....ips).
    """
    found: list[tuple[float, Path]] = []
    for folder in folders:
        try:
            panics = [path for path in folder.expanduser().iterdir() if _is_panic(path.name)]
        except (OSError, RuntimeError):  # not there, not ours to read, or no home
            continue
        for path in panics:
            with suppress(OSError):  # macOS moves a report away meanwhile
                found.append((path.stat().st_mtime, path))
    found = sorted(((modified, path) for modified, path in found if now - modified < REPORT_AGE_S), reverse=True)
    reports = []
    for modified, path in found[:MOST_REPORTS]:
        try:
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES).decode(errors="replace")
        except OSError:
            continue
        reports.append(CrashReport(path.name, modified, head))
    return tuple(reports)


def _is_panic(name: str) -> bool:
    return name.endswith(".panic") or (name.endswith(".ips") and name.lower().startswith(("panic", "kernel")))

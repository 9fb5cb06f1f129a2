"""Readings of a Mac: sysctl values and vm_stat. Never raises."""

import subprocess
from collections.abc import Callable, Sequence

SYSCTL_NAMES = ("hw.memsize", "hw.optional.arm64", "iogpu.wired_limit_mb")

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


def read_sysctl(run: Run = run_command) -> dict[str, str]:
    """The values that exist on this Mac. Each is asked for alone: one unknown name fails a whole call."""
    values = {name: run(["/usr/sbin/sysctl", "-n", name]) for name in SYSCTL_NAMES}
    return {name: value.strip() for name, value in values.items() if value is not None}


def read_vm_stat(run: Run = run_command) -> str | None:
    """The output of vm_stat, or None."""
    return run(["/usr/bin/vm_stat"])

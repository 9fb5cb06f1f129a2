"""The demo's model: made once, from a Python package and without any model hub."""

import asyncio
import contextlib
import os
import sys
import tempfile
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
    made_folders = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place, so that it appears whole or not at all, and nothing half made is left by whatever ends this.
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent, ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / folder.name
            await _run_maker(made)
            made.rename(folder)
    except OSError as failed:
        raise DemoModelError(f"The demo model could not be made in {folder}: {failed}") from None
    finally:
        for parent in made_folders:  # deepest first; stays where anything is in it
            with contextlib.suppress(OSError):
                parent.rmdir()
    return True


async def _run_maker(folder: Path) -> None:
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
        raise DemoModelError(f"Making the demo model took longer than {MAKE_TIMEOUT_S:.0f} s.") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0 or not (folder / "config.json").is_file():
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {process.returncode}"
        raise DemoModelError(f"The demo model could not be made: {reason}")

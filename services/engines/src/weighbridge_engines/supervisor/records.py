"""Which processes a service has started, on disk before they start: so that its successor can end what it left.

The guard ends an engine whose service died. This is for the day on which the guard died too, or was stopped: processes
are found by their recorded identity, never by name, and never while the service that recorded them lives.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog
from weighbridge_common import processes
from weighbridge_common.processes import ProcessIdentity
from weighbridge_common.tasks import to_its_end

from weighbridge_engines.supervisor.readiness import until_gone

FORMAT_VERSION = 1

REAP_TIMEOUT_S = 10.0
"""How long a killed orphan may take to be gone (reference system, supervisor, October 2026)."""

_log = structlog.get_logger(__name__)


class ProcessRecord:
    """The file that names the engine processes of one service.

    Args:
        path: the file; its folder must exist.
        owner: the service.
    """

    def __init__(self, path: Path, owner: ProcessIdentity) -> None:
        self._path = path
        self._owner = owner

    async def write(self, children: Iterable[ProcessIdentity]) -> None:
        """Record ``children``; on disk when this returns.

        In a thread, because a busy disk may take seconds to sync. Cancelled, it ends first: the next one to write, or
        to clear, must not meet it.

        Raises:
            OSError: it cannot be written.
        """
        await to_its_end(asyncio.to_thread(self._write, tuple(children)))

    def _write(self, children: tuple[ProcessIdentity, ...]) -> None:
        content = {
            "version": FORMAT_VERSION,
            "owner": asdict(self._owner),
            "children": [asdict(child) for child in children],
        }
        beside = self._path.with_suffix(".new")
        with beside.open("w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def clear(self) -> None:
        """Nothing of this service runs any more."""
        with contextlib.suppress(OSError):  # a record that stays names processes that are gone, and ends nobody
            self._path.unlink(missing_ok=True)

    async def reap(
        self,
        is_alive: Callable[[ProcessIdentity], bool | None] = processes.is_alive,
        kill: Callable[[int], None] | None = None,
    ) -> int:
        """End what an earlier service recorded and left behind; returns how many were still alive.

        An unreadable record ends nothing: a guess could kill a stranger.
        """
        recorded = self._read()
        if recorded is None:
            return 0
        owner, children = recorded
        if owner != self._owner and is_alive(owner):
            _log.warning("record_owner_alive", path=str(self._path), owner_pid=owner.pid)
            return 0
        living = [child for child in children if is_alive(child)]
        for child in living:
            _log.warning("orphan_killed", pid=child.pid)
            (kill or _kill)(child.pid)
        if not await until_gone(lambda: not any(is_alive(child) for child in living), REAP_TIMEOUT_S):
            _log.error("orphan_survives", pids=[child.pid for child in living if is_alive(child)])
            return len(living)
        self.clear()
        return len(living)

    def _read(self) -> tuple[ProcessIdentity, list[ProcessIdentity]] | None:
        try:
            content: Any = json.loads(self._path.read_text())
            if content["version"] != FORMAT_VERSION:
                _log.warning("record_of_other_version", path=str(self._path))
                return None
            return _identity(content["owner"]), [_identity(child) for child in content["children"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            _log.warning("record_unreadable", path=str(self._path))
            return None


def _identity(fields: Any) -> ProcessIdentity:
    identity = ProcessIdentity(**fields)
    if not (isinstance(identity.pid, int) and identity.pid > 1 and isinstance(identity.start_time, int)):
        raise ValueError("not a process")
    return identity


def _kill(pid: int) -> None:
    # An engine leads its own group; a guard leads its own session. What each has started goes with it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)

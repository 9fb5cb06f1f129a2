"""One suite for each run folder."""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

LOCK_NAME = "up.lock"
"""The file tells who holds it: the process's id, and on the second line the services that it keeps up."""

_LONGEST_RECORD_BYTES = 4096


class SuiteRunningError(Exception):
    """Another `weighbridge up` holds the run folder. ``pid`` is that process, 0 if it did not say."""

    def __init__(self, folder: Path, pid: int) -> None:
        process = f" (process {pid})" if pid else ""
        super().__init__(f"A suite already runs in {folder}{process}. Stop it first, or choose another run folder.")
        self.folder = folder
        self.pid = pid


class RunLock:
    """The right to run a suite in one folder, held until it is released or the process ends in any way.

    Args:
        folder: the run folder.
        services: what the suite keeps up, for :func:`supervised_services`.
    """

    def __init__(self, folder: Path, services: Sequence[str] = ()) -> None:
        self.path = folder / LOCK_NAME
        self._services = tuple(services)
        self._descriptor = -1

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            SuiteRunningError: another process holds it.
            OSError: the folder cannot be written.
        """
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid, _services = _read_record(descriptor)
                os.close(descriptor)
                raise SuiteRunningError(self.path.parent, pid) from None
            # Its last holder may have removed the file between our open and our lock: then we hold a nameless file.
            if _is_file_at(descriptor, self.path):
                break
            os.close(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n{' '.join(self._services)}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back and remove its file. Without the lock nothing happens."""
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def is_supervised(folder: Path) -> bool:
    """Whether a `weighbridge up` runs in ``folder``: services that end there are started again."""
    return _record_of_running(folder) is not None


def supervised_services(folder: Path) -> tuple[str, ...]:
    """The services that the `weighbridge up` of ``folder`` keeps up, whether they run at this moment or not.

    Empty where no suite runs, or where it was started just now and has not told yet.
    """
    _pid, services = _record_of_running(folder) or (0, ())
    return services


def _record_of_running(folder: Path) -> tuple[int, tuple[str, ...]] | None:
    """What the holder of the lock of ``folder`` tells; None: nobody holds it."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_record(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _read_record(descriptor: int) -> tuple[int, tuple[str, ...]]:
    """The process and the services that a lock file names; 0 and nothing where it does not."""
    text = os.pread(descriptor, _LONGEST_RECORD_BYTES, 0).decode("ascii", "replace")
    pid, _, services = text.partition("\n")
    return int(pid) if pid.isdigit() else 0, tuple(services.split())


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

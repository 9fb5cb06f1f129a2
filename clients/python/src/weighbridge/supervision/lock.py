"""One suite for each run folder."""

import fcntl
import os
from pathlib import Path

LOCK_NAME = "up.lock"


class SuiteRunningError(Exception):
    """Another `weighbridge up` holds the run folder. ``pid`` is that process, 0 if it did not say."""

    def __init__(self, folder: Path, pid: int) -> None:
        process = f" (process {pid})" if pid else ""
        super().__init__(f"A suite already runs in {folder}{process}. Stop it first, or choose another run folder.")
        self.folder = folder
        self.pid = pid


class RunLock:
    """The right to run a suite in one folder, held until it is released or the process ends in any way."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
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
                pid = _read_pid(descriptor)
                os.close(descriptor)
                raise SuiteRunningError(self.path.parent, pid) from None
            # Its last holder may have removed the file between our open and our lock: then we hold a nameless file.
            if _is_file_at(descriptor, self.path):
                break
            os.close(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back and remove its file. Without the lock nothing happens."""
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def is_supervised(folder: Path) -> bool:
    """Whether a `weighbridge up` runs in ``folder``: services that end there are started again."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _read_pid(descriptor: int) -> int:
    text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    return int(text) if text.isdigit() else 0


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

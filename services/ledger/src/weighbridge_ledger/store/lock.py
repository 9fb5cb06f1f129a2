"""The lock of a database: one ledger at a time, by whatever name it reaches the file.

It lies on the file itself, on a byte that SQLite never touches, so another link, another mount of the folder or a lost
lock file leads to the same lock. Not flock: on macOS its locks and those of fcntl, which SQLite takes, see each other
(fcntl(2)), and the database would be locked against its own ledger. A lock of an open file description (Linux 3.15;
macOS has them too) ends with its descriptor. Where there is none, a process's own lock must do. That one ends when the
process closes any descriptor of the file, or when SQLite holds no lock any more and unlocks the whole file: while it is
being looked at and opened. So it is confirmed after that; a database in WAL mode stays locked until it is closed.
"""

import contextlib
import fcntl
import os
import struct
import sys
from pathlib import Path

from weighbridge_ledger.store.interface import StoreRefusedError
from weighbridge_ledger.store.unusable import unusable

LOCK_BYTE = 2**62
"""Beyond the end of any file. SQLite's own locks lie at 2^30 and the 511 bytes after it."""

OWNER_BYTE = LOCK_BYTE + 1
"""Under a lock of the process: of such a one the system tells whose it is."""

_SET_LOCK: int = getattr(fcntl, "F_OFD_SETLK", fcntl.F_SETLK)

_FLOCK = "@qqihh" if sys.platform == "darwin" else "@hhqqi0q"
"""struct flock: (start, length, pid, type, whence) on macOS, (type, whence, start, length, pid) on Linux."""

_held: set[tuple[int, int]] = set()
"""The files that this process has locked. A second attempt must not open one: closing it would end SQLite's locks."""


class StoreLock:
    """The lock of one database, from now on until `release` or the end of the process.

    Args:
        path: the database, links resolved. Made, empty and readable by nobody else, if it is missing.

    Raises:
        StoreRefusedError: another ledger has it, or it cannot be opened. The database was not changed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beside = _lock_beside(path)
        try:
            self._refuse_own()
            self._descriptor = _opened(path)
        except BaseException:
            os.close(self._beside)
            raise
        try:
            status = os.fstat(self._descriptor)
            self._file = (status.st_dev, status.st_ino)
            self.confirm()
        except BaseException:
            os.close(self._descriptor)
            os.close(self._beside)
            raise
        _held.add(self._file)
        with contextlib.suppress(OSError):  # a full disk: then the next one is not told whose it is
            os.ftruncate(self._beside, 0)
            os.pwrite(self._beside, f"{os.getpid()}\n".encode(), 0)

    def confirm(self) -> None:
        """Take it once more: harmless where it is held, needed where it was lost with another descriptor of the file.

        Raises:
            StoreRefusedError: another ledger has it.
        """
        try:
            fcntl.fcntl(self._descriptor, _SET_LOCK, _request(fcntl.F_WRLCK, LOCK_BYTE))
            fcntl.fcntl(self._descriptor, fcntl.F_SETLK, _request(fcntl.F_WRLCK, OWNER_BYTE))
        except (BlockingIOError, PermissionError) as error:
            raise _taken(self._path, _owner_of(self._descriptor)) from error
        except OSError as error:
            raise StoreRefusedError(
                f"{self._path} cannot be locked: {error.strerror}. Give the ledger a data folder on a local disk."
            ) from error

    def release(self) -> None:
        """Give it back. SQLite must have closed the file before."""
        _held.discard(self._file)
        os.close(self._descriptor)
        os.close(self._beside)

    def _refuse_own(self) -> None:
        try:
            status = self._path.stat()
        except OSError:
            return
        if (status.st_dev, status.st_ino) in _held:
            raise _taken(self._path, str(os.getpid()))


def _lock_beside(path: Path) -> int:
    """The lock file beside the database: the one lock that version 0.1 takes and heeds, and it may still be running."""
    path = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unusable(path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise _taken(path, owner) from error
    return descriptor


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unusable(path, error) from error


def _request(kind: int, start: int) -> bytes:
    if sys.platform == "darwin":
        return struct.pack(_FLOCK, start, 1, 0, kind, os.SEEK_SET)
    return struct.pack(_FLOCK, kind, os.SEEK_SET, start, 1, 0)


def _owner_of(descriptor: int) -> str:
    """The process that has the file, if it can be seen from here."""
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, _request(fcntl.F_WRLCK, OWNER_BYTE))
    fields = struct.unpack(_FLOCK, answer)
    kind, pid = (fields[3], fields[2]) if sys.platform == "darwin" else (fields[0], fields[4])
    return str(pid) if kind != fcntl.F_UNLCK and pid > 0 else ""


def _taken(path: Path, owner: str) -> StoreRefusedError:
    return StoreRefusedError(
        f"Another ledger (process {owner or 'unknown'}) has the store in {path.parent}. One ledger owns one machine: "
        "stop it, or give this one a data folder of its own."
    )

"""Opening a weight file so that nothing in the file system can surprise the reader.

Only regular files are read, by position, never through a memory map: a file that is cut while it is mapped kills the
process with SIGBUS, a short `pread` is an error value.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weighbridge_fit.errors import WeightError, WeightReason


class RegularFile:
    """An open regular file: its size when opened, and reads at an offset."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self.size = size

    def fileno(self) -> int:
        """The open descriptor, to hand the file to a process that may read all of it."""
        return self._descriptor

    def read_exactly(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises TRUNCATED when the file has fewer."""
        if length > self.size - offset:
            raise WeightError(
                WeightReason.TRUNCATED,
                f"the file ends after {self.size} bytes, {offset + length} are needed",
                offset=min(offset, self.size),
            )
        data = os.pread(self._descriptor, length, offset)
        while len(data) < length:
            more = os.pread(self._descriptor, length - len(data), offset + len(data))
            if not more:
                raise WeightError(
                    WeightReason.TRUNCATED, "the file shrank while it was read", offset=offset + len(data)
                )
            data += more
        return data


@contextmanager
def open_regular(path: Path) -> Iterator[RegularFile]:
    """Opens an already resolved path. Raises NOT_A_REGULAR_FILE for pipes, devices, folders and links, UNREADABLE
    else."""
    # O_NONBLOCK: opening a pipe must not wait for a writer. O_NOFOLLOW: the path was resolved, a link here was
    # swapped in.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        # Asked before opening too, because opening a device can do something (rewind a tape, start a watchdog).
        _refuse_irregular(os.lstat(path), path)
        descriptor = os.open(path, flags)
    except OSError as error:
        message = f"the file cannot be opened ({error.strerror})"
        raise WeightError(WeightReason.UNREADABLE, message, file=path.name) from error
    try:
        status = os.fstat(descriptor)
        _refuse_irregular(status, path)
        yield RegularFile(descriptor, status.st_size)
    except OSError as error:
        message = f"the file cannot be read ({error.strerror})"
        raise WeightError(WeightReason.UNREADABLE, message, file=path.name) from error
    finally:
        os.close(descriptor)


def _refuse_irregular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise WeightError(WeightReason.NOT_A_REGULAR_FILE, "this is not a regular file", file=path.name)

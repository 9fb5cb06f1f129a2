"""Whether another ds4 has the machine to itself, told without touching its lock.

Every ds4 process takes the same lock (`flock`), and ends at once where it cannot. Whoever tried the lock to see whether
it is free would make a ds4 end that starts at that moment. So it is only read who holds it, which Linux tells of every
process; elsewhere the started ds4-server tells, after the memory was claimed for it.
"""

import os
import re
from pathlib import Path

DEFAULT_LOCK_FILE = "/tmp/ds4.lock"  # noqa: S108 # ds4's own choice
"""Where ds4 has its lock unless DS4_LOCK_FILE names another one. The file stays behind, so that it is there means
nothing."""

_FLOCK = re.compile(
    r"\d+: FLOCK +ADVISORY +WRITE +(?P<pid>\d+) +(?P<major>[0-9a-f]+):(?P<minor>[0-9a-f]+):(?P<inode>\d+) .*"
)


def holder_outside(lock_file: str = "", proc: Path = Path("/proc")) -> int | None:
    """The process that holds the lock and that this service did not start; None: nobody, or it cannot be told.

    Args:
        lock_file: empty: the one that all ds4 processes of a machine share.
        proc: the kernel's own file system.
    """
    pid = holder(lock_file, proc)
    if pid is None:
        return None
    # An engine of ours is its guard's child, and the guard is ours. It gives the lock up before another one starts.
    return None if _parent(_parent(pid, proc), proc) == os.getpid() else pid


def holder(lock_file: str = "", proc: Path = Path("/proc")) -> int | None:
    """The process that holds the lock; None: nobody, or it cannot be told. Arguments as :func:`holder_outside`."""
    try:
        found = Path(lock_file or DEFAULT_LOCK_FILE).stat()
        table = (proc / "locks").read_text()
    except OSError:
        return None
    wanted = (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)
    for match in map(_FLOCK.fullmatch, table.splitlines()):
        if match and (int(match["major"], 16), int(match["minor"], 16), int(match["inode"])) == wanted:
            return int(match["pid"])
    return None


def _parent(pid: int | None, proc: Path) -> int | None:
    try:
        # The name, in parentheses, may hold anything.
        return int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None

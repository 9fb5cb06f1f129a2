"""What has come of one file so far: on disk, only ever appended to, and its own only when it is whole."""

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weighbridge.pull.wanted import WantedFile

SUFFIX = ".part"
_VERSION_SUFFIX = ".version"
MAX_VERSION_BYTES = 4096


def part_name(file: WantedFile) -> str:
    """The name of what has come of `file`: its digest where it has one, so that what came from one address goes on
    from another."""
    return file.sha256 or "path-" + hashlib.sha256(file.path.encode()).hexdigest()


def names_of(file: WantedFile) -> tuple[str, str]:
    """The names of both files that belong to `file`: what has come of it, and which version that is."""
    return part_name(file) + SUFFIX, part_name(file) + _VERSION_SUFFIX


class Part:
    """What has come of `file`, in the folder `work`.

    Attributes:
        size: bytes that are there.
        etag: the version that they belong to, as the host names it; "" where a digest will tell, or nobody said.
    """

    def __init__(self, work: Path, file: WantedFile) -> None:
        name, version_name = names_of(file)
        self.path = work / name
        self._version = work / version_name
        self._by_digest = bool(file.sha256)
        self.etag = ""
        if self.path.is_symlink():
            self.path.unlink()
        self.size = size_of(self.path)
        if self.size and not self._by_digest:
            self.etag = self._read_version()
            if not self.etag:
                self.discard()

    @contextmanager
    def appending(self) -> Iterator[int]:
        """A descriptor that writes at its end; the file is made where there is none. Raises OSError."""
        self._version.parent.mkdir(parents=True, exist_ok=True)
        # A link that somebody put there would have us write to what it names.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def append(self, descriptor: int, piece: bytes) -> None:
        """Writes all of it. On a full disk what fitted is there, and `size` says so. Raises OSError."""
        rest = memoryview(piece)
        while rest:
            written = os.write(descriptor, rest)
            self.size += written
            rest = rest[written:]

    def create(self) -> None:
        """The file, empty if it was not there. Raises OSError."""
        with self.appending():
            pass

    def remember(self, etag: str) -> None:
        """Which version comes now. Weak ones do not tell versions apart byte by byte."""
        if self._by_digest or etag == self.etag:
            return
        self.etag = "" if etag.startswith("W/") else etag
        self._version.unlink(missing_ok=True)
        self._version.write_text(json.dumps({"etag": self.etag}))

    def discard(self) -> None:
        """Throws it away."""
        self.path.unlink(missing_ok=True)
        self._version.unlink(missing_ok=True)
        self.size, self.etag = 0, ""

    def become(self, target: Path) -> None:
        """Its own name, once it is certain to be on the disk. Raises OSError."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("rb") as opened:
            os.fsync(opened.fileno())
        self.path.replace(target)
        self._version.unlink(missing_ok=True)
        sync_folder(target.parent)

    def _read_version(self) -> str:
        try:
            with self._version.open("rb") as opened:
                etag = json.loads(opened.read(MAX_VERSION_BYTES))["etag"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""
        return etag if isinstance(etag, str) else ""


def size_of(path: Path) -> int:
    """The size of a regular file, links not followed; 0 for everything else."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def sync_folder(folder: Path) -> None:
    """Makes new names in `folder` outlive a power cut, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""What is to be had: files with sizes and digests, and where they go."""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weighbridge.pull.errors import PullError, PullReason

CHUNK_BYTES = 1 << 20
LONGEST_NAME_BYTES = 255
"""Of one step of a path, on every usual file system."""
LONGEST_PATH = 512

_HEX = {64: "sha256", 40: "sha1"}


@dataclass(frozen=True, slots=True)
class WantedFile:
    """One file of a model. `path` is relative to the model's folder; `sha256` "" where nobody knows it, `git_sha1` the
    digest that a repository gives small files; `url` "" where it comes from the entry's repository."""

    path: str
    size_bytes: int
    sha256: str = ""
    url: str = ""
    git_sha1: str = ""

    def target(self, folder: Path) -> Path:
        """Where it goes."""
        return folder / self.path

    def hasher(self) -> "Hasher | None":
        """What tells whether it is the right one; None where nobody knows its digest."""
        if self.sha256:
            return hashlib.sha256()
        if self.git_sha1:
            return hashlib.sha1(f"blob {self.size_bytes}\0".encode(), usedforsecurity=False)
        return None

    def is_right(self, hasher: "Hasher | None") -> bool:
        """Whether what was hashed is this file."""
        return hasher is None or hasher.hexdigest() == (self.sha256 or self.git_sha1)


class Hasher(Protocol):
    """A digest in the making."""

    def update(self, data: bytes, /) -> None:
        """Takes more."""

    def hexdigest(self) -> str:
        """Lower-case hex of what was taken so far."""


def checked(file: WantedFile) -> WantedFile:
    """The file itself. Raises PullError BAD_ENTRY for a path that leads out of the folder or hides in it, and for sizes
    and digests that are none."""
    parts = file.path.split("/")
    if (
        {"", ".", ".."} & set(parts)
        or parts[0].startswith(".")
        or not file.path.isprintable()
        or re.search(r"[\\:*?\"<>|]", file.path)
        # Some systems leave these out in silence, and two names become one.
        or any(part.endswith((".", " ")) or part.startswith(" ") for part in parts)
        or any(len(part.encode()) > LONGEST_NAME_BYTES for part in parts)
        or len(file.path) > LONGEST_PATH
    ):
        raise PullError(PullReason.BAD_ENTRY, f"{file.path[:200]!r} is no path that a model's file can have.")
    if file.size_bytes < 0:
        raise PullError(PullReason.BAD_ENTRY, f"{file.path[:200]!r} has no size that a file can have.")
    for digest, name in ((file.sha256, "sha256"), (file.git_sha1, "sha1")):
        if digest and (_HEX.get(len(digest)) != name or not re.fullmatch(r"[0-9a-f]+", digest)):
            raise PullError(PullReason.BAD_ENTRY, f"{file.path[:200]!r} has a digest that is none.")
    return file


def distinct(files: Sequence[WantedFile], taken: str) -> None:
    """Raises PullError BAD_ENTRY unless every path is one of its own, on every file system, and none is `taken`."""
    names = {_same_name(taken)}
    for file in files:
        if (name := _same_name(file.path)) in names:
            raise PullError(PullReason.BAD_ENTRY, f"{file.path!r} cannot be a file of this model: the name is taken.")
        names.add(name)
    for name in names:
        above = name.rpartition("/")[0]
        while above:
            if above in names:
                message = f"{above[:200]!r} cannot be a file of this model and a folder of it."
                raise PullError(PullReason.BAD_ENTRY, message)
            above = above.rpartition("/")[0]


def _same_name(path: str) -> str:
    """The same text for paths that some file system takes for the same: capitals, and letters in parts."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def digest_of(path: Path, file: WantedFile, on_bytes: Callable[[int], None] = lambda _: None) -> "Hasher | None":
    """What `path` hashes to, by the digest that `file` is known by. `on_bytes` hears of each piece read, and may
    raise."""
    hasher = file.hasher()
    if hasher is None:
        return None
    with path.open("rb") as opened:
        while piece := opened.read(CHUNK_BYTES):
            hasher.update(piece)
            on_bytes(len(piece))
    return hasher

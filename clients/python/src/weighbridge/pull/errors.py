"""Why a download failed."""

import errno
from enum import StrEnum


class PullReason(StrEnum):
    """Stable names of what can go wrong."""

    BAD_ANSWER = "BAD_ANSWER"
    """The host answers in a way that no download can be made of."""
    BAD_ENTRY = "BAD_ENTRY"
    """The catalogue's entry asks for something that is never done: a path out of its folder, an address of no web."""
    BUSY = "BUSY"
    """Another pull of this model is at work."""
    DIGEST_MISMATCH = "DIGEST_MISMATCH"
    """What came is not what the catalogue describes."""
    DISK_FULL = "DISK_FULL"
    """There is not enough room."""
    NOT_ALLOWED = "NOT_ALLOWED"
    """The host wants a token, or a licence accepted."""
    NOT_INSTALLED = "NOT_INSTALLED"
    """A library that this download needs is not installed."""
    NOT_THERE = "NOT_THERE"
    """The host does not have the file."""
    NOT_TRUSTED = "NOT_TRUSTED"
    """The host cannot show that it is the one that it says it is."""
    NOT_WRITABLE = "NOT_WRITABLE"
    """The model's folder does not take what came."""
    REDIRECT_REFUSED = "REDIRECT_REFUSED"
    """The host sent the download somewhere it does not go."""
    SIZE_MISMATCH = "SIZE_MISMATCH"
    """The host offers a file of another size than the catalogue describes."""
    UNREACHABLE = "UNREACHABLE"
    """The host does not answer, or breaks off again and again."""


class PullError(Exception):
    """One sentence for the person who pulls, and a stable reason."""

    def __init__(self, reason: PullReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class PullStoppedError(Exception):
    """The person stopped the download; what has come so far is kept."""


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def refused_by_disk(error: OSError, name: str) -> PullError:
    """What the disk's refusal means for the person who pulls `name`: a file, or the model as a whole."""
    if error.errno in _FULL:
        message = (
            f"{name}: the disk is full. What has come is kept: make room, and the same command goes on from there."
        )
        return PullError(PullReason.DISK_FULL, message)
    why = error.strerror or type(error).__name__
    if error.errno == errno.EXDEV:
        why = "it would lie on another disk than the model's folder"
    where = f" ({error.filename})" if isinstance(error.filename, str) and error.filename else ""
    return PullError(PullReason.NOT_WRITABLE, f"{name} cannot be written{where}: {why}.")

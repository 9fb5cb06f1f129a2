"""Why a download failed."""

from enum import StrEnum


class PullReason(StrEnum):
    """Stable names of what can go wrong."""

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

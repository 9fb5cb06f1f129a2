"""How the child process ends, and what that tells the host."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the runtime. From 64 up they keep clear of Python's own 1 and 2."""

    OK = 0
    """Asked to stop (SIGTERM, SIGINT) and stopped cleanly."""

    MLX_UNAVAILABLE = 69
    """MLX or mlx-lm cannot be imported here (sysexits EX_UNAVAILABLE)."""

    FATAL = 70
    """A defect in the runtime; the model's state is unknown (sysexits EX_SOFTWARE)."""

    PARENT_GONE = 74
    """The host that held the other end of the lifeline is gone (sysexits EX_IOERR)."""

"""Watches one process for what a reader of weights must never do, whatever the file says."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Audit events (Python's own table of them) of running code, importing, and reaching out of the process.
FORBIDDEN = frozenset(
    {
        "exec", "compile", "import", "marshal.loads", "pickle.find_class", "code.__new__", "function.__new__",
        "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.startfile", "os.kill", "os.putenv",
        "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
        "subprocess.Popen", "pty.spawn", "ctypes.dlopen", "ctypes.dlsym", "sys.addaudithook", "sys._getframe",
        "sys.settrace", "sys.setprofile", "shutil.rmtree", "tempfile.mkstemp", "urllib.Request", "webbrowser.open",
        "builtins.input", "builtins.breakpoint", "object.__setattr__", "gc.get_objects",
    }
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_watching = False
_installed = False


class ForbiddenError(BaseException):
    """A reader did what a file must not make it do. No `except Exception` catches it."""


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event in FORBIDDEN or event.startswith("socket."):
        raise ForbiddenError(f"{event}{arguments!r:.200}")
    if event == "open" and (arguments[2] or 0) & _WRITES:
        raise ForbiddenError(f"open for writing: {arguments!r:.200}")


@contextmanager
def nothing_executed() -> Iterator[None]:
    """Raises ForbiddenError where the code inside does anything of FORBIDDEN. What it needs is imported before."""
    global _watching, _installed
    if not _installed:
        sys.addaudithook(_hook)  # It cannot be taken off again; outside of this function it does nothing.
        _installed = True
    _watching = True
    try:
        yield
    finally:
        _watching = False

"""Where each weighbridge service listens, so that processes find each other without configuration."""

import os
from collections.abc import Mapping
from pathlib import Path

SERVICES = ("ledger", "fit", "engine-mlx", "engine-sd", "engine-ds4")
"""Every service that has a place of its own, by the name its socket carries."""

MAX_SOCKET_PATH_BYTES = 100
"""Longest socket path. The kernel's field holds 104 bytes on macOS and 108 on Linux, with the closing zero."""


def run_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The folder that holds the sockets of this user's suite.

    ``WEIGHBRIDGE_RUN_DIR``, else ``$XDG_RUNTIME_DIR/weighbridge``, else ``~/.weighbridge/run``. Nothing is created.
    """
    env = os.environ if environ is None else environ
    if chosen := env.get("WEIGHBRIDGE_RUN_DIR"):
        return Path(chosen).expanduser().absolute()
    if runtime := env.get("XDG_RUNTIME_DIR"):
        return Path(runtime).absolute() / "weighbridge"
    home = env.get("HOME")
    return (Path(home) if home else Path.home()) / ".weighbridge" / "run"


def check_socket_path(path: Path) -> Path:
    """Return ``path`` if a Unix socket can have it.

    Raises:
        ValueError: the path is longer than the kernel's address field.
    """
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"The socket path {path} is {length} bytes long and may have {MAX_SOCKET_PATH_BYTES}. "
            "Choose a shorter folder with WEIGHBRIDGE_RUN_DIR."
        )
    return path


def socket_path(name: str, environ: Mapping[str, str] | None = None) -> Path:
    """The socket of service ``name`` in the run folder.

    Raises:
        ValueError: ``name`` is no service, or the path is too long for a socket.
    """
    _check_name(name)
    return check_socket_path(run_dir(environ) / f"{name}.sock")


def target_variable(name: str) -> str:
    """The variable that moves service ``name`` elsewhere: ``engine-sd`` → ``WEIGHBRIDGE_ENGINE_SD_TARGET``."""
    _check_name(name)
    return f"WEIGHBRIDGE_{name.upper().replace('-', '_')}_TARGET"


def target(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The gRPC target of service ``name``: its variable, else its socket in the run folder.

    Raises:
        ValueError: ``name`` is no service, or the socket path is too long.
    """
    env = os.environ if environ is None else environ
    return env.get(target_variable(name)) or f"unix:{socket_path(name, env)}"


def _check_name(name: str) -> None:
    if name not in SERVICES:
        raise ValueError(f"There is no service named {name!r}. The services are: {', '.join(SERVICES)}.")

"""Where a service listens: an address it may take, and a socket file that is its own alone."""

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weighbridge_proto import targets

from weighbridge_common.settings import ServiceSettings, SettingsError

_CONNECT_TIMEOUT_S = 1.0
"""A listener whose queue is full lets a connection wait; one that waits this long is alive all the same."""


class StartError(Exception):
    """Why a service cannot start here: one line, for the person who started it."""


@dataclass(frozen=True)
class Address:
    """What to bind: ``socket_path``, or ``host`` and ``port`` (0: any free one)."""

    socket_path: Path | None = None
    host: str = ""
    port: int = 0

    def bind_to(self) -> str:
        """The address as gRPC binds it."""
        return f"unix:{self.socket_path}" if self.socket_path else _host_port(self.host, self.port)

    def target(self, bound_port: int) -> str:
        """What a client on this machine dials."""
        if self.socket_path:
            return f"unix:{self.socket_path}"
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 # compared, not bound
        return _host_port(everywhere.get(self.host, self.host), bound_port)


def choose_address(settings: ServiceSettings, name: str) -> Address:
    """Where service ``name`` shall listen.

    Raises:
        SettingsError: the address is malformed, too long, or open to other machines without leave.
    """
    variable = settings.variable("listen")
    text = settings.listen
    if not text:
        environ = {"WEIGHBRIDGE_RUN_DIR": settings.run_dir} if settings.run_dir else None
        try:
            return Address(socket_path=targets.socket_path(name, environ))
        except ValueError as error:
            raise SettingsError(f"{settings.variable('run_dir')}: {error}") from error
    if text.startswith("unix:"):
        path = Path(text.removeprefix("unix:").removeprefix("//"))
        if not path.is_absolute():
            raise SettingsError(f"{variable}: the socket path must be absolute, not {str(path)!r}.")
        try:
            return Address(socket_path=targets.check_socket_path(path))
        except ValueError as error:
            raise SettingsError(f"{variable}: {error}") from error
    host, colon, port = text.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"{variable}: must be unix:/path/to.sock or host:port, not {text!r}.")
    if not is_loopback(host) and not settings.allow_insecure_remote:
        raise SettingsError(
            f"{variable}: {host} can be reached from other machines, and that needs TLS and a token, which are not "
            "configured. Listen on 127.0.0.1 or a unix: socket. Inside a container network that nobody else reaches, "
            f"{settings.variable('allow_insecure_remote')}=true allows it."
        )
    return Address(host=host, port=int(port))


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name or an address) is this machine alone. Names other than localhost are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def own_socket(path: Path) -> Iterator[None]:
    """Hold the place of a socket: the folder is private, nobody else listens there, and the file goes at the end.

    gRPC itself would silently unlink a living server's socket and take its place. A lock file beside the socket, held
    as long as we live, keeps two starting processes from both finding a stale socket.

    Raises:
        StartError: another process serves there, the folder is open to others, or something else has that name.
    """
    _make_private_folder(path.parent)
    lock = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StartError(f"Cannot write to {path.parent}: {error.strerror}.") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StartError(_taken(path)) from error
        _remove_stale(path)
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    finally:
        # The lock file stays: removing it would let two holders of different files of this name believe in theirs.
        os.close(descriptor)


def _make_private_folder(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise StartError(f"Cannot make the folder {folder} for the socket: {error.strerror}.") from error
    if status.st_uid != os.getuid():
        raise StartError(f"The socket's folder {folder} belongs to another user. Choose one of your own.")
    if stat.S_IMODE(status.st_mode) & 0o077:
        # Not repaired here: it may be a folder that others are meant to use.
        raise StartError(
            f"The socket's folder {folder} is open to other users. "
            f"Make it private (chmod 700 {folder}) or choose another."
        )


def _remove_stale(path: Path) -> None:
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise StartError(f"{path} is not a socket; it is not replaced. Move it away or listen elsewhere.")
    if _someone_accepts(path):
        raise StartError(_taken(path))
    path.unlink(missing_ok=True)


def _someone_accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def _taken(path: Path) -> str:
    return f"Another process already serves {path}. Stop it first, or listen elsewhere."


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

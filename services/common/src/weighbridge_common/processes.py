"""Who a process is, whether it still lives, and how much memory its tree holds.

A pid alone names nobody: it is used again. A process is its pid *and* the moment it started, within one boot and one
pid namespace.
"""

import ctypes
import os
import sys
from pathlib import Path

import psutil
from weighbridge_proto.memory.v1 import process_pb2

from weighbridge_common.immutable import immutable

_PROC = Path("/proc")


@immutable
class ProcessIdentity:
    """One process, never to be confused with a later one of the same pid.

    Attributes:
        pid: process id, in ``pid_namespace``.
        start_time: when it started. Linux: clock ticks since boot, exact (field 22 of /proc/PID/stat). Elsewhere:
            microseconds since the epoch.
        boot_id: the boot of the machine that it lives in; empty where the system does not tell.
        pid_namespace: its pid namespace (Linux: ``pid:[4026531836]``); empty elsewhere.
    """

    pid: int
    start_time: int
    boot_id: str
    pid_namespace: str

    def to_message(self) -> process_pb2.ProcessIdentity:
        """The identity as the contracts carry it."""
        return process_pb2.ProcessIdentity(
            pid=self.pid, start_time=self.start_time, boot_id=self.boot_id, pid_namespace=self.pid_namespace
        )

    @classmethod
    def from_message(cls, message: process_pb2.ProcessIdentity) -> "ProcessIdentity":
        """Read what :meth:`to_message` wrote."""
        return cls(message.pid, message.start_time, message.boot_id, message.pid_namespace)


def current() -> ProcessIdentity:
    """The identity of this process."""
    identity = identify(os.getpid())
    assert identity is not None, "a running process finds itself"
    return identity


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of the living process ``pid`` of this pid namespace; None if there is none, or only its zombie."""
    start_time = _start_time(pid)
    return None if start_time is None else ProcessIdentity(pid, start_time, boot_id(), pid_namespace())


def is_alive(identity: ProcessIdentity) -> bool | None:
    """Whether exactly this process still runs; None where it cannot be known from here.

    A process of another boot is dead. One of another pid namespace (another container) cannot be seen. A zombie holds
    no memory and counts as dead.
    """
    boot = boot_id()  # read once: a second reading may fail, and a living process must not be taken for a dead one
    if identity.boot_id == boot:
        return _lives_here(identity)
    return False if identity.boot_id and boot else None


def boot_id() -> str:
    """A name for this boot of the machine, the same in all its containers; empty where the system tells none."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        pass
    if sys.platform == "darwin":
        # kern.boottime moves when the clock is set; the session's UUID does not.
        return _sysctl_text(b"kern.bootsessionuuid") or f"boottime:{int(psutil.boot_time())}"
    return ""


def pid_namespace() -> str:
    """The pid namespace of this process; empty where there is no such thing."""
    try:
        return str((_PROC / "self/ns/pid").readlink())
    except OSError:
        return ""


def tree_footprint(pid: int) -> int | None:
    """Physical memory, in bytes, of process ``pid`` and its descendants; None if it is gone.

    Linux: proportional set size, which counts shared pages once over all sharers, where the kernel lets us read it,
    else resident size. macOS: memory unique to each process (psutil's uss), the nearest figure that psutil offers to
    the physical footprint.
    """
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    sizes = [size for process in family if (size := _footprint(process)) is not None]
    return sum(sizes) if sizes else None


def peak_rss(pid: int) -> int | None:
    """Largest resident size, in bytes, that process ``pid`` has had (Linux VmHWM); None where it is not told."""
    kib = _kib_field(_PROC / str(pid) / "status", "VmHWM:")
    return None if kib is None else kib * 1024


def _lives_here(identity: ProcessIdentity) -> bool | None:
    if identity.pid_namespace != pid_namespace():
        return None
    return _start_time(identity.pid) == identity.start_time


def _start_time(pid: int) -> int | None:
    if sys.platform.startswith("linux"):
        try:
            stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The second field is the program's name in brackets and may itself hold brackets and spaces.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X", "x") else int(fields[19])
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 1e6)
    except psutil.NoSuchProcess:
        return None


def _footprint(process: psutil.Process) -> int | None:
    kib = _kib_field(_PROC / str(process.pid) / "smaps_rollup", "Pss:")
    if kib is not None:
        return kib * 1024
    try:
        if sys.platform == "darwin":
            return int(process.memory_full_info().uss)
        return int(process.memory_info().rss)
    except psutil.AccessDenied:
        try:
            return int(process.memory_info().rss)
        except psutil.Error:
            return None
    except psutil.NoSuchProcess:
        return None


def _kib_field(path: Path, label: str) -> int | None:
    try:
        with path.open() as lines:
            for line in lines:
                if line.startswith(label):
                    return int(line.split()[1])
    except (OSError, ValueError):
        return None
    return None


def _sysctl_text(name: bytes) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(128)
    buffer = ctypes.create_string_buffer(size.value)
    if libc.sysctlbyname(name, buffer, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return ""
    return buffer.value.decode("ascii", "replace")

"""The program between a service and its engine: the engine lives no longer than the service does.

A program of its own, not code after a fork: a gRPC process has threads, and forking one of those without exec is
undefined. It uses the standard library alone and is run as ``python -I -S guard.py LIFELINE REPORT -- PROGRAM ARG…``:

* LIFELINE is the read end of a pipe whose write end the service holds. One byte opens the gate; end of file, at any
  time, means that the service is gone (or wants the engine gone now): the engine's process group is killed.
* REPORT is the write end of a pipe to the service: a line of JSON for each event (``held``, ``started``,
  ``cannot_start``, ``ended``).

The engine is forked at once but held before exec until the gate opens, so that its identity can be recorded before it
allocates anything. SIGTERM is passed on to it. When it ends, what is left of its group and every stray descendant is
killed, and the guard ends the same way: same exit status, or the same signal.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
from pathlib import Path

GATE_BYTE = b"G"
HELD_BYTE = b"H"

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h, since 3.4: orphaned grandchildren come to us instead of to init

EXIT_NEVER_STARTED = 125
EXIT_CANNOT_EXECUTE = 127  # as shells say it

ON_LINUX = sys.platform.startswith("linux")


def prctl(option: int, value: int) -> None:
    """Set a process attribute; Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class Guard:
    """One engine from fork to burial."""

    def __init__(self, lifeline: int, report: int, command: list[str]) -> None:
        self._lifeline = lifeline
        self._report = report
        self._command = command
        self._pid = 0
        self._killed = False

    def run(self) -> int:
        """Guard the engine to its end; returns its wait status."""
        for descriptor in (self._lifeline, self._report):
            # Inherited from the service, and not to be inherited by the engine: it would keep the pipes open.
            os.set_inheritable(descriptor, False)
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._signal_engine(signal.SIGTERM))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if ON_LINUX:
            prctl(PR_SET_CHILD_SUBREAPER, 1)

        gate_read, self._gate = os.pipe()
        status, status_write = os.pipe()
        # The engine's standard input is never written to: its end tells the engine that the guard is gone, which is the
        # only sign where the system has no parent-death signal.
        stdin_read, self._stdin_write = os.pipe()
        guard_pid = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._become_engine(guard_pid, gate_read, status_write, stdin_read)
        for descriptor in (gate_read, status_write, stdin_read):
            os.close(descriptor)
        # A guard that dies by the engine's signal must not leave a core file beside the engine's.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        return self._watch(status, wake_read)

    def _watch(self, status: int, wake: int) -> int:
        watched = {self._lifeline, status, wake}
        while True:
            ready, _, _ = select.select(list(watched), [], [])
            if wake in ready:
                os.read(wake, 4096)
            if status in ready and not self._read_status(status):
                watched.discard(status)
            # The engine's end comes before the lifeline: a gate that opens late must not be taken for a start.
            if (wait_status := self._reap()) is not None:
                self._bury(wait_status)
                return wait_status
            if self._lifeline in ready:
                if os.read(self._lifeline, 1) == GATE_BYTE:
                    os.write(self._gate, GATE_BYTE)
                else:
                    watched.discard(self._lifeline)
                    self._killed = True
                    self._signal_engine(signal.SIGKILL)

    def _read_status(self, status: int) -> bool:
        """One word from the engine before it is one: held, or why it cannot be executed. False: no more will come."""
        word = os.read(status, 16)
        if word == HELD_BYTE:
            self._tell(held=self._pid)
        elif word:
            self._tell(cannot_start=int(word))
        else:
            self._tell(started=True)
        return word == HELD_BYTE

    def _signal_engine(self, number: int) -> None:
        # Unreaped, so neither id can be another's.
        for send in (os.killpg, os.kill):
            try:
                send(self._pid, number)
            except (ProcessLookupError, PermissionError):  # no group yet, or gone (macOS: a group of zombies)
                continue
            return

    def _reap(self) -> int | None:
        """Collect whoever ended; the engine's wait status if it was among them."""
        found = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid == 0:
                return found
            if pid == self._pid:
                found = status

    def _bury(self, wait_status: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError for a group of zombies
            os.killpg(self._pid, signal.SIGKILL)
        while strays := _children():
            for pid in strays:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except (ProcessLookupError, ChildProcessError):
                    continue
        if os.WIFSIGNALED(wait_status):
            self._tell(ended={"signal": os.WTERMSIG(wait_status), "by_guard": self._killed})
        else:
            self._tell(ended={"exit_code": os.waitstatus_to_exitcode(wait_status), "by_guard": self._killed})

    def _tell(self, **event: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # the service is gone; the lifeline says so too
            os.write(self._report, json.dumps(event).encode() + b"\n")

    def _become_engine(self, guard_pid: int, gate: int, status: int, stdin: int) -> None:
        """The forked child: held at the gate, then the engine. Never returns."""
        code = EXIT_NEVER_STARTED
        try:
            signal.set_wakeup_fd(-1)
            for number in (
                signal.SIGTERM,
                signal.SIGINT,
                signal.SIGHUP,
                signal.SIGCHLD,
                signal.SIGPIPE,
                signal.SIGXFSZ,
            ):
                signal.signal(number, signal.SIG_DFL)  # Python ignores the last two, and exec would keep that
            os.setsid()
            if ON_LINUX:
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for descriptor in (self._gate, self._stdin_write, self._lifeline, self._report):
                # With our own copies of the write ends, their end of file would never come.
                os.close(descriptor)
            if os.getppid() == guard_pid:  # else it died before it could be told to take us along
                os.dup2(stdin, 0)
                os.write(status, HELD_BYTE)
                if os.read(gate, 1) == GATE_BYTE:
                    code = EXIT_CANNOT_EXECUTE
                    os.execv(self._command[0], self._command)  # noqa: S606 # that is what a guard is for
        except OSError as error:
            if code == EXIT_CANNOT_EXECUTE:
                os.write(status, str(error.errno).encode())
        finally:
            os._exit(code)


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []  # no such file outside Linux, where strays go to init and nobody can tell them


def main(arguments: list[str]) -> None:
    """See the module. Ends the process."""
    separator = arguments.index("--")
    lifeline, report = (int(number) for number in arguments[:separator])
    wait_status = Guard(lifeline, report, arguments[separator + 1 :]).run()
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(wait_status) if os.WIFEXITED(wait_status) else EXIT_NEVER_STARTED)


if __name__ == "__main__":
    main(sys.argv[1:])

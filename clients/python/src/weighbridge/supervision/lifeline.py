"""Runs a service so that it does not outlive the process that started it.

``python -m weighbridge.supervision.lifeline MODULE [ARGUMENT ...]`` runs MODULE as ``python -m MODULE`` would, in this
same process, with standard input as the lifeline: a pipe whose other end the starter holds. When the starter is gone,
even by SIGKILL, the pipe ends, and the service is told to stop as by SIGTERM.
"""

import os
import runpy
import signal
import sys
import threading

STOP_TIMEOUT_S = 45.0
"""How long the service has for its clean stop once its starter is gone: its own grace (5 s) and its engine's end,
which takes ds4 up to 30 s: it writes its conversation to disk first."""


def watch(descriptor: int, stop_timeout_s: float = STOP_TIMEOUT_S) -> threading.Thread:
    """Stop this process once the other end of ``descriptor`` is closed: by SIGTERM, and after the time by force."""

    def wait_for_end() -> None:
        try:
            while os.read(descriptor, 4096):
                pass
        except OSError:
            pass  # a lifeline that cannot be read any more is no lifeline
        force = threading.Timer(stop_timeout_s, os._exit, args=(1,))
        force.daemon = True
        force.start()
        os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=wait_for_end, name="lifeline", daemon=True)
    watcher.start()
    return watcher


def main() -> None:
    """Watch standard input and run the module that the command line names."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m weighbridge.supervision.lifeline MODULE [ARGUMENT ...]")
    # A descriptor of its own: what the service starts shall inherit an empty standard input, not the lifeline.
    lifeline = os.dup(sys.stdin.fileno())
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, sys.stdin.fileno())
    os.close(empty)
    watch(lifeline)
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

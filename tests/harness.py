"""A whole suite in its own folders, as processes, for end-to-end tests and benchmarks."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

READY_S = 60.0
"""How long a suite may take to serve. Starting takes a few seconds; a loaded machine may need ten times that."""

POLL_S = 0.02


def make_model(kind: str, out: Path, *options: str) -> Path:
    """Make a model with ``python -m weighbridge_engines.models.<kind>`` unless ``out`` already has it.

    A model takes seconds to make, so runs of one checkout share it. It is made beside its final place and renamed, so
    that an interrupted run leaves no half-made model.
    """
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            made = Path(scratch) / "model"
            subprocess.run(
                [sys.executable, "-m", f"weighbridge_engines.models.{kind}", str(made), *options],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            with contextlib.suppress(OSError):  # another run was faster
                made.rename(out)
    return out


def wait_until(condition: Any, *, what: str, timeout_s: float = READY_S) -> Any:
    """Poll ``condition`` until it is true and return its value.

    Raises:
        AssertionError: it did not become true in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(POLL_S)


@dataclass
class Suite:
    """``weighbridge up`` in folders of its own."""

    models_root: Path
    extra_env: dict[str, str] = field(default_factory=dict)
    engines: str = "mlx"
    home: Path = field(init=False)
    process: subprocess.Popen[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # Not under pytest's tmp_path: a socket's path has room for 100 bytes.
        self.home = Path(tempfile.mkdtemp(prefix="wb-"))

    @property
    def env(self) -> dict[str, str]:
        """The environment of every process of this suite and of commands that talk to it."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHBRIDGE_")}
        return clean | {
            "WEIGHBRIDGE_RUN_DIR": str(self.home / "run"),
            "WEIGHBRIDGE_LEDGER_DATA_DIR": str(self.home / "ledger"),
            "WEIGHBRIDGE_FIT_MODELS_ROOT": str(self.models_root),
            "PYTHONUNBUFFERED": "1",
            **self.extra_env,
        }

    @property
    def run_dir(self) -> Path:
        """Where its sockets are."""
        return self.home / "run"

    def start(self) -> "Suite":
        """Start it and wait until every service serves."""
        log = (self.home / "up.log").open("w")
        # With a lifeline, so that a test run that is killed leaves no suite behind.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weighbridge.supervision.lifeline", "weighbridge", "up", "--engines", self.engines],
            env=self.env,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_until(self.serving, what=f"the suite to serve; it printed:\n{(self.home / 'up.log').read_text()}")
        return self

    def serving(self) -> bool:
        """Whether every service answers its health check."""
        assert self.process is not None
        assert self.process.poll() is None, (self.home / "up.log").read_text()
        listed = self.cli("ps", "--json", check=False)
        # It is content with one engine that answers.
        return listed.returncode == 0 and len(json.loads(listed.stdout)["engines"]) == len(self.engines.split(","))

    def cli(self, *arguments: str, check: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run the ``weighbridge`` command against this suite."""
        done = subprocess.run(
            [sys.executable, "-m", "weighbridge", *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
            **options,
        )
        assert not check or done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *arguments: str) -> Any:
        """Run a command with ``--json`` and return what it printed."""
        return json.loads(self.cli(*arguments, "--json").stdout)

    def committed_bytes(self) -> int:
        """What the ledger has committed in all."""
        return int(self.json("capacity")["capacity"]["total"].get("committed_bytes", 0))

    def processes(self) -> list[psutil.Process]:
        """Every process below ``weighbridge up``."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def find(self, *words: str) -> psutil.Process:
        """The one process below ``weighbridge up`` whose command line has all ``words``."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if all(word in line for word in words):
                    found.append(process)
        assert found, f"no process with {words} below weighbridge up"
        return found[0]

    def stop(self) -> int:
        """Stop it as Ctrl-C does and return its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)

    def close(self) -> None:
        """End whatever is left and remove the folders."""
        if self.process is not None:
            left = self.processes()
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        shutil.rmtree(self.home, ignore_errors=True)


@contextlib.contextmanager
def running_suite(models_root: Path, engines: str = "mlx", **extra_env: str) -> Iterator[Suite]:
    """A started suite that is gone afterwards."""
    suite = Suite(models_root, extra_env, engines)
    try:
        yield suite.start()
    finally:
        suite.close()

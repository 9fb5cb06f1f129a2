"""`weighbridge demo` as a person runs it: to its end, and with Ctrl-C at different moments."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.mlx

END_S = 60.0
"""How long a demo may take to end; it takes seconds."""


@pytest.fixture
def temporary_folder() -> Iterator[Path]:
    """The demo's own temporary folder. Not under pytest's tmp_path: a socket's path has room for 100 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp")).resolve()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def started_demo(model: Path, temporary_folder: Path) -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen(
        [sys.executable, "-m", "weighbridge", "demo", "--model-folder", str(model)],
        env={**os.environ, "TMPDIR": str(temporary_folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()  # its services end with it
        process.communicate()


def left_behind(temporary_folder: Path) -> list[str]:
    """Processes of the demo that lives, or lived, in ``temporary_folder``, wherever they are in the process tree."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            # The engine's runtime gets an environment of its own, but its socket's path on its command line.
            if process.environ().get("TMPDIR") == str(temporary_folder) or f"{temporary_folder}/" in line:
                found.append(f"{process.pid} {line}")
    return found


def test_the_demo_shows_that_everything_holds(demo_model: Path, temporary_folder: Path) -> None:
    with started_demo(demo_model, temporary_folder) as process:
        out, errors = process.communicate(timeout=END_S)
    assert process.returncode == 0, out + errors
    assert "Paris" in out
    assert "\nCommitted: 0 bytes\n" in out
    assert "\nOrphans: 0\n" in out
    roots = re.findall(r"^cli  weighbridge demo ", out, re.MULTILINE)
    assert len(roots) == 1, "the trace of the request has one root"
    assert left_behind(temporary_folder) == []
    assert list(temporary_folder.iterdir()) == []


@pytest.mark.parametrize("after_s", [0.2, 1.5, 3.0, 5.0])
def test_ctrl_c_leaves_nothing_behind(demo_model: Path, temporary_folder: Path, after_s: float) -> None:
    with started_demo(demo_model, temporary_folder) as process:
        children: list[psutil.Process] = []
        try:
            out, errors = process.communicate(timeout=after_s)
        except subprocess.TimeoutExpired:
            # Seen alive, so that nothing found afterwards means gone and not overlooked.
            assert left_behind(temporary_folder)
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=END_S)
    # A shell reports an end by the signal itself, as it comes while modules load, as 130 too.
    finished = "All of it held" in out
    assert process.returncode in ((0,) if finished else (130, -signal.SIGINT)), out + errors
    assert not [child for child in children if child.is_running()]
    assert left_behind(temporary_folder) == []
    assert list(temporary_folder.iterdir()) == []

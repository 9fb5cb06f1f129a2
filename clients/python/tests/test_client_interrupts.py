"""Ctrl-C and its kin at moments when a command has, or has not yet, something to let go of."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from weighbridge.cli.running import cancelled_by_signals
from weighbridge.demo.model import DemoModelError, ensure_demo_model

INTERRUPTED_WHILE_LOADING = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["weighbridge", "--version"]
from weighbridge.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["weighbridge.cli", "grpc", "rich.console"])
def test_ctrl_c_while_the_command_loads_ends_it_in_silence(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WHILE_LOADING.format(module=module)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_repeated_signals_cancel_and_do_not_break_off_a_clean_up(number: signal.Signals) -> None:
    steps: list[str] = []

    async def work() -> None:
        with cancelled_by_signals():
            try:
                os.kill(os.getpid(), number)
                await asyncio.Event().wait()
            finally:
                cleaning = asyncio.create_task(asyncio.sleep(0.01))
                os.kill(os.getpid(), number)
                try:
                    await asyncio.shield(cleaning)
                except asyncio.CancelledError:
                    steps.append("second signal")
                    await cleaning
                steps.append("cleaned up")

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())
    assert steps == ["second signal", "cleaned up"]


COMMAND = (sys.executable, "-m", "weighbridge")


def test_a_locale_without_unicode_ends_no_command(fake_suite: Any) -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*COMMAND, "fit", "/m"], env=environ, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"4,096 tokens ? 1 slot" in done.stdout


def test_closed_streams_end_no_command(fake_suite: Any) -> None:
    command = " ".join(COMMAND)
    done = subprocess.run(["sh", "-c", f"{command} fit /m >&-"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(["sh", "-c", f"{command} chat /m <&-"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "There is no prompt" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has this device")
def test_an_output_that_cannot_be_written_is_told_in_a_line(fake_suite: Any) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "fit", "/m"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_seen_enough_is_no_failure_to_tell(fake_suite: Any) -> None:
    done = subprocess.run(["sh", "-c", f"{' '.join(COMMAND)} fit /m | true"], capture_output=True, text=True)
    assert done.stderr == ""


def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let ``program`` be what makes the demo model."""
    (tmp_path / "client_fake_maker.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("weighbridge.demo.model.MAKER", "client_fake_maker")


async def test_a_demo_model_is_made_once_and_nothing_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker(tmp_path, monkeypatch, "import sys, os\nos.mkdir(sys.argv[1])\nopen(sys.argv[1] + '/config.json', 'w')\n")
    model = tmp_path / "made" / "models" / "m"
    assert await ensure_demo_model(model)
    assert [path.name for path in model.parent.iterdir()] == ["m"]
    assert not await ensure_demo_model(model)


async def test_a_cancelled_making_leaves_no_folder_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys, os, time\nopen(os.environ['SEEN'], 'w').write(str(os.getpid()))\n"
    maker(tmp_path, monkeypatch, program + "os.mkdir(sys.argv[1])\nos.mkdir(sys.argv[1] + '/half')\ntime.sleep(600)\n")
    seen = tmp_path / "seen"
    os.mkfifo(seen)
    monkeypatch.setenv("SEEN", str(seen))
    making = asyncio.create_task(ensure_demo_model(tmp_path / "made" / "models" / "m"))
    pid = int(await asyncio.to_thread(seen.read_text))
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert not (tmp_path / "made").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_making_that_fails_says_its_last_line_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker(tmp_path, monkeypatch, "raise SystemExit('Install this and that.')\n")
    with pytest.raises(DemoModelError, match="Install this and that"):
        await ensure_demo_model(tmp_path / "made" / "models" / "m")
    assert not (tmp_path / "made").exists()

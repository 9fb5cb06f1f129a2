"""`up` and `chat` as processes under signals."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from weighbridge.cli import main
from weighbridge.supervision.budget import FIRST_DELAY_S
from weighbridge_proto.engines.v1.chat_service_pb2 import ChatRequest

TESTS = Path(__file__).parent

COMMAND = (sys.executable, "-m", "weighbridge")

UP = """
import sys
from click.testing import CliRunner
import client_fake_service  # found by PYTHONPATH, as the services are
from weighbridge.cli import main, up
from weighbridge.supervision.services import ServiceSpec
from weighbridge.reach import HEALTH_SERVICES
def fakes(kinds):
    return tuple(
        ServiceSpec(name, (sys.executable, "-m", "weighbridge.supervision.lifeline", "client_fake_service", name),
                    HEALTH_SERVICES[name], rank)
        for name, rank in (("ledger", 2), ("fit", 1), ("engine-mlx", 0)))
up.suite_services = fakes
main()
"""


def start_up(run_dir: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", UP, "up"],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "The suite is up" in line:
            return process
    raise AssertionError(f"`up` ended with {process.wait()} before it was up")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_in_order(run_dir: Path, number: signal.Signals) -> None:
    process = start_up(run_dir)
    children = psutil.Process(process.pid).children()
    assert len(children) == 3
    process.send_signal(number)
    assert process.wait(60) == 0
    assert (run_dir / "stopped.txt").read_text().split() == ["engine-mlx", "fit", "ledger"]
    assert not any(child.is_running() for child in children)
    assert [path.name for path in run_dir.iterdir() if path.suffix in (".sock", ".lock")] == []


def test_events_are_one_json_object_per_line(run_dir: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", UP, "up", "--json"],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None

    def event() -> Any:
        return json.loads(process.stdout.readline())  # type: ignore[union-attr] # asserted above

    def ready(name: str) -> dict[str, str]:
        return {"service": name, "state": "ready", "target": f"unix:{run_dir / name}.sock"}

    assert [event() for _ in range(3)] == [ready("ledger"), ready("fit"), ready("engine-mlx")]
    assert event() == {"state": "up", "run_dir": str(run_dir)}

    (fit,) = (child for child in psutil.Process(process.pid).children() if child.cmdline()[-1] == "fit")
    fit.kill()
    ended = event()
    assert ended.pop("restart_in_s") == FIRST_DELAY_S
    assert ended == {"service": "fit", "state": "ended", "reason": "was killed by SIGKILL"}
    assert event() == ready("fit")

    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert [json.loads(line) for line in rest.splitlines()] == [{"state": "stopped"}]
    assert "ready" not in errors
    assert "The suite is up" not in errors


def test_the_last_event_says_why_the_suite_stopped(run_dir: Path) -> None:
    dying = UP.replace('"client_fake_service", name)', '"client_fake_service", name, "dies")')
    done = subprocess.run(
        [sys.executable, "-c", dying, "up", "--json"],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    (stopped,) = (json.loads(line) for line in done.stdout.splitlines())
    assert stopped.pop("reason").startswith("The service ledger ended with exit code 7.")
    assert stopped == {"state": "stopped"}
    assert "The service ledger ended with exit code 7." in done.stderr


def test_the_suite_ends_with_the_reader_of_its_events(run_dir: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", UP, "up", "--json"],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    assert process.wait(60) == 1
    assert "Traceback" not in errors
    assert [path.name for path in run_dir.iterdir() if path.suffix in (".sock", ".lock")] == []


def test_a_second_up_in_the_same_folder_is_refused(run_dir: Path) -> None:
    process = start_up(run_dir)
    second = subprocess.run(
        [sys.executable, "-c", UP, "up"],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 1
    assert f"A suite already runs in {run_dir} (process {process.pid})" in second.stderr
    process.terminate()
    assert process.wait(60) == 0


def test_a_run_folder_that_cannot_be_made_is_told_with_the_setting_that_names_another(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    refused = CliRunner().invoke(main, ["up"], env={"WEIGHBRIDGE_RUN_DIR": str(file / "run")})
    assert refused.exit_code == 1
    assert refused.stderr == (
        f"The suite cannot run in {file}/run: Not a directory. Choose another folder with WEIGHBRIDGE_RUN_DIR.\n"
    )


def test_ctrl_c_in_a_chat_cancels_the_call_and_exits_130(fake_suite: Any) -> None:
    fake_suite.state.hang_after_answer = True
    process = subprocess.Popen(
        [*COMMAND, "chat", "/m", "hi"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert fake_suite.state.hanging.wait(60)
    assert process.stdout is not None
    answer = "The capital is Paris."
    assert process.stdout.read(len(answer)) == answer
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == "\n", "the shell's prompt does not follow half a line"
    assert "Traceback" not in errors
    assert fake_suite.state.cancelled.wait(10)


def start_conversation() -> tuple["subprocess.Popen[bytes]", int]:
    """A `chat` at a terminal, and the terminal's other side."""
    ours, theirs = os.openpty()
    process = subprocess.Popen([*COMMAND, "chat", "/m"], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    return process, ours


def test_a_conversation_goes_on_after_a_stopped_answer_and_ends_with_ctrl_d(fake_suite: Any) -> None:
    process, ours = start_conversation()
    terminal = Terminal(ours)
    terminal.expect("> ")
    fake_suite.state.hang_after_answer = True
    terminal.type("first")
    terminal.expect("Paris.")
    process.send_signal(signal.SIGINT)
    terminal.expect("(stopped)")
    terminal.expect("> ")
    assert fake_suite.state.cancelled.wait(10)
    fake_suite.state.hang_after_answer = False
    terminal.type("second")
    terminal.expect("ended by stop")
    terminal.expect("> ")
    terminal.type("third")
    terminal.expect("ended by stop")
    terminal.expect("> ")
    os.write(ours, b"\x04")
    assert process.wait(60) == 0
    os.close(ours)
    asked = [[part.parts[0].text for part in request.messages] for request in fake_suite.state.asked(ChatRequest)]
    assert asked[-2:] == [["second"], ["second", "The capital is Paris.", "third"]], "the stopped question is forgotten"


def test_ctrl_c_at_the_prompt_ends_the_conversation(fake_suite: Any) -> None:
    process, ours = start_conversation()
    Terminal(ours).expect("> ")
    # Repeated, because Python's input() misses a signal that comes between its prompt and its read.
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
    assert process.returncode == 130
    os.close(ours)


class Terminal:
    """The other side of a pseudo-terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = ""

    def type(self, line: str) -> None:
        os.write(self._descriptor, f"{line}\n".encode())

    def expect(self, text: str) -> None:
        """Read on until ``text`` has been shown; what was shown up to it is used up."""
        while text not in self._seen:
            self._seen += os.read(self._descriptor, 4096).decode()
        self._seen = self._seen.partition(text)[2]

"""`fits` and `pull` against fake services: what is asked, what is shown, what is refused."""

import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from weighbridge.cli import main, pull_display
from weighbridge.cli.pull_display import PullDisplay
from weighbridge.pull.errors import PullReason
from weighbridge.pull.settings import pull_settings
from weighbridge.pull.wanted import WantedFile
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import fit_service_pb2, plan_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

from clients.python.tests.client_broken_host import Handler, Host, running

GIB = 1 << 30
CONTENT = b"weights" * 100_000


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def fit_of(catalog_id: str, verdict: int, size: int) -> fit_service_pb2.ModelFit:
    fit = fit_service_pb2.ModelFit(
        catalog_id=catalog_id, engine_kind=plan_pb2.ENGINE_KIND_SD, priced_by_facts=size > GIB
    )
    fit.assessment.verdict = verdict  # type: ignore[assignment] # an int is what enums are at run time
    fit.total.low_bytes, fit.total.expected_bytes, fit.total.high_bytes = size, size, 2 * size
    return fit


@pytest.fixture
def catalogue(fake_suite: Any) -> Any:
    fake_suite.state.fits.fits.extend(
        [
            fit_of("small", requirement_pb2.VERDICT_RUNS, GIB),
            fit_of("middle", requirement_pb2.VERDICT_TIGHT, 20 * GIB),
            fit_of("large", requirement_pb2.VERDICT_WONT_RUN, 300 * GIB),
        ]
    )
    fake_suite.state.fits.capacity.CopyFrom(fake_suite.state.plan.capacity)
    return fake_suite.state


def test_the_catalogue_is_one_row_for_each_model_from_every_page(catalogue: Any) -> None:
    result = run("fits")
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line}
    assert rows["small"][2:5] == ["RUNS", "1.00", "GiB"]
    assert rows["large"][2:5] == ["WONT_RUN", "300.00", "GiB"]
    assert rows["small"][-2:] == ["file", "sizes"] and rows["large"][-2:] == ["its", "tensors"]
    assert "1 of 3 run here." in result.stdout


def test_models_that_run_are_counted_among_all(catalogue: Any) -> None:
    shown = run("fits", "--runs").stdout
    assert "1 of 3 run here." in shown
    assert "small" in shown and "middle" not in shown


def test_manifests_that_were_left_out_are_told_as_they_are(catalogue: Any) -> None:
    catalogue.fits.notes.append("mine.json, [red]name: Field required.")
    lines = run("fits").stdout.splitlines()
    assert [line for line in lines if "mine.json" in line] == ["Left out: mine.json, [red]name: Field required."]


def test_the_catalogue_can_be_asked_in_part(catalogue: Any) -> None:
    printed = json.loads(run("fits", "small", "--runs", "--kind", "image", "--quality", "high", "--json").stdout)
    assert [fit["catalog_id"] for fit in printed["fits"]] == ["small"]
    request = catalogue.asked(fit_service_pb2.ListFitsRequest)[0]
    assert (request.use, request.quality) == (fit_service_pb2.MODEL_USE_IMAGE, plan_pb2.QUALITY_TIER_HIGH)
    assert list(request.catalog_ids) == ["small"]


@pytest.fixture
def host(tmp_path: Path, fake_suite: Any):
    with running(Host(files={"/w": CONTENT})) as served:
        entry = fake_suite.state.entry
        entry.catalog_id, entry.display_name, entry.version, entry.folder = "m", "Model M", "1.0.0", str(tmp_path / "m")
        entry.files.add(
            name="w.gguf",
            path="w.gguf",
            size_bytes=len(CONTENT),
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            url=f"{served.address}/w",
        )
        yield served


def test_a_pull_checks_downloads_and_records(host: Host, tmp_path: Path) -> None:
    result = run("pull", "m")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "m" / "w.gguf").read_bytes() == CONTENT
    assert f"Model M is here, whole and verified: {tmp_path / 'm'}" in result.stdout
    again = run("pull", "m")
    assert again.exit_code == 0
    assert "is there already" in again.stdout
    assert len(host.requests) == 1


def test_a_pull_tells_programs_one_object_per_line(host: Host) -> None:
    events = [json.loads(line) for line in run("pull", "m", "--json").stdout.splitlines()]
    assert [event["event"] for event in events[:2]] == ["planned", "file"]
    assert events[-1]["event"] == "done"
    assert events[-1]["downloaded_bytes"] == str(len(CONTENT))


def test_a_model_that_wont_run_is_not_downloaded(host: Host, fake_suite: Any, tmp_path: Path) -> None:
    fake_suite.state.failures["CheckPull"] = RequestError(
        grpc.StatusCode.FAILED_PRECONDITION, "MODEL_WONT_RUN", "It needs 300 GiB, this machine allows 24."
    )
    result = run("pull", "m")
    assert result.exit_code == 3
    assert "300 GiB" in result.stderr
    assert not host.requests
    assert not (tmp_path / "m").exists()


def test_a_check_downloads_nothing(host: Host, tmp_path: Path) -> None:
    result = run("pull", "m", "--check", "--machine", "unified:64")
    assert result.exit_code == 0
    assert "RUNS. It fits." in result.stdout
    assert not host.requests and not (tmp_path / "m").exists()


def test_a_wrong_file_is_an_error_and_leaves_nothing(host: Host, tmp_path: Path) -> None:
    host.files["/w"] = b"x" * len(CONTENT)
    result = run("pull", "m")
    assert result.exit_code == 1
    assert "[DIGEST_MISMATCH]" in result.stderr
    assert not (tmp_path / "m" / "w.gguf").exists()


def test_a_wrong_setting_is_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_PULL_HUB", "nowhere")
    result = run("pull", "m")
    assert result.exit_code == 2
    assert "WEIGHBRIDGE_PULL_HUB" in result.stderr


class Stalled:
    """A pull in a process of its own whose host has sent half of the file and keeps it waiting."""

    def __init__(self, host: Host, environ: dict[str, str], folder: Path, *arguments: str) -> None:
        self.half = len(CONTENT) // 2
        self.part = folder / ".weighbridge-pull" / f"{hashlib.sha256(CONTENT).hexdigest()}.part"
        self._host, self._release = host, threading.Event()
        host.behave = self._stall
        command = [sys.executable, "-m", "weighbridge", "pull", "m", *arguments]
        self.process = subprocess.Popen(
            command, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def _stall(self, handler: Handler, count: int) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()
        handler.wfile.write(CONTENT[: self.half])
        handler.wfile.flush()
        self._release.wait(30)
        handler.close_connection = True
        return True

    def __enter__(self) -> "Stalled":
        for _ in range(3000):
            if self.part.exists() and self.part.stat().st_size == self.half:
                return self
            threading.Event().wait(0.01)
        self.__exit__()
        raise AssertionError("the pull never came to the half")

    def __exit__(self, *_: object) -> None:
        self._release.set()
        self.process.kill()
        self.process.wait()
        self._host.behave = None


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]], ids=str)
def test_a_signal_stops_a_pull_at_once_and_the_next_one_goes_on(
    host: Host, fake_suite: Any, tmp_path: Path, numbers: list[signal.Signals]
) -> None:
    with Stalled(host, fake_suite.environ, tmp_path / "m") as pulling:
        for number in numbers:
            pulling.process.send_signal(number)
        _, said = pulling.process.communicate(timeout=30)
    # A second Ctrl-C may find everything done, and the process without a handler: shells show the same number.
    assert pulling.process.returncode in ((130,) if len(numbers) == 1 else (130, -signal.SIGINT)), said
    assert "goes on from there" in said or len(numbers) > 1
    assert "Traceback" not in said
    assert pulling.part.stat().st_size == pulling.half
    assert not (tmp_path / "m" / "weighbridge.json").exists()
    assert run("pull", "m").exit_code == 0
    assert host.header("Range")[-1] == f"bytes={pulling.half}-"


def test_a_pull_that_was_killed_leaves_no_lock_and_nothing_that_looks_whole(
    host: Host, fake_suite: Any, tmp_path: Path
) -> None:
    with Stalled(host, fake_suite.environ, tmp_path / "m") as pulling:
        second = run("pull", "m")
        assert second.exit_code == 1 and "[BUSY]" in second.stderr
        pulling.process.kill()
        pulling.process.communicate(timeout=30)
    assert not (tmp_path / "m" / "weighbridge.json").exists()
    assert not (tmp_path / "m" / "w.gguf").exists()
    again = run("pull", "m")
    assert again.exit_code == 0 and "341.8 KiB to come, 341.8 KiB came earlier" in again.stderr
    assert host.header("Range")[-1] == f"bytes={pulling.half}-"
    assert (tmp_path / "m" / "w.gguf").read_bytes() == CONTENT


def test_a_stopped_pull_tells_programs_so(host: Host, fake_suite: Any, tmp_path: Path) -> None:
    with Stalled(host, fake_suite.environ, tmp_path / "m", "--json") as pulling:
        pulling.process.send_signal(signal.SIGTERM)
        printed, _ = pulling.process.communicate(timeout=30)
    events = [json.loads(line) for line in printed.splitlines()]
    assert [event["event"] for event in events] == ["planned", "file", "progress", "stopped"]


def test_a_reader_who_goes_away_ends_a_pull(host: Host, fake_suite: Any, tmp_path: Path) -> None:
    with Stalled(host, fake_suite.environ, tmp_path / "m", "--json") as pulling:
        assert pulling.process.stdout is not None
        pulling.process.stdout.close()
        pulling.process.stdout = None
        pulling.process.send_signal(signal.SIGTERM)
        _, said = pulling.process.communicate(timeout=30)
    assert pulling.process.returncode != 0
    assert "Traceback" not in said


# -- what programs and people see ------------------------------------------------------------------------------------


def test_programs_are_told_everything_by_stable_names(host: Host) -> None:
    events = [json.loads(line) for line in run("pull", "m", "--json").stdout.splitlines()]
    size = str(len(CONTENT))
    planned = {"event": "planned", "files": 1, "total_bytes": size, "missing_bytes": size, "partial_bytes": "0"}
    assert events[0] == planned
    assert events[1] == {"event": "file", "path": "w.gguf", "size_bytes": size, "there": False}
    steps = [event for event in events if event["event"] in ("progress", "verifying")]
    assert all(set(step) == {"event", "path", "bytes", "size_bytes"} for step in steps)
    assert [step["event"] for step in steps if step["bytes"] == size] == ["progress", "verifying"]
    assert events[-2] == {"event": "verified", "path": "w.gguf", "by_digest": True}
    assert set(events[-1]) == {"event", "folder", "files", "total_bytes", "downloaded_bytes", "revision"}
    again = [json.loads(line) for line in run("pull", "m", "--json").stdout.splitlines()]
    assert [event["event"] for event in again] == ["planned", "file", "done"]
    assert again[0]["missing_bytes"] == "0" and again[1]["there"]


def test_a_failed_pull_tells_programs_why(host: Host) -> None:
    host.files["/w"] = CONTENT + b"more"
    result = run("pull", "m", "--json")
    assert result.exit_code == 1
    last = json.loads(result.stdout.splitlines()[-1])
    assert (last["event"], last["reason"]) == ("failed", "SIZE_MISMATCH")
    assert last["message"] in result.stderr


def test_a_host_that_does_not_answer_is_exit_code_4(
    host: Host, fake_suite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_suite.state.entry.files[0].url = "http://127.0.0.1:1/w"
    monkeypatch.setattr("weighbridge.pull.transfer.ATTEMPTS", 1)
    assert run("pull", "m").exit_code == 4


def test_an_unknown_id_is_told_where_ids_are_listed(fake_suite: Any) -> None:
    missing = RequestError(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "There is no model 'm' in the catalogue.")
    fake_suite.state.failures |= {"CheckPull": missing, "ListFits": missing}
    for command in ("pull", "fits"):
        result = run(command, "m")
        assert result.exit_code == 1
        assert "`weighbridge fits` lists" in result.stderr and "file or folder" not in result.stderr


@pytest.mark.parametrize("width", [40, 80, 160])
def test_bars_keep_to_the_terminal_whatever_files_are_called(width: int) -> None:
    to = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, markup=False)
    files = [WantedFile(name, 1000, "0" * 64) for name in ("[/red]" + "x" * 100, "[bold]y")]
    with PullDisplay(to) as display:
        listener = display.listener(lambda: False)
        listener.on_verify(files[0], 10)
        listener.on_plan(2, 2000, 2000, 0)
        for file in files:
            listener.on_file(file, False)
            listener.on_bytes(file, 500)
            display._progress.refresh()
            listener.on_verify(file, 500)
            display._progress.refresh()
            listener.on_done(file)
    printed = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", to.file.getvalue())  # type: ignore[attr-defined] # the StringIO
    assert "[bold]y" in printed and "[/red]xxx" in printed
    assert max(len(line) for line in re.split(r"[\r\n]", printed)) <= width


def test_a_log_hears_now_and_then_how_far_it_is() -> None:
    to, now = Console(file=io.StringIO(), width=100, markup=False), [0.0]
    display = PullDisplay(to, clock=lambda: now[0])
    file = WantedFile("a.gguf", 4 << 30, "0" * 64)
    display.on_plan(1, 4 << 30, 4 << 30, 0)
    display.on_file(file, False)
    for step in range(5):
        now[0] = step * 20.0
        display.on_bytes(file, step << 30)
    display.on_done(file)
    lines = to.file.getvalue().splitlines()  # type: ignore[attr-defined] # the StringIO given above
    assert [line.split(", ")[-1] for line in lines[2:-1]] == ["50%", "100%"]
    assert lines[-1] == "verified   a.gguf"


def test_the_documents_name_every_reason_event_and_setting() -> None:
    documents = Path(__file__).parents[3] / "docs"
    pulling, settings = (documents / "pull.md").read_text(), (documents / "settings.md").read_text()
    source = Path(pull_display.__file__).read_text()
    events = set(re.findall(r'event="(\w+)"', source)) | set(re.findall(r'_step\("(\w+)"', source))
    assert events >= {"planned", "progress", "failed"}
    for name in [*events, *PullReason]:
        assert f"| `{name}` |" in pulling, name
    for name in re.findall(r"``(WEIGHBRIDGE_PULL_\w+)``", pull_settings.__doc__ or ""):
        assert f"| `{name}` |" in pulling and f"| `{name}` |" in settings, name

"""`fits` and `pull` against fake services: what is asked, what is shown, what is refused."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from weighbridge.cli import main
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_pull_at_once_and_the_next_one_goes_on(
    host: Host, fake_suite: Any, tmp_path: Path, number: signal.Signals
) -> None:
    half = len(CONTENT) // 2
    reached, release = threading.Event(), threading.Event()

    def stall(handler: Handler, count: int) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()
        handler.wfile.write(CONTENT[:half])
        handler.wfile.flush()
        reached.set()
        release.wait(30)
        handler.close_connection = True
        return True

    host.behave = stall
    command = [sys.executable, "-m", "weighbridge", "pull", "m"]
    pulling = subprocess.Popen(
        command, env={**os.environ, **fake_suite.environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert reached.wait(30)
        part = tmp_path / "m" / ".weighbridge-pull" / f"{hashlib.sha256(CONTENT).hexdigest()}.part"
        for _ in range(1000):
            if part.exists() and part.stat().st_size == half:
                break
            threading.Event().wait(0.01)
        pulling.send_signal(number)
        _, said = pulling.communicate(timeout=30)
    finally:
        release.set()
        pulling.kill()
        pulling.wait()
    assert pulling.returncode == 130, said
    assert "goes on from there" in said
    assert part.stat().st_size == half
    assert not (tmp_path / "m" / "weighbridge.json").exists()
    host.behave = None
    assert run("pull", "m").exit_code == 0
    assert host.header("Range")[-1] == f"bytes={half}-"

"""How the child process starts and ends."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from weighbridge_engines.mlx_qwen.runtime.exits import ExitCode
from weighbridge_engines.mlx_qwen.runtime.harness import started_runtime

pytest.importorskip("mlx.core")
pytestmark = pytest.mark.mlx

MODULE = "weighbridge_engines.mlx_qwen.runtime"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-models")
    subprocess.run([sys.executable, "-m", "weighbridge_engines.models.tiny", str(folder)], check=True)
    return folder / "tiny-qwen3-bf16"


@pytest.fixture
def socket():
    with tempfile.TemporaryDirectory(prefix="wb-mlx-") as folder:
        yield Path(folder) / "runtime.sock"


def log_of(tmp_path):
    return (tmp_path / "log").read_text()


@pytest.mark.parametrize("run", range(5))
def test_sigterm_ends_it_with_0_even_while_it_computes(tiny, tmp_path, run):
    # Streams that are torn down late abort the process in one of five ends or so: hence several.
    environ = os.environ | {"WEIGHBRIDGE_MLX_RUNTIME_GRACE_S": "0.1"}
    with (tmp_path / "log").open("wb") as log, started_runtime(log=log, environ=environ) as runtime:
        runtime.load(tiny, context_tokens=32_000)
        if run % 2:
            call = runtime.stream("Go on", max_output_tokens=20_000)
            next(call)
            next(call)
        runtime.process.send_signal(signal.SIGTERM)
        assert runtime.process.wait(60) == ExitCode.OK
        assert not runtime.socket.exists()
    assert "Traceback" not in log_of(tmp_path)


def test_sigterm_while_mlx_is_being_imported_ends_it_with_0(socket, tmp_path):
    # The import takes about a second; the signal comes as soon as the process can handle it.
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, "--socket", str(socket)], stdin=subprocess.DEVNULL, stderr=log
        )
    lock = socket.with_name(socket.name + ".lock")
    while not lock.exists() and process.poll() is None:
        os.sched_yield()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == ExitCode.OK
    assert "stopped_while_starting" in log_of(tmp_path)
    assert "Traceback" not in log_of(tmp_path)


def test_it_ends_at_once_when_its_host_is_gone(tiny, tmp_path):
    with (tmp_path / "log").open("wb") as log, started_runtime(log=log) as runtime:
        runtime.load(tiny, context_tokens=32_000)
        call = runtime.stream("Go on", max_output_tokens=20_000)
        next(call)
        runtime.process.stdin.close()
        assert runtime.process.wait(60) == ExitCode.PARENT_GONE
        assert not runtime.socket.exists()
    assert "The host is gone." in log_of(tmp_path)


def test_another_descriptor_can_be_the_lifeline(socket):
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, "--socket", str(socket), "--parent-fd", str(reading)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[reading],
    )
    os.close(reading)
    os.close(writing)
    assert process.wait(60) == ExitCode.PARENT_GONE


def test_without_mlx_it_says_so_and_ends_with_its_own_code(socket, tmp_path):
    (tmp_path / "mlx_lm.py").write_text("raise ImportError('no mlx_lm here')\n")
    run = subprocess.run(
        [sys.executable, "-m", MODULE, "--socket", str(socket)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == ExitCode.MLX_UNAVAILABLE
    assert run.stderr.splitlines()[-1] == "weighbridge-mlx-runtime ends: MLX cannot be imported here: no mlx_lm here"


def test_the_limits_on_open_files_stay_as_they_are():
    # In a process of its own, because importing mlx-lm is what would change them.
    program = (
        "import resource\n"
        "before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "from weighbridge_engines.mlx_qwen.runtime.mlx import import_mlx\n"
        "import_mlx()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before, before\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "64", run.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 64


def test_prompts_and_answers_never_reach_the_log(tiny, tmp_path):
    with (tmp_path / "log").open("wb") as log, started_runtime(log=log) as runtime:
        runtime.load(tiny)
        answer = runtime.answer("a very private question", max_output_tokens=8)
    text = log_of(tmp_path)
    assert "private" not in text
    assert answer.text not in text


def test_torch_stays_out_of_a_worker_that_could_have_it():
    pytest.importorskip("torch", reason="only where torch is installed can it come in")
    program = (
        "import sys; from weighbridge_engines.mlx_qwen.runtime.mlx import import_mlx; import_mlx();"
        "import transformers; print('torch' in sys.modules, transformers.utils.is_torch_available())"
    )
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert said.stdout.split() == ["False", "False"]

"""How sd-server starts, shares a port and ends: the real one, and its stand-in the same way.

Measured with stable-diffusion-cpp-python 0.4.7 (CPU, 2026-11-30), as the answers are.
"""

import http.client
import json
import signal
import socket
import struct

import pytest
from sd_files import cut_off, flux1_without_text_encoder, patched, rewritten
from weighbridge_engines.sd_server.ends import CANNOT_BIND, explain_end
from weighbridge_engines.sd_server.events import FailureKind, LoadProgress, ModelVersion, ParamsMemory
from weighbridge_engines.sd_server.output import OutputReader
from weighbridge_engines.supervisor.exits import ExitCause, ExitFacts

TINY = {"prompt": "a cat", "width": 64, "height": 64, "steps": 1, "seed": 7, "cfg_scale": 1}
MIB = 2**20


@pytest.fixture
def start(subject):
    """Starts servers and ends them."""
    started = []

    def starting(arguments, **conditions):
        started.append(subject.start(arguments, **conditions))
        return started[-1]

    yield starting
    for server in started:
        server.stop()


def explanation(server):
    """Why it ended, as the engine would tell it."""
    code = server.wait_exit()
    reader = OutputReader()
    for line, from_stderr in server.lines:
        reader.read(line, from_stderr=from_stderr)
    by_signal = code < 0
    return explain_end(
        ExitFacts(exit_code=None if by_signal else code, signal_number=-code if by_signal else None), reader
    )


# Words on the command line


def test_help_names_flags_and_leaves_with_0_and_an_error(start):
    server = start(["--help"])
    assert server.wait_exit() == 0
    usage = server.text(from_stderr=False)
    assert usage.startswith("stable-diffusion.cpp version ")
    for flag in ("--diffusion-model", "--llm", "--taesd", "--lora-model-dir", "--max-vram", "--listen-port"):
        assert f"{flag} <" in usage
    assert "[ERROR]" in server.text(from_stderr=True)


def test_version_leaves_with_0(start):
    server = start(["--version"])  # only as the first word
    assert server.wait_exit() == 0
    assert server.text(from_stderr=False).startswith("stable-diffusion.cpp version ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--no-such-flag"], "unknown argument: --no-such-flag"),
        (["--host", "127.0.0.1"], "unknown argument: --host"),
        (["--model", "x", "--type", "zz"], "invalid weight format zz"),
        ([], "the following arguments are required"),
    ],
)
def test_what_it_does_not_take_makes_it_print_its_usage_and_leave_with_1(start, arguments, complaint):
    server = start(arguments)
    why = explanation(server)
    assert why.metadata["exit_code"] == "1"
    assert why.metadata["failure"] == FailureKind.WRONG_ARGUMENT
    assert complaint in server.text(from_stderr=True)
    assert "Usage: " in server.text(from_stderr=False)


# Loading


def test_a_load_is_told_by_tensors_and_ends_with_its_memory(start, tiny_model):
    server = start(tiny_model.arguments).wait_ready()
    reader = OutputReader()
    events = [event for line, from_stderr in server.lines for event in reader.read(line, from_stderr=from_stderr)]
    counted = [event for event in events if isinstance(event, LoadProgress)]
    assert counted == sorted(counted, key=lambda event: event.done)
    assert counted[-1].done == counted[-1].total
    assert ModelVersion("Flux.2 klein") in events
    (memory,) = (event for event in events if isinstance(event, ParamsMemory))
    files = sum(path.stat().st_size for path in tiny_model.files.values())
    assert memory.host_bytes == pytest.approx(files, rel=0.02)  # Q4_0 and F16 stay as they are in the file
    assert reader.is_listening
    assert reader.failures == []


FAULTS = {
    "no file": (lambda model, folder: {"--diffusion-model": folder / "nope.gguf"}, FailureKind.MISSING_FILE),
    "no text encoder's file": (lambda model, folder: {"--llm": folder / "nope.gguf"}, FailureKind.MISSING_FILE),
    "a part not named": (lambda model, folder: {"--llm": None}, FailureKind.MISSING_TENSOR),
    "no autoencoder": (lambda model, folder: {"--taesd": None}, FailureKind.MISSING_TENSOR),
    "an autoencoder for a model": (
        lambda model, folder: {"--diffusion-model": model["--taesd"], "--llm": None}, FailureKind.WRONG_FILE),
    "not weights": (lambda model, folder: {"--diffusion-model": _text(folder)}, FailureKind.WRONG_FILE),
    "unknown dtype": (
        lambda model, folder: {"--taesd": rewritten(model["--taesd"], folder / "dtype.safetensors", _unknown_dtype)},
        FailureKind.WRONG_FILE),
    "a tensor missing": (
        lambda model, folder: {"--taesd": rewritten(model["--taesd"], folder / "less.safetensors", _less)},
        FailureKind.MISSING_TENSOR),
    "a tensor of another shape": (
        lambda model, folder: {"--taesd": rewritten(model["--taesd"], folder / "shape.safetensors", _other_shape)},
        FailureKind.WRONG_SHAPE),
    "safetensors cut off": (
        lambda model, folder: {"--taesd": cut_off(model["--taesd"], folder / "cut.safetensors")},
        FailureKind.TRUNCATED_FILE),
    "gguf cut off": (
        lambda model, folder: {"--llm": cut_off(model["--llm"], folder / "cut.gguf")}, FailureKind.TRUNCATED_FILE),
}  # fmt: skip

ONE_TENSOR = "decoder.layers.0.weight"


def _text(folder):
    path = folder / "text.gguf"
    path.write_text("no weights, but long enough to look into\n")
    return path


def _unknown_dtype(header):
    header[ONE_TENSOR]["dtype"] = "I99"


def _no_dtype(header):
    del header[ONE_TENSOR]["dtype"]


def _less(header):
    del header[ONE_TENSOR]


def _other_shape(header):
    header[ONE_TENSOR]["shape"] = [32, 64, 3, 3]


def arguments_with(model, changes):
    files = {flag: path for flag, path in (dict(model.files) | changes).items() if path is not None}
    return [word for flag, path in files.items() for word in (flag, str(path))]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_cannot_be_loaded_makes_it_leave_with_1(start, tiny_model, tmp_path, fault):
    change, kind = FAULTS[fault]
    server = start(arguments_with(tiny_model, change(tiny_model.files, tmp_path)))
    why = explanation(server)
    assert server.text(from_stderr=True).endswith("new_sd_ctx_t failed")
    assert (why.cause, why.metadata["exit_code"]) == (ExitCause.EXITED, "1")
    assert why.metadata["failure"] == kind


def test_broken_headers_make_it_abort(start, tiny_model, tmp_path):
    no_dtype = rewritten(tiny_model.files["--taesd"], tmp_path / "no-dtype.safetensors", _no_dtype)
    why = explanation(start(arguments_with(tiny_model, {"--taesd": no_dtype})))
    assert (why.cause, why.metadata["signal"]) == (ExitCause.CRASHED, "SIGABRT")
    assert why.metadata["failure"] == FailureKind.CRASH
    absurd = patched(tiny_model.files["--llm"], tmp_path / "absurd.gguf", 8, struct.pack("<Q", 2**60))  # tensor count
    why = explanation(start(arguments_with(tiny_model, {"--llm": absurd})))
    assert (why.cause, why.metadata["signal"]) == (ExitCause.CRASHED, "SIGABRT")
    assert why.metadata["failure"] == FailureKind.WRONG_FILE


def test_a_gguf_of_a_version_to_come_complains_and_loads(start, tiny_model, tmp_path):
    newer = patched(tiny_model.files["--llm"], tmp_path / "newer.gguf", 4, struct.pack("<I", 99))
    server = start(arguments_with(tiny_model, {"--llm": newer})).wait_ready()
    assert "this GGUF file is version 99" in server.text(from_stderr=True)


def test_out_of_memory_while_loading_makes_it_abort(start, subject, tiny_model):
    subject.needs_memory_limit()
    why = explanation(start(tiny_model.arguments, short_of_memory="at_load"))
    assert (why.cause, why.metadata["signal"]) == (ExitCause.OUT_OF_MEMORY, "SIGABRT")


def test_a_flux_without_text_encoders_loads_with_a_warning_and_crashes_in_its_first_render(start, tmp_path):
    server = start(flux1_without_text_encoder(tmp_path)).wait_ready()
    assert "No text encoders provided" in server.text(from_stderr=False)
    with pytest.raises((http.client.HTTPException, OSError)):
        server.post("/sdapi/v1/txt2img", TINY)
    why = explanation(server)
    assert (why.cause, why.metadata["signal"]) == (ExitCause.CRASHED, "SIGSEGV")
    assert why.metadata["failure"] == FailureKind.MISSING_PART


# Ports


def test_a_port_that_another_program_holds_makes_it_leave_with_0_after_saying_that_it_listens(start, tiny_model):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = start(tiny_model.arguments, port=other.getsockname()[1])
        why = explanation(server)
    assert why.metadata["exit_code"] == "0"
    assert why.metadata["failure"] == CANNOT_BIND
    assert server.text(from_stderr=True) == ""


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="ports cannot be shared here")
def test_two_of_them_share_a_port_without_a_word(start, tiny_model, tmp_path):
    folders = []
    for name in ("first", "second"):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / f"{name}.safetensors").write_bytes(b"")
    first = start([*tiny_model.arguments, "--lora-model-dir", str(folders[0])]).wait_ready()
    second = start([*tiny_model.arguments, "--lora-model-dir", str(folders[1])], port=first.port).wait_ready()
    answered = {first.get("/sdapi/v1/loras").json[0]["name"] for _ in range(60)}
    # The kernel deals connections out; that all sixty go to one of two is as likely as 2**-59.
    assert answered == {"first", "second"}
    assert first.process.poll() is second.process.poll() is None


# Ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_ends_by_the_signal_without_a_word(start, tiny_model, number):
    server = start(tiny_model.arguments).wait_ready()
    printed = len(server.lines)
    server.process.send_signal(number)
    assert server.wait_exit() == -number
    assert server.lines[printed:] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_render_and_the_connection_at_once(start, tiny_model, number):
    server = start(tiny_model.arguments, step_s=0.1).wait_ready()
    long = TINY | {"steps": 500}  # clamped to 100
    waiting = server.send("POST", "/sdapi/v1/txt2img", json.dumps(long).encode())
    server.wait_line(r" 1/100 - ")
    server.process.send_signal(number)
    with pytest.raises((http.client.HTTPException, OSError)):
        waiting.getresponse()
    assert server.wait_exit() == -number

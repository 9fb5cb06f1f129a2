"""Why sd-server ended, told from what it printed (as measured with 0.4.7) and how it left."""

import signal

import pytest
from weighbridge_engines.sd_server.ends import CANNOT_BIND, explain_end, explain_render, fatal_line
from weighbridge_engines.sd_server.events import FailureKind
from weighbridge_engines.sd_server.output import OutputReader
from weighbridge_engines.supervisor.exits import ExitCause, ExitFacts, FatalLine

LISTENING = "[INFO ] main.cpp:148  - listening on: 127.0.0.1:44879"
LOAD_FAILED = "[ERROR] main.cpp:92   - new_sd_ctx_t failed"
BAD_ALLOC = ["terminate called after throwing an instance of 'std::bad_alloc'", "  what():  std::bad_alloc"]


def read(stdout=(), stderr=(), *, stderr_first=False):
    """The two streams are read side by side: either may come first."""
    reader = OutputReader()
    for lines, from_stderr in sorted(((stdout, False), (stderr, True)), key=lambda part: part[1] is not stderr_first):
        for line in lines:
            reader.read(line, from_stderr=from_stderr)
    return reader


def error(text):
    return f"[ERROR] model.cpp:1067 - {text}"


def warning(text):
    return f"[WARN ] model.cpp:231  - {text}"


def part_failed(part, file):
    return warning(f"loading {part} from '{file}' failed")


# What was printed for each fault, the fault as we name it, and what its message must name.
LOADS = {
    "a file that is not there": (
        [warning("file /models/nope.gguf not found"), part_failed("diffusion model", "/models/nope.gguf")],
        [error("get sd version from file failed: ''"), LOAD_FAILED],
        FailureKind.MISSING_FILE, "nope.gguf"),
    "a part that is not there": (
        [warning("file /models/llm.gguf not found"), part_failed("llm", "/models/llm.gguf")],
        [error("tensor 'text_encoders.llm.model.norm.weight' not in model file"), LOAD_FAILED],
        FailureKind.MISSING_FILE, "llm.gguf"),
    "a part that was not named": (
        [],
        [error("tensor 'text_encoders.llm.model.norm.weight' not in model file"), LOAD_FAILED],
        FailureKind.MISSING_TENSOR, "text encoder"),
    "no autoencoder": (
        [],
        [error("tensor 'first_stage_model.quant_conv.bias' not in model file"), LOAD_FAILED],
        FailureKind.MISSING_TENSOR, "vae"),
    "a text file": (
        [warning("unknown format /models/text.gguf"), part_failed("diffusion model", "/models/text.gguf")],
        [error("get sd version from file failed: ''"), LOAD_FAILED],
        FailureKind.WRONG_FILE, "text.gguf"),
    "an autoencoder for a model": (
        [],
        [error("get sd version from file failed: '/models/tae.safetensors'"), LOAD_FAILED],
        FailureKind.WRONG_FILE, "tae.safetensors"),
    "a file cut off": (
        [],
        [error("read tensor data failed: '/models/trunc.gguf'"), error("load tensors from file failed"), LOAD_FAILED],
        FailureKind.TRUNCATED_FILE, "trunc.gguf"),
    "a part of another model": (
        [warning("process tensor failed: 'tae.decoder.layers.0.weight'")],
        [error("tensor 'tae.decoder.layers.0.weight' has wrong shape in model file: got [3, 3, 64, 32], "
               "expected [3, 3, 32, 64]"), LOAD_FAILED],
        FailureKind.WRONG_SHAPE, "autoencoder"),
    "a flag of another build": (
        [], [error("error: unknown argument: --nope")],
        FailureKind.WRONG_ARGUMENT, "--nope"),
}  # fmt: skip


@pytest.mark.parametrize("stderr_first", [False, True])
@pytest.mark.parametrize("fault", LOADS)
def test_loads_that_end_with_1_are_told_apart(fault, stderr_first):
    stdout, stderr, kind, named = LOADS[fault]
    why = explain_end(ExitFacts(exit_code=1), read(stdout, stderr, stderr_first=stderr_first))
    assert why.cause is ExitCause.EXITED
    assert why.metadata["failure"] == kind
    assert why.metadata["exit_code"] == "1"
    assert named in why.message
    assert "/models" not in why.message.split("(")[0]


def test_want_of_memory_is_known_by_its_mangled_name_too():
    """With no memory left to make it readable."""
    mangled = ["terminate called after throwing an instance of 'St9bad_alloc'"]
    assert explain_end(ExitFacts(signal_number=signal.SIGABRT), read(stderr=mangled)).cause is ExitCause.OUT_OF_MEMORY


def test_an_allocation_that_fails_while_loading_is_told_from_a_header_with_absurd_counts():
    aborted = ExitFacts(signal_number=signal.SIGABRT)
    short = explain_end(aborted, read(stderr=BAD_ALLOC))
    assert (short.cause, short.metadata["failure"]) == (ExitCause.OUT_OF_MEMORY, FailureKind.OUT_OF_MEMORY)
    absurd = error("gguf_init_from_file_ptr: number of tensors is 1152921504606846976 but must be in [0, 4521]")
    broken = explain_end(aborted, read(stderr=[absurd, *BAD_ALLOC]))
    assert (broken.cause, broken.metadata["failure"]) == (ExitCause.CRASHED, FailureKind.WRONG_FILE)


def test_a_failed_assertion_behind_a_failed_allocation_is_want_of_memory():
    lines = [
        error("ggml_aligned_malloc: insufficient memory (attempted to allocate  13.50 MB)"),
        "/src/ggml/src/ggml.c:1581: GGML_ASSERT(ctx->mem_buffer != NULL) failed",
    ]
    assert explain_end(ExitFacts(signal_number=signal.SIGABRT), read(stderr=lines)).cause is ExitCause.OUT_OF_MEMORY


def test_an_exception_that_nobody_caught_while_loading_points_at_the_file():
    lines = ["terminate called after throwing an instance of 'nlohmann::json_abi_v3_11_2::detail::type_error'"]
    why = explain_end(ExitFacts(signal_number=signal.SIGABRT), read(stderr=lines))
    assert (why.cause, why.metadata["failure"]) == (ExitCause.CRASHED, FailureKind.CRASH)
    assert "broken file" in why.message


def test_leaving_with_0_after_listening_is_a_port_that_was_taken():
    why = explain_end(ExitFacts(exit_code=0), read([LISTENING]))
    assert (why.cause, why.metadata["failure"]) == (ExitCause.EXITED, CANNOT_BIND)
    assert "port" in why.message


def test_leaving_with_0_before_listening_is_not():
    assert "failure" not in explain_end(ExitFacts(exit_code=0), read()).metadata


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (ExitFacts(signal_number=signal.SIGILL), ExitCause.ILLEGAL_INSTRUCTION),
        (ExitFacts(signal_number=signal.SIGKILL, oom_kills=0), ExitCause.KILLED),
        (ExitFacts(signal_number=signal.SIGKILL, oom_kills=1), ExitCause.OUT_OF_MEMORY),
        (ExitFacts(signal_number=signal.SIGSEGV), ExitCause.CRASHED),
        (ExitFacts(signal_number=signal.SIGSEGV, oom_kills=1), ExitCause.CRASHED),
        (ExitFacts(signal_number=signal.SIGTERM, asked=True), ExitCause.STOPPED),
    ],
)
def test_ends_from_outside_are_told_by_the_exit(facts, cause):
    harmless = [error("gguf_init_from_file_ptr: this GGUF file is version 99 but this software only supports up to 3")]
    assert explain_end(facts, read([LISTENING], harmless, stderr_first=True)).cause is cause


def test_a_build_for_another_processor_is_told_whatever_it_complained_of_before():
    complaint = [error("gguf_init_from_file_ptr: this GGUF file is version 99 but this software only supports up to 3")]
    why = explain_end(ExitFacts(signal_number=signal.SIGILL), read(stderr=complaint))
    assert why.cause is ExitCause.ILLEGAL_INSTRUCTION


def test_an_allocation_that_failed_in_an_earlier_render_explains_no_later_end():
    reader = read([LISTENING], [error("flux: failed to allocate the compute buffer")])
    assert explain_end(ExitFacts(signal_number=signal.SIGSEGV), reader).cause is ExitCause.CRASHED


def test_a_card_that_runs_out_of_memory_ends_it():
    reader = read([LISTENING], ["CUDA error: out of memory"])
    assert explain_end(ExitFacts(signal_number=signal.SIGABRT), reader).cause is ExitCause.OUT_OF_MEMORY


def test_a_crash_in_the_first_render_for_want_of_text_encoders_says_so():
    """FLUX.1 without any loads with one warning and ends by SIGSEGV in its first render."""
    reader = read([warning("IMPORTANT NOTICE: No text encoders provided, cannot process prompts!"), LISTENING])
    why = explain_end(ExitFacts(signal_number=signal.SIGSEGV), reader)
    assert (why.cause, why.metadata["failure"]) == (ExitCause.CRASHED, FailureKind.MISSING_PART)
    assert "text encoder" in why.message


@pytest.mark.parametrize(
    ("tensor", "option"),
    [
        # The roles of docs/engines/sd-server.md, "Parts"; the prefixes are sd-server's own.
        ("first_stage_model.decoder.conv_in.weight", "--set parts=vae=FILE"),
        ("tae.decoder.layers.0.weight", "--set parts=taesd=FILE"),
        ("text_encoders.llm.model.norm.weight", "--set parts=llm=FILE"),
        ("text_encoders.t5xxl.transformer.shared.weight", "--set parts=t5xxl=FILE"),
        ("text_encoders.clip_l.transformer.text_model.final_layer_norm.weight", "--set parts=clip_l=FILE"),
    ],
)
def test_a_part_that_is_missing_is_told_with_the_option_that_names_it(tensor, option):
    why = explain_end(ExitFacts(exit_code=1), read([], [error(f"tensor '{tensor}' not in model file"), LOAD_FAILED]))
    assert why.message.endswith(f"Name the file that has it: {option}.")


def test_what_is_no_part_is_told_without_an_option():
    tensor = "model.diffusion_model.final_layer.linear.weight"
    why = explain_end(ExitFacts(exit_code=1), read([], [error(f"tensor '{tensor}' not in model file"), LOAD_FAILED]))
    assert "--set" not in why.message and "the diffusion model is missing or incomplete" in why.message


def test_a_render_without_memory_tells_how_much_it_needed():
    reader = read([LISTENING], [
        error("ggml_gallocr_reserve_n_impl: failed to allocate CPU buffer of size 1289945184"),
        error("flux: failed to allocate the compute buffer"),
        error("sampling for image 1/1 failed after 2.68s"),
    ])  # fmt: skip
    trouble = explain_render(reader.render_failures)
    assert trouble.kind is FailureKind.OUT_OF_MEMORY
    assert "1.20 GiB" in trouble.message  # 1289945184 / 2^30
    assert trouble.metadata == {"size_bytes": "1289945184"}


def test_a_render_that_failed_without_a_reason_says_that():
    assert explain_render([]).kind is FailureKind.RENDER_FAILED


def test_lines_after_which_it_cannot_go_on():
    assert fatal_line(BAD_ALLOC[0]) == FatalLine(ExitCause.OUT_OF_MEMORY, BAD_ALLOC[0])
    assert fatal_line(LOAD_FAILED) == FatalLine(ExitCause.EXITED, "new_sd_ctx_t failed", specific=False)
    assert fatal_line(error("flux: failed to allocate the compute buffer")) is None  # the next render may do
    assert fatal_line(error("json parse failed {new_sd_ctx_t failed")) is None

"""Why a ds4-server ended: from its last lines and its exit to a cause, a sentence and what to do."""

import signal

import pytest
from weighbridge_engines.ds4.ends import EXIT_MEANINGS, explain_end
from weighbridge_engines.ds4.events import FailureKind
from weighbridge_engines.ds4.output import OutputReader
from weighbridge_engines.host.failures import start_failed
from weighbridge_engines.supervisor.exits import ExitCause, ExitExplanation, ExitFacts

STAMP = "1130 22:35:48 "
LISTENING = f"{STAMP}ds4-server: listening on http://127.0.0.1:4711"


def why(facts: ExitFacts, *lines: str, platform: str = "linux") -> ExitExplanation:
    reader = OutputReader()
    for line in lines:
        reader.read(line)
    return explain_end(facts, reader, platform)


EXITED_1 = ExitFacts(exit_code=1)
EXITED_2 = ExitFacts(exit_code=2)
KILLED = ExitFacts(signal_number=signal.SIGKILL)


@pytest.mark.parametrize(
    ("facts", "line", "cause", "failure", "advice"),
    [
        (EXITED_2, "ds4: failed to open lock file /tmp/ds4.lock: Permission denied", "EXITED", "LOCK_UNUSABLE",
         "WEIGHBRIDGE_ENGINES_DS4_LOCK_FILE"),
        (EXITED_2, f"{STAMP}ds4-server: unknown option: --vision", "EXITED", "WRONG_ARGUMENT", "--vision"),
        (EXITED_2, "ds4: --dspark requires --mtp FILE", "EXITED", "NOT_TOGETHER", "Other options"),
        (EXITED_1, "ds4: --ssd-streaming-cache-experts byte budget 3.00 GiB is too small: two need 3.38 GiB", "EXITED",
         "CACHE_TOO_SMALL", "expert_cache_gib"),
        (EXITED_1, f"{STAMP}ds4-server: failed to listen on 127.0.0.1:4711: Address already in use", "EXITED",
         "PORT_TAKEN", "another port"),
        (EXITED_1, f"{STAMP}ds4-server: failed to chdir to /x: No such file or directory", "EXITED", "NO_FOLDER", "/x"),
        (EXITED_1, "ds4: cannot open model '/models/big.gguf': Permission denied", "EXITED", "MISSING_FILE",
         "big.gguf"),
        (EXITED_1, "ds4: tensor points outside GGUF file", "EXITED", "TRUNCATED_FILE", "Get the model again"),
        (EXITED_1, "ds4: required metadata key is missing: deepseek4.block_count", "EXITED", "WRONG_FILE",
         "deepseek4.block_count"),
        (EXITED_1, "ds4: Metal source metal/dense.metal not found (set X to override)", "EXITED", "SHADERS_MISSING",
         "beside the program"),
        (EXITED_1, "ds4: cuda backend unavailable; aborting startup", "EXITED", "BACKEND_MISSING", "driver"),
        (EXITED_1, f"{STAMP}ds4-server: failed to create cuda session", "OUT_OF_MEMORY", "OUT_OF_MEMORY",
         "smaller context"),
        (EXITED_1, "ds4: out of memory", "OUT_OF_MEMORY", "OUT_OF_MEMORY", "smaller context"),
    ],
)  # fmt: skip
def test_a_load_that_failed_is_explained(facts: ExitFacts, line: str, cause: str, failure: str, advice: str) -> None:
    found = why(facts, line)
    assert (found.cause, found.metadata["cause"], found.metadata["failure"]) == (ExitCause(cause), cause, failure)
    assert advice in found.message
    assert found.metadata["exit_code"] == str(facts.exit_code)


def test_a_lock_held_elsewhere_is_told_with_its_holder_and_is_nobody_s_crash() -> None:
    found = why(EXITED_2, "ds4: another ds4 process is already running (pid 4711); refusing to start")
    assert (found.cause, found.metadata["pid"]) == (ExitCause.LOCK_HELD, "4711")
    assert "process 4711" in found.message
    assert start_failed(found).reason == "ENGINE_LOCKED"
    nameless = why(EXITED_2, "ds4: another ds4 process is already running; refusing to start")
    assert nameless.cause is ExitCause.LOCK_HELD
    assert "pid" not in nameless.metadata


def test_out_of_memory_at_load_is_told_to_callers_as_that() -> None:
    assert start_failed(why(EXITED_1, "ds4: out of memory")).reason == "ENGINE_OUT_OF_MEMORY"
    assert start_failed(why(KILLED)).reason == "ENGINE_OUT_OF_MEMORY"


def test_of_several_lines_the_one_that_names_the_fault_is_told() -> None:
    shaders = "ds4: Metal source metal/moe.metal not found (set X to override)"
    assert why(EXITED_1, shaders, "ds4: metal backend unavailable; aborting startup").metadata["failure"] == (
        FailureKind.SHADERS_MISSING
    )


def test_what_went_wrong_before_it_was_loaded_does_not_explain_its_end_afterwards() -> None:
    """A device's allocation may fail and be done another way."""
    fallback = "ds4: CUDA model range alloc failed for weights (64.00 MiB): out of memory"
    found = why(ExitFacts(signal_number=signal.SIGSEGV, was_ready=True), fallback, LISTENING)
    assert found.cause is ExitCause.CRASHED
    assert "failure" not in found.metadata


def test_a_device_that_failed_while_it_served_explains_a_crash() -> None:
    line = "ds4: CUDA sync failed: an illegal memory access was encountered"
    found = why(ExitFacts(signal_number=signal.SIGABRT, was_ready=True), LISTENING, line)
    assert (found.cause, found.metadata["failure"]) == (ExitCause.CRASHED, FailureKind.DEVICE_FAULT)


def test_what_ds4_said_explains_its_exit_also_where_the_kernel_killed_another_program() -> None:
    """All engines of a suite share one control group; the kernel kills by SIGKILL, and ds4 left by itself."""
    line = "ds4: CUDA sync failed: an illegal memory access was encountered"
    found = why(ExitFacts(exit_code=1, was_ready=True, oom_kills=1), LISTENING, line)
    assert (found.cause, found.metadata["failure"]) == (ExitCause.CRASHED, FailureKind.DEVICE_FAULT)


# -- killed ------------------------------------------------------------------------------------------------------------


def test_a_kill_that_nobody_asked_for_is_most_likely_the_kernel_s_on_linux() -> None:
    found = why(KILLED)
    assert (found.cause, found.metadata["certainty"]) == (ExitCause.OUT_OF_MEMORY, "probable")
    assert "most likely" in found.message


@pytest.mark.parametrize(
    ("facts", "platform", "cause"),
    [
        (ExitFacts(signal_number=signal.SIGKILL, oom_kills=1), "linux", "OUT_OF_MEMORY"),
        (ExitFacts(signal_number=signal.SIGKILL, oom_kills=0), "linux", "KILLED"),
        (KILLED, "darwin", "KILLED"),
        (ExitFacts(signal_number=signal.SIGKILL, asked=True), "linux", "STOPPED"),
        (ExitFacts(exit_code=130, asked=True), "linux", "STOPPED"),
        (ExitFacts(guard_lost=True), "linux", "GUARD_LOST"),
        (ExitFacts(start_errno=2), "linux", "CANNOT_START"),
        (ExitFacts(signal_number=signal.SIGILL), "linux", "ILLEGAL_INSTRUCTION"),
    ],
    ids=["the kernel says so", "the kernel says no", "macOS does not", "we did", "twice", "guard", "start", "build"],
)
def test_what_the_kernel_and_the_supervisor_know_goes_before_guesses(
    facts: ExitFacts, platform: str, cause: str
) -> None:
    found = why(facts, platform=platform)
    assert found.cause is ExitCause(cause)
    assert "certainty" not in found.metadata


@pytest.mark.parametrize("code", EXIT_MEANINGS)
def test_exit_codes_without_a_line_say_what_ds4_means_by_them(code: int) -> None:
    found = why(ExitFacts(exit_code=code, was_ready=True), LISTENING)
    assert found.cause is ExitCause.EXITED
    assert EXIT_MEANINGS[code] in found.message


def test_words_that_are_not_known_are_passed_on() -> None:
    """Builds come without releases; what V4.1 says when it is not admitted was never seen."""
    found = why(EXITED_1, "ds4: loading", "ds4: a sentence of a build to come")
    assert found.cause is ExitCause.EXITED
    assert "a sentence of a build to come" in found.message
    assert len(why(EXITED_1, "ds4: " + "long " * 500).message) < 500


def test_no_answer_s_text_is_passed_on() -> None:
    found = why(EXITED_1, LISTENING, "ds4: what the model said")
    assert "what the model said" not in found.message

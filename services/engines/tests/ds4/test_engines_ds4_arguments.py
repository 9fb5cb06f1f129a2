"""The command line of a planned launch, in the words of three builds, or the flags for which it is refused."""

from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_engines.ds4.arguments import WITH_VALUE, WITHOUT_VALUE, command_line
from weighbridge_engines.ds4.binary import Ds4Binary, flags_of
from weighbridge_proto.errors import RequestError

from services.engines.standins.ds4.behaviour import BUILDS, Behaviour
from services.engines.standins.ds4.command_line import parse
from services.engines.standins.ds4.flags import help_text

MAY, JULY, SEPTEMBER = BUILDS
FOLDER = Path("/conversations")
PORT = 4711


def build_of(month: str, compute: str = "cuda") -> Ds4Binary:
    """A build that prints the help of that month."""
    found = dict(flags_of(help_text(month)))
    with_value = frozenset(flag for flag, takes_value in found.items() if takes_value)
    return Ds4Binary(Path("/ds4-server"), compute, frozenset(found), with_value, "")


def made(month: str, *planned: str, compute: str = "cuda") -> tuple[str, ...]:
    return command_line(build_of(month, compute), planned, PORT, FOLDER)


def refused(month: str, *planned: str, compute: str = "cuda") -> RequestError:
    with pytest.raises(RequestError) as error:
        made(month, *planned, compute=compute)
    failure = error.value.failure
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ENGINE_LACKS_FEATURE")
    return error.value


WHERE = ("--host", "127.0.0.1", "--port", "4711")
RESIDENT = ("--model", "/m.gguf", "--cuda", "--ctx", "32768")


@pytest.mark.parametrize("month", BUILDS)
def test_a_plan_is_given_as_it_is_with_the_address(month: str) -> None:
    assert made(month, *RESIDENT) == ("/ds4-server", *RESIDENT, *WHERE)


@pytest.mark.parametrize("month", BUILDS)
def test_a_folder_for_conversations_is_named_only_where_the_plan_has_space_for_them(month: str) -> None:
    kept = (*RESIDENT, "--kv-disk-space-mb", "16384")
    assert made(month, *kept) == ("/ds4-server", *kept, *WHERE, "--kv-disk-dir", "/conversations")
    assert "--kv-disk-dir" not in made(month, *RESIDENT)


@pytest.mark.parametrize(("month", "flag"), [(MAY, "--mtp"), (JULY, "--mtp"), (SEPTEMBER, "--mtp-model")])
def test_a_drafter_s_file_is_named_by_the_flag_that_the_build_has_for_it(month: str, flag: str) -> None:
    arguments = made(month, *RESIDENT, "--mtp-model", "/d.gguf", "--mtp-draft", "2")
    assert arguments[6:10] == (flag, "/d.gguf", "--mtp-draft", "2")


@pytest.mark.parametrize(("month", "flag"), [(JULY, "--glm-mtp"), (SEPTEMBER, "--mtp")])
def test_a_draft_block_is_used_by_the_flag_that_the_build_has_for_it(month: str, flag: str) -> None:
    assert made(month, *RESIDENT, "--glm-mtp")[6:7] == (flag,)


@pytest.mark.parametrize(
    ("month", "planned", "missing", "instead"),
    [
        (MAY, ("--ssd-streaming", "--ssd-streaming-cache-experts", "32GB"),
         "--ssd-streaming --ssd-streaming-cache-experts", "stream_experts=false"),
        (MAY, ("--prefill-chunk", "4096"), "--prefill-chunk", "prefill_chunk_tokens"),
        (MAY, ("--power", "60"), "--power", "power=100"),
        (MAY, ("--batched-session", "2"), "--batched-session", "sessions=1"),
        (MAY, ("--glm-mtp",), "--glm-mtp", "draft_policy=off"),
        (MAY, ("--dspark", "--mtp-model", "/d.gguf"), "--dspark", "draft_policy=off"),
        (JULY, ("--vision", "/v.gguf"), "--vision", "vision=false"),
    ],
)  # fmt: skip
def test_what_the_build_does_not_know_is_named_with_what_to_ask_for_instead(
    month: str, planned: tuple[str, ...], missing: str, instead: str
) -> None:
    failure = refused(month, *RESIDENT, *planned).failure
    assert failure.metadata["flags"] == missing
    assert instead in failure.message
    assert all(flag in failure.message for flag in missing.split())


@pytest.mark.parametrize(("compute", "flag"), [("cpu", "--cuda"), ("cuda", "--metal"), ("metal", "--cuda")])
def test_a_plan_for_another_backend_is_refused_though_the_help_lists_its_flag(compute: str, flag: str) -> None:
    failure = refused(JULY, "--model", "/m.gguf", flag, "--ctx", "4096", compute=compute).failure
    assert (failure.metadata["flags"], failure.metadata["compute"]) == (flag, compute)
    assert f"compute={compute}" in failure.message


@pytest.mark.parametrize("compute", ["cpu", "cuda", "metal"])
def test_every_build_computes_on_the_processor_too(compute: str) -> None:
    assert "--cpu" in made(JULY, "--model", "/m.gguf", "--cpu", "--ctx", "4096", compute=compute)


def test_a_flag_of_a_newer_plan_is_refused_though_the_build_knows_it() -> None:
    """What it would mean for memory was never thought of here, nor whether a value follows it."""
    assert refused(JULY, *RESIDENT, "--quality").failure.metadata["flags"] == "--quality"


def _flag(flag: str, values: st.SearchStrategy[str] | None = None) -> st.SearchStrategy[tuple[str, ...]]:
    said = st.just((flag,)) if values is None else values.map(lambda value: (flag, value))
    return st.one_of(st.just(()), said)


def _count(most: int) -> st.SearchStrategy[str]:
    return st.integers(1, most).map(str)


FILES = st.text("abcÄ -=é", min_size=1).map(lambda name: f"/models/{name}.gguf")
PLANS = st.tuples(
    FILES.map(lambda file: ("--model", file)),
    st.sampled_from(["--metal", "--cuda", "--cpu"]).map(lambda flag: (flag,)),
    _count(1 << 24).map(lambda tokens: ("--ctx", tokens)),
    _flag("--kv-disk-space-mb", st.just("16384")),
    st.one_of(
        st.just(()), _count(1 << 14).map(lambda gib: ("--ssd-streaming", "--ssd-streaming-cache-experts", f"{gib}GB"))
    ),
    _flag("--prefill-chunk", _count(65_536)),
    _flag("--power", _count(99)),
    _flag("--batched-session", st.integers(2, 64).map(str)),
    st.one_of(
        st.just(()),
        st.just(("--glm-mtp",)),
        FILES.map(lambda file: ("--dspark", "--mtp-model", file)),
        FILES.map(lambda file: ("--mtp-model", file, "--mtp-draft", "2")),
    ),
    _flag("--vision", FILES),
).map(lambda parts: tuple(word for part in parts for word in part))
"""Whatever fit can plan, in its order."""


@given(PLANS, st.sampled_from(BUILDS), st.sampled_from(["metal", "cuda", "cpu"]))
def test_any_plan_is_taken_word_for_word_by_a_build_s_own_parser_or_refused_by_name(
    planned: tuple[str, ...], month: str, compute: str
) -> None:
    build = build_of(month, compute)
    pairs = {word for word in planned if word in WITH_VALUE | WITHOUT_VALUE}
    unknown = {flag for flag in pairs - {"--mtp-model", "--glm-mtp"} if flag not in build.flags}
    unknown |= pairs & ({"--metal", "--cuda"} - {f"--{compute}"})
    if "--glm-mtp" in pairs and month == MAY:
        unknown.add("--glm-mtp")
    try:
        arguments = command_line(build, planned, PORT, FOLDER)
    except RequestError as error:
        assert set(error.failure.metadata["flags"].split()) == unknown
        return
    assert not unknown
    # Exits where there is a flag that it does not know, a value that it does not take, or a value too many.
    read = parse(arguments[1:], Behaviour(build=month, compute=compute))
    assert (read.host, read.port, read.model) == ("127.0.0.1", PORT, planned[1])
    assert read.has("kv-disk-dir") is ("--kv-disk-space-mb" in planned)
    assert len(arguments) == 1 + len(planned) + len(WHERE) + 2 * ("--kv-disk-space-mb" in planned)
    values = {word for word in planned if word not in pairs}
    assert values <= set(arguments)


@given(PLANS, st.sampled_from(BUILDS))
def test_no_command_line_lets_it_write_prompts_or_listen_to_others(planned: tuple[str, ...], month: str) -> None:
    try:
        arguments = command_line(build_of(month, "cuda"), planned, PORT, FOLDER)
    except RequestError:
        return
    flags = {word for word in arguments if word.startswith("--")}
    assert not flags & {"--trace", "--cors", "--chdir", "--prefix-file"}
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"

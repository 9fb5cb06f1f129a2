"""The command against fake services: exit codes, JSON, tables."""

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from weighbridge.cli import main
from weighbridge.cli.output import console, say
from weighbridge.cli.tables import plain_table, print_plan
from weighbridge.version import __version__
from weighbridge_proto.engines.v1 import chat_service_pb2, engine_service_pb2
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import fit_service_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

MIB = 1 << 20


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


def refuse(code: grpc.StatusCode, reason: str) -> RequestError:
    return RequestError(code, reason, f"Because of {reason}.", metadata={"needed_bytes": 7})


def test_version_and_usage() -> None:
    assert run("--version").output.strip() == f"weighbridge, version {__version__}"
    assert run("fit").exit_code == 2
    assert run("nonsense").exit_code == 2
    assert run("fit", "m", "--machine", "gpu:8").exit_code == 2
    wrong = run("fit", "m", "--set", "kv_bit=4")
    assert wrong.exit_code == 2
    assert "kv_bits" in wrong.output
    assert run("fit", "m", "--size", "huge").exit_code == 2
    assert run("fit", "m", "--size", "512x512", "--context", "100").exit_code == 2


def test_fit_prints_a_table_whose_figures_add_up(fake_suite: Any) -> None:
    result = run("fit", "/m")
    assert result.exit_code == 0, result.output
    rows = {}
    for line in result.stdout.splitlines():
        figures = re.findall(r"\d+\.\d\d(?=\s|$)", line)
        if len(figures) == 3:
            rows[line.split("  ")[0].strip()] = [int(figure.replace(".", "")) for figure in figures]
    for column in range(3):
        resident = sum(rows[name][column] for name in ("model", "kv_cache", "process"))
        assert resident == rows["resident"][column]
        assert rows["largest phase"][column] == rows["prefill"][column], "prefill needs more than decode"
        assert rows["total"][column] == rows["resident"][column] + rows["largest phase"][column]
    # 96,123,457 + 94,371,841 + 200,000,001 + 40,000,007 bytes are 430,495,306, in MiB 410.55.
    assert rows["total"][1] == 41055
    assert "RUNS: It needs what it needs." in result.stdout
    assert "Try less." in result.stdout


def test_fit_ends_its_table_with_what_was_measured_before_and_claims_that(fake_suite: Any) -> None:
    plan = fake_suite.state.plan
    assert "measured before" not in run("fit", "/m").stdout
    plan.requirement.total.expected_bytes = 300 * MIB
    plan.claim.host_bytes = 300 * MIB
    printed = run("fit", "/m").stdout
    table = printed.partition("component")[2].partition("\n\n")[0].splitlines()
    assert table[-1].startswith("measured before") and " 300.00 " in table[-1]
    assert "A launch would claim 300.0 MiB of host memory" in printed


@pytest.mark.parametrize(("count", "words"), [(1, "Seen once before: "), (2, "Seen 2 times before: ")])
def test_fit_says_how_often_a_launch_was_measured(fake_suite: Any, count: int, words: str) -> None:
    fake_suite.state.plan.observations.count = count
    assert words in run("fit", "/m").stdout


def test_a_narrow_terminal_keeps_every_name_and_figure_whole(fake_suite: Any) -> None:
    plan = fake_suite.state.plan
    plan.requirement.lines[0].component = "attention_scores"
    plan.requirement.lines[0].basis = "a reason of many words " * 8
    to = Console(file=io.StringIO(), width=80)
    print_plan(to, plan)
    printed = to.file.getvalue()  # type: ignore[attr-defined] # the StringIO given above
    wide = run("fit", "/m").stdout
    for line, at in zip(plan.requirement.lines, wide.partition("basis")[2].splitlines()[1:], strict=False):
        assert line.component in printed
        assert set(re.findall(r"[\d,]+\.\d\d", at)) <= set(re.findall(r"[\d,]+\.\d\d", printed))
    assert "…" not in printed
    assert " ".join(printed.split()).count("a reason of many words " * 2) > 0, "the basis goes below the table"
    assert max(map(len, printed.splitlines())) <= 80


def test_an_engine_that_does_not_run_here_is_told_from_a_suite_that_does_not(fake_suite: Any) -> None:
    elsewhere = run("load", "/m", "--engine", "sd")
    assert elsewhere.exit_code == 4
    assert "The engine sd does not run here. What runs: mlx." in elsewhere.stderr


def test_fit_json_is_the_response_with_proto_names_and_text_integers(fake_suite: Any) -> None:
    result = run("fit", "/m", "--json", "--context", "2048", "--slots", "2", "--set", "kv_bits=8", "--machine", "cpu:8")
    printed = json.loads(result.stdout)
    assert printed["requirement"]["lines"][0]["expected_bytes"] == "96123457"
    assert printed["requirement"]["peak_phase"] == "prefill"
    assert printed["assessment"]["verdict"] == "VERDICT_RUNS"
    assert printed["claim"]["optional_host_bytes"] == "0", "zeros are written out, so that scripts find them"
    request = fake_suite.state.asked(fit_service_pb2.PlanModelRequest)[0]
    assert (request.workload.chat.context_tokens, request.workload.chat.slots) == (2048, 2)
    assert request.options.mlx.kv_bits == 8
    assert request.machine.ram_bytes == 8 << 30


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (requirement_pb2.VERDICT_WONT_RUN, 3),
        (requirement_pb2.VERDICT_TIGHT, 0),
        (requirement_pb2.VERDICT_UNKNOWN, 0),
    ],
)
def test_fit_exits_by_the_verdict(fake_suite: Any, verdict: "requirement_pb2.Verdict.ValueType", expected: int) -> None:
    fake_suite.state.plan.assessment.verdict = verdict
    fake_suite.state.plan.claim.host_bytes = MIB
    result = run("fit", "/m")
    assert result.exit_code == expected
    assert ("A launch would claim" in result.stdout) == (expected == 0), "what won't run claims nothing"


def test_facts_show_exact_bytes(fake_suite: Any) -> None:
    result = run("facts", "/m")
    assert result.exit_code == 0
    assert "1,000,000 bytes" in result.stdout
    assert "BF16" in result.stdout
    assert json.loads(run("facts", "/m", "--json").stdout)["facts"]["tensor_bytes"] == "1000000"


def test_capacity_and_leases(fake_suite: Any) -> None:
    capacity = run("capacity")
    assert capacity.exit_code == 0
    assert "24.00 GiB" in capacity.stdout
    assert "512.0 MiB" in capacity.stdout
    fake_suite.state.committed = 0
    assert json.loads(run("capacity", "--json").stdout)["capacity"]["total"]["committed_bytes"] == "0"
    leases = run("leases")
    assert "lease-1" in leases.stdout
    assert f"{512 * MIB:,}" in leases.stdout
    assert json.loads(run("leases", "--json").stdout)["leases"][0]["charge"]["host_bytes"] == str(512 * MIB)
    fake_suite.state.leases = []
    assert run("leases").stdout.strip() == "No leases."


def test_load_shows_each_event_and_streams_one_object_per_line(fake_suite: Any) -> None:
    shown = run("load", "/m")
    assert shown.exit_code == 0
    words = [line.split()[0] for line in shown.stderr.splitlines()]
    assert words == ["PLANNED", "ADMITTED", "STARTING", "READY"]
    assert "410.6 MiB expected at the peak" in shown.stderr
    lines = [json.loads(line) for line in run("load", "/m", "--json").stdout.splitlines()]
    assert [next(iter(line)) for line in lines] == ["planned", "admitted", "starting", "ready"]


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_WONT_RUN", 3),
        (grpc.StatusCode.FAILED_PRECONDITION, "CLAIM_EXCEEDS_CAPACITY", 3),
        (grpc.StatusCode.UNAVAILABLE, "LEDGER_UNREACHABLE", 4),
        (grpc.StatusCode.INTERNAL, "ENGINE_START_FAILED", 1),
    ],
)
def test_a_load_that_fails_says_why_and_exits_by_the_reason(
    fake_suite: Any, code: grpc.StatusCode, reason: str, expected: int
) -> None:
    fake_suite.state.failures["LoadModel"] = refuse(code, reason)
    result = run("load", "/m")
    assert result.exit_code == expected
    assert f"Because of {reason}." in result.stderr
    as_json = run("load", "/m", "--json")
    assert as_json.exit_code == expected
    failure = json.loads(as_json.stderr.splitlines()[-1])["failure"]
    assert (failure["reason"], failure["metadata"]["needed_bytes"]) == (reason, "7")


def test_unload_and_ps(fake_suite: Any) -> None:
    assert "512.0 MiB given back" in run("unload", "mlx", "--force").stdout
    assert fake_suite.state.asked(engine_service_pb2.UnloadModelRequest)[0].force
    listed = run("ps")
    assert listed.exit_code == 0
    assert "mlx-lm 0.32.2" in listed.stdout
    assert json.loads(run("ps", "--json").stdout)["engines"][0]["state"] == "ENGINE_STATE_READY"


def test_unload_takes_the_only_engine_there_is(fake_suite: Any) -> None:
    assert run("unload").exit_code == 0
    assert run("unload", "abacus").exit_code == 2
    (fake_suite.run_dir / "engine-sd.sock").touch()
    several = run("unload")
    assert several.exit_code == 1
    assert "unload mlx|sd" in several.stderr


def test_chat_puts_the_answer_alone_on_stdout(fake_suite: Any) -> None:
    result = run("chat", "/m", "Capital of France?", "--temperature", "0", "--max-tokens", "9", "--system", "Be brief.")
    assert result.exit_code == 0
    assert result.stdout == "The capital is Paris.\n"
    # 21 tokens: 20 of them after the first, in half a second.
    assert "21 answer tokens, 40.0 tokens/s, first token after 0.25 s, ended by stop" in result.stderr
    request = fake_suite.state.asked(chat_service_pb2.ChatRequest)[0]
    assert [message.parts[0].text for message in request.messages] == ["Be brief.", "Capital of France?"]
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0
    assert not request.sampling.HasField("top_p"), "what is not given stays the model's own"
    assert request.max_output_tokens == 9


def test_chat_takes_a_piped_prompt(fake_suite: Any) -> None:
    assert run("chat", "/m", stdin="from a pipe\n").exit_code == 0
    assert fake_suite.state.asked(chat_service_pb2.ChatRequest)[0].messages[0].parts[0].text == "from a pipe"
    assert run("chat", "/m", stdin="").exit_code == 2


def test_no_name_out_of_a_file_steers_the_terminal(fake_suite: Any, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\x07\x9b1m\u202ename"
    table = plain_table(("column",), ())
    table.add_row(hostile)
    to = console()
    to.print(table)
    to.print(f"Note: {hostile}")
    say(hostile)
    shown = capsys.readouterr()
    for text in shown:
        assert "\\x1b[2J\\x07\\x9b1m\\u202ename" in text
        assert not set(text) & set("\x1b\x07\x9b\u202e")
    say("two\nlines")
    assert capsys.readouterr().err == "two\nlines\n"


@pytest.mark.parametrize("command", [["facts"], ["fit"], ["pull"], ["fits"]])
def test_a_name_in_another_encoding_is_a_usage_error(fake_suite: Any, command: list[str]) -> None:
    result = run(*command, os.fsdecode(b"m\xff.gguf"))
    assert result.exit_code == 2
    assert "not UTF-8" in result.stderr


def test_text_streamed_before_a_failure_stands(fake_suite: Any) -> None:
    fake_suite.state.failures["Chat"] = refuse(grpc.StatusCode.UNAVAILABLE, "ENGINE_DIED")
    result = run("chat", "/m", "hi")
    assert (result.exit_code, result.stdout) == (1, "The capital is Paris.\n")
    assert "ENGINE_DIED" in result.stderr


def test_chat_json_streams_events(fake_suite: Any) -> None:
    lines = [json.loads(line) for line in run("chat", "/m", "hi", "--json").stdout.splitlines()]
    assert [next(iter(line)) for line in lines] == ["started", "delta", "delta", "finished"]
    assert lines[-1]["finished"]["usage"]["output_tokens"] == 21


@pytest.mark.parametrize(
    "command", [["capacity"], ["leases"], ["load", "/m"], ["unload"], ["ps"], ["chat", "/m", "hi"]]
)
def test_without_a_suite_the_command_says_so_and_exits_4(run_dir: Path, command: list[str]) -> None:
    result = run(*command)
    assert result.exit_code == 4
    assert "weighbridge up" in result.stderr


def test_a_run_folder_too_deep_for_sockets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_RUN_DIR", "/tmp/" + "x" * 100)
    result = run("capacity")
    assert result.exit_code == 1
    assert "Choose a shorter folder" in result.stderr

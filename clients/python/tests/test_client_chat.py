"""`chat` beyond a plain answer: thinking, tools, forms, warm-ups, and what is said while nothing comes."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from weighbridge import Suite, SyncSuite, tools_from_json
from weighbridge.answers import ANSWER_INCOMPLETE, AnswerAssembler, collected_answer, tool_result
from weighbridge.cli import chat as chat_command
from weighbridge.cli import conversation, draining, main
from weighbridge.cli.answer_display import thinking_line
from weighbridge.cli.chat_options import THINKING
from weighbridge.failures import CallError
from weighbridge.supervision.lock import RunLock
from weighbridge_proto.engines.v1 import chat_service_pb2
from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.fit.v1.fit_service_pb2 import PlanModelRequest

Delta = chat_service_pb2.ChatDelta
Piece = chat_service_pb2.ToolCallDelta
Request = chat_service_pb2.ChatRequest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"name": "get_time"}

CALLING = [
    Delta(reasoning="Weather is a tool's."),
    Delta(text="Let me look."),
    Delta(tool_call=Piece(index=0, tool_call_id="call_1", name="get_weather")),
    Delta(tool_call=Piece(index=0, arguments_json='{"city":')),
    Delta(tool_call=Piece(index=1, tool_call_id="call_2", name="get_time", arguments_json="{}")),
    Delta(tool_call=Piece(index=0, arguments_json=' "Paris"}')),
]
"""An answer that asks for two tools, pieces of both mixed."""


@pytest.fixture
def tools_file(tmp_path: Path) -> str:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([WEATHER, CLOCK]))
    return str(file)


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, ["chat", "/m", *arguments], input=stdin)


def asked(suite: Any) -> Any:
    return suite.state.asked(Request)[-1]


@pytest.mark.parametrize("level", ["off", "on", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_every_level_of_thinking_can_be_asked_for(fake_suite: Any, level: str) -> None:
    assert run("hi", "--thinking", level).exit_code == 0
    assert chat_service_pb2.Thinking.Name(asked(fake_suite).thinking) == f"THINKING_{level.upper()}"


def test_no_level_of_the_contract_is_left_out() -> None:
    assert set(THINKING.values()) == set(chat_service_pb2.Thinking.values()) - {chat_service_pb2.THINKING_UNSPECIFIED}


def test_tools_reach_the_request_as_the_contract_has_them(fake_suite: Any, tools_file: str) -> None:
    assert run("hi", "--tools", tools_file).exit_code == 0
    request = asked(fake_suite)
    assert [(tool.name, tool.description) for tool in request.tools] == [
        ("get_weather", "The weather of a place."),
        ("get_time", ""),
    ]
    assert json.loads(request.tools[0].parameters_json_schema) == WEATHER["function"]["parameters"]  # type: ignore[index]
    assert request.tools[1].parameters_json_schema == ""
    assert (request.tool_choice, request.forced_tool) == (chat_service_pb2.TOOL_CHOICE_UNSPECIFIED, "")


@pytest.mark.parametrize(
    ("said", "choice", "forced"),
    [
        ("auto", "TOOL_CHOICE_AUTO", ""),
        ("none", "TOOL_CHOICE_NONE", ""),
        ("required", "TOOL_CHOICE_REQUIRED", ""),
        ("get_time", "TOOL_CHOICE_REQUIRED", "get_time"),
    ],
)
def test_a_choice_of_tools(fake_suite: Any, tools_file: str, said: str, choice: str, forced: str) -> None:
    assert run("hi", "--tools", tools_file, "--tool-choice", said).exit_code == 0
    request = asked(fake_suite)
    assert (chat_service_pb2.ToolChoice.Name(request.tool_choice), request.forced_tool) == (choice, forced)


def test_a_choice_that_is_none_is_refused_here(fake_suite: Any, tools_file: str) -> None:
    wrong = run("hi", "--tools", tools_file, "--tool-choice", "get_rain")
    assert wrong.exit_code == 2
    assert "get_weather, get_time" in wrong.stderr
    assert run("hi", "--tool-choice", "auto").exit_code == 2
    assert fake_suite.state.asked(Request) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON"),
        ("{}", "no list"),
        ("[]", "no list"),
        ('["get_time"]', "Tool 1 is no JSON object"),
        ('[{"name": "a"}, {"type": "retrieval"}]', "Tool 2 is no function"),
        ('[{"type": "function", "function": "a"}]', "Tool 1 is no function"),
        ('[{"description": "a"}]', "Tool 1 has no name"),
        ('[{"name": "a", "description": 3}]', "Tool 1, a: its description"),
        ('[{"name": "a", "parameters": "city"}]', "Tool 1, a: its parameters"),
        ('[{"name": "a"}, {"name": "a"}]', "Two tools have the name a"),
    ],
)
def test_what_is_no_list_of_tools_is_refused_with_the_place(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tools_from_json(text)


def test_a_broken_file_of_tools_is_named(fake_suite: Any, tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_bytes(b"\xff")
    done = run("hi", "--tools", str(file))
    assert (done.exit_code, "tools.json" in done.stderr) == (2, True)


def test_calls_are_printed_whole_after_the_text_and_thinking_stays_beside(fake_suite: Any, tools_file: str) -> None:
    fake_suite.state.deltas = CALLING
    done = run("hi", "--tools", tools_file)
    assert done.stdout == 'Let me look.\nCALL      get_weather {"city": "Paris"}\nCALL      get_time {}\n'
    assert "Weather is a tool's.\n" in done.stderr
    assert "\x1b" not in done.stderr, "nothing is dimmed in a file"


def test_thinking_is_dimmed_on_a_terminal(fake_suite: Any) -> None:
    fake_suite.state.deltas = CALLING[:2]
    done = CliRunner().invoke(main, ["chat", "/m", "hi"], color=True)
    assert "\x1b[2mWeather is a tool's.\x1b[0m\n" in done.stderr


def test_thinking_that_was_cut_off_is_told_with_what_to_do(fake_suite: Any) -> None:
    fake_suite.state.deltas = [Delta(reasoning="Hm, hm")]
    fake_suite.state.ended_in_thinking = True
    done = run("hi", "--max-tokens", "1500", "--thinking", "high")
    assert done.stdout == ""
    told = done.stderr.splitlines()
    assert told[0] == "Hm, hm"
    assert told[1] == (
        "The longest answer, 1,500 tokens, was reached while the model still thought: there is no answer. "
        "Raise --max-tokens, or lower --thinking (medium or low)."
    )


def test_what_to_do_about_thinking_follows_what_was_asked() -> None:
    assert "--context" in thinking_line(Request()) and "(low or off)" in thinking_line(Request())
    least = thinking_line(Request(max_output_tokens=9, thinking=chat_service_pb2.THINKING_OFF))
    assert least.endswith("Raise --max-tokens.")
    assert "(off)" in thinking_line(Request(thinking=chat_service_pb2.THINKING_MINIMAL))


def test_the_form_of_an_answer(fake_suite: Any, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    assert run("hi").exit_code == 0
    assert not asked(fake_suite).HasField("response_format")
    assert run("hi", "--json-object").exit_code == 0
    assert asked(fake_suite).response_format.json_object
    assert run("hi", "--json-schema", str(schema)).exit_code == 0
    assert asked(fake_suite).response_format.json_schema == '{"type": "object"}'
    assert run("hi", "--json-schema", str(schema), "--json-object").exit_code == 2
    for wrong in ("{", "[]"):
        schema.write_text(wrong)
        assert run("hi", "--json-schema", str(schema)).exit_code == 2


def test_a_warm_up_reads_and_answers_nothing(fake_suite: Any) -> None:
    fake_suite.state.answer = []
    done = run("--warm-up", "--system", "Be brief.")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "Read 12 tokens. What begins like this starts sooner now." in done.stderr
    request = asked(fake_suite)
    assert request.warm_up
    assert [message.role for message in request.messages] == [chat_service_pb2.ROLE_SYSTEM]
    assert run("--warm-up").exit_code == 2


def test_the_notes_of_a_plan_are_told_with_the_load(fake_suite: Any) -> None:
    note = plan_pb2.PlanNote(code="DRAFT_UNMET", message="The drafter does not fit beside the weights.")
    fake_suite.state.plan.notes.append(note)
    done = CliRunner().invoke(main, ["load", "/m"])
    assert done.stderr.splitlines()[1] == "NOTE      The drafter does not fit beside the weights."


def test_a_model_goes_to_the_engine_of_its_plan(ds4_suite: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft.gguf").touch()
    ds4_suite.state.plan.engine_kind = plan_pb2.ENGINE_KIND_DS4
    assert run("hi", "--set", "drafter_file=draft.gguf").exit_code == 0
    (planned,) = ds4_suite.state.asked(PlanModelRequest)
    assert planned.options.ds4.drafter_file == str(tmp_path / "draft.gguf"), "a file is named as seen from here"
    (ds4_suite.run_dir / "engine-mlx.sock").unlink()
    assert run("hi").exit_code == 0, "the other engine is not needed"


def test_a_model_of_an_engine_that_does_not_run_says_how_to_start_it(image_suite: Any) -> None:
    image_suite.state.plan.engine_kind = plan_pb2.ENGINE_KIND_DS4
    done = run("hi")
    assert done.exit_code == 4
    assert "for the engine ds4" in done.stderr
    assert "weighbridge up --engines mlx,sd,ds4" in done.stderr


@pytest.mark.parametrize("suite", ["image_suite", "ds4_suite"])  # whether the engine for images runs or not
def test_a_model_that_makes_images_is_told_from_one_to_chat_with(suite: str, request: pytest.FixtureRequest) -> None:
    fakes = request.getfixturevalue(suite)
    fakes.state.plan.engine_kind = plan_pb2.ENGINE_KIND_SD
    fakes.state.plan.workload.image.width_px = 512
    done = run("hi")
    assert done.exit_code == 1
    assert "tiny makes images and does not chat. Use `weighbridge image`." in done.stderr
    assert fakes.state.asked(Request) == []


def test_an_engine_that_is_killed_during_its_answer_is_named_with_what_to_do(unstarted_suite: Any) -> None:
    unstarted_suite.state.hang_after_answer = True
    unstarted_suite.start()

    def kill() -> None:
        unstarted_suite.state.hanging.wait(60)
        unstarted_suite.stop_serving()

    killer = threading.Thread(target=kill)
    killer.start()
    done = run("hi")
    killer.join()
    unstarted_suite.stop()
    assert done.exit_code == 4
    assert done.stdout == "The capital is Paris.\n", "what came stands"
    assert "The service engine-mlx went away during the call." in done.stderr
    assert "ask again" in done.stderr and "`weighbridge doctor`" in done.stderr
    assert "[UNREACHABLE]" in done.stderr
    assert "Stream" not in done.stderr and "ocket" not in done.stderr


def test_an_engine_that_the_running_suite_starts_again_is_waited_for(image_suite: Any) -> None:
    """As after it was killed, while others run: the suite is there, and its engine will be."""

    def plan(request: PlanModelRequest) -> Any:
        image_suite.serve_soon("engine-ds4")  # no sooner: when the command looks which engines there are, it is away
        return image_suite.state.plan

    image_suite.state.plan.engine_kind = plan_pb2.ENGINE_KIND_DS4
    image_suite.state.plan_for = plan
    lock = RunLock(image_suite.run_dir, ["ledger", "fit", "engine-mlx", "engine-sd", "engine-ds4"])
    lock.acquire()
    try:
        done = run("hi")
    finally:
        lock.release()
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "The capital is Paris.\n"


def test_silence_is_explained_by_what_was_cancelled_before(fake_suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "SILENCE_S", 0.0)
    fake_suite.state.draining = 2
    done = run("hi")
    assert (done.exit_code, done.stdout) == (0, "The capital is Paris.\n")
    told = "WAITING   for 2 requests that were cancelled: the engine cannot break off"
    assert done.stderr.splitlines().count(told) == 1


def test_ps_and_top_tell_what_an_engine_cannot_be_stopped_in(fake_suite: Any) -> None:
    fake_suite.state.draining = 1
    fake_suite.state.engine_kind = plan_pb2.ENGINE_KIND_DS4
    listed = CliRunner().invoke(main, ["ps"]).stdout
    assert "ds4 still works on a request that was cancelled, and takes the next one when that is over." in listed
    assert "busy (1 cancelled)" in CliRunner().invoke(main, ["top", "--once"]).stdout
    fake_suite.state.draining = 0
    assert "cancelled" not in CliRunner().invoke(main, ["ps"]).stdout
    assert "cancelled" not in CliRunner().invoke(main, ["top", "--once"]).stdout


def test_pieces_become_the_turn_that_goes_on() -> None:
    assembler = AnswerAssembler()
    for delta in CALLING:
        assembler.take(delta)
    message = assembler.message()
    assert message.role == chat_service_pb2.ROLE_ASSISTANT
    assert ([part.text for part in message.parts], message.reasoning) == (["Let me look."], "Weather is a tool's.")
    assert [(call.tool_call_id, call.name, call.arguments_json) for call in message.tool_calls] == [
        ("call_1", "get_weather", '{"city": "Paris"}'),
        ("call_2", "get_time", "{}"),
    ]
    result = tool_result(message.tool_calls[0], "Rain.")
    assert (result.role, result.parts[0].tool_result.tool_call_id) == (chat_service_pb2.ROLE_TOOL, "call_1")


async def test_a_program_gets_the_whole_answer(fake_suite: Any) -> None:
    fake_suite.state.deltas = CALLING
    async with Suite() as suite:
        answer = await suite.engine("mlx").answer(Request())
    assert (answer.text, answer.reasoning) == ("Let me look.", "Weather is a tool's.")
    assert [call.name for call in answer.tool_calls] == ["get_weather", "get_time"]
    assert answer.finished.usage.output_tokens == 21


def test_a_program_without_asyncio_gets_it_too(fake_suite: Any) -> None:
    with SyncSuite() as suite:
        assert suite.answer("mlx", Request()).text == "The capital is Paris."


async def test_an_answer_without_an_end_is_none() -> None:
    async def events() -> Any:
        yield chat_service_pb2.ChatResponse(delta=Delta(text="The cap"))

    with pytest.raises(CallError, match=ANSWER_INCOMPLETE):
        await collected_answer(events())


async def converse(suite: Any, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> Any:
    """Say ``lines`` in a conversation and leave it; what was asked each time."""
    said = iter(lines)

    def read_line(prompt: str) -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(conversation, "_read_line", read_line)

    async def ask(engine: Any, request: Request) -> Any:
        return await chat_command.answer(engine, request, json_output=True)

    async with Suite() as opened:
        await conversation.converse(opened.engine("mlx"), Request(), ask, json_output=True)
    return suite.state.asked(Request)


async def test_a_conversation_replays_thinking_and_calls_and_asks_for_results(
    fake_suite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_suite.state.deltas = CALLING
    first, second = await converse(fake_suite, monkeypatch, ["Weather in Paris?", "Rain.", "12:00"])
    assert len(first.messages) == 1
    turns = list(second.messages)
    assert [turn.role for turn in turns] == [
        chat_service_pb2.ROLE_USER,
        chat_service_pb2.ROLE_ASSISTANT,
        chat_service_pb2.ROLE_TOOL,
        chat_service_pb2.ROLE_TOOL,
    ]
    assert turns[1].reasoning == "Weather is a tool's."
    assert [call.name for call in turns[1].tool_calls] == ["get_weather", "get_time"]
    results = [turn.parts[0].tool_result for turn in turns[2:]]
    assert [(result.tool_call_id, result.text) for result in results] == [("call_1", "Rain."), ("call_2", "12:00")]


async def test_a_question_without_an_answer_is_not_replayed(fake_suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_suite.state.ended_in_thinking = True
    first, second = await converse(fake_suite, monkeypatch, ["one", "two"])
    assert [message.parts[0].text for message in (*first.messages, *second.messages)] == ["one", "two"]

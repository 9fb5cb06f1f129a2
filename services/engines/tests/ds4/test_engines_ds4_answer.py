"""One answer of ds4, from the events of its stream. Forms of events as ds4's source writes them (May 2026)."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_engines.ds4.answer import AnswerFailedError, AnswerReader, said_in
from weighbridge_engines.ds4.sse import ServerEvent
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb

DONE = ServerEvent("", "[DONE]")


def chunk(delta=None, finish=None, **fields) -> ServerEvent:
    choices = [{"index": 0, "delta": delta or {}, "finish_reason": finish}]
    return ServerEvent("", json.dumps({"object": "chat.completion.chunk", "choices": choices, **fields}))


def usage(prompt=7, output=5, cached=3, **more) -> ServerEvent:
    told = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prompt - cached},
        **more,
    }
    return ServerEvent("", json.dumps({"object": "chat.completion.chunk", "choices": [], "usage": told}))


def call(**fields):
    return {"tool_calls": [fields]}


def read(*events) -> tuple[list[chat_pb.ChatDelta], chat_pb.ChatFinished]:
    reader = AnswerReader()
    deltas = [delta for event in events for delta in reader.take(event)]
    assert reader.is_done
    return deltas, reader.finished()


def failure(*events) -> AnswerFailedError:
    reader = AnswerReader()
    with pytest.raises(AnswerFailedError) as caught:
        for event in events:
            reader.take(event)
    return caught.value


def test_thinking_and_answer_are_told_apart():
    deltas, finished = read(
        chunk({"role": "assistant"}),
        chunk({"reasoning_content": "hm"}),
        chunk({"content": "Yes"}),
        chunk({"content": "."}),
        chunk(finish="stop"),
        usage(),
        DONE,
    )
    assert deltas == [chat_pb.ChatDelta(reasoning="hm"), chat_pb.ChatDelta(text="Yes"), chat_pb.ChatDelta(text=".")]
    assert finished.reason == chat_pb.FINISH_REASON_STOP
    told = finished.usage
    assert (told.prompt_tokens, told.cached_tokens, told.output_tokens) == (7, 3, 5)
    assert told.reasoning_tokens == 0  # thinking and answer both came, and ds4 tells them apart by text alone


def test_a_tool_call_comes_in_pieces_and_its_first_names_it():
    deltas, finished = read(
        chunk(call(index=0, id="call_1", type="function", function={"name": "look", "arguments": ""})),
        chunk(call(index=0, function={"arguments": '{"a":'})),
        chunk(call(index=0, function={"arguments": '"\\u00e9 "}'})),
        chunk(call(index=1, id="call_2", type="function", function={"name": "go", "arguments": "{}"})),
        chunk(finish="tool_calls"),
        usage(),
        DONE,
    )
    assert [each.tool_call for each in deltas] == [
        chat_pb.ToolCallDelta(index=0, tool_call_id="call_1", name="look"),
        chat_pb.ToolCallDelta(index=0, arguments_json='{"a":'),
        chat_pb.ToolCallDelta(index=0, arguments_json='"\\u00e9 "}'),
        chat_pb.ToolCallDelta(index=1, tool_call_id="call_2", name="go", arguments_json="{}"),
    ]
    assert finished.reason == chat_pb.FINISH_REASON_TOOL_CALLS


def test_several_calls_of_one_chunk_are_several_pieces():
    both = {"tool_calls": [{"index": n, "id": f"c{n}", "function": {"name": "t", "arguments": "{}"}} for n in (0, 1)]}
    deltas, _ = read(chunk(both), chunk(finish="tool_calls"), usage(), DONE)
    assert [each.tool_call.tool_call_id for each in deltas] == ["c0", "c1"]


@pytest.mark.parametrize(
    ("deltas", "finish", "in_thinking", "reasoning_tokens"),
    [
        ([{"reasoning_content": "hm"}], "length", True, 5),
        ([{"reasoning_content": "hm"}, {"content": "a"}], "length", False, 0),
        ([{"reasoning_content": "hm"}, call(index=0, id="c", function={"name": "t"})], "length", False, 0),
        ([{"content": "a"}], "length", False, 0),
        ([], "length", False, 0),
        # Ended by itself (or by a stop sequence) inside its thinking: no answer, and not for want of tokens.
        ([{"reasoning_content": "hm"}], "stop", False, 5),
    ],
)
def test_a_thought_that_was_cut_off_is_told(deltas, finish, in_thinking, reasoning_tokens):
    _, finished = read(*map(chunk, deltas), chunk(finish=finish), usage(output=5), DONE)
    assert finished.ended_in_thinking is in_thinking
    assert finished.usage.reasoning_tokens == reasoning_tokens


def test_thinking_that_is_counted_is_taken_as_counted():
    counted = usage(output=9, completion_tokens_details={"reasoning_tokens": 4})
    _, finished = read(chunk({"reasoning_content": "hm"}), chunk({"content": "a"}), chunk(finish="stop"), counted, DONE)
    assert finished.usage.reasoning_tokens == 4


def test_without_usage_an_answer_is_complete_and_uncounted():
    _, finished = read(chunk({"content": "a"}), chunk(finish="stop"), DONE)
    assert finished.usage == chat_pb.Usage()


def test_what_comes_behind_the_end_is_not_read():
    reader = AnswerReader()
    for event in (chunk(finish="stop"), DONE):
        reader.take(event)
    assert reader.take(chunk({"content": "more"})) == []


def test_an_error_event_says_what_ds4_said():
    error = ServerEvent("error", '{"error":{"message":"prompt eval failed","type":"server_error"}}')
    failed = failure(chunk({"role": "assistant"}), error)
    assert (failed.said, failed.is_over) == ("prompt eval failed", True)


def test_an_answer_that_ds4_broke_off_failed_though_an_end_follows():
    failed = failure(chunk({"content": "a"}), chunk(finish="error"), usage(), DONE)
    assert failed.is_over
    assert "broke the answer off" in str(failed)


@pytest.mark.parametrize(
    "event",
    [
        ServerEvent("", "{"),
        ServerEvent("", "no JSON"),
        ServerEvent("", "[1]"),
        ServerEvent("", "null"),
        ServerEvent("", "[" * 100_000),
        ServerEvent("", '{"choices":{}}'),
        ServerEvent("", '{"choices":["x"]}'),
        ServerEvent("", '{"choices":[{"delta":[]}]}'),
        chunk({"content": 7}),
        chunk({"reasoning_content": ["a"]}),
        chunk({"tool_calls": "x"}),
        chunk({"tool_calls": ["x"]}),
        chunk(call(index=-1, function={})),
        chunk(call(index=True, function={})),
        chunk(call(index=10**9, function={})),
        chunk(call(index=0, function="x")),
        usage(prompt=-1),
        usage(prompt=2**31),
        usage(prompt=True),
        usage(output=1.5),
        usage(prompt_tokens_details=[]),
    ],
)
def test_what_cannot_be_read_is_a_failure_of_its_own_that_quotes_nothing(event):
    failed = failure(event)
    assert "cannot be read" in str(failed)
    assert not failed.is_over
    assert failed.said == ""


def test_ends_that_are_none_are_failures():
    assert failure(chunk({"content": "a"}), DONE).is_over
    assert failure(chunk(finish="content_filter")).is_over


def test_events_with_names_that_are_not_known_are_passed_over():
    deltas, _ = read(ServerEvent("progress", '{"done":1}'), chunk({"content": "a"}), chunk(finish="stop"), DONE)
    assert deltas == [chat_pb.ChatDelta(text="a")]


def test_halves_of_surrogate_pairs_become_text_that_can_be_sent():
    deltas, _ = read(chunk({"content": "a\ud800b\U0001f600"}), chunk(finish="stop"), DONE)
    assert deltas == [chat_pb.ChatDelta(text="a\ufffdb\U0001f600")]


KEYS = ["choices", "delta", "content", "tool_calls", "index", "function", "usage", "finish_reason", "error"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3) | JSON)
def test_whatever_json_comes_it_is_read_or_refused(content):
    reader = AnswerReader()
    try:
        reader.take(ServerEvent("", json.dumps(content)))
    except AnswerFailedError as failed:
        assert str(failed)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"error": {"message": "no"}}, "no"),
        ({"error": "no"}, "no"),
        ({"error": {"message": 3}}, ""),
        ({}, ""),
        (None, ""),
        ({"error": {"message": "x" * 5000}}, "x" * 300),
    ],
)
def test_what_an_error_says_is_short(content, said):
    assert said_in(content) == said

"""What ds4 is sent for a chat, and what is refused because ds4 would ignore it without a word."""

import base64
import json

import grpc
import pytest
from weighbridge_engines.ds4 import requests
from weighbridge_engines.ds4.served import Served
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.errors import RequestError

MAY = Served(model_name="flash", context_tokens=32_768)
SEEING = Served(model_name="flash", context_tokens=32_768, sees=True)
LATER = Served(model_name="flash", context_tokens=32_768, samples_while_thinking=True)
PNG = b"\x89PNG\r\n\x1a\n-rest"


def said(text="Hi", role=chat_pb.ROLE_USER, **fields):
    return chat_pb.ChatMessage(role=role, parts=[chat_pb.ContentPart(text=text)], **fields)


def result(call_id, text="22", role=chat_pb.ROLE_TOOL):
    part = chat_pb.ContentPart(tool_result=chat_pb.ToolResultPart(tool_call_id=call_id, text=text))
    return chat_pb.ChatMessage(role=role, parts=[part])


def shown(data=PNG, media_type="image/png", role=chat_pb.ROLE_USER):
    part = chat_pb.ContentPart(image=chat_pb.ImagePart(data=data, media_type=media_type))
    return chat_pb.ChatMessage(role=role, parts=[chat_pb.ContentPart(text="What is it?"), part])


def asked(*messages, **fields) -> chat_pb.ChatRequest:
    return chat_pb.ChatRequest(messages=messages or [said()], **fields)


def body(request, served=MAY, **more):
    return json.loads(requests.render(request, served, **more))


def refusal(request, served=MAY):
    with pytest.raises(RequestError) as caught:
        requests.render(request, served)
    assert caught.value.failure.code is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.failure


def test_an_answer_is_always_streamed_and_counted():
    assert body(asked()) == {
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_everything_that_is_asked_for_is_sent():
    sent = body(
        asked(
            said("Be brief.", chat_pb.ROLE_SYSTEM),
            said(),
            sampling=chat_pb.Sampling(temperature=0.0, top_p=0.5, top_k=7, min_p=0.25, seed=2**53 - 1),
            max_output_tokens=9,
            stop_sequences=["\n\n", "END"],
            thinking=chat_pb.THINKING_OFF,
        )
    )
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["min_p"]) == (0.0, 0.5, 7, 0.25)
    assert (sent["seed"], sent["max_tokens"], sent["stop"]) == (9007199254740991, 9, ["\n\n", "END"])
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]


def test_history_goes_back_as_it_came():
    # Spaces, the order of keys and escapes are the model's own: ds4 finds its prefix only by the same bytes.
    arguments = '{"b" : 1,\t"a": "\\u00e9\u20ac"}'
    call = chat_pb.ToolCall(tool_call_id="call_0f", name="look", arguments_json=arguments)
    other = chat_pb.ToolCall(tool_call_id="call_1f", name="look", arguments_json="")
    turn = said("One moment.", chat_pb.ROLE_ASSISTANT, reasoning="hm\n", tool_calls=[call, other])
    results = result("call_0f")
    results.parts.extend(result("call_1f", "23").parts)
    sent = body(asked(said(), turn, results))["messages"]
    assert sent[1] == {
        "role": "assistant",
        "content": "One moment.",
        "reasoning_content": "hm\n",
        "tool_calls": [
            {"id": "call_0f", "type": "function", "function": {"name": "look", "arguments": arguments}},
            {"id": "call_1f", "type": "function", "function": {"name": "look", "arguments": ""}},
        ],
    }
    assert sent[2:] == [
        {"role": "tool", "tool_call_id": "call_0f", "content": "22"},
        {"role": "tool", "tool_call_id": "call_1f", "content": "23"},
    ]


@pytest.mark.parametrize(
    ("level", "thinks", "effort"),
    [
        (chat_pb.THINKING_OFF, False, "none"),
        (chat_pb.THINKING_ON, True, None),
        (chat_pb.THINKING_MINIMAL, True, "minimal"),
        (chat_pb.THINKING_LOW, True, "low"),
        (chat_pb.THINKING_MEDIUM, True, "medium"),
        (chat_pb.THINKING_HIGH, True, "high"),
        (chat_pb.THINKING_XHIGH, True, "xhigh"),
    ],
)
def test_thinking_is_said_in_every_spelling(level, thinks, effort):
    sent = body(asked(thinking=level))
    assert sent["think"] is thinks
    assert sent["thinking"] == {"type": "enabled" if thinks else "disabled"}
    assert sent["chat_template_kwargs"] == {"enable_thinking": thinks}
    assert sent.get("reasoning_effort") == effort


def test_thinking_that_is_not_said_is_the_models_default():
    assert body(asked()).keys().isdisjoint({"think", "thinking", "reasoning_effort", "chat_template_kwargs"})


def test_the_deepest_thinking_needs_the_context_that_ds4_thinks_so_deep_with():
    deepest = asked(thinking=chat_pb.THINKING_MAX)
    # Below 393,216 tokens ds4 thinks "high" without a word (facts, May 2026).
    refused = refusal(deepest, Served(model_name="m", context_tokens=393_215))
    assert refused.reason == "UNSUPPORTED_THINKING"
    assert dict(refused.metadata) == {"context_tokens": "393215", "needed_context_tokens": "393216"}
    assert body(deepest, Served(model_name="m", context_tokens=393_216))["reasoning_effort"] == "max"
    anywhere = Served(model_name="m", context_tokens=4096, max_thinking_context=0)
    assert body(deepest, anywhere)["reasoning_effort"] == "max"


def test_a_level_that_is_not_known_is_refused():
    assert refusal(asked(thinking=99)).reason == "UNSUPPORTED_THINKING"


def test_tools_are_sent_with_their_schemas_as_they_are():
    schema = '{"type":"object","properties":{"z":{"type":"string","default":"\\u20ac"},"a":{"minimum":1.0}}}'
    sent = body(asked(tools=[chat_pb.Tool(name="look", description="Looks.", parameters_json_schema=schema)]))
    function = sent["tools"][0]["function"]
    assert sent["tools"][0]["type"] == "function"
    assert (function["name"], function["description"]) == ("look", "Looks.")
    assert function["parameters"] == json.loads(schema)
    assert list(function["parameters"]["properties"]) == ["z", "a"]
    assert "tool_choice" not in sent


def test_a_tool_without_a_schema_takes_no_arguments():
    sent = body(asked(tools=[chat_pb.Tool(name="now")]))
    assert sent["tools"][0]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_tools_that_must_not_be_called_are_said_to_be_so():
    tools = [chat_pb.Tool(name="now")]
    assert body(asked(tools=tools, tool_choice=chat_pb.TOOL_CHOICE_NONE))["tool_choice"] == "none"
    assert "tool_choice" not in body(asked(tools=tools, tool_choice=chat_pb.TOOL_CHOICE_AUTO))


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        "[]",
        '"x"',
        "NaN",
        '{"a":NaN}',
        '{"a":1e999}',
        '{"a":"\\ud800"}',
        "[" * 100_000,
        '{"a":' * 201 + "1" + "}" * 201,
    ],
)
def test_a_schema_that_ds4_could_not_read_is_refused(schema):
    refused = refusal(asked(tools=[chat_pb.Tool(name="t", parameters_json_schema=schema)]))
    assert refused.reason == "UNSUPPORTED_CONTENT"
    assert refused.field_violations[0][0] == "tools[0].parameters_json_schema"


def test_a_schema_may_be_nested_200_deep():
    schema = '{"a":' * 200 + "1" + "}" * 200
    assert body(asked(tools=[chat_pb.Tool(name="t", parameters_json_schema=schema)]))["tools"]


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"tool_choice": chat_pb.TOOL_CHOICE_REQUIRED}, "UNSUPPORTED_TOOL_CHOICE", "tool_choice"),
        ({"forced_tool": "t"}, "UNSUPPORTED_TOOL_CHOICE", "forced_tool"),
        ({"tool_choice": chat_pb.TOOL_CHOICE_NONE, "forced_tool": "t"}, "UNSUPPORTED_TOOL_CHOICE", "forced_tool"),
        ({"response_format": {"json_object": True}}, "UNSUPPORTED_RESPONSE_FORMAT", "response_format"),
        ({"response_format": {"json_schema": "{}"}}, "UNSUPPORTED_RESPONSE_FORMAT", "response_format"),
        ({"adapter": "a"}, "UNSUPPORTED_CONTENT", "adapter"),
        ({"tools": [chat_pb.Tool()]}, "UNSUPPORTED_CONTENT", "tools[0].name"),
        ({"tools": [chat_pb.Tool(name="t", description="a\0b")]}, "UNSUPPORTED_CONTENT", "tools[0].description"),
        ({"max_output_tokens": -1}, "INVALID_SAMPLING", "max_output_tokens"),
        ({"stop_sequences": [""]}, "INVALID_SAMPLING", "stop_sequences"),
        ({"stop_sequences": ["x" * 1025]}, "INVALID_SAMPLING", "stop_sequences"),
        ({"stop_sequences": ["a\0"]}, "INVALID_SAMPLING", "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "INVALID_SAMPLING", "stop_sequences"),
        ({"sampling": {"repetition_penalty": 1.1}}, "INVALID_SAMPLING", "sampling.repetition_penalty"),
        ({"sampling": {"presence_penalty": 0.1}}, "INVALID_SAMPLING", "sampling.presence_penalty"),
        ({"sampling": {"frequency_penalty": -0.1}}, "INVALID_SAMPLING", "sampling.frequency_penalty"),
        ({"sampling": {"temperature": -0.1}}, "INVALID_SAMPLING", "sampling.temperature"),
        ({"sampling": {"temperature": float("nan")}}, "INVALID_SAMPLING", "sampling.temperature"),
        ({"sampling": {"temperature": float("inf")}}, "INVALID_SAMPLING", "sampling.temperature"),
        ({"sampling": {"top_p": 0.0}}, "INVALID_SAMPLING", "sampling.top_p"),
        ({"sampling": {"top_p": 1.1}}, "INVALID_SAMPLING", "sampling.top_p"),
        ({"sampling": {"top_k": -1}}, "INVALID_SAMPLING", "sampling.top_k"),
        ({"sampling": {"min_p": 1.5}}, "INVALID_SAMPLING", "sampling.min_p"),
        ({"sampling": {"seed": 0}}, "INVALID_SAMPLING", "sampling.seed"),
        ({"sampling": {"seed": -1}}, "INVALID_SAMPLING", "sampling.seed"),
        ({"sampling": {"seed": 2**53}}, "INVALID_SAMPLING", "sampling.seed"),
    ],
)
def test_what_ds4_would_ignore_is_refused_before_a_model_is_loaded(fields, reason, field):
    request = asked(thinking=chat_pb.THINKING_OFF, **fields)
    refused = refusal(request)
    assert refused.reason == reason
    assert [name for name, _ in refused.field_violations] == [field]
    with pytest.raises(RequestError, match=reason):
        requests.check(request)


def test_penalties_that_change_nothing_are_no_reason_to_refuse():
    neutral = chat_pb.Sampling(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    assert "repetition_penalty" not in body(asked(sampling=neutral))


@pytest.mark.parametrize(
    ("field", "value", "forced"),
    [("temperature", 0.7, 1.0), ("top_p", 0.9, 1.0), ("top_k", 40, 0), ("min_p", 0.1, 0.05)],
)
@pytest.mark.parametrize("level", [chat_pb.THINKING_UNSPECIFIED, chat_pb.THINKING_ON, chat_pb.THINKING_LOW])
def test_sampling_that_a_build_ignores_while_the_model_thinks_is_refused(field, value, forced, level):
    request = asked(sampling=chat_pb.Sampling(**{field: value}), thinking=level)
    refused = refusal(request)
    assert refused.reason == "INVALID_SAMPLING"
    assert refused.field_violations[0][0] == f"sampling.{field}"
    assert body(request, LATER)[field] == value
    request.thinking = chat_pb.THINKING_OFF
    assert body(request)[field] == value
    # What it draws with anyway may be asked for.
    assert body(asked(sampling=chat_pb.Sampling(**{field: forced}), thinking=level))[field] == forced


@pytest.mark.parametrize(
    ("messages", "reason", "field"),
    [
        ([said("  ")], "EMPTY_CONVERSATION", "messages"),
        ([chat_pb.ChatMessage(role=chat_pb.ROLE_USER)], "EMPTY_CONVERSATION", "messages"),
        ([said(role=chat_pb.ROLE_UNSPECIFIED)], "UNSUPPORTED_CONTENT", "messages[0]"),
        ([said(), said("Hello", chat_pb.ROLE_ASSISTANT)], "UNSUPPORTED_CONTENT", "messages[1]"),
        ([said("Be brief.", chat_pb.ROLE_SYSTEM)], "UNSUPPORTED_CONTENT", "messages[0]"),
        ([said(reasoning="hm")], "UNSUPPORTED_CONTENT", "messages[0]"),
        ([said(tool_calls=[chat_pb.ToolCall(tool_call_id="c", name="t")])], "UNSUPPORTED_CONTENT", "messages[0]"),
        ([said("a\0b")], "UNSUPPORTED_CONTENT", "messages[0].parts[0].text"),
        ([said(), result("call_9")], "UNSUPPORTED_CONTENT", "messages[1].parts[0].tool_result.tool_call_id"),
        ([said(), said("22", chat_pb.ROLE_TOOL)], "UNSUPPORTED_CONTENT", "messages[1].parts[0]"),
        ([said(), chat_pb.ChatMessage(role=chat_pb.ROLE_TOOL)], "UNSUPPORTED_CONTENT", "messages[1]"),
        ([said(), result("c", role=chat_pb.ROLE_USER)], "UNSUPPORTED_CONTENT", "messages[1].parts[0]"),
        (
            [said(), said("x", chat_pb.ROLE_ASSISTANT, tool_calls=[chat_pb.ToolCall(name="t")]), said()],
            "UNSUPPORTED_CONTENT",
            "messages[1].tool_calls[0]",
        ),
        (
            [said(), said("x", chat_pb.ROLE_ASSISTANT, reasoning="a\0"), said()],
            "UNSUPPORTED_CONTENT",
            "messages[1].reasoning",
        ),
    ],
)
def test_a_conversation_that_ds4_would_read_otherwise_is_refused(messages, reason, field):
    refused = refusal(chat_pb.ChatRequest(messages=messages))
    assert refused.reason == reason
    assert [name for name, _ in refused.field_violations] == [field]


def test_a_call_that_comes_after_its_result_is_none():
    call = chat_pb.ToolCall(tool_call_id="c", name="t")
    turns = [said(), result("c"), said("", chat_pb.ROLE_ASSISTANT, tool_calls=[call]), said()]
    assert refusal(chat_pb.ChatRequest(messages=turns)).reason == "UNSUPPORTED_CONTENT"


def test_images_are_sent_where_a_vision_companion_is_loaded():
    sent = body(asked(shown()), SEEING)["messages"][0]["content"]
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert sent == [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    refused = refusal(asked(shown()))
    assert refused.reason == "UNSUPPORTED_CONTENT"
    assert "vision" in refused.message


@pytest.mark.parametrize(
    "messages",
    [
        [shown(media_type="image/gif")],
        [shown(data=b"GIF89a")],
        [shown(media_type="image/jpeg")],
        [shown(role=chat_pb.ROLE_SYSTEM), said()],
        [shown() for _ in range(17)],
    ],
)
def test_images_that_ds4_could_not_read_are_refused(messages):
    assert refusal(chat_pb.ChatRequest(messages=messages), SEEING).reason == "UNSUPPORTED_CONTENT"


def test_sixteen_images_are_taken():
    assert body(asked(*(shown() for _ in range(16))), SEEING)


def test_a_warm_up_is_read_as_the_real_request_would_be():
    real = asked(
        said("Be brief.", chat_pb.ROLE_SYSTEM),
        said(),
        tools=[chat_pb.Tool(name="now")],
        thinking=chat_pb.THINKING_LOW,
        max_output_tokens=9,
    )
    warm = chat_pb.ChatRequest()
    warm.CopyFrom(real)
    warm.warm_up = True
    assert body(warm, max_tokens=0) == {**body(real), "max_tokens": 0}


def test_a_warm_up_needs_no_question():
    instructions = said("Be brief.", chat_pb.ROLE_SYSTEM)
    assert body(asked(instructions, warm_up=True), max_tokens=0)["messages"] == [
        {"role": "system", "content": "Be brief."}
    ]


def test_a_request_larger_than_ds4_reads_is_refused(monkeypatch):
    monkeypatch.setattr(requests, "MOST_BODY_BYTES", 1000)
    assert refusal(asked(said("x" * 1000))).reason == "UNSUPPORTED_CONTENT"

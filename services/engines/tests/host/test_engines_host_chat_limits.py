"""Bounds on the pieces of a chat. The numbers are the contract's, in the comments of chat_service.proto."""

import grpc
import pytest
from weighbridge_engines.host.chat_limits import refuse_too_many
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.errors import RequestError

EMPTY = chat_pb.ChatMessage(role=chat_pb.ROLE_USER)
PART = chat_pb.ContentPart(text="a")
CALL = chat_pb.ToolCall(tool_call_id="c", name="t")


def messages(count):
    return chat_pb.ChatRequest(messages=[EMPTY] * count)


def parts(count):
    """In two messages, some of them tool calls."""
    said = chat_pb.ChatMessage(role=chat_pb.ROLE_USER, parts=[PART] * 10)
    called = chat_pb.ChatMessage(role=chat_pb.ROLE_ASSISTANT, parts=[PART] * (count - 15), tool_calls=[CALL] * 5)
    return chat_pb.ChatRequest(messages=[said, called])


def tools(count):
    return chat_pb.ChatRequest(messages=[EMPTY], tools=[chat_pb.Tool(name="t")] * count)


BOUNDS = [
    (messages, 16_384, "messages", "TOO_MANY_MESSAGES"),
    (parts, 65_536, "messages", "TOO_MANY_PARTS"),
    (tools, 1_024, "tools", "TOO_MANY_TOOLS"),
]


@pytest.mark.parametrize(("made_of", "limit", "field", "reason"), BOUNDS)
def test_one_more_than_the_limit_is_refused_and_the_limit_is_not(made_of, limit, field, reason):
    refuse_too_many(made_of(limit))
    with pytest.raises(RequestError) as caught:
        refuse_too_many(made_of(limit + 1))
    failure = caught.value.failure
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert failure.metadata == {"given": str(limit + 1), "limit": str(limit)}
    assert failure.message.startswith(f"{field}: a chat may have at most {limit:,} ")

"""Failures as exit codes (design: 0 done, 1 failed, 2 usage, 3 refused, 4 unreachable)."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from weighbridge.failures import MESSAGE_TOO_LARGE, CallError, exit_code, unreachable, verdict_exit_code
from weighbridge_proto.channel import MAX_MESSAGE_BYTES, MESSAGE_OPTIONS
from weighbridge_proto.engines.v1 import chat_service_pb2, chat_service_pb2_grpc
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.memory.v1 import requirement_pb2

CODE = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (CODE.FAILED_PRECONDITION, "MODEL_WONT_RUN", 3),
        (CODE.FAILED_PRECONDITION, "CLAIM_EXCEEDS_CAPACITY", 3),
        (CODE.RESOURCE_EXHAUSTED, "QUEUE_FULL", 3),
        (CODE.DEADLINE_EXCEEDED, "ADMISSION_TIMED_OUT", 3),
        (CODE.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS", 3),
        (CODE.UNAVAILABLE, "UNREACHABLE", 4),
        (CODE.UNAVAILABLE, "LEDGER_UNREACHABLE", 4),
        (CODE.UNAVAILABLE, "FIT_UNREACHABLE", 4),
        (CODE.UNAVAILABLE, "ENGINE_DIED", 1),
        (CODE.NOT_FOUND, "MODEL_NOT_FOUND", 1),
        (CODE.INVALID_ARGUMENT, "MALFORMED_WEIGHTS", 1),
        (CODE.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", 1),
        (CODE.RESOURCE_EXHAUSTED, "ENGINE_OUT_OF_MEMORY", 1),
        (CODE.UNIMPLEMENTED, "UNIMPLEMENTED", 1),
    ],
)
def test_each_reason_has_its_exit_code(code: grpc.StatusCode, reason: str, expected: int) -> None:
    assert exit_code(RpcFailure(code, reason, "")) == expected


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (requirement_pb2.VERDICT_RUNS, 0),
        (requirement_pb2.VERDICT_TIGHT, 0),
        (requirement_pb2.VERDICT_UNKNOWN, 0),
        (requirement_pb2.VERDICT_WONT_RUN, 3),
    ],
)
def test_only_wont_run_is_a_refusal(verdict: "requirement_pb2.Verdict.ValueType", expected: int) -> None:
    assert verdict_exit_code(verdict) == expected


def test_unreachable_says_who_where_and_what_to_do() -> None:
    failure = unreachable("ledger", "unix:/run/ledger.sock").failure
    assert exit_code(failure) == 4
    assert "ledger" in failure.message
    assert "unix:/run/ledger.sock" in failure.message
    assert "weighbridge up" in failure.message


class Echo(chat_service_pb2_grpc.ChatServiceServicer):
    """Answers with as many letters as it is asked for."""

    async def Chat(self, request: Any, context: Any) -> AsyncIterator[chat_service_pb2.ChatResponse]:  # noqa: N802
        text = "x" * request.max_output_tokens
        yield chat_service_pb2.ChatResponse(delta=chat_service_pb2.ChatDelta(text=text))


@pytest.mark.parametrize(
    ("client_limit", "server_sends", "request_bytes", "answer_bytes", "said"),
    [
        (MAX_MESSAGE_BYTES, -1, MAX_MESSAGE_BYTES, 1, "The request is too large: it has 32.0 MiB"),
        (-1, -1, MAX_MESSAGE_BYTES, 1, "The request is too large: it has 32.0 MiB"),
        (MAX_MESSAGE_BYTES, -1, 1, 40 << 20, "The answer is too large: it has 40.0 MiB"),
        (-1, MAX_MESSAGE_BYTES, 1, 40 << 20, "The answer is too large: it has 40.0 MiB"),
    ],
)
async def test_a_message_that_grpc_turns_away_is_told_in_words_of_people(
    client_limit: int, server_sends: int, request_bytes: int, answer_bytes: int, said: str
) -> None:
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", server_sends),
        ]
    )
    chat_service_pb2_grpc.add_ChatServiceServicer_to_server(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sizes = ("grpc.max_send_message_length", "grpc.max_receive_message_length")
    options = [(name, client_limit if name in sizes else value) for name, value in MESSAGE_OPTIONS]
    request = chat_service_pb2.ChatRequest(adapter="x" * request_bytes, max_output_tokens=answer_bytes)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        with pytest.raises(grpc.RpcError) as turned_away:
            async for _ in chat_service_pb2_grpc.ChatServiceStub(channel).Chat(request):
                pass
    await server.stop(None)
    failure = CallError.from_rpc_error(turned_away.value).failure
    assert (failure.code, failure.reason) == (CODE.RESOURCE_EXHAUSTED, MESSAGE_TOO_LARGE)
    assert said in failure.message and "takes 32.0 MiB" in failure.message

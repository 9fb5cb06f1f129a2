"""An answer out of the pieces in which it comes."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
from weighbridge_proto.engines.v1 import chat_service_pb2
from weighbridge_proto.errors import RpcFailure

from weighbridge.failures import CallError

ANSWER_INCOMPLETE = "ANSWER_INCOMPLETE"
"""Reason of a stream that ended well and did not say that the answer was over."""


@dataclass(frozen=True)
class Answer:
    """One whole answer.

    Attributes:
        message: what the model said, as the turn of a conversation that goes on: with its thinking and its calls of
            tools, so that the engine finds again what it has computed.
        finished: why it ended and what it took. ``ended_in_thinking`` says that there is thinking alone.
    """

    message: chat_service_pb2.ChatMessage
    finished: chat_service_pb2.ChatFinished

    @property
    def text(self) -> str:
        """What the model said."""
        return "".join(part.text for part in self.message.parts)

    @property
    def reasoning(self) -> str:
        """What it thought before."""
        return self.message.reasoning

    @property
    def tool_calls(self) -> tuple[chat_service_pb2.ToolCall, ...]:
        """The tools that it asks for."""
        return tuple(self.message.tool_calls)


class AnswerAssembler:
    """Puts the pieces of one answer together."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, chat_service_pb2.ToolCall] = {}
        self._arguments: dict[int, list[str]] = {}

    def take(self, delta: chat_service_pb2.ChatDelta) -> None:
        """One more piece."""
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        if delta.HasField("tool_call"):
            piece = delta.tool_call
            call = self._calls.setdefault(piece.index, chat_service_pb2.ToolCall())
            call.tool_call_id = call.tool_call_id or piece.tool_call_id
            call.name = call.name or piece.name
            self._arguments.setdefault(piece.index, []).append(piece.arguments_json)

    def message(self) -> chat_service_pb2.ChatMessage:
        """What has come so far, as the model's turn."""
        text = "".join(self._text)
        calls = [
            chat_service_pb2.ToolCall(
                tool_call_id=call.tool_call_id, name=call.name, arguments_json="".join(self._arguments[index])
            )
            for index, call in sorted(self._calls.items())
        ]
        return chat_service_pb2.ChatMessage(
            role=chat_service_pb2.ROLE_ASSISTANT,
            parts=[chat_service_pb2.ContentPart(text=text)] if text else [],
            tool_calls=calls,
            reasoning="".join(self._reasoning),
        )


async def collected_answer(events: AsyncIterator[chat_service_pb2.ChatResponse]) -> Answer:
    """An answer, when all of it has come.

    Raises:
        CallError: as the events do, or the stream ended without the answer's end (ANSWER_INCOMPLETE).
    """
    assembler = AnswerAssembler()
    finished: chat_service_pb2.ChatFinished | None = None
    async for event in events:
        kind = event.WhichOneof("event")
        if kind == "delta":
            assembler.take(event.delta)
        elif kind == "finished":
            finished = event.finished
    if finished is None:
        message = "The engine ended the stream before the answer was finished."
        raise CallError(RpcFailure(grpc.StatusCode.DATA_LOSS, ANSWER_INCOMPLETE, message))
    return Answer(assembler.message(), finished)


def tool_result(call: chat_service_pb2.ToolCall, text: str) -> chat_service_pb2.ChatMessage:
    """The turn that answers ``call`` with ``text``."""
    result = chat_service_pb2.ToolResultPart(tool_call_id=call.tool_call_id, text=text)
    part = chat_service_pb2.ContentPart(tool_result=result)
    return chat_service_pb2.ChatMessage(role=chat_service_pb2.ROLE_TOOL, parts=[part])

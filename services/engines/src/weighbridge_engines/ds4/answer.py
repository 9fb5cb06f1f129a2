"""One answer of ds4, put together from the events of its stream (OpenAI's ``chat.completion.chunk``).

ds4 says of an end only ``stop``, ``length``, ``tool_calls`` or ``error``. A stop sequence that came and an answer that
the model ended are both ``stop``, its text is cut before the sequence, and no line of its output tells them apart (May
2026): so FINISH_REASON_STOP_SEQUENCE never comes of this engine. It looks for stop sequences in the thinking too.
"""

import json
from typing import Any

from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb

from weighbridge_engines.ds4.sse import ServerEvent

LAST_DATA = "[DONE]"
"""Ends every answer that was not cut off."""

MOST_SAID_CHARS = 300
"""How much of what ds4 says of a failure is passed on. Its own texts are shorter."""

LARGEST_COUNT = 2**31 - 1
LARGEST_CALL_INDEX = 10_000
"""Far beyond any answer, so that a wrong number is one."""

_FINISH = {
    "stop": chat_pb.FINISH_REASON_STOP,
    "length": chat_pb.FINISH_REASON_LENGTH,
    "tool_calls": chat_pb.FINISH_REASON_TOOL_CALLS,
}


class AnswerFailedError(Exception):
    """The answer ended in a failure, or cannot be read.

    Attributes:
        said: ds4's own words; empty: none came.
        is_over: whether ds4 is done with the request. Where it is not, it goes on with an answer that nobody can read.
    """

    def __init__(self, message: str, said: str = "", *, is_over: bool) -> None:
        super().__init__(message)
        self.said = said
        self.is_over = is_over


class AnswerReader:
    """See the module: fed with one answer's events, in order.

    Attributes:
        is_done: whether the answer is complete. Nothing is read after it.
        usage: tokens, as soon as ds4 has told them; times and bytes are not its to tell.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.usage: chat_pb.Usage | None = None
        self._reason: chat_pb.FinishReason.ValueType = chat_pb.FINISH_REASON_UNSPECIFIED
        self._told_reasoning_tokens: int | None = None
        self._has_reasoning = False
        self._has_answer = False

    def take(self, event: ServerEvent) -> list[chat_pb.ChatDelta]:
        """What an event adds to the answer.

        Raises:
            AnswerFailedError: see there.
        """
        if self.is_done:
            return []
        if event.data == LAST_DATA and not event.name:
            if self._reason == chat_pb.FINISH_REASON_UNSPECIFIED:
                raise AnswerFailedError("the answer ended and ds4 did not say why", is_over=True)
            self.is_done = True
            return []
        content = _object(event.data)
        if event.name == "error" or "error" in content:
            raise AnswerFailedError("ds4 failed while it read the prompt or answered", said_in(content), is_over=True)
        if event.name:
            return []  # an event of a later build, which answers to chats do not have today
        if (usage := content.get("usage")) is not None:
            self._take_usage(usage)
        choices = content.get("choices", [])
        if not isinstance(choices, list):
            raise _unreadable("choices is no list")
        return self._take_choice(choices[0]) if choices else []

    def finished(self) -> chat_pb.ChatFinished:
        """The end of a complete answer, without the times that it took."""
        reason = self._reason
        finished = chat_pb.ChatFinished(
            reason=reason,
            ended_in_thinking=reason == chat_pb.FINISH_REASON_LENGTH and self._has_reasoning and not self._has_answer,
        )
        finished.usage.CopyFrom(self.usage or chat_pb.Usage())
        finished.usage.reasoning_tokens = self._reasoning_tokens(finished.usage.output_tokens)
        return finished

    def _reasoning_tokens(self, output_tokens: int) -> int:
        """As ds4 tells, else all where all is thinking. It does not tell in May 2026; pieces of text are not tokens."""
        if self._told_reasoning_tokens is not None:
            return min(self._told_reasoning_tokens, output_tokens)
        return output_tokens if self._has_reasoning and not self._has_answer else 0

    def _take_usage(self, usage: Any) -> None:
        counted = chat_pb.Usage(
            prompt_tokens=_count(usage, "prompt_tokens"),
            cached_tokens=_count(_part(usage, "prompt_tokens_details"), "cached_tokens"),
            output_tokens=_count(usage, "completion_tokens"),
        )
        details = _part(usage, "completion_tokens_details")
        if "reasoning_tokens" in details:
            self._told_reasoning_tokens = _count(details, "reasoning_tokens")
        self.usage = counted

    def _take_choice(self, choice: Any) -> list[chat_pb.ChatDelta]:
        delta = _part(choice, "delta")
        found = []
        reasoning, text = _text(delta, "reasoning_content"), _text(delta, "content")
        if reasoning:
            self._has_reasoning = True
            found.append(chat_pb.ChatDelta(reasoning=reasoning))
        if text:
            self._has_answer = True
            found.append(chat_pb.ChatDelta(text=text))
        calls = delta.get("tool_calls") or []
        if not isinstance(calls, list):
            raise _unreadable("tool_calls is no list")
        for call in calls:
            self._has_answer = True
            found.append(chat_pb.ChatDelta(tool_call=_call(call)))
        self._take_finish(choice.get("finish_reason"))
        return found

    def _take_finish(self, finish: object) -> None:
        if finish is None:
            return
        if finish == "error":
            raise AnswerFailedError("ds4 broke the answer off", is_over=True)
        if not isinstance(finish, str) or finish not in _FINISH:
            raise AnswerFailedError("ds4 ended the answer for a reason that is not known here", is_over=True)
        self._reason = _FINISH[finish]


def said_in(content: object) -> str:
    """What the body of an error says; empty: nothing."""
    error = content.get("error") if isinstance(content, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    return _clean(said)[:MOST_SAID_CHARS] if isinstance(said, str) else ""


def _call(call: object) -> chat_pb.ToolCallDelta:
    if not isinstance(call, dict):
        raise _unreadable("a tool call is no object")
    index, function = call.get("index", 0), _part(call, "function")
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index <= LARGEST_CALL_INDEX:
        raise _unreadable("a tool call's index is no number of one")
    return chat_pb.ToolCallDelta(
        index=index,
        tool_call_id=_text(call, "id"),
        name=_text(function, "name"),
        arguments_json=_text(function, "arguments"),
    )


def _object(data: str) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _unreadable("an event is no JSON") from error
    if not isinstance(content, dict):
        raise _unreadable("an event is no object")
    return content


def _part(container: object, name: str) -> dict[str, Any]:
    """An object in an object; absent and null are an empty one."""
    if not isinstance(container, dict):
        raise _unreadable(f"what should hold {name} is no object")
    part = container.get(name)
    if part is not None and not isinstance(part, dict):
        raise _unreadable(f"{name} is no object")
    return part or {}


def _text(container: dict[str, Any], name: str) -> str:
    text = container.get(name)
    if text is not None and not isinstance(text, str):
        raise _unreadable(f"{name} is no text")
    return _clean(text or "")


def _clean(text: str) -> str:
    """JSON can hold halves of a surrogate pair; Unicode text, and protobuf's, cannot."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _count(container: object, name: str) -> int:
    value = container.get(name, 0) if isinstance(container, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST_COUNT:
        raise _unreadable(f"{name} is no count of tokens")
    return value


def _unreadable(why: str) -> AnswerFailedError:
    return AnswerFailedError(f"ds4's answer cannot be read: {why}", is_over=False)

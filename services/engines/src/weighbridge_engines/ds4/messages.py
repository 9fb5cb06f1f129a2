"""A conversation as ds4 takes it: OpenAI's messages, refused where ds4 would drop a part of them without a word.

What the model thought goes back as ``reasoning_content``, ids of tool calls unchanged and their arguments byte for
byte: only then is the prompt the one that ds4 still holds, and need not be computed again.
"""

import base64
from collections.abc import Iterable, Sequence
from typing import Any

from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.errors import RequestError, invalid_argument

MOST_IMAGES = 16
"""That a vision build takes in one request (upstream's documentation, September 2026)."""

IMAGE_BEGINNINGS = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff", "image/webp": b"RIFF"}
"""Media types, and how the bytes of such a file begin."""

_ROLES = {
    chat_pb.ROLE_SYSTEM: "system",
    chat_pb.ROLE_USER: "user",
    chat_pb.ROLE_ASSISTANT: "assistant",
    chat_pb.ROLE_TOOL: "tool",
}


def check(messages: Sequence[chat_pb.ChatMessage], *, needs_a_question: bool) -> None:
    """Refuse a conversation that ds4 would read otherwise than it is meant.

    Args:
        needs_a_question: whether an answer is wanted. ds4 gives the model its turn only after a user or a tool.

    Raises:
        RequestError: INVALID_ARGUMENT EMPTY_CONVERSATION, UNSUPPORTED_CONTENT.
    """
    if not any(_says_something(message) for message in messages):
        raise invalid_argument("messages", "the conversation holds nothing to read", "EMPTY_CONVERSATION")
    called: set[str] = set()
    images = 0
    for number, message in enumerate(messages):
        path = f"messages[{number}]"
        if message.role not in _ROLES:
            raise unsupported(path, "says no role: system, user, assistant or tool")
        if message.role != chat_pb.ROLE_ASSISTANT and (message.tool_calls or message.reasoning):
            raise unsupported(path, "thoughts and tool calls are the assistant's alone")
        check_text(f"{path}.reasoning", message.reasoning)
        for index, part in enumerate(message.parts):
            _check_part(f"{path}.parts[{index}]", part, message.role, called)
            images += part.HasField("image")
        if message.role == chat_pb.ROLE_TOOL and not message.parts:
            raise unsupported(path, "a message of a tool needs its result")
        _check_calls(path, message.tool_calls, called)
    if images > MOST_IMAGES:
        raise unsupported("messages", f"hold {images} images; ds4 takes at most {MOST_IMAGES} in one request")
    if needs_a_question and messages[-1].role not in (chat_pb.ROLE_USER, chat_pb.ROLE_TOOL):
        raise unsupported(f"messages[{len(messages) - 1}]", "ds4 answers a user or a tool: one of them must come last")


def has_images(messages: Iterable[chat_pb.ChatMessage]) -> bool:
    """Whether any of them shows one."""
    return any(part.HasField("image") for message in messages for part in message.parts)


def render(messages: Iterable[chat_pb.ChatMessage]) -> list[dict[str, Any]]:
    """Checked messages in OpenAI's form. Each result of a tool is a message of its own there."""
    return [rendered for message in messages for rendered in _rendered(message)]


def _rendered(message: chat_pb.ChatMessage) -> list[dict[str, Any]]:
    if message.role == chat_pb.ROLE_TOOL:
        return [
            {"role": "tool", "tool_call_id": part.tool_result.tool_call_id, "content": part.tool_result.text}
            for part in message.parts
        ]
    rendered: dict[str, Any] = {"role": _ROLES[message.role], "content": _content(message.parts)}
    if message.reasoning:
        rendered["reasoning_content"] = message.reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": call.tool_call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in message.tool_calls
        ]
    return [rendered]


def _content(parts: Sequence[chat_pb.ContentPart]) -> str | list[dict[str, Any]]:
    if not any(part.HasField("image") for part in parts):
        return "".join(part.text for part in parts)
    return [_image(part.image) if part.HasField("image") else {"type": "text", "text": part.text} for part in parts]


def _image(image: chat_pb.ImagePart) -> dict[str, Any]:
    data = base64.b64encode(image.data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{image.media_type};base64,{data}"}}


def _says_something(message: chat_pb.ChatMessage) -> bool:
    return any(part.WhichOneof("part") != "text" or part.text.strip() for part in message.parts)


def _check_part(path: str, part: chat_pb.ContentPart, role: "chat_pb.Role.ValueType", called: set[str]) -> None:
    kind = part.WhichOneof("part")
    if kind is None:
        raise unsupported(path, "holds nothing")
    if (kind == "tool_result") != (role == chat_pb.ROLE_TOOL):
        raise unsupported(path, "results of tools come in messages of a tool, and nothing else does")
    if kind == "text":
        check_text(f"{path}.text", part.text)
    elif kind == "tool_result":
        if part.tool_result.tool_call_id not in called:
            raise unsupported(f"{path}.tool_result.tool_call_id", "no tool call before it has this id")
        check_text(f"{path}.tool_result.text", part.tool_result.text)
    else:
        _check_image(f"{path}.image", part.image, role)


def _check_image(path: str, image: chat_pb.ImagePart, role: "chat_pb.Role.ValueType") -> None:
    if role != chat_pb.ROLE_USER:
        raise unsupported(path, "images come in messages of a user")
    beginning = IMAGE_BEGINNINGS.get(image.media_type)
    if beginning is None:
        raise unsupported(f"{path}.media_type", f"must be one of {', '.join(IMAGE_BEGINNINGS)}")
    if not image.data.startswith(beginning):
        raise unsupported(f"{path}.data", f"is no file of type {image.media_type}")


def _check_calls(path: str, calls: Iterable[chat_pb.ToolCall], called: set[str]) -> None:
    for index, call in enumerate(calls):
        where = f"{path}.tool_calls[{index}]"
        if not call.tool_call_id or not call.name:
            raise unsupported(where, "needs its id and the tool's name")
        for text in (call.tool_call_id, call.name, call.arguments_json):
            check_text(where, text)
        called.add(call.tool_call_id)


def check_text(path: str, text: str) -> None:
    """Refuse what ds4 would cut a text at: it keeps texts as C does.

    Raises:
        RequestError: INVALID_ARGUMENT UNSUPPORTED_CONTENT.
    """
    if "\0" in text:
        raise unsupported(path, "holds the character U+0000, at which ds4 would cut it off")


def unsupported(path: str, description: str) -> RequestError:
    """INVALID_ARGUMENT UNSUPPORTED_CONTENT."""
    return invalid_argument(path, description, "UNSUPPORTED_CONTENT")

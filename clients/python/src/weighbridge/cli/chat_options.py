"""What the options of `chat` ask for: thinking, tools, and the form of the answer."""

import json
from collections.abc import Sequence
from pathlib import Path

import click
from weighbridge_proto.engines.v1 import chat_service_pb2

from weighbridge.tools import tools_from_json

THINKING = {
    "off": chat_service_pb2.THINKING_OFF,
    "on": chat_service_pb2.THINKING_ON,
    "minimal": chat_service_pb2.THINKING_MINIMAL,
    "low": chat_service_pb2.THINKING_LOW,
    "medium": chat_service_pb2.THINKING_MEDIUM,
    "high": chat_service_pb2.THINKING_HIGH,
    "xhigh": chat_service_pb2.THINKING_XHIGH,
    "max": chat_service_pb2.THINKING_MAX,
}

TOOL_CHOICE = {
    "auto": chat_service_pb2.TOOL_CHOICE_AUTO,
    "none": chat_service_pb2.TOOL_CHOICE_NONE,
    "required": chat_service_pb2.TOOL_CHOICE_REQUIRED,
}
"""Whatever else is said is the name of the one tool to call."""


def set_tools(request: chat_service_pb2.ChatRequest, file: Path | None, choice: str | None) -> None:
    """Put the tools of ``file`` into ``request``, and whether they may or must be called.

    Raises:
        click.UsageError: the file holds no tools, or the choice is none of them.
    """
    if file is None:
        if choice is not None:
            raise click.UsageError("--tool-choice is of use with --tools alone.")
        return
    try:
        request.tools.extend(tools_from_json(_text_of(file)))
    except ValueError as wrong:
        raise click.BadParameter(f"{file}: {wrong}", param_hint="'--tools'") from None
    if choice is None:
        return
    if choice in TOOL_CHOICE:
        request.tool_choice = TOOL_CHOICE[choice]
        return
    names = [tool.name for tool in request.tools]
    if choice not in names:
        raise click.BadParameter(
            f"{choice!r} is neither {', '.join(TOOL_CHOICE)} nor one of the tools: {', '.join(names)}.",
            param_hint="'--tool-choice'",
        )
    request.tool_choice = chat_service_pb2.TOOL_CHOICE_REQUIRED
    request.forced_tool = choice


def response_format(json_object: bool, schema: Path | None) -> chat_service_pb2.ResponseFormat | None:
    """The form that the answer shall have; None: text.

    Raises:
        click.UsageError: two forms, or the file holds no JSON Schema.
    """
    if json_object and schema is not None:
        raise click.UsageError("--json-object and --json-schema are two forms: give one.")
    if schema is None:
        return chat_service_pb2.ResponseFormat(json_object=True) if json_object else None
    try:
        text = _text_of(schema)
        described = json.loads(text)
    except ValueError as wrong:
        raise click.BadParameter(f"{schema} is no JSON: {wrong}.", param_hint="'--json-schema'") from None
    if not isinstance(described, dict):
        raise click.BadParameter(f"{schema} is no JSON Schema, which is an object.", param_hint="'--json-schema'")
    return chat_service_pb2.ResponseFormat(json_schema=text)


def lower_thinking(asked: "chat_service_pb2.Thinking.ValueType") -> Sequence[str]:
    """The levels below ``asked``, the nearest first; those that are always there, where none is said."""
    names = [name for name in THINKING if name != "on"]  # it says that the model thinks, and not how much
    below = next((names[:at] for at, name in enumerate(names) if THINKING[name] == asked), ["off", "low"])
    return below[::-1]


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError("it is no UTF-8 text") from None

"""Tools that a model may call, as the field writes them down."""

import json
from collections.abc import Mapping
from typing import Any

from weighbridge_proto.engines.v1 import chat_service_pb2


def tools_from_json(text: str) -> list[chat_service_pb2.Tool]:
    """The tools of a JSON list, each as the chat API of OpenAI has them.

    An item is ``{"type": "function", "function": {"name": ..., "description": ..., "parameters": SCHEMA}}``, or what
    stands under ``function`` alone. ``parameters`` is a JSON Schema; without it a tool takes no arguments.

    Raises:
        ValueError: it is no such list. The text says which item is wrong, and how.
    """
    try:
        listed = json.loads(text)
    except ValueError as wrong:
        raise ValueError(f"It is no JSON: {wrong}.") from None
    if not isinstance(listed, list) or not listed:
        raise ValueError("It is no list of tools: write [{...}, ...].")
    tools = [_tool(f"Tool {number}", item) for number, item in enumerate(listed, 1)]
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"Two tools have the name {twice}.")
    return tools


def _tool(where: str, item: Any) -> chat_service_pb2.Tool:
    if not isinstance(item, Mapping):
        raise ValueError(f"{where} is no JSON object.")
    kind = item.get("type", "function")
    function = item.get("function", item)
    if kind != "function" or not isinstance(function, Mapping):
        raise ValueError(f"{where} is no function: a model calls nothing else.")
    name, description = function.get("name"), function.get("description") or ""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where} has no name.")
    if not isinstance(description, str):
        raise ValueError(f"{where}, {name}: its description is no text.")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ValueError(f"{where}, {name}: its parameters are no JSON Schema, which is an object.")
    schema = "" if parameters is None else json.dumps(parameters, ensure_ascii=False)
    return chat_service_pb2.Tool(name=name, description=description, parameters_json_schema=schema)

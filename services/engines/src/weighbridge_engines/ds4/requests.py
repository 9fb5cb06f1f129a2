"""From a chat request to the JSON that ds4 takes. What ds4 would ignore without a word is refused instead.

Seen in its source (May 2026): it skips ``response_format``, penalties, and every ``tool_choice`` but "none"; draws with
values of its own while the model thinks; and thinks "high" where "max" was asked for and the context is too small.
"""

import json
import math
from collections.abc import Iterable
from typing import Any, Literal

from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.errors import RequestError, invalid_argument

from weighbridge_engines.ds4 import messages
from weighbridge_engines.ds4.served import Served

MOST_STOP_SEQUENCES = 16
"""ds4 looks for each after every token. OpenAI's interface takes 4."""
LONGEST_STOP_CHARS = 1024
"""So much of an answer is held back until it is known whether it is the beginning of one."""

LARGEST_SEED = 2**53 - 1
"""ds4 reads numbers as doubles, and takes a seed of 0 or less as none."""

DEEPEST_SCHEMA = 200
"""ds4 gives up on JSON that is nested 256 deep; a schema begins at the fifth."""

MOST_BODY_BYTES = 64 * 2**20
"""Of one HTTP request to ds4."""

_Drawn = Literal["temperature", "top_k", "top_p", "min_p"]
_Lacking = Literal["repetition_penalty", "presence_penalty", "frequency_penalty"]

SAMPLING_WHILE_THINKING: dict[_Drawn, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.05}
"""What builds draw with while the model thinks that take no other value then (May 2026)."""

_NEUTRAL: dict[_Lacking, float] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""What ds4 does not have, and the value that asks for nothing."""

_RANGES: tuple[tuple[_Drawn | Literal["seed"], float, float, str], ...] = (
    ("temperature", 0.0, 100.0, "0 to 100"),
    ("top_p", math.ulp(0.0), 1.0, "above 0 and at most 1"),
    ("top_k", 0, 2**31 - 1, "0 (all tokens) or more"),
    ("min_p", 0.0, 1.0, "0 to 1"),
    ("seed", 1, LARGEST_SEED, f"1 to {LARGEST_SEED}: ds4 takes others as no seed"),
)

_EFFORT = {
    chat_pb.THINKING_OFF: "none",
    chat_pb.THINKING_MINIMAL: "minimal",
    chat_pb.THINKING_LOW: "low",
    chat_pb.THINKING_MEDIUM: "medium",
    chat_pb.THINKING_HIGH: "high",
    chat_pb.THINKING_XHIGH: "xhigh",
    chat_pb.THINKING_MAX: "max",
}
"""How ds4 names levels. Builds of 2026 have two, "high" and "max", and take those below as "high"."""

_THINKING = {chat_pb.THINKING_UNSPECIFIED, chat_pb.THINKING_ON, *_EFFORT}


def check(request: chat_pb.ChatRequest) -> None:
    """Refuse what ds4 cannot answer whatever the model.

    Raises:
        RequestError: INVALID_ARGUMENT with the reasons of ChatService.Chat.
    """
    messages.check(request.messages, needs_a_question=not request.warm_up)
    if request.adapter:
        raise messages.unsupported("adapter", "ds4 has no adapters")
    _check_form(request)
    _check_tools(request.tools)
    _check_sampling(request.sampling)
    if request.max_output_tokens < 0:
        raise _bad_sampling("max_output_tokens", "must be 0 (what the context leaves) or more")
    if len(request.stop_sequences) > MOST_STOP_SEQUENCES:
        raise _bad_sampling("stop_sequences", f"at most {MOST_STOP_SEQUENCES} can be given")
    for stop in request.stop_sequences:
        if not 0 < len(stop) <= LONGEST_STOP_CHARS or "\0" in stop:
            raise _bad_sampling("stop_sequences", f"each must have 1 to {LONGEST_STOP_CHARS} characters, none U+0000")


def check_for(request: chat_pb.ChatRequest, served: Served) -> None:
    """Refuse what this build, or this model as it is loaded, would ignore.

    Raises:
        RequestError: INVALID_ARGUMENT UNSUPPORTED_CONTENT, UNSUPPORTED_THINKING, INVALID_SAMPLING.
    """
    if messages.has_images(request.messages) and not served.sees:
        raise messages.unsupported(
            "messages",
            "hold images, and the model is loaded without its vision companion. Load it with the option vision",
        )
    if request.thinking == chat_pb.THINKING_MAX and served.context_tokens < served.max_thinking_context:
        raise invalid_argument(
            "thinking",
            f"MAX needs a context of {served.max_thinking_context} tokens, and the model is loaded with "
            f"{served.context_tokens}: ds4 would think HIGH. Ask for that, or load with a larger context",
            "UNSUPPORTED_THINKING",
            metadata={"context_tokens": served.context_tokens, "needed_context_tokens": served.max_thinking_context},
        )
    if request.thinking == chat_pb.THINKING_OFF or served.samples_while_thinking:
        return
    for name, forced in SAMPLING_WHILE_THINKING.items():
        if request.sampling.HasField(name) and getattr(request.sampling, name) != forced:
            raise _bad_sampling(
                f"sampling.{name}",
                f"this build of ds4 always draws with {forced:g} while the model thinks. Leave it out, turn thinking "
                "off, or use a newer ds4-server",
            )


def render(request: chat_pb.ChatRequest, served: Served, max_tokens: int | None = None) -> bytes:
    """The body of the HTTP request, checked.

    Args:
        max_tokens: instead of the request's own.

    Raises:
        RequestError: as :func:`check` and :func:`check_for`.
    """
    check(request)
    check_for(request, served)
    body: dict[str, Any] = {"messages": messages.render(request.messages), **_thinking(request.thinking)}
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
    if request.tool_choice == chat_pb.TOOL_CHOICE_NONE:
        body["tool_choice"] = "none"
    longest = request.max_output_tokens or None if max_tokens is None else max_tokens
    if longest is not None:
        body["max_tokens"] = longest
    for name, *_ in _RANGES:
        if request.sampling.HasField(name):
            body[name] = getattr(request.sampling, name)
    if request.stop_sequences:
        body["stop"] = list(request.stop_sequences)
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    encoded = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    if len(encoded) > MOST_BODY_BYTES:
        raise messages.unsupported("messages", "are more than the 64 MiB that ds4 takes in one request")
    return encoded


def _thinking(asked: "chat_pb.Thinking.ValueType") -> dict[str, Any]:
    """Every spelling at once: builds differ in those they know, and skip the others."""
    if asked == chat_pb.THINKING_UNSPECIFIED:
        return {}
    thinks = asked != chat_pb.THINKING_OFF
    fields: dict[str, Any] = {
        "think": thinks,
        "thinking": {"type": "enabled" if thinks else "disabled"},
        "chat_template_kwargs": {"enable_thinking": thinks},
    }
    if asked in _EFFORT:
        fields["reasoning_effort"] = _EFFORT[asked]
    return fields


def _check_form(request: chat_pb.ChatRequest) -> None:
    if request.thinking not in _THINKING:
        raise invalid_argument("thinking", "is no level that ds4 knows", "UNSUPPORTED_THINKING")
    if request.forced_tool or request.tool_choice not in (
        chat_pb.TOOL_CHOICE_UNSPECIFIED,
        chat_pb.TOOL_CHOICE_AUTO,
        chat_pb.TOOL_CHOICE_NONE,
    ):
        raise invalid_argument(
            "forced_tool" if request.forced_tool else "tool_choice",
            "ds4 cannot make the model call a tool. Use AUTO, and say in the prompt that a tool must be called",
            "UNSUPPORTED_TOOL_CHOICE",
        )
    form = request.response_format.WhichOneof("format")
    if form == "json_schema" or (form == "json_object" and request.response_format.json_object):
        raise invalid_argument(
            "response_format",
            "ds4 cannot hold the model to a form. Ask for JSON in the prompt, or offer a tool with that schema",
            "UNSUPPORTED_RESPONSE_FORMAT",
        )


def _check_sampling(sampling: chat_pb.Sampling) -> None:
    for lacking, neutral in _NEUTRAL.items():
        if sampling.HasField(lacking) and getattr(sampling, lacking) != neutral:
            raise _bad_sampling(f"sampling.{lacking}", f"ds4 has none. Leave it out (or {neutral:g})")
    for name, lowest, highest, expected in _RANGES:
        # NaN is in no range.
        if sampling.HasField(name) and not lowest <= getattr(sampling, name) <= highest:
            raise _bad_sampling(f"sampling.{name}", f"must be {expected}")


def _check_tools(tools: Iterable[chat_pb.Tool]) -> None:
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if not tool.name:
            raise messages.unsupported(f"{path}.name", "a tool needs a name")
        messages.check_text(f"{path}.name", tool.name)
        messages.check_text(f"{path}.description", tool.description)
        if _schema(tool) is None:
            raise messages.unsupported(
                f"{path}.parameters_json_schema",
                f"is no JSON Schema: it must be one JSON object, nested at most {DEEPEST_SCHEMA} deep",
            )


def _tool(tool: chat_pb.Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": _schema(tool)}
    return {"type": "function", "function": function}


def _schema(tool: chat_pb.Tool) -> dict[str, Any] | None:
    """The schema of a tool's arguments; None: it is none that ds4 can read."""
    if not tool.parameters_json_schema.strip():
        return {"type": "object", "properties": {}}
    try:
        schema = json.loads(tool.parameters_json_schema)
        # Refuses what Python reads and JSON, or Unicode, does not have: NaN, 1e999, half a surrogate pair.
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict) and _is_shallow(schema) else None


def _is_shallow(schema: dict[str, Any]) -> bool:
    level: list[Any] = [schema]
    for _ in range(DEEPEST_SCHEMA + 1):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
        ]
        if not level:
            return True
    return False


def _bad_sampling(path: str, description: str) -> RequestError:
    return invalid_argument(path, description, "INVALID_SAMPLING")

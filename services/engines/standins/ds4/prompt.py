"""A chat request as ds4 reads it, and the text that it becomes: one token for each byte, and for each mark."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from weighbridge_engines.models.sparse_ds4 import SPECIAL_TOKENS

BEGIN, END, USER, ASSISTANT, THINK, THOUGHT, _ = SPECIAL_TOKENS
ALIAS = "deepseek-v4-flash"
_MARKS = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MAX_CONTEXT = 393_216
"""Contexts from here on think at most; below, `max` is `high`."""
_MAX_PREFIX = "Think as long and as thoroughly as you can.\n\n"


class RefusedError(Exception):
    """A request that cannot be read: what is told with status 400."""


@dataclass
class Request:
    """What of a chat request counts."""

    prompt: str
    model: str
    stream: bool
    include_usage: bool
    max_tokens: int
    stops: list[str]
    has_tools: bool
    thinks: bool
    keeps_reasoning: bool
    """Whether earlier reasoning stands in the prompt: where tools are or were used."""
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = count_tokens(self.prompt)


def count_tokens(text: str) -> int:
    """Tokens of a text in the vocabulary of `sparse_ds4`."""
    return len(_MARKS.sub("\0", text).encode())


def read_request(body: bytes, default_tokens: int, context: int) -> Request:
    """Read a chat request. Raises RefusedError."""
    try:
        sent = json.loads(body)
        if not isinstance(sent, dict):
            raise TypeError
        return _read(sent, default_tokens, context)
    except (ValueError, TypeError, RecursionError):
        raise RefusedError("invalid JSON request") from None


def _read(sent: dict[str, Any], default_tokens: int, context: int) -> Request:
    thinks, effort, said = True, "high", False
    for key in ("thinking", "think"):
        value = sent.get(key)
        if key == "think" and key in sent:
            thinks, said = _typed(value, bool), True
        elif key in sent:
            said = True
            kind = value.get("type") if isinstance(value, dict) else value
            thinks = kind if isinstance(kind, bool) else {"enabled": True, "disabled": False}.get(str(kind), thinks)
    if sent.get("reasoning_effort") is not None:
        effort = _typed(sent["reasoning_effort"], str)
        if effort not in _EFFORTS:
            raise TypeError
    model = _typed(sent.get("model", ALIAS), str)
    for key in ("temperature", "top_p", "min_p", "seed", "top_k"):
        if key in sent:
            _typed(sent[key], int, float)
    options = sent.get("stream_options")
    limit = default_tokens
    for key in ("max_tokens", "max_completion_tokens"):
        if key in sent:
            limit = int(_typed(sent[key], int, float))
    if "messages" not in sent:
        raise RefusedError("missing messages")
    messages = [_message(each) for each in _typed(sent["messages"], list)]
    tools = sent.get("tools")
    has_tools = bool(tools) and sent.get("tool_choice") != "none"
    if not said:
        thinks = {"deepseek-chat": False, "deepseek-reasoner": True}.get(model, thinks)
    thinks = thinks and effort != "none"
    stop = sent.get("stop") or []
    used = has_tools or any(each["tool_calls"] or each["role"] in ("tool", "function") for each in messages)
    most = thinks and effort == "max" and context >= _MAX_CONTEXT
    return Request(
        prompt=_render(messages, tools if has_tools else None, thinks=thinks, most=most, used_tools=used),
        model=model,
        stream=_typed(sent.get("stream", False), bool),
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        max_tokens=max(0, limit),
        stops=[stop] if isinstance(stop, str) else [_typed(each, str) for each in stop],
        has_tools=has_tools,
        thinks=thinks,
        keeps_reasoning=used,
    )


def _typed(value: Any, *types: type) -> Any:
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise TypeError
    return value


def _message(sent: Any) -> dict[str, Any]:
    message = _typed(sent, dict)
    return {
        "role": _typed(message.get("role", "user"), str),
        "content": _text(message.get("content")),
        "reasoning": _text(message.get("reasoning_content")),
        "tool_calls": [
            (_typed(call["function"]["name"], str), call["function"].get("arguments", ""))
            for call in message.get("tool_calls") or ()
            if isinstance(call, dict) and isinstance(call.get("function"), dict)
        ],
    }


def _text(content: Any) -> str:
    """Parts without a text, pictures among them, are left out without a word."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part if isinstance(part, str) else _part(part) for part in parts)


def _part(part: Any) -> str:
    return str(part.get("text", "")) if isinstance(part, dict) else ""


def _render(messages: list[dict[str, Any]], tools: Any, *, thinks: bool, most: bool, used_tools: bool) -> str:
    system = [json.dumps(tools, ensure_ascii=False)] if tools else []
    system += [each["content"] for each in messages if each["role"] in ("system", "developer")]
    out = [BEGIN, _MAX_PREFIX if most else "", "\n\n".join(system)]
    asked = [number for number, each in enumerate(messages) if each["role"] in ("user", "tool", "function")]
    waits = result = False
    for number, each in enumerate(messages):
        role = each["role"]
        if role == "user":
            out += [USER, each["content"]]
            waits, result = True, False
        elif role in ("tool", "function"):
            out += ["" if result else USER, "<tool_result>", each["content"], "</tool_result>"]
            waits = result = True
        elif role == "assistant":
            if waits:
                shown = thinks and (used_tools or number > max(asked, default=-1))
                out += [ASSISTANT, THINK + each["reasoning"] if shown else "", THOUGHT]
            out += [each["content"], render_calls(each["tool_calls"]), END]
            waits = result = False
    if waits:
        out += [ASSISTANT, THINK if thinks else THOUGHT]
    return "".join(out)


def render_calls(calls: list[tuple[str, str]]) -> str:
    """Tool calls as the model writes them; the same text whether it has just made them or they are sent back."""
    if not calls:
        return ""
    mark = SPECIAL_TOKENS[-1]
    written = "".join(f'<{mark}invoke name="{name}">{_canonical(given)}</{mark}invoke>\n' for name, given in calls)
    return f"\n\n<{mark}tool_calls>\n{written}</{mark}tool_calls>"


def _canonical(arguments: Any) -> str:
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, TypeError):
        return str(arguments)

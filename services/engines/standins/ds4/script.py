"""What the stand-in generates: tokens, and the pieces of an answer that a stream makes of them."""

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from services.engines.standins.ds4.behaviour import Behaviour
from services.engines.standins.ds4.prompt import THOUGHT, Request, render_calls

_WORD = re.compile(r"\s*\S+|\s+")
_HELD_BYTES = len(THOUGHT) - 1
"""Of thinking, which may be the beginning of its end."""
_FRAGMENT = 8
"""Characters of a tool call's arguments in one token."""


@dataclass(frozen=True)
class Token:
    """One token. ``call`` is the number of the tool call that it belongs to, -1 for none."""

    text: str
    kind: Literal["thinking", "thought", "text", "call", "arguments", "called"]
    call: int = -1


def tokens_of(request: Request, behaviour: Behaviour) -> Iterator[Token]:
    """Everything before the end, which is no token of the answer."""
    if request.thinks:
        for word in _WORD.findall(behaviour.reasoning):
            yield Token(word, "thinking")
        yield Token(THOUGHT, "thought")
    if behaviour.tokens:
        for number in range(behaviour.tokens):
            yield Token(f" w{number}" if number else "w0", "text")
    else:
        for word in _WORD.findall(behaviour.answer):
            yield Token(word, "text")
    if request.has_tools:
        for number, (name, arguments) in enumerate(behaviour.calls):
            yield Token(name, "call", number)
            for at in range(0, len(arguments), _FRAGMENT):
                yield Token(arguments[at : at + _FRAGMENT], "arguments", number)
        if behaviour.calls:
            yield Token("", "called")


@dataclass
class Answer:
    """What has been generated, and how much of it was handed on. ``stops`` end it wherever they stand."""

    stops: list[str]
    has_tools: bool
    thinking: bool
    """Whether it is still thinking."""
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """Tool calls: id, name, arguments."""
    tokens: int = 0
    stopped: bool = False
    closed_calls: bool = False
    _held: str = ""
    _began_thinking: bool = field(init=False)

    def __post_init__(self) -> None:
        self._began_thinking = self.thinking

    def add(self, token: Token) -> list[dict[str, Any]]:
        """Take a token; the deltas that can be sent now."""
        self.tokens += 1
        match token.kind:
            case "thinking" | "text":
                return self._text(token.text)
            case "thought":
                deltas = self.flush()
                self.thinking = False
                return deltas
            case "call":
                deltas = self.flush()
                name, call_id = token.text, f"call_{secrets.token_hex(16)}"
                self.calls.append((call_id, name, ""))
                function = {"name": name, "arguments": ""}
                started = {"index": token.call, "id": call_id, "type": "function", "function": function}
                return [*deltas, {"tool_calls": [started]}]
            case "arguments":
                call_id, name, arguments = self.calls[token.call]
                self.calls[token.call] = call_id, name, arguments + token.text
                return [{"tool_calls": [{"index": token.call, "function": {"arguments": token.text}}]}]
            case "called":
                self.closed_calls = True
                return []

    def flush(self) -> list[dict[str, Any]]:
        """What was held back."""
        held, self._held = self._held, ""
        return self._delta(held)

    @property
    def open_call(self) -> bool:
        """Whether it ended in the middle of a tool call."""
        return bool(self.calls) and not self.closed_calls

    @property
    def raw(self) -> str:
        """The text as the model wrote it, which is what the cache holds."""
        thought = THOUGHT if self._began_thinking and not self.thinking else ""
        calls = render_calls([(name, arguments) for _, name, arguments in self.calls])
        return "".join(self.reasoning) + thought + "".join(self.content) + calls

    def message(self) -> dict[str, Any]:
        """The whole answer. Thinking that was cut off comes as content: the trap of answers that are not streamed."""
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        told: dict[str, Any] = {"role": "assistant", "content": reasoning if self.thinking else content}
        if reasoning and not self.thinking:
            told["reasoning_content"] = reasoning
        if self.calls:
            told["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": _object(arguments)}}
                for call_id, name, arguments in self.calls
            ]
        return told

    def _text(self, piece: str) -> list[dict[str, Any]]:
        self._held += piece
        for stop in self.stops:
            at = self._held.find(stop) if stop else -1
            if at >= 0:
                self._held, self.stopped = self._held[:at], True
        if self.stopped:
            return self.flush()
        hold = max((len(stop.encode()) - 1 for stop in self.stops), default=0)
        if self.thinking:
            hold = max(hold, _HELD_BYTES)
        at = len(self._held)
        while at and len(self._held[at:].encode()) < hold:
            at -= 1
        sent, self._held = self._held[:at], self._held[at:]
        return self._delta(sent)

    def _delta(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        if self.thinking:
            self.reasoning.append(text)
            return [{"reasoning_content": text}]
        self.content.append(text)
        return [{"content": text}]


def _object(arguments: str) -> str:
    """Arguments of an answer that is not streamed are an object whatever the model wrote."""
    try:
        return arguments if isinstance(json.loads(arguments), dict) else "{}"
    except ValueError:
        return "{}"

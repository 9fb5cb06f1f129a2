"""Turns tokens into text: detokenised as they come, thinking told from answering, ended at a stop sequence."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from weighbridge_engines.mlx_qwen.runtime.stops import StopScanner


@dataclass(frozen=True)
class Delta:
    """More of an answer; reasoning is what the model thinks before it answers."""

    text: str = ""
    reasoning: str = ""

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning)

    def __add__(self, other: "Delta") -> "Delta":
        return Delta(self.text + other.text, self.reasoning + other.reasoning)


class AnswerText:
    """The text of one answer.

    Thinking is told by the tokenizer's tags where it has them as single tokens; the tags themselves and the line breaks
    around the thought are not text. Stop sequences are looked for in the answer, not in the thought.
    """

    def __init__(self, tokenizer: Any, stops: Iterable[str], prompt: Iterable[int]) -> None:
        """tokenizer: mlx-lm's wrapper. prompt: its tokens, which may end inside an open thought."""
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer
        self._stops = StopScanner(stops)
        self._opens, self._closes = _tags(tokenizer)
        self._thinking = _ends_thinking(prompt, self._opens, self._closes)
        self._trim_next = self._thinking
        self.reasoning_tokens = 0

    @property
    def stopped_by(self) -> str | None:
        """The stop sequence that ended the answer, if one did."""
        return self._stops.matched

    def add(self, token: int) -> Delta:
        """Takes the next token and returns the text that it makes showable."""
        if self._opens is not None and token in (self._opens, self._closes):
            # The tag's token belongs to the thought; what is still in the detokenizer belongs to the side before it.
            self.reasoning_tokens += 1
            delta = self._flush()
            self._thinking = token == self._opens
            self._trim_next = True
            self._detokenizer = self._tokenizer.detokenizer
            return delta
        if self._thinking:
            self.reasoning_tokens += 1
        self._detokenizer.add_token(token)
        return self._show(self._detokenizer.last_segment)

    def finish(self) -> Delta:
        """The rest, when no more tokens come. Nothing more after a stop sequence."""
        delta = self._flush()
        return delta + Delta(text=self._stops.finish())

    def _flush(self) -> Delta:
        self._detokenizer.finalize()
        return self._show(self._detokenizer.last_segment)

    def _show(self, segment: str) -> Delta:
        if self._trim_next:
            segment = segment.lstrip("\n")
            self._trim_next = not segment
        if not segment:
            return Delta()
        return Delta(reasoning=segment) if self._thinking else Delta(text=self._stops.feed(segment))


def _tags(tokenizer: Any) -> tuple[int | None, int | None]:
    if not tokenizer.has_thinking:
        return None, None
    start, end = tokenizer.think_start_tokens, tokenizer.think_end_tokens
    return (start[0], end[0]) if len(start) == len(end) == 1 else (None, None)


def _ends_thinking(prompt: Iterable[int], opens: int | None, closes: int | None) -> bool:
    thinking = False
    if opens is not None:
        for token in prompt:
            if token == opens:
                thinking = True
            elif token == closes:
                thinking = False
    return thinking

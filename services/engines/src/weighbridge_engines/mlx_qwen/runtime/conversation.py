"""A chat request as the engine takes it: checked, free of protobuf, made a prompt by the model's template."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weighbridge_engines.mlx_qwen.runtime import refusals, sampling
from weighbridge_engines.mlx_qwen.runtime.sampling import Sampling

MAX_STOP_SEQUENCES = 16
"""More would make every token's scan noticeable and serve nobody (OpenAI's API allows 4)."""
MAX_STOP_CHARACTERS = 1024

FIRST_CHARACTERS_PER_TOKEN = 8
"""Prompts up to this many characters per token of context are tokenized at once. English has about 4, runs of blanks
up to 128."""
CUT_TOKENS = 16
"""Where a text is cut, its last word can make a few more tokens than the whole would."""


@dataclass(frozen=True)
class Turn:
    """One message: role as chat templates spell it (system, user, assistant), its text, and what the model thought."""

    role: str
    text: str
    reasoning: str = ""


@dataclass(frozen=True)
class ChatSpec:
    """One request. sampling holds only what the request carries; the model's defaults fill the rest."""

    turns: tuple[Turn, ...]
    sampling: Mapping[str, float | int]
    max_output_tokens: int = 0
    """Longest answer in tokens; 0 is what the context leaves."""
    stops: tuple[str, ...] = ()
    thinking: bool | None = None
    """Whether to think before answering; None is the model's own default."""


def check(spec: ChatSpec) -> ChatSpec:
    """Returns spec if it can be answered in principle. Raises RequestError EMPTY_CONVERSATION or INVALID_SAMPLING."""
    if not any(turn.text.strip() for turn in spec.turns):
        raise refusals.empty_conversation()
    if spec.max_output_tokens < 0:
        raise refusals.invalid_sampling(
            "max_output_tokens", "max_output_tokens must be 0 (what the context leaves) or more."
        )
    if len(spec.stops) > MAX_STOP_SEQUENCES:
        raise refusals.invalid_sampling("stop_sequences", f"At most {MAX_STOP_SEQUENCES} stop sequences can be given.")
    for stop in spec.stops:
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise refusals.invalid_sampling(
                "stop_sequences",
                f"A stop sequence must have 1 to {MAX_STOP_CHARACTERS} characters; one has {len(stop)}.",
            )
    # Beside defaults that are in range whatever the model's are: only the request's own parameters can fail here.
    sampling.check(with_defaults(spec.sampling, Sampling()))
    return spec


def with_defaults(requested: Mapping[str, float | int], defaults: Sampling) -> Sampling:
    """The request's parameters over the model's defaults."""
    values: dict[str, Any] = {**vars(defaults), **requested}
    return Sampling(**values)


def encode(tokenizer: Any, spec: ChatSpec, context_tokens: int) -> list[int]:
    """The prompt's tokens by the model's chat template. Raises RequestError UNSUPPORTED_CONTENT if the template
    refuses, CONTEXT_OVERFLOW as soon as it is certain.

    What the template says is not passed on: it may quote the conversation.
    """
    text = _render(tokenizer, spec)
    # A tokenizer takes some 25 bytes for each byte of text (measured: 0.8 GiB for a 30 MiB prompt, 2026-11-30). That is
    # in no plan, so no more is tokenized than shows that the prompt is too long.
    length = FIRST_CHARACTERS_PER_TOKEN * context_tokens
    while length < len(text):
        found = len(tokenizer.encode(text[:length], add_special_tokens=False))
        if found > context_tokens + CUT_TOKENS:
            raise refusals.prompt_overflow(found - CUT_TOKENS, spec.max_output_tokens, context_tokens)
        length *= 2
    return list(tokenizer.encode(text, add_special_tokens=False))


def _render(tokenizer: Any, spec: ChatSpec) -> str:
    messages = [
        {"role": turn.role, "content": turn.text} | ({"reasoning_content": turn.reasoning} if turn.reasoning else {})
        for turn in spec.turns
    ]
    options = {} if spec.thinking is None else {"enable_thinking": spec.thinking}
    try:
        text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    except Exception as refused:
        if not type(refused).__module__.startswith("jinja2"):
            raise
        roles = ", ".join(turn.role for turn in spec.turns[:8]) + (", …" if len(spec.turns) > 8 else "")
        raise refusals.unsupported_content(
            "messages", f"The model's chat template does not take these messages (roles: {roles})."
        ) from None
    return text


def answer_room(prompt_tokens: int, max_output_tokens: int, context_tokens: int) -> int:
    """How many tokens the answer may have. Raises RequestError CONTEXT_OVERFLOW if the context is exceeded."""
    room = context_tokens - prompt_tokens
    if room < max(1, max_output_tokens):
        raise refusals.context_overflow(prompt_tokens, max_output_tokens, context_tokens)
    return max_output_tokens or room

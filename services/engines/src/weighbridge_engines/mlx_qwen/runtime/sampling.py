"""How tokens are drawn: the request's parameters, checked, and mlx-lm's sampler and logits processors for them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weighbridge_proto.errors import RequestError

from weighbridge_engines.mlx_qwen.runtime import refusals
from weighbridge_engines.mlx_qwen.runtime.mlx import Mlx

_UINT64 = 2**64 - 1

LIKELIEST_BELOW = 1e-6
"""Temperatures below this take the likeliest token, as their limit does. MLX divides by them in 32 bits, and what is no
number any more would be drawn from at random (seen with 1e-320, 2026-11-30)."""


@dataclass(frozen=True)
class Sampling:
    """Checked parameters. Each default means "off"; temperature 0 takes the likeliest token."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None


_RANGES: tuple[tuple[str, float, float, bool, str], ...] = (
    # name, lowest, highest, whether the lowest itself is allowed, what is expected
    ("temperature", 0.0, math.inf, True, "0 or more"),
    ("top_p", 0.0, 1.0, False, "above 0 and at most 1"),
    ("top_k", 0.0, math.inf, True, "0 (all tokens) or more"),
    ("min_p", 0.0, 1.0, True, "between 0 and 1"),
    ("repetition_penalty", 0.0, math.inf, False, "above 0"),
    ("presence_penalty", -math.inf, math.inf, False, "a finite number"),
    ("frequency_penalty", -math.inf, math.inf, False, "a finite number"),
)


def check(sampling: Sampling) -> Sampling:
    """Returns sampling if every parameter is in range. Raises RequestError INVALID_SAMPLING naming the field."""
    for name, lowest, highest, inclusive, expected in _RANGES:
        value = getattr(sampling, name)
        in_range = (value >= lowest if inclusive else value > lowest) and value <= highest
        if not (math.isfinite(value) and in_range):
            raise refusals.invalid_sampling(f"sampling.{name}", f"{name} is {value}; it must be {expected}.")
    return sampling


def defaults_of(generation_config: Mapping[str, Any]) -> Sampling:
    """The model's own defaults, from its generation_config.json.

    As its publisher means it: without ``do_sample`` the likeliest token is taken. Values that are no numbers or out of
    range are passed over, because a request must not fail for a field it does not carry.
    """
    chosen = Sampling()
    if generation_config.get("do_sample") is not True:
        return chosen
    known = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    values: dict[str, Any] = {}
    for name, fallback in known.items():
        value = generation_config.get(name, fallback)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        values[name] = type(fallback)(value) if is_number and _is_finite(value) else fallback
    try:
        return check(Sampling(**values))
    except RequestError:
        return Sampling(temperature=1.0)


def _is_finite(value: float) -> bool:
    """Whether a number of a JSON file is one that a float can hold: integers there have no bound."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def make_sampler(mlx: Mlx, sampling: Sampling, vocabulary: int) -> Any:
    """mlx-lm's sampler. A top_k of the whole vocabulary or more is off, which mlx-lm itself would refuse."""
    return mlx.make_sampler(
        temp=sampling.temperature if sampling.temperature >= LIKELIEST_BELOW else 0.0,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        top_k=sampling.top_k if sampling.top_k < vocabulary else 0,
    )


def make_logits_processors(mlx: Mlx, sampling: Sampling, *, prompt_tokens: int, context_tokens: int) -> list[Any]:
    """mlx-lm's penalties. Only those that are on are made, because each costs time at every token.

    The repetition penalty looks at prompt and answer, presence and frequency penalties at the answer alone, all of them
    over the whole context instead of mlx-lm's last 20 tokens.
    """
    processors: list[Any] = []
    if sampling.repetition_penalty != 1.0:
        processors += mlx.make_logits_processors(
            repetition_penalty=sampling.repetition_penalty, repetition_context_size=context_tokens
        )
    answer_only: list[Any] = []
    if sampling.presence_penalty != 0.0:
        answer_only += mlx.make_logits_processors(
            presence_penalty=sampling.presence_penalty, presence_context_size=context_tokens
        )
    if sampling.frequency_penalty != 0.0:
        answer_only += mlx.make_logits_processors(
            frequency_penalty=sampling.frequency_penalty, frequency_context_size=context_tokens
        )
    return processors + [_after_prompt(processor, prompt_tokens) for processor in answer_only]


def _after_prompt(processor: Any, prompt_tokens: int) -> Any:
    def on_answer(tokens: Any, logits: Any) -> Any:
        return processor(tokens[prompt_tokens:], logits)

    return on_answer


def seed_bits(seed: int) -> int:
    """A signed 64-bit seed as the unsigned one that MLX takes."""
    return seed & _UINT64

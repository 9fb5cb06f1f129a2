"""One answer, token by token. Runs on the owner thread."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from weighbridge_engines.mlx_qwen.runtime import conversation, sampling
from weighbridge_engines.mlx_qwen.runtime.answer import AnswerText, Delta
from weighbridge_engines.mlx_qwen.runtime.conversation import ChatSpec
from weighbridge_engines.mlx_qwen.runtime.loading import LoadedModel
from weighbridge_engines.mlx_qwen.runtime.mlx import Mlx
from weighbridge_engines.mlx_qwen.runtime.owner import Cancellation

# Memory is published this often while tokens come: rarely enough to cost nothing, often enough for a watchdog.
_TOKENS_PER_MEMORY_REPORT = 32


class CancelledError(Exception):
    """The caller has gone: the work ended at its next step."""


class Finish(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    STOP_SEQUENCE = "stop_sequence"


@dataclass(frozen=True)
class Started:
    """The prompt has been read and fits."""

    model_name: str
    prompt_tokens: int


@dataclass(frozen=True)
class Finished:
    """The answer is over. Times in seconds; kv_bytes is what the request's caches held at its end."""

    finish: Finish
    stop_sequence: str
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int
    first_token_s: float
    generation_s: float
    kv_bytes: int


Event = Started | Delta | Finished


@dataclass(frozen=True)
class Request:
    """A request on its way: what is asked, when it came (time.monotonic), and whether its caller is still there."""

    spec: ChatSpec
    asked_at: float
    cancellation: Cancellation


def kv_bytes(caches: list[Any]) -> int:
    """Bytes that a prompt cache holds: keys and values of attention layers, state of the others."""
    return sum(int(cache.nbytes) for cache in caches)


def answer(
    mlx: Mlx, model: LoadedModel, request: Request, emit: Callable[[Event], None], publish: Callable[[int], None]
) -> None:
    """Computes one answer and emits its events. publish is told the bytes of the caches from time to time.

    The caches are made here and die here. Raises CancelledError at the next token or prefill step after the caller
    has gone, and RequestError for a request that does not fit or that the template refuses.
    """
    if request.cancellation.requested:
        raise CancelledError
    spec = request.spec
    chosen = conversation.with_defaults(spec.sampling, model.sampling_defaults)
    prompt = conversation.encode(model.tokenizer, spec, model.limits.context_tokens)
    longest = conversation.answer_room(len(prompt), spec.max_output_tokens, model.limits.context_tokens)
    emit(Started(model.name, len(prompt)))

    # Seeded for every request, so that one request's draws never depend on another's.
    seed = secrets.randbits(64) if chosen.seed is None else sampling.seed_bits(chosen.seed)
    mlx.core.random.seed(seed)
    caches = mlx.make_prompt_cache(model.module)

    def at_prefill_step(_done: int, _total: int) -> None:
        if request.cancellation.requested:
            raise CancelledError
        publish(kv_bytes(caches))

    tokens = mlx.generate_step(
        mlx.core.array(prompt),
        model.module,
        max_tokens=longest,
        sampler=sampling.make_sampler(mlx, chosen, model.vocabulary),
        logits_processors=sampling.make_logits_processors(
            mlx, chosen, prompt_tokens=len(prompt), context_tokens=model.limits.context_tokens
        ),
        prompt_cache=caches,
        prefill_step_size=model.limits.prefill_step_tokens,
        kv_bits=model.limits.kv_bits or None,
        kv_group_size=model.limits.kv_group_size,
        quantized_kv_start=0,
        prompt_progress_callback=at_prefill_step,
    )
    text = AnswerText(model.tokenizer, spec.stops, prompt)
    end_tokens = model.tokenizer.eos_token_ids
    finish = Finish.LENGTH
    count = 0
    first_at = last_at = request.asked_at
    try:
        for token, _ in tokens:
            count += 1
            last_at = time.monotonic()
            if count == 1:
                first_at = last_at
            if token in end_tokens:
                finish = Finish.STOP
                break
            delta = text.add(token)
            if delta:
                emit(delta)
            if text.stopped_by is not None:
                finish = Finish.STOP_SEQUENCE
                break
            if count == longest:
                break
            if request.cancellation.requested:
                raise CancelledError
            if count % _TOKENS_PER_MEMORY_REPORT == 0:
                publish(kv_bytes(caches))
    finally:
        tokens.close()
    rest = text.finish()
    if rest:
        emit(rest)
    if text.stopped_by is not None:
        finish = Finish.STOP_SEQUENCE
    emit(
        Finished(
            finish=finish,
            stop_sequence=text.stopped_by or "",
            prompt_tokens=len(prompt),
            output_tokens=count,
            reasoning_tokens=text.reasoning_tokens,
            first_token_s=first_at - request.asked_at,
            generation_s=last_at - first_at,
            kv_bytes=kv_bytes(caches),
        )
    )

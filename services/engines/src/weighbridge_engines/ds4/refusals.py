"""How a chat with ds4 fails: one function per reason of the contract. None of them quotes the conversation."""

import grpc
from weighbridge_proto.errors import RequestError, invalid_argument, resource_exhausted, unavailable


def context_overflow(prompt_tokens: int, max_output_tokens: int, context_tokens: int) -> RequestError:
    """The prompt, or prompt and answer together, do not fit the context."""
    what = f"the prompt has {prompt_tokens} tokens" if prompt_tokens else "the prompt is too long"
    if prompt_tokens < context_tokens and max_output_tokens:
        what += f" and the answer may have {max_output_tokens}"
    return invalid_argument(
        "messages",
        f"{what}; the model is loaded with a context of {context_tokens} tokens, of which the answer needs some. "
        "Shorten the conversation, or load with a larger context.",
        "CONTEXT_OVERFLOW",
        metadata={
            "prompt_tokens": prompt_tokens,
            "max_output_tokens": max_output_tokens,
            "context_tokens": context_tokens,
        },
    )


def engine_error(what: str, said: str = "") -> RequestError:
    """ds4 failed in this request.

    Args:
        what: the beginning of a sentence.
        said: its own words; the machine's, never the model's or the caller's.
    """
    return RequestError(
        grpc.StatusCode.INTERNAL,
        "ENGINE_ERROR",
        f"{what}{f' ({said})' if said else ''}. The engine's log has more.",
        metadata={"engine_message": said} if said else {},
    )


def stream_lost() -> RequestError:
    """The answer broke off without its end, and ds4 lives."""
    return unavailable(
        "STREAM_LOST",
        "ds4 broke the answer off without ending it, and is still there. Ask again.",
        retry_after_s=1.0,
    )


def engine_silent(limit_s: float) -> RequestError:
    """Nothing came for too long."""
    return RequestError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "ENGINE_SILENT",
        f"Nothing came of ds4 for {limit_s:g} s, neither of the answer nor in its log, and the request was given up. "
        "Where prompts take longer on this machine, raise WEIGHBRIDGE_ENGINES_DS4_IDLE_LIMIT_S.",
        metadata={"idle_limit_seconds": f"{limit_s:g}"},
    )


def answer_not_read(limit_bytes: int) -> RequestError:
    """The caller does not take what it asked for."""
    return resource_exhausted(
        "ANSWER_NOT_READ",
        f"{limit_bytes >> 20} MiB of the answer wait to be read, and the request was given up. Read the stream faster.",
        metadata={"limit_bytes": limit_bytes},
    )

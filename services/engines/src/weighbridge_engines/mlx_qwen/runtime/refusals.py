"""The errors that the runtime answers with: one function per reason of the contract."""

import grpc
from weighbridge_common.sizes import format_gib
from weighbridge_proto.errors import RequestError


def malformed_config(message: str) -> RequestError:
    """The model's config.json is missing or does not say what it must."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_CONFIG", message)


def unsupported_architecture(message: str, model_type: str) -> RequestError:
    """The model is of a kind that this runtime does not run."""
    return RequestError(
        grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_ARCHITECTURE", message, metadata={"model_type": model_type}
    )


def malformed_weights(message: str) -> RequestError:
    """A weight file is missing, cut short, or does not match the configuration."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_WEIGHTS", message)


def tokenizer_missing(message: str) -> RequestError:
    """There is no tokenizer, or none that can be used for chat."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, "TOKENIZER_MISSING", message)


def model_already_loaded(model_name: str) -> RequestError:
    """Load was called while a model is loaded."""
    return RequestError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "MODEL_ALREADY_LOADED",
        f"{model_name} is loaded. Unload it before loading another model.",
    )


def no_model_loaded() -> RequestError:
    """Generate was called while no model is loaded."""
    return RequestError(grpc.StatusCode.FAILED_PRECONDITION, "NO_MODEL_LOADED", "No model is loaded. Load one first.")


def weights_above_limit(weight_bytes: int, limit_bytes: int) -> RequestError:
    """The weights alone are larger than what the plan allows the runtime. Nothing has been opened."""
    return RequestError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "ENGINE_OUT_OF_MEMORY",
        f"The weights take {format_gib(weight_bytes)} and the plan allows the runtime {format_gib(limit_bytes)}. "
        "The model has changed since it was planned: load it again.",
        metadata={"weight_bytes": str(weight_bytes), "memory_limit_bytes": str(limit_bytes)},
    )


def out_of_memory() -> RequestError:
    """An allocation failed. The request's memory has been given back; the engine goes on."""
    return RequestError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "ENGINE_OUT_OF_MEMORY",
        "The engine could not get the memory for this. Ask for a shorter context, or free memory and try again.",
    )


def engine_error(kind: str) -> RequestError:
    """Something failed inside the engine. kind is the exception's type: its text may quote the prompt."""
    return RequestError(
        grpc.StatusCode.INTERNAL,
        "ENGINE_ERROR",
        f"The engine failed on this request ({kind}). Other requests are not affected; the engine's log has the place.",
        metadata={"exception": kind},
    )


def too_many_requests(waiting: int) -> RequestError:
    """The runtime's queue is full."""
    return RequestError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOO_MANY_REQUESTS",
        f"{waiting} requests are waiting for the engine. Try again shortly.",
        metadata={"waiting": str(waiting)},
        retry_after_s=1.0,
    )


def empty_conversation() -> RequestError:
    """There is nothing to answer."""
    return _bad_field("messages", "EMPTY_CONVERSATION", "The conversation holds no text. Send at least one message.")


def unsupported_content(field: str, message: str) -> RequestError:
    """The request holds something that this runtime cannot take."""
    return _bad_field(field, "UNSUPPORTED_CONTENT", message)


def unsupported_tool_choice(field: str) -> RequestError:
    """A tool is to be called, and nothing here can make the model call one."""
    return _bad_field(field, "UNSUPPORTED_TOOL_CHOICE", "This engine does not call tools. Leave the choice out.")


def unsupported_response_format() -> RequestError:
    """The answer is to have a form, and nothing here holds the model to one."""
    return _bad_field(
        "response_format", "UNSUPPORTED_RESPONSE_FORMAT", "This engine answers in text. Ask for JSON in the prompt."
    )


def warm_up_not_supported() -> RequestError:
    """A conversation is to be read in advance, and nothing of it would be kept for the next request."""
    return RequestError(
        grpc.StatusCode.UNIMPLEMENTED,
        "WARM_UP_NOT_SUPPORTED",
        "This engine keeps nothing between requests, so reading a conversation in advance would save nothing.",
    )


def invalid_sampling(field: str, message: str) -> RequestError:
    """A sampling parameter or a limit of the answer is out of range."""
    return _bad_field(field, "INVALID_SAMPLING", message)


def context_overflow(prompt_tokens: int, max_output_tokens: int, context_tokens: int) -> RequestError:
    """Prompt and answer together do not fit the planned context."""
    if max_output_tokens:
        message = (
            f"The prompt has {prompt_tokens} tokens and the answer may have {max_output_tokens}; that is above the "
            f"planned context of {context_tokens} tokens. Shorten one of them or load with a larger context."
        )
    else:
        message = (
            f"The prompt has {prompt_tokens} tokens, which leaves no room for an answer in the planned context of "
            f"{context_tokens} tokens. Shorten it or load with a larger context."
        )
    return RequestError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "CONTEXT_OVERFLOW",
        message,
        metadata=_context_figures(prompt_tokens, max_output_tokens, context_tokens),
    )


def prompt_overflow(prompt_tokens: int, max_output_tokens: int, context_tokens: int) -> RequestError:
    """The prompt is so long that its end was not looked at. prompt_tokens: it has at least these."""
    return RequestError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "CONTEXT_OVERFLOW",
        f"The prompt has more than {prompt_tokens} tokens, and the planned context is {context_tokens} tokens. "
        "Shorten it or load with a larger context.",
        metadata=_context_figures(prompt_tokens, max_output_tokens, context_tokens),
    )


def _context_figures(prompt_tokens: int, max_output_tokens: int, context_tokens: int) -> dict[str, str]:
    return {
        "prompt_tokens": str(prompt_tokens),
        "max_output_tokens": str(max_output_tokens),
        "context_tokens": str(context_tokens),
    }


def _bad_field(field: str, reason: str, message: str) -> RequestError:
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, reason, message, field_violations=((field, message),))

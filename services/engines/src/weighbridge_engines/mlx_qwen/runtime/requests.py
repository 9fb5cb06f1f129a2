"""Protobuf messages as the runtime's own values, and back."""

from pathlib import Path
from typing import Literal, get_args

from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb2
from weighbridge_proto.engines.v1 import runtime_service_pb2 as runtime_pb2

from weighbridge_engines.mlx_qwen.runtime import conversation, refusals
from weighbridge_engines.mlx_qwen.runtime.answer import Delta
from weighbridge_engines.mlx_qwen.runtime.conversation import ChatSpec, Turn
from weighbridge_engines.mlx_qwen.runtime.generation import Event, Finish, Finished, Started
from weighbridge_engines.mlx_qwen.runtime.loading import Limits, LoadSpec

# mlx-lm's own default; the plan normally says another.
_PREFILL_STEP_TOKENS = 2048
_KV_GROUP_SIZE = 64

_ROLES = {
    chat_pb2.ROLE_SYSTEM: "system",
    chat_pb2.ROLE_USER: "user",
    chat_pb2.ROLE_ASSISTANT: "assistant",
}
_THINKING = {
    chat_pb2.THINKING_OFF: False,
    # Qwen's templates know on and off: every level is on.
    chat_pb2.THINKING_ON: True,
    chat_pb2.THINKING_MINIMAL: True,
    chat_pb2.THINKING_LOW: True,
    chat_pb2.THINKING_MEDIUM: True,
    chat_pb2.THINKING_HIGH: True,
    chat_pb2.THINKING_XHIGH: True,
    chat_pb2.THINKING_MAX: True,
}
_FREE_TOOL_CHOICES = (chat_pb2.TOOL_CHOICE_UNSPECIFIED, chat_pb2.TOOL_CHOICE_AUTO, chat_pb2.TOOL_CHOICE_NONE)
_SamplingField = Literal[
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"
]
_SAMPLING_FIELDS: tuple[_SamplingField, ...] = get_args(_SamplingField)
_FINISH = {
    Finish.STOP: chat_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: chat_pb2.FINISH_REASON_LENGTH,
    Finish.STOP_SEQUENCE: chat_pb2.FINISH_REASON_STOP_SEQUENCE,
}


def load_spec(request: runtime_pb2.LoadRequest) -> LoadSpec:
    """What to load. Raises RequestError if no path or no context is given."""
    launch = request.launch
    if not request.model_path:
        raise refusals.malformed_config("The request names no model folder.")
    if launch.context_tokens <= 0:
        raise refusals.malformed_config("The launch plans no context: context_tokens must be above 0.")
    return LoadSpec(
        folder=Path(request.model_path),
        name=request.model_name,
        limits=Limits(
            context_tokens=launch.context_tokens,
            prefill_step_tokens=launch.prefill_step_tokens or _PREFILL_STEP_TOKENS,
            cache_bytes=launch.allocator_cache_bytes,
            memory_bytes=launch.memory_limit_bytes,
            kv_bits=launch.kv_bits,
            kv_group_size=launch.kv_group_size or _KV_GROUP_SIZE,
        ),
    )


def chat_spec(request: chat_pb2.ChatRequest) -> ChatSpec:
    """What to answer, checked. Raises RequestError for content or parameters that this runtime does not take."""
    if request.warm_up:
        raise refusals.warm_up_not_supported()
    if request.forced_tool or request.tool_choice not in _FREE_TOOL_CHOICES:
        raise refusals.unsupported_tool_choice("forced_tool" if request.forced_tool else "tool_choice")
    form = request.response_format.WhichOneof("format")
    if form == "json_schema" or (form == "json_object" and request.response_format.json_object):
        raise refusals.unsupported_response_format()
    if request.tools and request.tool_choice != chat_pb2.TOOL_CHOICE_NONE:
        raise refusals.unsupported_content("tools", "This engine does not call tools.")
    if request.adapter:
        raise refusals.unsupported_content("adapter", "This engine has no adapters mounted.")
    sampling = request.sampling
    return conversation.check(
        ChatSpec(
            turns=tuple(_turn(index, message) for index, message in enumerate(request.messages)),
            sampling={name: getattr(sampling, name) for name in _SAMPLING_FIELDS if sampling.HasField(name)},
            max_output_tokens=request.max_output_tokens,
            stops=tuple(request.stop_sequences),
            thinking=_THINKING.get(request.thinking),
        )
    )


def _turn(index: int, message: chat_pb2.ChatMessage) -> Turn:
    role = _ROLES.get(message.role)
    if role is None or message.tool_calls:
        raise refusals.unsupported_content(
            f"messages[{index}]", "A message must come from system, user or assistant; this engine does not call tools."
        )
    texts = []
    for number, part in enumerate(message.parts):
        if part.WhichOneof("part") != "text":
            raise refusals.unsupported_content(
                f"messages[{index}].parts[{number}]", "This engine reads text only. Send text parts."
            )
        texts.append(part.text)
    return Turn(role, "".join(texts), message.reasoning)


def response(event: Event) -> runtime_pb2.GenerateResponse:
    """An event of an answer as its message."""
    if isinstance(event, Delta):
        return runtime_pb2.GenerateResponse(delta=chat_pb2.ChatDelta(text=event.text, reasoning=event.reasoning))
    if isinstance(event, Started):
        return runtime_pb2.GenerateResponse(
            started=chat_pb2.ChatStarted(model_name=event.model_name, prompt_tokens=event.prompt_tokens)
        )
    return runtime_pb2.GenerateResponse(finished=_finished(event))


def _finished(event: Finished) -> chat_pb2.ChatFinished:
    usage = chat_pb2.Usage(
        prompt_tokens=event.prompt_tokens,
        output_tokens=event.output_tokens,
        reasoning_tokens=event.reasoning_tokens,
        cache_bytes=event.kv_bytes,
    )
    usage.time_to_first_token.FromNanoseconds(round(event.first_token_s * 1e9))
    usage.generation_time.FromNanoseconds(round(event.generation_s * 1e9))
    return chat_pb2.ChatFinished(reason=_FINISH[event.finish], usage=usage, stop_sequence=event.stop_sequence)

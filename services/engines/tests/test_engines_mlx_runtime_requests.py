import math

import grpc
import pytest
from weighbridge_engines.mlx_qwen.runtime import conversation, requests, sampling
from weighbridge_engines.mlx_qwen.runtime.conversation import Turn
from weighbridge_engines.mlx_qwen.runtime.sampling import Sampling
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb2
from weighbridge_proto.engines.v1 import runtime_service_pb2 as runtime_pb2
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import plan_pb2


def failure(call, *arguments):
    with pytest.raises(RequestError) as caught:
        call(*arguments)
    return caught.value.failure


def message(text="Hi", role=chat_pb2.ROLE_USER, **fields):
    return chat_pb2.ChatMessage(role=role, parts=[chat_pb2.ContentPart(text=text)], **fields)


def test_a_request_becomes_a_spec_with_only_the_sampling_it_carries():
    spec = requests.chat_spec(
        chat_pb2.ChatRequest(
            messages=[
                message("Be brief.", chat_pb2.ROLE_SYSTEM),
                message("Hi"),
                message("Yes?", chat_pb2.ROLE_ASSISTANT),
            ],
            sampling=chat_pb2.Sampling(temperature=0.0, seed=-1),
            max_output_tokens=7,
            stop_sequences=["\n"],
            thinking=chat_pb2.THINKING_OFF,
        )
    )
    assert spec.turns == (Turn("system", "Be brief."), Turn("user", "Hi"), Turn("assistant", "Yes?"))
    assert spec.sampling == {"temperature": 0.0, "seed": -1}
    assert (spec.max_output_tokens, spec.stops, spec.thinking) == (7, ("\n",), False)


def test_text_parts_of_a_message_are_joined_and_thoughts_kept():
    parts = [chat_pb2.ContentPart(text="a"), chat_pb2.ContentPart(text="b")]
    spec = requests.chat_spec(
        chat_pb2.ChatRequest(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT, parts=parts, reasoning="hm")])
    )
    assert spec.turns == (Turn("assistant", "ab", "hm"),)


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (chat_pb2.ChatRequest(), "EMPTY_CONVERSATION", "messages"),
        (chat_pb2.ChatRequest(messages=[message("  ")]), "EMPTY_CONVERSATION", "messages"),
        (chat_pb2.ChatRequest(messages=[message()], tools=[chat_pb2.Tool(name="t")]), "UNSUPPORTED_CONTENT", "tools"),
        (chat_pb2.ChatRequest(messages=[message()], adapter="a"), "UNSUPPORTED_CONTENT", "adapter"),
        (
            chat_pb2.ChatRequest(messages=[message()], tool_choice=chat_pb2.TOOL_CHOICE_REQUIRED),
            "UNSUPPORTED_TOOL_CHOICE",
            "tool_choice",
        ),
        (chat_pb2.ChatRequest(messages=[message()], forced_tool="t"), "UNSUPPORTED_TOOL_CHOICE", "forced_tool"),
        (
            chat_pb2.ChatRequest(messages=[message()], response_format=chat_pb2.ResponseFormat(json_object=True)),
            "UNSUPPORTED_RESPONSE_FORMAT",
            "response_format",
        ),
        (
            chat_pb2.ChatRequest(messages=[message(), message(role=chat_pb2.ROLE_TOOL)]),
            "UNSUPPORTED_CONTENT",
            "messages[1]",
        ),
        (
            chat_pb2.ChatRequest(
                messages=[
                    chat_pb2.ChatMessage(
                        role=chat_pb2.ROLE_USER, parts=[chat_pb2.ContentPart(image=chat_pb2.ImagePart(data=b"x"))]
                    )
                ]
            ),
            "UNSUPPORTED_CONTENT",
            "messages[0].parts[0]",
        ),
        (chat_pb2.ChatRequest(messages=[message()], max_output_tokens=-1), "INVALID_SAMPLING", "max_output_tokens"),
        (chat_pb2.ChatRequest(messages=[message()], stop_sequences=[""]), "INVALID_SAMPLING", "stop_sequences"),
        (chat_pb2.ChatRequest(messages=[message()], stop_sequences=["x"] * 17), "INVALID_SAMPLING", "stop_sequences"),
    ],
)
def test_what_the_engine_cannot_take_is_refused_by_field(request_, reason, field):
    refused = failure(requests.chat_spec, request_)
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert [name for name, _ in refused.field_violations] == [field]


def test_tools_that_must_not_be_called_are_no_reason_to_refuse():
    spec = requests.chat_spec(
        chat_pb2.ChatRequest(
            messages=[message()], tools=[chat_pb2.Tool(name="t")], tool_choice=chat_pb2.TOOL_CHOICE_NONE
        )
    )
    assert spec.turns == (Turn("user", "Hi"),)


def test_a_form_that_is_not_asked_for_is_no_reason_to_refuse():
    plain = chat_pb2.ResponseFormat(json_object=False)
    assert requests.chat_spec(chat_pb2.ChatRequest(messages=[message()], response_format=plain)).turns


def test_a_warm_up_is_refused():
    refused = failure(requests.chat_spec, chat_pb2.ChatRequest(messages=[message()], warm_up=True))
    assert (refused.code, refused.reason) == (grpc.StatusCode.UNIMPLEMENTED, "WARM_UP_NOT_SUPPORTED")


def test_every_level_of_thinking_is_known():
    for level in chat_pb2.Thinking.values():
        expected = {chat_pb2.THINKING_UNSPECIFIED: None, chat_pb2.THINKING_OFF: False}.get(level, True)
        assert requests.chat_spec(chat_pb2.ChatRequest(messages=[message()], thinking=level)).thinking is expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
    ],
)
def test_sampling_out_of_range_names_the_parameter(name, value):
    refused = failure(sampling.check, Sampling(**{name: value}))
    assert refused.reason == "INVALID_SAMPLING"
    assert refused.field_violations[0][0] == f"sampling.{name}"


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        {"temperature": 2.5, "top_p": 0.01, "top_k": 40, "min_p": 1.0, "repetition_penalty": 0.5},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
    ],
)
def test_sampling_in_range_passes_unchanged(values):
    assert sampling.check(Sampling(**values)) == Sampling(**values)


def test_defaults_are_the_publishers_and_greedy_without_do_sample():
    # What Qwen publishes for its chat models.
    published = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
    assert sampling.defaults_of(published) == Sampling(temperature=0.6, top_k=20, top_p=0.95)
    assert sampling.defaults_of({"temperature": 0.6}) == Sampling(temperature=0.0)
    assert sampling.defaults_of({"do_sample": True}) == Sampling(temperature=1.0)


@pytest.mark.parametrize(
    "broken",
    [
        {"temperature": 10**400},
        {"top_k": 10**400, "temperature": 1.0},
        {"temperature": "hot"},
        {"top_p": 7},
        {"top_k": None},
        {"temperature": math.inf},
    ],
)
def test_a_broken_default_never_fails_a_request(broken):
    assert sampling.defaults_of({"do_sample": True, **broken}).temperature == 1.0


def test_the_request_goes_over_the_models_defaults():
    chosen = conversation.with_defaults({"temperature": 0.0, "seed": 3}, Sampling(temperature=0.6, top_k=20))
    assert chosen == Sampling(temperature=0.0, top_k=20, seed=3)


def test_negative_seeds_are_taken_by_their_bits():
    assert sampling.seed_bits(-1) == 2**64 - 1
    assert sampling.seed_bits(5) == 5


@pytest.mark.parametrize(("prompt", "asked", "room"), [(100, 50, 50), (100, 0, 156), (255, 1, 1), (255, 0, 1)])
def test_the_answers_room_is_what_was_asked_or_what_the_context_leaves(prompt, asked, room):
    assert conversation.answer_room(prompt, asked, 256) == room


@pytest.mark.parametrize(("prompt", "asked"), [(200, 57), (256, 0), (257, 1), (300, 0)])
def test_a_request_above_the_context_says_all_three_numbers(prompt, asked):
    refused = failure(conversation.answer_room, prompt, asked, 256)
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_OVERFLOW")
    assert dict(refused.metadata) == {
        "prompt_tokens": str(prompt),
        "max_output_tokens": str(asked),
        "context_tokens": "256",
    }


def test_a_launch_becomes_limits():
    launch = plan_pb2.MlxLaunch(
        context_tokens=4096, slots=2, prefill_step_tokens=64, allocator_cache_bytes=5, memory_limit_bytes=6, kv_bits=8,
        kv_group_size=32,
    )  # fmt: skip
    spec = requests.load_spec(runtime_pb2.LoadRequest(model_path="/m/x", model_name="x", launch=launch))
    limits = spec.limits
    assert (spec.name, limits.context_tokens, limits.prefill_step_tokens) == ("x", 4096, 64)
    assert (limits.cache_bytes, limits.memory_bytes, limits.kv_bits, limits.kv_group_size) == (5, 6, 8, 32)


def test_a_load_without_folder_or_context_is_refused():
    assert failure(requests.load_spec, runtime_pb2.LoadRequest()).reason == "MALFORMED_CONFIG"
    assert failure(requests.load_spec, runtime_pb2.LoadRequest(model_path="/m")).reason == "MALFORMED_CONFIG"


class Template:
    """A tokenizer whose template fails as jinja2 does when a template calls raise_exception."""

    def __init__(self, error=None):
        self.error = error
        self.encoded = 0

    def apply_chat_template(self, messages, **options):
        self.seen = (messages, options)
        if self.error is not None:
            raise self.error
        return "".join(message["content"] for message in messages)

    def encode(self, text, **options):
        """One token for each pair of characters."""
        assert options == {"add_special_tokens": False}  # the template has written them
        self.encoded += len(text)
        return list(range(-(-len(text) // 2)))


def test_a_prompt_is_built_by_the_template():
    tokenizer = Template()
    spec = conversation.ChatSpec((Turn("user", "Hi"), Turn("assistant", "Yo", "thought")), {}, thinking=True)
    assert conversation.encode(tokenizer, spec, 100) == [0, 1]  # "HiYo"
    messages, options = tokenizer.seen
    assert messages == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo", "reasoning_content": "thought"},
    ]
    assert options == {"add_generation_prompt": True, "tokenize": False, "enable_thinking": True}


def test_a_template_that_refuses_is_a_bad_request_that_quotes_nothing():
    from jinja2.exceptions import TemplateError

    tokenizer = Template(TemplateError("bad turn: my secret"))
    spec = conversation.ChatSpec((Turn("user", "my secret"),), {})
    refused = failure(conversation.encode, tokenizer, spec, 100)
    assert refused.reason == "UNSUPPORTED_CONTENT"
    assert "secret" not in refused.message


def test_another_error_of_the_template_is_not_taken_for_a_refusal():
    with pytest.raises(KeyError):
        conversation.encode(Template(KeyError("x")), conversation.ChatSpec((Turn("user", "Hi"),), {}), 100)


def test_of_a_prompt_that_is_far_too_long_only_the_start_is_tokenized():
    tokenizer = Template()
    spec = conversation.ChatSpec((Turn("user", 30 * 2**20 * "x"),), {})
    refused = failure(conversation.encode, tokenizer, spec, 100)
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_OVERFLOW")
    assert int(refused.metadata["prompt_tokens"]) > 100
    assert refused.metadata["context_tokens"] == "100"
    assert tokenizer.encoded == 800


def test_a_long_text_of_few_tokens_is_no_overflow():
    class Dense(Template):
        def encode(self, text, **options):
            return list(range(len(text) // 50))

    spec = conversation.ChatSpec((Turn("user", 5000 * "x"),), {})
    assert conversation.encode(Dense(), spec, 100) == list(range(100))

"""The runtime as its host meets it: a child process on a socket, with tiny random models and once the demo model."""

import json
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from weighbridge_engines.mlx_qwen.runtime.harness import started_runtime
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb2
from weighbridge_proto.engines.v1 import runtime_service_pb2 as pb2
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.fit.v1 import plan_pb2

pytest.importorskip("mlx.core")
pytestmark = pytest.mark.mlx

# Tensor bytes of the checkpoints, from the sizes in their configuration (measured too, 2026-11).
QWEN3_BYTES, QWEN35_BYTES = 15_739_392, 15_550_112
# MLX keeps its random state in one array of two 32-bit words.
RANDOM_STATE_BYTES = 8

# Key/value bytes per slot: 2 (K, V) × layers of full attention × 2 heads × 64 × 2 bytes.
QWEN3_SLOT_BYTES = 2 * 8 * 2 * 64 * 2
QWEN35_SLOT_BYTES = 2 * 2 * 2 * 64 * 2
# Six linear layers: 3 conv steps × (2·4·32 + 8·32) × 2 bytes, and a state of 8·32·32 × 4 bytes.
QWEN35_STATE_BYTES = 6 * (3 * (2 * 4 * 32 + 8 * 32) * 2 + 8 * 32 * 32 * 4)


def slots(*chunks):
    """Slots of an mlx-lm KVCache after these chunks: on overflow it adds whole blocks of 256 to its offset."""
    offset = capacity = 0
    for chunk in chunks:
        if offset + chunk > capacity:
            capacity = offset + -(-chunk // 256) * 256
        offset += chunk
    return capacity


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folders of the tiny checkpoints; made in a process of their own, so that MLX never runs in pytest's."""
    folder = tmp_path_factory.mktemp("tiny-models")
    subprocess.run([sys.executable, "-m", "weighbridge_engines.models.tiny", str(folder)], check=True)
    return {"qwen3": folder / "tiny-qwen3-bf16", "qwen35": folder / "tiny-qwen35-bf16"}


@pytest.fixture(scope="module")
def runtime():
    with started_runtime() as started:
        yield started


@pytest.fixture
def loaded(runtime, tiny):
    """The runtime with tiny Qwen3 loaded within a context of 400 tokens."""
    runtime.load(tiny["qwen3"], context_tokens=400)
    yield runtime
    runtime.unload()


def refusal(call):
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return RpcFailure.from_rpc_error(caught.value)


def load_request(folder, **launch):
    launch = {"context_tokens": 512} | launch
    return pb2.LoadRequest(model_path=str(folder), launch=plan_pb2.MlxLaunch(**launch))


def prompt_of(folder: Path, tokens: int) -> str:
    """A user message that makes a prompt of exactly so many tokens with the tiny models' template."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def length(text):
        return len(tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids)

    count = tokens - length("")
    text = "1" * count
    while length(text) < tokens:
        text += " 1"
    while length(text) > tokens:
        text = text[:-1]
    assert length(text) == tokens
    return text


def test_it_says_what_it_is(runtime):
    described = runtime.stub.Describe(pb2.DescribeRequest())
    assert described.name == "mlx-lm"
    assert {"qwen2", "qwen3", "qwen3_moe", "qwen3_5"} <= set(described.model_types)
    assert described.device


@pytest.mark.parametrize(
    ("name", "weights", "per_slot", "state", "known"),
    [
        ("qwen3", QWEN3_BYTES, QWEN3_SLOT_BYTES, 0, 2_097_152),
        ("qwen35", QWEN35_BYTES, QWEN35_SLOT_BYTES, QWEN35_STATE_BYTES, 739_328),
    ],
)
def test_weights_and_caches_are_exactly_what_the_formulas_say(tiny, name, weights, per_slot, state, known):
    folder = tiny[name]
    with started_runtime() as fresh:
        assert fresh.memory().active_bytes == RANDOM_STATE_BYTES
        events = fresh.load(folder, context_tokens=1024, prefill_step_tokens=2048)
        assert [event.phase for event in events if event.fraction == 1.0] == ["weights", "done"]
        # A compiled function of Qwen3.5 keeps one bf16 constant once it has run (in the warm-up).
        constant = 2 if name == "qwen35" else 0
        assert fresh.memory().active_bytes == weights + RANDOM_STATE_BYTES + constant
        answer = fresh.answer(prompt_of(folder, 300), max_output_tokens=32)
        usage = answer.finished.usage
        assert usage.prompt_tokens == answer.started.prompt_tokens == 300
        generated = usage.output_tokens
        # The prompt but its last token in one chunk, the last token, and every generated token (one is computed ahead).
        expected = slots(299, 1, *[1] * generated) * per_slot + state
        assert usage.cache_bytes == expected == known
        after = fresh.memory()
        assert after.kv_cache_bytes == 0
        assert after.active_bytes == weights + RANDOM_STATE_BYTES + constant


def test_caches_follow_the_prefill_step(loaded, tiny):
    loaded.unload()
    loaded.load(tiny["qwen3"], context_tokens=1024, prefill_step_tokens=100)
    usage = loaded.answer(prompt_of(tiny["qwen3"], 300), max_output_tokens=4).finished.usage
    assert usage.cache_bytes == slots(100, 100, 99, 1, *[1] * usage.output_tokens) * QWEN3_SLOT_BYTES


def test_quantised_caches_hold_what_was_measured(loaded, tiny):
    loaded.unload()
    loaded.load(tiny["qwen3"], context_tokens=1024, prefill_step_tokens=2048, kv_bits=4, kv_group_size=64)
    usage = loaded.answer(prompt_of(tiny["qwen3"], 300), max_output_tokens=2).finished.usage
    # 4 bits and two bf16 per group of 64: 0.5625 bytes instead of 2.
    assert usage.cache_bytes == 589_824


def test_unloading_gives_everything_back_twice(runtime, tiny):
    held = []
    for name in ("qwen3", "qwen3"):
        before = runtime.memory().active_bytes
        runtime.load(tiny[name])
        held.append(runtime.memory().active_bytes - before)
        runtime.unload()
        assert runtime.memory().active_bytes == before
        assert runtime.memory().allocator_cache_bytes == 0
    assert held == [QWEN3_BYTES, QWEN3_BYTES]


def test_greedy_answers_equal_mlx_lms_own(loaded, tiny):
    program = (
        "import json, sys, mlx_lm\n"
        "model, tokenizer = mlx_lm.load(sys.argv[1])\n"
        "turns = [{'role': 'user', 'content': 'Tell me more'}]\n"
        "prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True)\n"
        "parts = [r.text for r in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=24)]\n"
        "print(json.dumps(''.join(parts)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tiny["qwen3"])], check=True, capture_output=True, text=True
    )
    expected = json.loads(run.stdout.splitlines()[-1])
    answer = loaded.answer("Tell me more", max_output_tokens=24)
    assert answer.text == expected
    assert answer.finished.usage.output_tokens == 24
    assert answer.finished.reason == chat_pb2.FINISH_REASON_LENGTH
    assert answer.finished.usage.time_to_first_token.ToNanoseconds() > 0


def test_equal_seeds_give_equal_text_and_others_do_not(loaded):
    def drawn(seed):
        sampling = chat_pb2.Sampling(temperature=1.5, top_p=0.95, top_k=200, min_p=0.0, seed=seed)
        return loaded.answer("Once", max_output_tokens=16, sampling=sampling).text

    first = drawn(7)
    other = drawn(8)
    assert drawn(7) == first
    assert other != first


def test_penalties_change_a_greedy_answer(loaded):
    plain = loaded.answer("Again", max_output_tokens=48).text
    for penalty in ({"repetition_penalty": 5.0}, {"presence_penalty": 20.0}, {"frequency_penalty": 20.0}):
        sampling = chat_pb2.Sampling(temperature=0.0, **penalty)
        assert loaded.answer("Again", max_output_tokens=48, sampling=sampling).text != plain


def test_a_stop_sequence_ends_the_answer_before_itself(loaded):
    whole = loaded.answer("Tell me more", max_output_tokens=24).text
    # From the middle of one token's text into the next: the runtime must find it across tokens.
    stop = whole[len(whole) // 2 : len(whole) // 2 + 6]
    answer = loaded.answer("Tell me more", max_output_tokens=24, stop_sequences=[stop])
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finished.reason == chat_pb2.FINISH_REASON_STOP_SEQUENCE
    assert answer.finished.stop_sequence == stop
    assert answer.finished.usage.output_tokens < 24


def test_a_request_above_the_context_is_refused_with_its_figures(loaded, tiny):
    text = prompt_of(tiny["qwen3"], 376)
    refused = refusal(loaded.stream(text, max_output_tokens=25))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_OVERFLOW")
    assert refused.metadata == {"prompt_tokens": "376", "max_output_tokens": "25", "context_tokens": "400"}
    usage = loaded.answer(text, max_output_tokens=24).finished.usage
    assert usage.prompt_tokens == 376


def test_a_huge_prompt_is_refused_without_the_memory_to_read_it(loaded):
    held = loaded.memory().process_bytes
    text = "hello world, this goes on. " * 2**20  # 27 MiB, for which a tokenizer takes some 25 times that
    assert refusal(loaded.stream(text, max_output_tokens=5)).reason == "CONTEXT_OVERFLOW"
    assert loaded.memory().process_peak_bytes - held < 10 * len(text)


def test_a_vanishing_temperature_takes_the_likeliest_token(loaded):
    greedy = loaded.answer("Go on", max_output_tokens=8).text
    for temperature in (1e-320, 1e-40, 1e-7):
        sampling = chat_pb2.Sampling(temperature=temperature, seed=1)
        assert loaded.answer("Go on", max_output_tokens=8, sampling=sampling).text == greedy


def test_without_a_longest_answer_the_context_is_the_end(loaded, tiny):
    finished = loaded.answer(prompt_of(tiny["qwen3"], 395)).finished
    assert finished.usage.output_tokens <= 5
    if finished.reason == chat_pb2.FINISH_REASON_LENGTH:
        assert finished.usage.output_tokens == 5


def test_a_bad_request_fails_alone(loaded):
    bad = loaded.stream("Hi", sampling=chat_pb2.Sampling(top_p=0.0))
    assert refusal(bad).reason == "INVALID_SAMPLING"
    # mlx-lm itself refuses a top_k of the vocabulary or more; here it means all tokens.
    wide = chat_pb2.Sampling(temperature=1.0, top_k=100_000, seed=1)
    assert loaded.answer("Hi", max_output_tokens=2, sampling=wide).finished.usage.output_tokens >= 1


def test_generating_without_a_model_is_refused(runtime):
    assert refusal(runtime.stream("Hi")).reason == "NO_MODEL_LOADED"


def test_cancelling_frees_the_engine_and_its_cache(runtime, tiny):
    # An answer of thirty thousand tokens would take many minutes: whatever follows proves that it was ended.
    runtime.load(tiny["qwen3"], context_tokens=32_000)
    try:
        sampling = chat_pb2.Sampling(temperature=1.0, seed=3)
        runtime.answer("Go on", sampling=sampling, max_output_tokens=2)  # compiled functions keep a few constants
        held = runtime.memory().active_bytes
        call = runtime.stream("Go on", sampling=sampling)
        kinds = []
        for event in call:
            kinds.append(event.WhichOneof("event"))
            if kinds.count("delta") == 3:
                break
        call.cancel()
        assert runtime.answer("Next", max_output_tokens=2).finished.usage.output_tokens >= 1
        memory = runtime.memory()
        assert memory.kv_cache_bytes == 0
        assert memory.active_bytes <= held
    finally:
        runtime.unload()


def test_a_cancelled_prompt_ends_at_its_next_step(runtime, tiny):
    # The recurrent layers take a prompt of thousands of tokens for minutes on a CPU; steps of 32 are milliseconds.
    runtime.load(tiny["qwen35"], context_tokens=32_000, prefill_step_tokens=32)
    try:
        call = runtime.stream(prompt_of(tiny["qwen35"], 20_000), max_output_tokens=1)
        assert next(call).WhichOneof("event") == "started"
        call.cancel()
        assert runtime.answer("Next", max_output_tokens=1).finished.usage.output_tokens == 1
    finally:
        runtime.unload()


def test_a_second_load_is_refused_and_the_first_stays(loaded, tiny):
    refused = refusal(loaded.stub.Load(load_request(tiny["qwen35"])))
    assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_ALREADY_LOADED")
    assert loaded.answer("Hi", max_output_tokens=1).finished.usage.output_tokens == 1


def test_weights_above_the_plan_are_not_opened(runtime, tiny):
    before = runtime.memory().active_bytes
    refused = refusal(runtime.stub.Load(load_request(tiny["qwen3"], memory_limit_bytes=QWEN3_BYTES - 1)))
    assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "ENGINE_OUT_OF_MEMORY")
    assert refused.metadata["weight_bytes"] == str(QWEN3_BYTES)
    assert runtime.memory().active_bytes == before
    runtime.load(tiny["qwen3"], memory_limit_bytes=QWEN3_BYTES)
    runtime.unload()


def test_the_text_only_name_of_qwen35_loads(runtime, tiny, tmp_path):
    config = json.loads((tiny["qwen35"] / "config.json").read_text())
    flat = config["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"], "eos_token_id": 2}
    folder = copied(tiny["qwen35"], tmp_path / "text-only", config=flat)
    assert flat["model_type"] == "qwen3_5_text"
    runtime.load(folder)
    assert runtime.answer("Hi", max_output_tokens=2).finished.usage.output_tokens >= 1
    runtime.unload()


def copied(source: Path, target: Path, *, config=None, without=(), weights=None) -> Path:
    """A copy of a model's folder with something about it changed; files are links where they stay the same."""
    target.mkdir()
    for file in source.iterdir():
        if file.name not in without:
            (target / file.name).symlink_to(file)
    if config is not None:
        (target / "config.json").unlink()
        (target / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights is not None:
        (target / "model.safetensors").unlink()
        (target / "model.safetensors").write_bytes(weights)
    return target


def broken_folders(source: Path, root: Path):
    whole = (source / "model.safetensors").read_bytes()
    config = json.loads((source / "config.json").read_text())
    yield "MALFORMED_CONFIG", root / "absent"
    yield "MALFORMED_CONFIG", copied(source, root / "no-config", without=["config.json"])
    yield "MALFORMED_CONFIG", copied(source, root / "config-is-no-json", config="{")
    yield "MALFORMED_CONFIG", copied(source, root / "no-type", config={})
    yield "MALFORMED_CONFIG", copied(source, root / "no-sizes", config={"model_type": "qwen3"})
    yield "UNSUPPORTED_ARCHITECTURE", copied(source, root / "llama", config=config | {"model_type": "llama"})
    yield "UNSUPPORTED_ARCHITECTURE", copied(source, root / "own-code", config=config | {"model_file": "evil.py"})
    yield "TOKENIZER_MISSING", copied(source, root / "no-tokenizer", without=["tokenizer.json"])
    bad_tokenizer = copied(source, root / "bad-tokenizer", without=["tokenizer.json"])
    (bad_tokenizer / "tokenizer.json").write_text('{"version": "1.0"}')
    yield "TOKENIZER_MISSING", bad_tokenizer
    no_template = copied(source, root / "no-template", without=["tokenizer_config.json"])
    (no_template / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    )
    yield "TOKENIZER_MISSING", no_template
    yield "MALFORMED_WEIGHTS", copied(source, root / "cut", weights=whole[:-1000])
    yield "MALFORMED_WEIGHTS", copied(source, root / "cut-in-header", weights=whole[:100])
    yield "MALFORMED_WEIGHTS", copied(source, root / "four-bytes", weights=b"abcd")
    yield "MALFORMED_WEIGHTS", copied(source, root / "none", without=["model.safetensors"])
    yield "MALFORMED_WEIGHTS", copied(source, root / "other-model", config=config | {"num_hidden_layers": 9})


def test_what_cannot_be_loaded_is_refused_clearly_and_leaves_nothing(runtime, tiny, tmp_path):
    before = runtime.memory().active_bytes
    for reason, folder in broken_folders(tiny["qwen3"], tmp_path):
        refused = refusal(runtime.stub.Load(load_request(folder)))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason), folder.name
        assert folder.name in refused.message or "model.safetensors" in refused.message
        assert runtime.memory().active_bytes == before, folder.name
    runtime.load(tiny["qwen3"])
    runtime.unload()


def test_only_the_files_of_the_index_load(runtime, tiny, tmp_path):
    # Left beside the weights: mlx-lm alone would load this too and fail. Brackets would be a pattern to it.
    folder = copied(tiny["qwen3"], tmp_path / "odd [name]")
    (folder / "model-old.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    before = runtime.memory().active_bytes
    runtime.load(folder)
    assert runtime.memory().active_bytes - before == QWEN3_BYTES
    runtime.unload()

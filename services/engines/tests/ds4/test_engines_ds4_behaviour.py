"""What ds4-server does, where that matters to whoever starts it or asks it.

Tests with `subject` run on the real one too where WEIGHBRIDGE_TEST_DS4_SERVER names it: what was measured with
antirez/ds4 8d57664 (2026-05-21, CPU build). Tests with `standin` need a card, real weights or more patience than a test
has, and hold the stand-in to what is known of later builds.
"""

import http.client
import os
import signal
import socket
import stat

import pytest
from ds4_subjects import read_all, wait_until
from weighbridge_engines.models import sparse_ds4

SMALL = ("--cpu", "--ctx", "2048")
CALLS = (("get_weather", '{"city":"Oslo","days":2}'),)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def started(request, flash_model):
    """Starts a subject with the model; what was started ends with the test."""
    servers = []

    def start(who, *arguments, **behaviour):
        servers.append(who.start("--model", flash_model, *arguments, **behaviour))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


# Command line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ctx", "0"], "invalid value for --ctx: 0"),
        (["--ctx"], r"missing value for --(ctx|port)|invalid value for --ctx: --port"),
        (["--tokens", "x"], "invalid value for --tokens: x"),
        (["--backend", "tpu"], "invalid --backend value: tpu"),
        (["--mtp-margin", "1001"], "invalid value for --mtp-margin: 1001"),
        (["--nothing"], "unknown option: --nothing"),
        (["--kv-cache-cold-max-tokens", "5"], "--kv-cache-cold-max-tokens must be 0 or >= --kv-cache-min-tokens"),
    ],
)
def test_what_it_does_not_take_ends_it_with_code_2(subject, arguments, said):
    server = subject.start(*arguments)
    assert server.wait_exit() == 2
    server.wait_line(rf"^\d{{4}} \d\d:\d\d:\d\d ds4-server: ({said})")


def test_no_port_of_its_own_choice(subject):
    server = subject.start(port=0)
    assert server.wait_exit() == 2
    server.wait_line("invalid value for --port: 0")


def test_its_help_goes_to_standard_output_and_names_no_flag_of_later_builds(subject):
    server = subject.start("--help")
    told = server.process.stdout.read().decode()
    assert server.wait_exit() == 0
    assert all(flag in told for flag in ("--model", "--mtp FILE", "--ctx", "--kv-disk-dir", "--backend NAME"))
    assert not any(flag in told for flag in ("--ssd-streaming", "--dspark", "--mtp-model", "--vision"))
    assert server.lines == []


# Start


def test_it_says_what_the_context_takes_and_listens_last(subject, started):
    """A context's buffers on the processor: 43 rings of 128 rows and the compressed rows, all in float32."""
    server = started(subject, *SMALL).wait_ready()
    buffers = server.wait_line(r"context buffers (\S+) MiB \(ctx=2048, backend=cpu, prefill_chunk=0, raw_kv_rows=128, ")
    assert float(buffers[1]) == 37.81
    assert "listening" in server.lines[-1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "model file is too small to be GGUF"),
        (bytes(64), "model is not a GGUF file"),
        (b"GGUF\2\0\0\0" + bytes(56), "only GGUF v3 is supported"),
        (None, r"cannot open model '.*': No such file or directory"),
    ],
)
def test_what_is_no_model_ends_it_with_code_1(subject, tmp_path, content, said):
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    server = subject.start("--model", path, "--cpu")
    assert server.wait_exit() == 1
    server.wait_line(f"^ds4: {said}$")


def test_a_download_that_was_cut_short_is_noticed(subject, tmp_path):
    path = sparse_ds4.write(tmp_path / "model.gguf")
    os.truncate(path, path.stat().st_size - 1)
    server = subject.start("--model", path, "--cpu")
    assert server.wait_exit() == 1
    server.wait_line("^ds4: tensor points outside GGUF file$")


@pytest.mark.parametrize(
    ("without", "changed", "said"),
    [
        (["deepseek4.block_count"], {}, "required metadata key is missing: deepseek4.block_count"),
        ([], {"deepseek4.expert_count": 128}, "expected expert_count=256 for DeepSeek4 Flash, got 128"),
        (["blk.7.attn_kv.weight"], {}, "required tensor is missing: blk.7.attn_kv.weight"),
        (["tokenizer.ggml.tokens"], {}, "GGUF tokenizer token table is missing or invalid"),
    ],
)
def test_a_model_of_another_shape_ends_it_with_code_1(subject, tmp_path, without, changed, said):
    path = sparse_ds4.write(tmp_path / "model.gguf", without=without, changed=changed)
    server = subject.start("--model", path, "--cpu")
    assert server.wait_exit() == 1
    server.wait_line(f"^ds4: {said}$")


def test_a_build_without_a_card_refuses_one(subject, started):
    server = started(subject, "--cuda")
    assert server.wait_exit() == 1
    server.wait_line("^ds4: cuda backend requested but this build has no graph backend support; aborting startup$")


def test_a_second_one_names_the_first_and_the_lock_is_left_behind(subject, started):
    first = started(subject, *SMALL).wait_ready()
    assert subject.lock.read_text().strip() == str(first.process.pid)
    second = started(subject, *SMALL)
    assert second.wait_exit() == 2
    second.wait_line(rf"^ds4: another ds4 process is already running \(pid {first.process.pid}\); refusing to start$")
    first.process.send_signal(signal.SIGTERM)
    assert first.wait_exit() == 0
    assert subject.lock.exists()


def test_a_taken_port_is_found_out_after_everything_else(subject, started, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = started(subject, *SMALL, port=taken.getsockname()[1])
        assert server.wait_exit() == 1
    server.wait_line("context buffers")
    server.wait_line(r"failed to listen on 127\.0\.0\.1:\d+: Address already in use")


def test_a_stop_ends_it_with_code_0(subject, started):
    server = started(subject, *SMALL).wait_ready()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    server.wait_line("shutdown requested, draining requests")


# What can be asked


def test_only_models_and_chats_are_there(subject, started):
    server = started(subject, *SMALL).wait_ready()
    (model,) = server.get("/v1/models").json["data"]
    assert (model["id"], model["owned_by"], model["context_length"]) == ("deepseek-v4-flash", "ds4.c", 2048)
    assert server.get("/v1/models/deepseek-v4-flash").json == model
    assert {server.get(path).status for path in ("/health", "/metrics", "/v1/models/other", "/")} == {404}
    assert server.ask("OPTIONS", "/v1/chat/completions").status == 204
    assert server.get("/v1/models").headers["Connection"] == "close"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"reasoning_effort": "huge"}, "invalid JSON request"),
        ({"messages": 3}, "invalid JSON request"),
        ({"stream": "yes"}, "invalid JSON request"),
    ],
)
def test_what_it_cannot_read_is_refused(subject, started, fields, said):
    answer = started(subject, *SMALL).wait_ready().chat(**fields)
    assert (answer.status, answer.json["error"]["message"]) == (400, said)


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(subject, started):
    """A token for each byte, and one for each of four marks."""
    answer = started(subject, *SMALL).wait_ready().chat("a" * 3000)
    assert answer.status == 400
    assert answer.json["error"] == {
        "message": "Prompt has 3004 tokens, but the configured context size is 2048 tokens",
        "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded",
        "n_prompt_tokens": 3004, "n_ctx": 2048,
    }  # fmt: skip


# Chats


def test_a_stream_has_a_role_pieces_an_end_what_it_took_and_a_last_line(subject, started):
    """Takes the real one a minute or two."""
    answer = started(subject, *SMALL).wait_ready().chat(think=False, max_tokens=2, **STREAMED)
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert answer.events[-1] == "[DONE]"
    first, *_, last, usage = answer.chunks
    assert first["choices"] == [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "length"}]
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 6},
    }  # fmt: skip


def test_thinking_comes_before_the_answer_and_calls_after_it(standin, started):
    server = started(standin, *SMALL, calls=CALLS, reasoning="I think.", answer="I look.").wait_ready()
    answer = server.chat(tools=TOOLS, **STREAMED)
    assert answer.joined("reasoning_content") == "I think."
    assert answer.joined("content") == "I look."
    kinds = [next(iter(delta), "") for delta in answer.deltas]
    assert kinds == sorted(kinds, key=["role", "reasoning_content", "content", "tool_calls", ""].index)
    (started_call, *fragments) = [delta["tool_calls"][0] for delta in answer.deltas if "tool_calls" in delta]
    assert started_call["function"] == {"name": "get_weather", "arguments": ""}
    assert len(started_call["id"]) == len("call_") + 32
    assert "".join(piece["function"]["arguments"] for piece in fragments) == CALLS[0][1]
    assert all(piece.keys() == {"index", "function"} for piece in fragments)
    assert answer.finish == "tool_calls"


def test_thinking_that_is_cut_off_is_content_where_nothing_is_streamed(standin, started):
    server = started(standin, *SMALL, reasoning="one two three four").wait_ready()
    message = server.chat(max_tokens=2).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "one two"}
    assert server.chat(max_tokens=2, stream=True).joined("reasoning_content") == "one two"


def test_a_conversation_goes_on_from_where_it_stands(standin, started):
    server = started(standin, *SMALL, reasoning="I think.", answer="Yes.", calls=CALLS).wait_ready()
    asked = {"role": "user", "content": "hi"}
    first = server.chat(tools=TOOLS, **STREAMED)
    call = {"id": "x", "type": "function", "function": {"name": "get_weather", "arguments": CALLS[0][1]}}
    said = {"role": "assistant", "content": "Yes.", "tool_calls": [call]}
    result = {"role": "tool", "content": "rain", "tool_call_id": "x"}
    replayed = [asked, said | {"reasoning_content": "I think."}, result]
    held = first.chunks[-1]["usage"]["prompt_tokens"]
    cached = server.chat(messages=replayed, tools=TOOLS, **STREAMED).chunks[-1]["usage"]["prompt_tokens_details"]
    assert cached["cached_tokens"] > held
    server.chat("something else", tools=TOOLS)
    server.chat(tools=TOOLS)
    forgotten = server.chat(messages=[asked, said, result], tools=TOOLS, **STREAMED).chunks[-1]["usage"]
    assert forgotten["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("rate", [30, 200])
def test_tokens_come_at_the_asked_rate(standin, started, rate):
    """Told by its own lines: none may come early, and no more than one is late."""
    server = started(standin, *SMALL, tokens=rate, rate=rate).wait_ready()
    assert server.chat(think=False, **STREAMED).chunks[-1]["usage"]["completion_tokens"] == rate
    told = server.wait_line(rf"gen={rate} decoding .* avg=(\S+) t/s")
    assert float(told[1]) <= rate * 1.01


# Failures


def test_a_prompt_that_fails_behind_the_headers_is_an_event(standin, started):
    server = started(standin, "--metal", "--ctx", "4096", "--prefill-chunk", "8", build="2026-07", compute="metal",
                     prefill_fault="error").wait_ready()  # fmt: skip
    answer = server.chat("a" * 20, stream=True)
    assert answer.status == 200
    assert b"event: error\ndata: " in answer.body
    assert b"[DONE]" not in answer.body
    assert server.chat().status == 500


def test_a_comment_is_sent_while_a_long_prompt_is_read(standin, started):
    server = started(standin, "--metal", "--ctx", "4096", "--prefill-chunk", "8", build="2026-07", compute="metal",
                     keepalive_s=0.0).wait_ready()  # fmt: skip
    assert b": prefill\n\n" in server.chat("a" * 40, stream=True).body


@pytest.mark.parametrize("fault", ["error", "cut"])
def test_an_answer_that_fails(standin, started, fault):
    server = started(standin, *SMALL, decode_fault=fault).wait_ready()
    if fault == "cut":
        answer = server.chat(stream=True)
        assert answer.chunks and "[DONE]" not in answer.events
    else:
        assert server.chat(stream=True).finish == "error"
        assert server.chat().json["choices"][0]["finish_reason"] == "error"
        server.wait_line('finish=error error="decode failed"')


def test_a_broken_card_leaves_it_up_and_answers_nothing(standin, started):
    server = started(standin, *SMALL, breaks_after=1).wait_ready()
    assert [server.chat().status for _ in range(3)] == [200, 500, 500]
    assert server.get("/v1/models").status == 200


def test_whoever_leaves_still_costs_the_whole_prompt(standin, started):
    server = started(
        standin, "--metal", "--ctx", "4096", build="2026-07", compute="metal", prefill_rate=100
    ).wait_ready()
    server.open_chat("a" * 46, stream=True).close()
    assert server.chat().status == 200
    server.wait_line(r"ctx=0\.\.50:50 prompt done")


def test_a_later_build_notices_that_somebody_left(standin, started):
    server = started(standin, "--metal", "--ctx", "4096", compute="metal", prefill_rate=10, cancels=True).wait_ready()
    gone = server.open_chat("a" * 3000, stream=True)
    server.wait_line("prompt start")
    gone.close()
    server.wait_line("request cancelled: client disconnected")


def test_a_reader_that_takes_nothing_loses_its_stream(standin, started):
    server = started(standin, "--cpu", "--ctx", "8192", answer="x" * 4_000_000 + " " + "y" * 4_000_000,
                     send_buffer_bytes=4096, stall_s=0.2).wait_ready()  # fmt: skip
    slow = server.open_chat(think=False, stream=True)
    server.wait_line('finish=error error="client stream write failed"')
    slow.close()
    assert server.get("/v1/models").status == 200


def test_a_stop_in_the_middle_ends_the_stream_without_a_word(standin, started):
    server = started(standin, *SMALL, tokens=2000, rate=50).wait_ready()
    connection = server.open_chat(think=False, stream=True)
    wait_until(lambda: b"w0" in connection.recv(4096), "the first token")
    server.process.send_signal(signal.SIGTERM)
    rest = read_all(connection)
    assert b"[DONE]" not in rest and b'finish_reason":"' not in rest
    assert server.wait_exit() == 0
    # Whichever it was at when it was told.
    server.wait_line('finish=error error="(shutdown requested|client stream write failed)"')


def test_a_second_stop_gives_up_a_prompt(standin, started):
    server = started(standin, "--metal", "--ctx", "4096", compute="metal", prefill_rate=1).wait_ready()
    server.open_chat("a" * 1000, stream=True)
    server.wait_line("prompt start")
    server.process.send_signal(signal.SIGTERM)
    server.wait_line("shutdown requested")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 130


@pytest.mark.parametrize(
    ("backend", "fault", "code", "said"),
    [
        ("metal", "out_of_memory", 1, "metal failed to map model views"),
        ("cuda", "out_of_memory", 1, "cuda failed to prepare startup model cache"),
        ("cuda", "no_session", 1, "failed to create cuda session"),
        ("cuda", "SIGKILL", -9, "CUDA loading model tensors"),
    ],
)
def test_a_load_that_fails(standin, started, backend, fault, code, said):
    server = started(standin, f"--{backend}", build="2026-07", compute="", load_fault=fault)
    assert server.wait_exit() == code
    server.wait_line(said)


def test_metal_needs_its_sources_below_the_working_directory(standin, started, tmp_path):
    server = started(standin, "--metal", "--chdir", tmp_path, build="2026-07", compute="metal", metal_sources=True)
    assert server.wait_exit() == 1
    server.wait_line("^ds4: metal backend unavailable; aborting startup$")


# Builds with streaming


def test_the_plan_of_a_streamed_launch(standin, started):
    """The example that another launcher measured: Q2 at 131,072 tokens with 32 GB, 35.35 GiB (reference, §3.4)."""
    server = started(standin, "--metal", "--ctx", "131072", "--ssd-streaming", "--ssd-streaming-cache-experts", "32GB",
                     build="2026-07", compute="metal").wait_ready()  # fmt: skip
    server.wait_line(
        r"^ds4: memory: KV 1\.36 GiB \(raw 0\.36 \+ compressed 1\.00\) \+ buffers 1\.00 GiB "
        r"\+ resident model 0\.99 GiB \+ expert cache 28\.62 GiB "
        r"\+ prefill expert reserve 3\.38 GiB = 35\.35 GiB planned$"
    )
    server.wait_line(r"ctx=131072 prefill_cap=4096 raw_kv_rows=4352 compressed_kv_rows=32770 backend=metal")


@pytest.mark.parametrize(
    ("context", "mib"),
    [("163840", "3797.75"), ("1000000", "21302.79")],  # ds4 issues 812 and 554
)
def test_context_buffers_of_public_logs(standin, started, context, mib):
    server = started(standin, "--cuda", "--ctx", context, build="2026-07", compute="cuda").wait_ready()
    server.wait_line(rf"context buffers {mib} MiB \(ctx={context}, backend=cuda, ")


def test_drafting_and_streaming_exclude_each_other_but_for_v41(standin, flash_model, v41_model, tmp_path):
    drafter = sparse_ds4.write_drafter(tmp_path / "drafter.gguf")
    streamed = (
        "--metal",
        "--ssd-streaming",
        "--ssd-streaming-cache-experts",
        "16GB",
        "--dspark",
        "--mtp-model",
        drafter,
    )
    refused = standin.start("--model", flash_model, *streamed, build="2026-09", compute="metal")
    assert refused.wait_exit() == 1
    refused.wait_line("is not compatible with --mtp-model yet")
    v41 = standin.start("--model", v41_model, *streamed, build="2026-09", compute="metal")
    try:
        (model,) = v41.wait_ready().get("/v1/models").json["data"]
        assert model["id"] == "deepseek-v4.1-flash"
    finally:
        v41.stop()


def test_dspark_needs_its_file_and_a_cache_its_reserve(standin, started):
    alone = started(standin, "--metal", "--dspark", build="2026-09", compute="metal")
    assert alone.wait_exit() == 2
    alone.wait_line("--dspark requires --mtp-model FILE")
    small = started(standin, "--metal", "--ssd-streaming", "--ssd-streaming-cache-experts", "3GB", build="2026-07",
                    compute="metal")  # fmt: skip
    assert small.wait_exit() == 1
    slow = started(standin, "--cpu", "--ssd-streaming", build="2026-07", compute="metal")
    assert slow.wait_exit() == 1


def test_conversations_are_kept_in_a_folder_of_its_owner_alone(standin, started, tmp_path):
    folder = tmp_path / "kept" / "kv"
    server = started(standin, *SMALL, "--kv-disk-dir", folder, "--kv-cache-min-tokens", "8").wait_ready()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert server.chat("remember this well", think=False).status == 200
    server.wait_line(r"kv cache stored tokens=\d+ trimmed=0 reason=cold")
    (kept,) = folder.glob("*.kv")
    assert b"remember this well" in kept.read_bytes()


def test_it_answers_one_after_the_other(standin, started):
    server = started(standin, *SMALL, tokens=20, rate=100).wait_ready()
    connections = [server.open_chat(think=False, stream=True) for _ in range(3)]
    numbers = []
    for connection in connections:
        response = http.client.HTTPResponse(connection)
        response.begin()
        numbers.append(response.read().decode().split('"id":"chatcmpl-')[1].split('"')[0])
        connection.close()
    assert sorted(numbers) == ["1", "2", "3"]
    running = 0
    for line in server.lines:
        running += ("prompt start" in line) - ("finish=" in line)
        assert running in (0, 1)

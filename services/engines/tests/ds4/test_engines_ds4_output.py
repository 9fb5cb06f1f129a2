"""From ds4-server's lines to what they say.

Lines as its builds of May and July 2026 print them, and as public logs have them; figures from the reference system's
own tests of such lines.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_engines.ds4 import events
from weighbridge_engines.ds4.feed import OutputFeed
from weighbridge_engines.ds4.output import MOST_FAILURES, OutputReader
from weighbridge_engines.ds4.turns import TurnLog
from weighbridge_engines.supervisor.output import LineSplitter

GIB = 2**30
MIB = 2**20
LISTENING = "1130 22:35:48 ds4-server: listening on http://127.0.0.1:18931"
PLAN = (
    "ds4: memory: KV 1.36 GiB (raw 0.36 + compressed 1.00) + buffers 1.00 GiB + resident model 0.99 GiB "
    "+ expert cache 28.62 GiB + prefill expert reserve 3.38 GiB = 35.35 GiB planned"
)
SPAN = events.Span(98, 148, 50)


def gib(figure: str) -> int:
    return round(float(figure) * GIB)


def read(line: str) -> object:
    return OutputReader().read(line)


def read_loaded(line: str) -> object:
    reader = OutputReader()
    reader.read(LISTENING)
    return reader.read(line)


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ("ds4: CUDA prepared model tensor mappings 40.25 GiB", events.LoadProgress(gib("40.25"))),
        ("ds4: ROCm prepared model tensor mappings 1.00 GiB", events.LoadProgress(GIB)),
        ("ds4: CUDA loading model tensors 12.34 GiB cached", events.LoadProgress(gib("12.34"))),
        ("ds4: CUDA loading model tensors into device cache: 0.00 GiB", events.LoadProgress(0)),
        ("ds4: CUDA model chunk copy 4.00/80.77 GiB", events.LoadProgress(4 * GIB, gib("80.77"))),
        ("ds4: warming mapped tensor pages: 81.20 GiB", events.Warming(gib("81.20"))),
        ("ds4: warmed tensor pages in 176.001s (checksum=42)", events.Warmed(176.001)),
        ("ds4: metal backend initialized for graph diagnostics", events.BackendReady("metal")),
        (PLAN, events.MemoryPlan(gib("35.35"), gib("1.36"), gib("1.00"))),
        (
            "ds4: memory: KV 1.36 GiB (raw 0.36 + compressed 1.00) + buffers 1.00 GiB + resident model 80.76 GiB "
            "= 83.12 GiB planned",
            events.MemoryPlan(gib("83.12"), gib("1.36"), GIB),
        ),
        (
            "1130 22:35:48 ds4-server: context buffers 64.69 MiB (ctx=4096, backend=cpu, prefill_chunk=0, "
            "raw_kv_rows=128, compressed_kv_rows=1026)",
            events.ContextBuffers(round(64.69 * MIB), 4096, "cpu"),
        ),
        (
            "0723 01:02:03 ds4-server: 4 resident sessions request at least 9.45 GiB of context buffers",
            events.SessionBuffers(4, gib("9.45")),
        ),
        (LISTENING, events.Listening("127.0.0.1", 18931)),
    ],
)
def test_a_load_is_told(line: str, event: object) -> None:
    assert read(line) == event


def test_a_plan_in_the_colours_of_a_terminal_is_the_same() -> None:
    green = "\x1b[32m" + PLAN.replace("35.35 GiB planned", "\x1b[1;32m35.35 GiB planned\x1b[0m")
    assert read(green) == read(PLAN) is not None


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("prompt start", events.PromptStarted(SPAN)),
        ("TOOLS prefill chunk 512/7880 (6.5%) chunk=39.35 t/s avg=39.35 t/s 13.011s",
         events.PromptProgress(SPAN, 512, 7880, 39.35)),
        ("prefill chunk 2048/2048 (100.0%) chunk=0.00 t/s avg=40.11 t/s 51.059s",
         events.PromptProgress(SPAN, 2048, 2048, 40.11)),
        ("tool checkpoint rebuild chunk 3200/7880 (40.6%) chunk=41.00 t/s avg=40.00 t/s 80.000s",
         events.PromptProgress(SPAN, 3200, 7880, 40.0, rebuilds=True)),
        ("prompt done 0.272s", events.PromptDone(SPAN, 0.272)),
        ("gen=150 THINKING decoding chunk=5.20 t/s avg=5.35 t/s 28.037s", events.Decoding(SPAN, 150, 5.35)),
        ("gen=1250 RESPPROTO TOOLS THINKING DSML_START DSML_END decoding chunk=5.00 t/s avg=5.02 t/s 249.004s",
         events.Decoding(SPAN, 1250, 5.02)),
        ("gen=50 finish=stop 3.100s", events.RequestEnded(SPAN, 50, "stop")),
        ("gen=7 TOOLS finish=tool_calls 3.100s", events.RequestEnded(SPAN, 7, "tool_calls")),
        ('gen=3 finish=error error="shutdown requested" 1.000s',
         events.RequestEnded(SPAN, 3, "error", "shutdown requested")),
        ('gen=3 finish=error error="it said "no"" 1.000s', events.RequestEnded(SPAN, 3, "error", 'it said "no"')),
        ("stream closed during prefill", events.RequestEnded(SPAN, error="stream closed during prefill")),
        ("TOOLS sse headers failed", events.RequestEnded(SPAN, error="sse headers failed")),
        ("openai role chunk failed", events.RequestEnded(SPAN, error="openai role chunk failed")),
        ("prefill failed after stream closed: CUDA prefill failed",
         events.RequestEnded(SPAN, error="CUDA prefill failed")),
        ("prefill chunk 5/0 (0.0%) chunk=0.00 t/s avg=0.00 t/s 0.000s", None),
        ("prefill chunk 9/4 (225.0%) chunk=0.00 t/s avg=0.00 t/s 0.000s", None),
        ("prefill SSE error failed: broken pipe", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_request_is_told(text: str, event: object, kind: str) -> None:
    assert read_loaded(f"0521 13:32:43 ds4-server: {kind} ctx=98..148:50 {text}") == event


def failure(line: str) -> events.Ds4Failure:
    event = read(line)
    assert isinstance(event, events.Ds4Failure), line
    return event


@pytest.mark.parametrize(
    ("line", "kind", "subject"),
    [
        ("ds4: another ds4 process is already running (pid 4711); refusing to start", "LOCK_HELD", "4711"),
        ("ds4: another ds4 process is already running; refusing to start", "LOCK_HELD", ""),
        ("ds4: failed to open lock file /tmp/ds4.lock: Permission denied", "LOCK_UNUSABLE", "/tmp/ds4.lock"),
        ("1130 22:35:48 ds4-server: unknown option: --vision", "WRONG_ARGUMENT", "--vision"),
        ("1130 22:35:48 ds4-server: invalid value for --port: 0", "WRONG_ARGUMENT", "--port"),
        ("1130 22:35:48 ds4-server: missing value for --ctx", "WRONG_ARGUMENT", "--ctx"),
        ("1130 22:35:48 ds4-server: --power must be between 1 and 100", "WRONG_ARGUMENT", "--power"),
        ("ds4: --dspark requires --mtp FILE", "NOT_TOGETHER", "--dspark"),
        ("ds4: --ssd-streaming is not compatible with --mtp yet", "NOT_TOGETHER", "--ssd-streaming"),
        ("ds4: --prefill-chunk is not supported for GLM 5.2; GLM uses graph-selected prefill chunks", "NOT_TOGETHER",
         "--prefill-chunk"),
        ("ds4: --ssd-streaming-cache-experts byte budget 3.00 GiB is too small: two routed prefill layers need 3.38 "
         "GiB", "CACHE_TOO_SMALL", ""),
        ("1130 22:35:48 ds4-server: failed to listen on 127.0.0.1:8000: Address already in use", "PORT_TAKEN", ""),
        ("1130 22:35:48 ds4-server: failed to listen on 127.0.0.1:80: Permission denied", "CANNOT_LISTEN", ""),
        ("1130 22:35:48 ds4-server: failed to chdir to /nope: No such file or directory", "NO_FOLDER", "/nope"),
        ("ds4: cannot open model '/m/a b.gguf': No such file or directory", "MISSING_FILE", "/m/a b.gguf"),
        ("ds4: model file is too small to be GGUF", "WRONG_FILE", ""),
        ("ds4: model is not a GGUF file", "WRONG_FILE", ""),
        ("ds4: only GGUF v3 is supported", "WRONG_FILE", ""),
        ("ds4: tensor points outside GGUF file", "TRUNCATED_FILE", ""),
        ("ds4: required metadata key is missing: deepseek4.block_count", "WRONG_FILE", "deepseek4.block_count"),
        ("ds4: required tensor is missing: blk.0.attn_q_a.weight", "WRONG_FILE", "blk.0.attn_q_a.weight"),
        ("ds4: tensor output.weight has type F16, expected Q8_0", "WRONG_FILE", "output.weight"),
        ("ds4: tensor output.weight has dim[1]=5, expected 129280", "WRONG_FILE", "output.weight"),
        ("ds4: expected block_count=43 for DeepSeek4 Flash, got 40", "WRONG_FILE", ""),
        ("ds4: required tokenizer token is missing: <think>", "WRONG_FILE", "<think>"),
        ("ds4: GGUF tokenizer token table is missing or invalid", "WRONG_FILE", ""),
        ("ds4: metal backend unavailable; aborting startup", "BACKEND_MISSING", ""),
        ("ds4: cuda backend requested but this build has no graph backend support; aborting startup",
         "BACKEND_MISSING", ""),
        ("ds4: Metal source metal/dense.metal not found (set DS4_METAL_DENSE to override)", "SHADERS_MISSING",
         "metal/dense.metal"),
        ("ds4: metal failed to map model views; aborting startup. This is commonly caused by insufficient memory or "
         "accelerator VM budget.", "OUT_OF_MEMORY", ""),
        ("ds4: cuda failed to prepare startup model cache", "OUT_OF_MEMORY", ""),
        ("ds4: CUDA model arena alloc failed for weights (1792.00 MiB chunk): out of memory", "OUT_OF_MEMORY", ""),
        ("1130 22:35:48 ds4-server: failed to create cuda session", "OUT_OF_MEMORY", ""),
        ("1130 22:35:48 ds4-server: failed to create cuda session 2/4", "OUT_OF_MEMORY", ""),
        ("ds4: out of memory", "OUT_OF_MEMORY", ""),
        ("ds4: cannot mmap model '/m.gguf': Cannot allocate memory", "OUT_OF_MEMORY", ""),
    ],
)  # fmt: skip
def test_what_went_wrong_is_told_apart(line: str, kind: str, subject: str) -> None:
    found = failure(line)
    assert (found.kind, found.subject, found.while_loaded) == (events.FailureKind(kind), subject, False)
    assert line.endswith(found.text)


@pytest.mark.parametrize(
    "line",
    [
        "ds4: warning: POSIX_MADV_WILLNEED failed for CPU model mapping: Cannot allocate memory",
        "ds4: WARNING: SSD streaming expert cache (512 experts) is under twice the per-token routed working set",
        "ds4: CUDA q8 fp16 cache alloc failed (64.00 MiB): out of memory",
        "ds4: CUDA host registration skipped: operation not supported",
        "ds4: Linux cuda backend set oom_score_adj=1000",
        "ds4: Metal device Apple M2 Max, 32.00 GiB RAM",
        "Segmentation fault",
        "another ds4 process is already running (pid 1); refusing to start",
        "",
    ],
)
def test_what_it_goes_on_after_is_no_failure(line: str) -> None:
    assert read(line) is None


def test_a_device_that_fails_while_it_serves_is_remembered() -> None:
    found = read_loaded("ds4: CUDA layer sync failed: an illegal memory access was encountered")
    assert isinstance(found, events.Ds4Failure)
    assert (found.kind, found.while_loaded) == (events.FailureKind.DEVICE_FAULT, True)


def test_an_answer_that_is_printed_forges_no_load_and_no_lock() -> None:
    """Since July a line about a broken tool call repeats a piece of the answer, with its line ends."""
    reader = OutputReader()
    reader.read(LISTENING)
    for line in (PLAN, "ds4: another ds4 process is already running (pid 1); refusing to start", LISTENING):
        assert reader.read(line) is None
    assert (reader.memory_plan, reader.failures) == (None, [])


@pytest.mark.parametrize(
    "text",
    [
        "chat ctx=98..148:50 prompt start",
        "chat ctx=98..148:50 prompt done 0.272s",
        "chat ctx=98..148:50 gen=50 decoding chunk=5.20 t/s avg=5.35 t/s 28.037s",
        "chat ctx=98..148:50 gen=50 finish=stop 3.100s",
        "chat ctx=98..148:50 stream closed during prefill",
    ],
)
def test_a_line_about_a_request_without_the_servers_stamp_is_an_answers(text: str) -> None:
    """ds4-server stamps each line about a request (May and July 2026); a piece of an answer has none in front."""
    assert read_loaded(f"ds4-server: {text}") is None
    assert read_loaded(f"0521 13:32:43 ds4: {text}") is None
    assert read_loaded(f"0521 13:32:43 ds4-server: {text}") is not None


def test_an_answer_that_is_printed_ends_no_request() -> None:
    feed = OutputFeed()
    log = TurnLog(sessions=1, now=lambda: 0.0)
    feed.tell = log.take
    turn = log.begin()
    for line in (
        LISTENING,
        "1130 22:35:50 ds4-server: chat ctx=0..53:53 prompt start",
        "1130 22:35:51 ds4-server: chat ctx=0..53:53 TOOLS invalid tool call dsml_snippet: <｜DSML｜tool_calls>",
        "ds4-server: chat ctx=0..53:53 gen=9 finish=stop 1.000s",
        "ds4-server: chat ctx=0..60:60 prompt start",
    ):
        feed.take(line, True)
    assert (turn.span, turn.is_over) == (events.Span(0, 53, 53), False)
    feed.take("1130 22:35:52 ds4-server: chat ctx=0..53:53 gen=9 finish=stop 2.000s", True)
    assert (turn.is_over, turn.ended) == (True, events.RequestEnded(events.Span(0, 53, 53), 9, "stop"))


def test_what_the_server_says_last_before_it_aborts_has_no_stamp() -> None:
    assert failure("ds4-server: out of memory").kind is events.FailureKind.OUT_OF_MEMORY


def test_the_failures_of_a_load_are_not_pushed_out_by_what_comes_after() -> None:
    reader = OutputReader()
    reader.read("ds4: out of memory")
    for _ in range(MOST_FAILURES + 10):
        reader.read("ds4: tensor points outside GGUF file")
    assert len(reader.failures) == MOST_FAILURES
    assert reader.failures[0].kind is events.FailureKind.OUT_OF_MEMORY


# -- what it says that it will hold ------------------------------------------------------------------------------------


def test_what_it_announces_is_its_planned_total() -> None:
    reader = OutputReader()
    assert reader.announced_bytes is None
    reader.read(PLAN)
    assert reader.announced_bytes == gib("35.35")


def test_of_several_sessions_each_has_buffers_of_its_own() -> None:
    reader = OutputReader()
    reader.read(PLAN)  # 1.36 and 1.00 GiB of it are one session's
    reader.read("0723 01:02:03 ds4-server: 4 resident sessions request at least 9.44 GiB of context buffers")
    assert reader.announced_bytes == pytest.approx(gib("35.35") + 3 * 2.36 * GIB, abs=4)


# -- as it comes -------------------------------------------------------------------------------------------------------

START = (
    "ds4: prefill layer 3/43\rds4: prefill layer 4/43\r\n"
    "ds4: CUDA prepared model tensor mappings 40.25 GiB\n"
    "\r\x1b[Kds4: CUDA preparing model tensor mappings: 80.50 GiB\n"
    "ds4: cuda backend initialized for graph diagnostics\n"
    f"{PLAN}\r\n{LISTENING}\n"
    "1130 22:35:50 ds4-server: chat ctx=0..53:53 prompt start\n"
    "ds4: gpu prefill layer 12/61\r"
    "1130 22:35:51 ds4-server: chat ctx=0..53:53 prompt done 0.272s\n"
)
"""Of a GPU build; meters end with a bare carriage return, which glues them to the next line on a pipe."""


def told(chunks: list[bytes]) -> tuple[list[object], OutputFeed]:
    feed, splitter, heard = OutputFeed(), LineSplitter(), []
    feed.tell = heard.append
    for lines in [*(splitter.feed(chunk) for chunk in chunks), splitter.end()]:
        for line in lines:
            assert feed.take(line, True) is None
    return heard, feed


@given(st.lists(st.integers(0, len(START)), max_size=12))
def test_wherever_the_stream_is_cut_it_tells_the_same(cuts: list[int]) -> None:
    stream = START.encode()
    edges = sorted({0, *cuts, len(stream)})
    heard, feed = told([stream[begin:end] for begin, end in itertools.pairwise(edges)])
    assert heard == [events.PromptStarted(events.Span(0, 53, 53)), events.PromptDone(events.Span(0, 53, 53), 0.272)]
    assert feed.reader.announced_bytes == gib("35.35")
    assert (feed.reader.is_listening, feed.load) == (True, events.BackendReady("cuda"))


def test_standard_output_says_nothing() -> None:
    feed = OutputFeed()
    assert feed.take(LISTENING, False) is None
    assert not feed.reader.is_listening


@given(st.text(st.characters(blacklist_categories=("Cs",)), max_size=200), st.booleans())
def test_no_line_is_stumbled_over(text: str, loaded: bool) -> None:
    reader = OutputReader()
    if loaded:
        reader.read(LISTENING)
    for prefix in ("", "ds4: ", "1130 22:35:48 ds4-server: ", "ds4-server: chat ctx=0..1:1 "):
        reader.read(prefix + text)

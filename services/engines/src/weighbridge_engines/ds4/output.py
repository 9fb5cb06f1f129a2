"""From the lines that ds4-server prints to what it is at and what went wrong.

There is no health, progress or memory endpoint: its output is the only source. All of it is on standard error. Lines of
its server begin with month, day and time, those of its engine do not; both name themselves. The one line of the server
without a stamp that tells anything here is its last word before it aborts.

A line is believed only from its beginning. Builds since July 2026 repeat a piece of a model's answer within a line
about a broken tool call, and such a piece may have lines of its own. So after the model is loaded, a line of the server
needs its stamp, and what is read moves nothing but progress, ends a request whose span it names, and explains an end.
A model that writes a stamp and the span of its own prompt too can still have its request taken for ended: if that one's
client leaves early, the next request waits within ds4 and not before it.

Wording: antirez/ds4 8d57664 (2026-05-21) and 7e3dbef (2026-07-23), both read in source, the first also run.
"""

import re
from collections.abc import Callable

from weighbridge_engines.ds4.events import (
    BackendReady,
    ContextBuffers,
    Decoding,
    Ds4Failure,
    Event,
    FailureKind,
    Listening,
    LoadEvent,
    LoadProgress,
    MemoryPlan,
    PromptDone,
    PromptProgress,
    PromptStarted,
    RequestEnded,
    RequestEvent,
    SessionBuffers,
    Span,
    Warmed,
    Warming,
)

GIB = 2**30
MIB = 2**20

MOST_FAILURES = 64
"""Kept of one process: a device that fails prints a line for each request."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"(?P<stamp>\d{4} \d\d:\d\d:\d\d )?(?P<name>ds4|ds4-server): (?P<text>.*\S)\s*", re.ASCII)
_GIB = r"(\d+\.\d+) GiB"
_REQUEST = re.compile(
    r"(?:chat|completion) ctx=(?P<cached>\d+)\.\.(?P<prompt>\d+):(?P<new>\d+)(?: gen=(?P<generated>\d+))?"
    r"(?: (?:RESPPROTO|TOOLS|THINKING|DSML_START|DSML_END))* (?P<rest>.*)",
    re.ASCII,
)
_RATE = r"avg=(?P<rate>\d+\.\d+) t/s"
_CHUNK = re.compile(
    rf"(?P<phase>prefill|tool checkpoint rebuild) chunk (?P<done>\d+)/(?P<total>\d+) \(.*\) .*{_RATE} .*", re.ASCII
)
_PROMPT_DONE = re.compile(r"prompt done (\d+\.\d+)s", re.ASCII)
_DECODING = re.compile(rf"decoding .*{_RATE} .*", re.ASCII)
_FINISH = re.compile(r'finish=(\w+)(?: error="(.*)")? \d+\.\d+s', re.ASCII)


_LoadTable = tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], LoadEvent]], ...]


def _load_table(*rows: tuple[str, Callable[[re.Match[str]], LoadEvent]]) -> _LoadTable:
    return tuple((re.compile(pattern, re.ASCII), make) for pattern, make in rows)


_LOADING = _load_table(
    (rf"\w+ prepared model tensor mappings {_GIB}", lambda m: LoadProgress(_bytes(m[1]))),
    (rf"\w+ loading model tensors {_GIB} cached", lambda m: LoadProgress(_bytes(m[1]))),
    (rf"\w+ (?:preparing model tensor mappings|loading model tensors into device cache): {_GIB}",
     lambda m: LoadProgress(_bytes(m[1]))),
    (rf"\w+ model chunk copy (\d+\.\d+)/{_GIB}", lambda m: LoadProgress(_bytes(m[1]), _bytes(m[2]))),
    (rf"warming mapped tensor pages: {_GIB}", lambda m: Warming(_bytes(m[1]))),
    (r"warmed tensor pages in (\d+\.\d+)s\b.*", lambda m: Warmed(float(m[1]))),
    (r"(\w+) backend initialized\b.*", lambda m: BackendReady(m[1].lower())),
    (rf"memory: KV {_GIB} \(.*\) \+ buffers {_GIB} \+ .* = {_GIB} planned",
     lambda m: MemoryPlan(_bytes(m[3]), _bytes(m[1]), _bytes(m[2]))),
    (r"context buffers (\d+\.\d+) MiB \(ctx=(\d+), backend=(\w+),.*",
     lambda m: ContextBuffers(_bytes(m[1], MIB), int(m[2]), m[3])),
    (rf"(\d+) resident sessions request at least {_GIB} of context buffers",
     lambda m: SessionBuffers(int(m[1]), _bytes(m[2]))),
    (r"listening on http://([\w.]+):(\d+)", lambda m: Listening(m[1], int(m[2]))),
)  # fmt: skip

_FailureTable = tuple[tuple[re.Pattern[str], FailureKind], ...]


def _failure_table(*rows: tuple[str, FailureKind]) -> _FailureTable:
    return tuple((re.compile(pattern, re.ASCII), kind) for pattern, kind in rows)


_FAILURES = _failure_table(
    (r"another ds4 process is already running(?: \(pid (?P<subject>\d+)\))?.*", FailureKind.LOCK_HELD),
    (r"failed to (?:open lock file|lock|truncate lock file) (?P<subject>.*): .*", FailureKind.LOCK_UNUSABLE),
    (r"(?:unknown option:|missing value for|invalid value for) (?P<subject>--?[\w-]+).*", FailureKind.WRONG_ARGUMENT),
    (r"invalid (?P<subject>--?[\w-]+) value: .*", FailureKind.WRONG_ARGUMENT),
    (r"(?P<subject>--[\w-]+) must be .*", FailureKind.WRONG_ARGUMENT),
    (r"--ssd-streaming-cache-experts byte budget .* too small.*", FailureKind.CACHE_TOO_SMALL),
    (r"(?P<subject>--[\w-]+) (?:requires|is not|is currently|cannot|and) .*", FailureKind.NOT_TOGETHER),
    (r".* (?:is|are) (?:not (?:compatible|supported|implemented)|unsupported)\b.*", FailureKind.NOT_TOGETHER),
    (r"unsupported --mtp(?:-model)? support model (?P<subject>.*?) \(.*", FailureKind.NOT_TOGETHER),
    (r"failed to listen on .*: Address already in use", FailureKind.PORT_TAKEN),
    (r"failed to listen on .*", FailureKind.CANNOT_LISTEN),
    (r"failed to chdir to (?P<subject>.*): .*", FailureKind.NO_FOLDER),
    (r"cannot (?:open|stat) model '(?P<subject>.*)': .*", FailureKind.MISSING_FILE),
    (r"tensor points outside GGUF file", FailureKind.TRUNCATED_FILE),
    (r"model (?:file is too small to be|is not a) GGUF.*|only GGUF v3 is supported", FailureKind.WRONG_FILE),
    (r"required .* is missing: (?P<subject>.*)", FailureKind.WRONG_FILE),
    (r"tensor (?P<subject>\S+) has (?:type|dim\[|\d+ dimensions).*|expected \S+=.*", FailureKind.WRONG_FILE),
    (r"metadata .*|GGUF tokenizer .*|routed gate/up experts use different .*|unexpected .* ratio .*"
     r"|tensor (?:has an unsupported|element count|offset).*", FailureKind.WRONG_FILE),
    (r"Metal source (?P<subject>.*) not found.*|failed to read Metal source (?P<folder>.*): .*"
     r"|Metal shader compilation failed.*", FailureKind.SHADERS_MISSING),
    (r"\w+ backend (?:unavailable|requested but).*|Metal device not available", FailureKind.BACKEND_MISSING),
    (r".*\b(?:illegal memory access|launch failure|device-side assert|misaligned address|hardware stack error).*",
     FailureKind.DEVICE_FAULT),
    (r"out of memory\b.*|cannot mmap model .*|.*failed to map (?:\w+ )?model views.*"
     r"|failed to create \w+ session.*|\w+ failed to prepare (?:startup|optional) .*"
     r"|accelerator failed to (?:cache|prepare) .*|CUDA (?!q8 ).*(?:alloc failed|out of memory).*"
     r"|Metal could not wrap .*|failed to allocate Metal .*|Metal .*allocation failed.*"
     r"|.*memory guard refused.*|.*placement does not fit.*|.*insufficient memory.*"
     r"|.*need \d+\.\d+ GiB, (?:budget|have) .*", FailureKind.OUT_OF_MEMORY),
)  # fmt: skip
"""The first row that fits tells. A failed half-precision copy of 8-bit weights on CUDA is none: it goes on without."""

_TELLING_WHILE_LOADED = (FailureKind.DEVICE_FAULT, FailureKind.OUT_OF_MEMORY)

_WITHOUT_ANSWER = ("stream closed during prefill", "sse headers failed", "openai role chunk failed")
_ENDED_AFTER_CLIENT = "prefill failed after stream closed: "


class OutputReader:
    """Follows one ds4-server process from its first line on.

    Attributes:
        is_listening: whether it said that it listens: the model is loaded then.
        failures: what went wrong, oldest first, at most :data:`MOST_FAILURES`; those of the load are never pushed out.
        memory_plan: what it said that it will hold; None: nothing yet, or it is a build that does not say.
        session_buffers: what its sessions ask for together; None where it has one.
        last_words: the last line of its own before it listened, for an end that nothing else explains.
    """

    def __init__(self) -> None:
        self.is_listening = False
        self.failures: list[Ds4Failure] = []
        self.memory_plan: MemoryPlan | None = None
        self.session_buffers: SessionBuffers | None = None
        self.last_words = ""

    @property
    def announced_bytes(self) -> int | None:
        """What it says that it will hold with all its sessions; None where it does not say."""
        plan, sessions = self.memory_plan, self.session_buffers
        if plan is None:
            return None
        if sessions is None:
            return plan.total_bytes
        return plan.total_bytes - plan.kv_bytes - plan.buffers_bytes + sessions.size_bytes

    def read(self, line: str) -> Event | None:
        """What a line of standard error says, if it says anything."""
        event = self._read(_COLOUR.sub("", line))
        match event:
            case MemoryPlan():
                self.memory_plan = event
            case SessionBuffers():
                self.session_buffers = event
            case Listening():
                self.is_listening = True
            case Ds4Failure() if len(self.failures) < MOST_FAILURES:
                self.failures.append(event)
            case _:
                pass
        return event

    def _read(self, line: str) -> Event | None:
        match = _LINE.fullmatch(line)
        if match is None:
            return None
        text, of_server = match["text"], match["name"] == "ds4-server"
        is_stamped = match["stamp"] is not None
        if self.is_listening:
            request = _REQUEST.fullmatch(text) if of_server and is_stamped else None
            return self._failure(text) if request is None else _request_event(request)
        self.last_words = text
        if is_stamped == of_server:
            for pattern, make in _LOADING:
                if (found := pattern.fullmatch(text)) is not None:
                    return make(found)
        return self._failure(text)

    def _failure(self, text: str) -> Ds4Failure | None:
        if text.lower().startswith("warning:"):
            return None
        for pattern, kind in _FAILURES:
            if (found := pattern.fullmatch(text)) is not None:
                if self.is_listening and kind not in _TELLING_WHILE_LOADED:
                    return None
                named = found.groupdict()
                return Ds4Failure(kind, text, named.get("subject") or named.get("folder") or "", self.is_listening)
        return None


def _request_event(found: re.Match[str]) -> RequestEvent | None:
    span = Span(int(found["cached"]), int(found["prompt"]), int(found["new"]))
    rest, generated = found["rest"], int(found["generated"] or 0)
    if rest == "prompt start":
        return PromptStarted(span)
    if (chunk := _CHUNK.fullmatch(rest)) is not None:
        done, total = int(chunk["done"]), int(chunk["total"])
        if not 0 < total >= done:
            return None
        return PromptProgress(span, done, total, float(chunk["rate"]), chunk["phase"] != "prefill")
    if (done_line := _PROMPT_DONE.fullmatch(rest)) is not None:
        return PromptDone(span, float(done_line[1]))
    if (decoding := _DECODING.fullmatch(rest)) is not None:
        return Decoding(span, generated, float(decoding["rate"]))
    if (finish := _FINISH.fullmatch(rest)) is not None:
        return RequestEnded(span, generated, finish[1], finish[2] or "")
    if rest in _WITHOUT_ANSWER:
        return RequestEnded(span, error=rest)
    if rest.startswith(_ENDED_AFTER_CLIENT):
        return RequestEnded(span, error=rest.removeprefix(_ENDED_AFTER_CLIENT))
    return None


def _bytes(figure: str, unit: int = GIB) -> int:
    return round(float(figure) * unit)

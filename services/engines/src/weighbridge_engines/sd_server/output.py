"""From the lines that sd-server prints to what it is at and what went wrong.

It reports no progress over HTTP, so its output is the only source of it. Its bars for loading, sampling and tiles look
alike (``|====>    | 3/20 - 1.20it/s``): the unit tells a loading bar, the last line that named a phase the others.

A line is believed only where sd-server writes it: bars, INFO and WARN on standard output, ERROR on standard error, and
a message only from its beginning. So a prompt that it repeats within an error, as it does for a broken prompt
extension, forges nothing. With ``-v`` it would print prompts as lines of their own, which nothing can tell from its
words: it is never started with ``-v``.

Messages are those of stable-diffusion-cpp-python 0.4.7 (2026-11-30); line numbers in them differ between builds.
"""

import re
from collections.abc import Iterator

from weighbridge_engines.sd_server.events import (
    Event,
    FailureKind,
    Listening,
    LoadProgress,
    ModelVersion,
    ParamsMemory,
    PartMemory,
    Phase,
    RenderEnded,
    RenderStarted,
    SdFailure,
    SizeAligned,
)
from weighbridge_engines.sd_server.jobs import RenderProgress

_MIB = 2**20

_HEADER = re.compile(r"(?:\[(?P<level>DEBUG|INFO|WARN|ERROR) *\] )+[\w.+-]+:\d+ *- (?P<text>.*)", re.ASCII)
"""The level twice: threads that load together print level and text separately, and may fail at the same moment."""
_BAR = re.compile(
    r" *\|[=> ]{50}\| (?P<done>\d{1,9})/(?P<total>\d{1,9}) - \d+\.\d+(?P<unit>[MG]B/s|it/s|s/it)(?:\x1b\[K)?", re.ASCII
)
_WITHOUT_LINE_END = re.compile(
    r"the number of channels for the input image must be >= \d+,but got \d+ channels, image_path = memory", re.ASCII
)
"""The one message without a line end: the next line of standard error begins right behind it."""

_MEMORY_OF_PART = re.compile(r"(?P<part>[a-z_]+) (?P<mib>\d+\.\d+)MB\((?P<where>RAM|VRAM)\)", re.ASCII)
_PARTS = "diffusion model|high noise diffusion model|clip_l|clip_g|clip_vision|t5xxl|llm vision|llm|vae|tae"

_FailureTable = tuple[tuple[re.Pattern[str], FailureKind], ...]


def _table(*rows: tuple[str, FailureKind]) -> _FailureTable:
    return tuple((re.compile(pattern, re.ASCII), kind) for pattern, kind in rows)


_ERRORS = _table(
    (r"\S+: failed to allocate (?:\S+ )?buffer of size (?P<size>\d+)", FailureKind.OUT_OF_MEMORY),
    (r"ggml_aligned_malloc: insufficient memory|.*failed to allocate the compute buffer|.*alloc [a-z ]*buffer failed",
     FailureKind.OUT_OF_MEMORY),
    (r"read tensor data failed: too less memory", FailureKind.OUT_OF_MEMORY),
    (r"tensor '(?P<subject>[^']*)' not in model file", FailureKind.MISSING_TENSOR),
    (r"tensor '(?P<subject>[^']*)' has wrong shape in model file", FailureKind.WRONG_SHAPE),
    (r"read tensor data failed: '(?P<subject>.*)'", FailureKind.TRUNCATED_FILE),
    (r"(?:get sd version|init model loader) from file failed: '(?P<subject>.*)'", FailureKind.WRONG_FILE),
    (r"(?:invalid safetensor file|read safetensors header failed:|read safetensors header size failed:"
     r"|parsing safetensors header failed:|failed to open|failed to read|empty file) '(?P<subject>[^']*)'",
     FailureKind.WRONG_FILE),
    (r"(?:unsupported dtype|size mismatch for tensor|invalid tensor) '|not a valid GGUF file|read meta data failed"
     r"|gguf_init_from_file_ptr: ", FailureKind.WRONG_FILE),
    (r"error: (?:unknown argument|invalid parameter for argument): (?P<subject>.*)", FailureKind.WRONG_ARGUMENT),
    (r"error: (?:invalid |the following arguments are required)", FailureKind.WRONG_ARGUMENT),
    (r"load image from 'memory' failed", FailureKind.UNREADABLE_SOURCE),
    (r"new_sd_ctx_t failed", FailureKind.LOAD_FAILED),
    (r".*compute failed|Diffusion model sampling failed|decode_first_stage failed|failed to encode "
     r"|(?:hires )?sampling for image \d+/\d+ failed", FailureKind.RENDER_FAILED),
)  # fmt: skip

_WARNINGS = _table(
    (rf"loading (?P<subject>{_PARTS}) from '.*' failed", FailureKind.MISSING_PART),
    (r"file (?P<subject>.*) not found", FailureKind.MISSING_FILE),
    (r"IMPORTANT NOTICE: No text encoders provided", FailureKind.MISSING_PART),
    (r"unknown format (?P<subject>.*)", FailureKind.WRONG_FILE),
)

_UNLABELLED = _table(
    # Where not even the memory is left to make the name readable, it is printed as it is.
    (r"terminate called after throwing an instance of '(?:std::bad_alloc|St9bad_alloc)'", FailureKind.OUT_OF_MEMORY),
    (r"ggml_vulkan: (?:Device memory|Memory) allocation of size (?P<size>\d+) failed", FailureKind.OUT_OF_MEMORY),
    (r".*(?:CUDA error: out of memory|cudaMalloc failed: out of memory|ErrorOutOf(?:Device|Host)Memory)",
     FailureKind.OUT_OF_MEMORY),
    (r"terminate called after throwing an instance of '|[^ ]+:\d+: (?:GGML_ASSERT\(|fatal error)", FailureKind.CRASH),
)  # fmt: skip
"""The C++ runtime and ggml's backends print these without level or file. Those of cards are from ggml's source."""


class OutputReader:
    """Follows one sd-server process from its first line on.

    Attributes:
        is_listening: whether it said that it listens: the model is loaded then.
        failures: what went wrong while it loaded, and what it cannot go on after, in the order in which it was read.
            Standard output and standard error are read side by side, so a WARN and an ERROR may have changed places.
        render_failures: what went wrong since the last render was asked for, and leaves the server alive.
    """

    def __init__(self) -> None:
        self.is_listening = False
        self.failures: list[SdFailure] = []
        self.render_failures: list[SdFailure] = []
        self._tensors_told = 0
        self._steps, self._has_source = 1, False
        self._render: _Render | None = None

    def expect_render(self, *, steps: int, has_source: bool) -> None:
        """A render is about to be asked for; the phases and failures of the last one are forgotten.

        Args:
            steps: sampling steps that each image is asked with.
            has_source: whether it is given an image, which is encoded before the prompt is.
        """
        self._steps, self._has_source = steps, has_source
        self._render = None
        self.render_failures = []

    def read(self, line: str, *, from_stderr: bool) -> list[Event]:
        """What a line says: mostly one event or none; more where a bar or an unended line stands before a message."""
        return list(self._read_stderr(line) if from_stderr else self._read_stdout(line))

    def _read_stdout(self, line: str) -> Iterator[Event]:
        bar = _BAR.match(line)
        if bar:
            yield from self._on_bar(int(bar["done"]), int(bar["total"]), bar["unit"])
        message = _HEADER.fullmatch(line, bar.end() if bar else 0)
        if message and message["level"] in ("INFO", "WARN"):
            text = message["text"].rstrip()
            if message["level"] == "WARN":
                yield from self._failure(_WARNINGS, text)
            yield from self._on_message(text)

    def _read_stderr(self, line: str) -> Iterator[Event]:
        unended = _WITHOUT_LINE_END.match(line)
        if unended:
            yield self._remember(SdFailure(FailureKind.UNREADABLE_SOURCE, unended[0], while_loaded=self.is_listening))
            line = line[unended.end() :]
        message = _HEADER.fullmatch(line)
        if not message:
            yield from self._failure(_UNLABELLED, line.rstrip())
        elif message["level"] == "ERROR":
            yield from self._failure(_ERRORS, message["text"].rstrip())

    def _failure(self, table: _FailureTable, text: str) -> Iterator[Event]:
        for pattern, kind in table:
            match = pattern.match(text)
            if match:
                named = match.groupdict()
                size = named.get("size")
                failure = SdFailure(
                    kind,
                    text,
                    subject=named.get("subject") or "",
                    size_bytes=int(size) if size else None,
                    while_loaded=self.is_listening,
                    is_fatal=table is _UNLABELLED or kind is FailureKind.LOAD_FAILED,
                )
                yield self._remember(failure)
                return

    def _remember(self, failure: SdFailure) -> SdFailure:
        (self.render_failures if failure.while_loaded and not failure.is_fatal else self.failures).append(failure)
        return failure

    def _on_bar(self, done: int, total: int, unit: str) -> Iterator[Event]:
        if not 0 < done <= total:
            return
        if unit.endswith("B/s"):
            if not self.is_listening and done > self._tensors_told:  # the bar is printed again for each file
                self._tensors_told = done
                yield LoadProgress(done, total)
        elif self._render is not None:
            yield from self._render.on_bar(done, total)

    def _on_message(self, text: str) -> Iterator[Event]:
        if match := re.fullmatch(r"Version: (.*)", text):
            yield ModelVersion(match[1])
        elif text.startswith("total params memory size = "):
            yield _params_memory(text)
        elif text.startswith("listening on: "):
            self.is_listening = True
            yield Listening()
        elif match := re.fullmatch(r"align generation request up (\d+)x(\d+) to (\d+)x(\d+) \(multiple=(\d+)\)", text):
            yield SizeAligned(*map(int, match.groups()))
        elif match := re.fullmatch(r"generate_image (\d+)x(\d+)", text):
            self._render = _Render(self._steps, self._has_source)
            yield RenderStarted(int(match[1]), int(match[2]))
            yield from self._render.begin()
        elif self._render is not None:
            if match := re.fullmatch(r"generate_image completed in (\d+\.\d+)s", text):
                yield RenderEnded(float(match[1]), self._render.used_source)
                self._render = None
            else:
                yield from self._render.on_message(text)


class _Render:
    """The phases of one render. Tells only what is ahead of what was told."""

    def __init__(self, steps: int, has_source: bool) -> None:
        self.used_source = False
        self._phase: Phase | None = Phase.ENCODE if has_source else Phase.TEXT_ENCODE
        self._steps = steps
        self._image, self._images = 1, 1
        self._parts_per_image = 1
        """Bars count these: sampling steps, or tiles."""
        self._told: RenderProgress | None = None

    def begin(self) -> Iterator[RenderProgress]:
        yield from self._tell(0, 1)

    def on_bar(self, done: int, total: int) -> Iterator[RenderProgress]:
        if self._phase is Phase.ENCODE:
            yield from self._tell(done, total)
        elif self._phase in (Phase.SAMPLING, Phase.DECODE):
            self._parts_per_image = total
            yield from self._tell((self._image - 1) * total + done, self._images * total)

    def on_message(self, text: str) -> Iterator[RenderProgress]:
        if text in ("IMG2IMG", "EDIT mode"):
            self.used_source = True
            if self._phase is not Phase.ENCODE:
                yield from self._enter(Phase.ENCODE, 1)
        elif match := re.fullmatch(r"target t_enc is (\d+) steps", text):
            # From a source it samples the last of its noise levels: t_enc of them, and the one that it starts at.
            self._steps = int(match[1]) + 1
        elif text.startswith("encode_first_stage completed"):
            yield from self._complete()
            yield from self._enter(Phase.TEXT_ENCODE, 1)
        elif text.startswith("get_learned_condition completed"):
            if self._phase is Phase.ENCODE:  # a source was sent that it could not read
                yield from self._enter(Phase.TEXT_ENCODE, 1)
            yield from self._complete()
            self._phase = None
        elif match := re.fullmatch(r"generating image: (\d+)/(\d+) - seed -?\d+", text):
            if self._phase is not Phase.SAMPLING:
                yield from self._enter(Phase.SAMPLING, self._steps, images=int(match[2]))
            self._image = int(match[1])
        elif text.startswith("sampling completed"):
            yield from self._image_done(self._image)
        elif match := re.fullmatch(r"decoding (\d+) latents", text):
            yield from self._enter(Phase.DECODE, 1, images=int(match[1]))
        elif match := re.match(r"latent (\d+) decoded", text):
            yield from self._image_done(int(match[1]))
            self._image = int(match[1]) + 1
        elif text.startswith("generating ") and "latent images completed" in text:
            self._phase = None

    def _enter(self, phase: Phase, parts_per_image: int, images: int = 1) -> Iterator[RenderProgress]:
        self._phase = phase
        self._image, self._images = 1, images
        self._parts_per_image = parts_per_image
        yield from self._tell(0, images * parts_per_image)

    def _image_done(self, image: int) -> Iterator[RenderProgress]:
        yield from self._tell(image * self._parts_per_image, self._images * self._parts_per_image)

    def _complete(self) -> Iterator[RenderProgress]:
        total = self._told.total if self._told else 1
        yield from self._tell(total, total)

    def _tell(self, done: int, total: int) -> Iterator[RenderProgress]:
        if self._phase is None or not 0 <= done <= total:
            return
        told = self._told
        if told is None or told.phase != self._phase or done * told.total > told.done * total:
            self._told = RenderProgress(self._phase.value, done, total)
            yield self._told


def _params_memory(text: str) -> ParamsMemory:
    return ParamsMemory(
        tuple(
            PartMemory(part["part"], round(float(part["mib"]) * _MIB), part["where"] == "VRAM")
            for part in _MEMORY_OF_PART.finditer(text)
        )
    )

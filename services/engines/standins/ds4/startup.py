"""From the command line to a model that is ready, in ds4's order: folder, lock, model, support files, backend, plan."""

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.engines.standins.ds4 import log
from services.engines.standins.ds4.behaviour import Behaviour
from services.engines.standins.ds4.command_line import CommandLine
from services.engines.standins.ds4.flags import MAY, SEPTEMBER
from services.engines.standins.ds4.memory import (
    GIB,
    MIB,
    Context,
    ExpertCache,
    context_of,
    expert_cache,
    tell_context,
    tell_plan,
)
from services.engines.standins.ds4.model_checks import check_head, check_model
from services.engines.standins.ds4.model_file import ModelFile, die, read

LOCK_VARIABLE = "DS4_LOCK_FILE"
DEFAULT_LOCK = "/tmp/ds4.lock"  # noqa: S108 - where the real one has it
_STEPS = 4
"""In how many steps a load tells how far it is."""
_STREAMED_DRAFTS = ("deepseek41",)
_CARDS = {"cuda": "CUDA backend initialized on NVIDIA Stand-in (sm_90)", "metal": "Metal device Apple Stand-in"}


@dataclass(frozen=True)
class Loaded:
    """A model that is ready."""

    file: ModelFile
    context: Context
    lock: int
    """Descriptor of the lock, held while the process lives."""


def load(line: CommandLine, behaviour: Behaviour) -> Loaded:
    """Ends the process where ds4 would."""
    _change_folder(line)
    lock = _take_lock()
    _check_streaming(line)
    file = read(line.model)
    if line.has("warm-weights"):
        log.engine(f"warming mapped tensor pages: {(file.file_bytes - file.data_start) / GIB:.2f} GiB")
        log.engine("warmed tensor pages in 0.001s (checksum=0)")
    check_model(file, behaviour.build)
    _load_companions(line, file, behaviour)
    context = context_of(file, line, behaviour.build)
    cache = None
    if line.streams:
        working_set = int(behaviour.working_set_gib * GIB)
        cache = expert_cache(file, line, context, working_set)
    _prepare_backend(line, file, behaviour, cache)
    if behaviour.build != MAY:
        tell_plan(file, line, context, cache, int(behaviour.extra_planned_gib * GIB))
    tell_context(line, context)
    if behaviour.load_fault == "no_session":
        if line.backend == "cuda":
            log.engine("CUDA tensor alloc failed: out of memory")
        log.server(f"failed to create {line.backend} session")
        sys.exit(1)
    return Loaded(file, context, lock)


def _change_folder(line: CommandLine) -> None:
    folder = line.text("chdir")
    try:
        if folder:
            os.chdir(folder)
    except OSError as error:
        log.server(f"failed to chdir to {folder}: {error.strerror}")
        sys.exit(1)


def _take_lock() -> int:
    path = os.environ.get(LOCK_VARIABLE) or DEFAULT_LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.engine(f"failed to open lock file {path}: {error.strerror}")
        sys.exit(2)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        written = os.pread(lock, 63, 0).split()
        owner = f" (pid {int(written[0])})" if written and written[0].isdigit() else ""
        log.engine(f"another ds4 process is already running{owner}; refusing to start")
        sys.exit(2)
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def _check_streaming(line: CommandLine) -> None:
    if line.streams and line.backend == "cpu":
        die("--ssd-streaming is not compatible with the cpu backend")
    if line.streams and (line.has("gpu-vram") or line.has("gpu-devices") or line.has("cuda-tensor-parallel")):
        die("--ssd-streaming is not compatible with multi-GPU placement")


def _load_companions(line: CommandLine, file: ModelFile, behaviour: Behaviour) -> None:
    v41 = file.architecture in _STREAMED_DRAFTS
    spelling = "--mtp-model" if behaviour.build == SEPTEMBER else "--mtp"
    if file.architecture == "glm-dsa" and line.draft_file:
        die(f"{spelling} is not supported for GLM")
    if v41 and line.number("power", 100) != 100:
        die("DeepSeek V4.1 requires --power 100")
    if line.draft_file:
        if line.streams and not v41:
            die(f"--ssd-streaming is not compatible with {spelling} yet")
        check_head(read(line.draft_file), behaviour.build)
        log.engine(f"MTP support model loaded: {line.draft_file} (draft={min(line.number('mtp-draft', 1), 16)})")
    if line.has("vision"):
        vision = read(line.text("vision"))
        log.engine(f"vision encoder loaded: {line.text('vision')} ({vision.file_bytes / GIB:.2f} GiB)")


def _prepare_backend(line: CommandLine, file: ModelFile, behaviour: Behaviour, cache: ExpertCache | None) -> None:
    """The longest part of a load: the card is made ready, and what is resident goes there."""
    backend = line.backend
    if backend == "cpu":
        _work(backend, behaviour, lambda share: None)
        return
    if behaviour.compute == "cpu":
        die(f"{backend} backend requested but this build has no graph backend support; aborting startup")
    if behaviour.compute and backend != behaviour.compute:
        names = {"metal": "Metal", "cuda": "CUDA"}
        linked = f"linked with {names[behaviour.compute]}, not {names[backend]}"
        die(f"{names[backend]} backend requested but this build is {linked}")
    if backend == "metal" and behaviour.metal_sources and not list(Path("metal").glob("*.metal")):
        log.engine("Metal shader source metal/common.metal not found")
        die("metal backend unavailable; aborting startup")
    log.engine(_CARDS[backend])
    if cache is not None:
        _tell_streaming(backend, file, cache)
    resident = file.tensors["token_embd.weight"].bytes if cache else file.file_bytes - file.data_start
    started = time.monotonic()
    if backend == "cuda":
        log.engine("CUDA loading model tensors into device cache")
        _work(
            backend,
            behaviour,
            lambda share: log.engine(f"CUDA loading model tensors {resident * share / GIB:.2f} GiB cached"),
        )
        took = time.monotonic() - started
        log.engine(f"CUDA startup model cache prepared {resident / GIB:.2f} GiB of tensor spans in {took:.3f}s")
    else:
        _work(
            backend,
            behaviour,
            lambda share: log.engine(f"metal prepared model tensor mappings {resident * share / GIB:.2f} GiB"),
        )
        took_ms = (time.monotonic() - started) * 1000
        log.engine(
            f"Metal model views created in 0.500 ms, residency requested in {took_ms:.3f} ms, warmup 0.500 ms "
            f"(mapped {resident / MIB:.2f} MiB from offset {file.data_start / MIB:.2f} MiB)"
        )
    log.engine(f"{backend} backend initialized for graph diagnostics")


def _tell_streaming(backend: str, file: ModelFile, cache: ExpertCache) -> None:
    name = "Metal" if backend == "metal" else "CUDA"
    log.engine(f"{name} SSD streaming mode enabled; full model residency and warmup are skipped")
    layers = 40 if file.architecture == "deepseek41" else 43
    if cache.slots < 2 * layers * 6:
        thrashing = 2 * layers * 6 * cache.expert / GIB
        log.engine(
            f"WARNING: SSD streaming expert cache ({cache.slots} experts) is under twice the per-token routed working "
            f"set ({layers} layers x 6 experts = {layers * 6}); expect heavy thrashing below {thrashing:.2f} GiB"
        )
    span = file.tensors["token_embd.weight"].bytes / GIB
    restricted = f"restricted to token embedding (1 spans, {span:.2f} GiB tensor span)"
    log.engine(f"SSD streaming initial {backend} model map {restricted}")


def _work(backend: str, behaviour: Behaviour, tell: Callable[[float], None]) -> None:
    for step in range(1, _STEPS + 1):
        if step == _STEPS // 2 + 1 and behaviour.load_fault not in ("", "no_session"):
            _fail(behaviour.load_fault, backend)
        time.sleep(behaviour.load_s / _STEPS)
        tell(step / _STEPS)


def _fail(fault: str, backend: str) -> None:
    if fault == "out_of_memory" and backend == "cpu":
        die("out of memory")
    if fault == "out_of_memory" and backend == "metal":
        why = "This is commonly caused by insufficient memory or accelerator VM budget."
        die(f"metal failed to map model views; aborting startup. {why}")
    if fault == "out_of_memory":
        log.engine("CUDA model arena alloc failed for tensor-span:1 (1792.00 MiB chunk): out of memory")
        log.engine("accelerator failed to cache model tensor span 1 at offset 1879048192")
        die("cuda failed to prepare startup model cache")
    while fault == "hang":
        time.sleep(60)
    end_by(fault)


def end_by(name: str) -> None:
    """End by a signal."""
    sys.stderr.flush()
    os.kill(os.getpid(), signal.Signals[name])
    signal.pause()

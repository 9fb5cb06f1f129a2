"""Images through the whole suite against the same sd-server asked directly, and planned against measured memory."""

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
from weighbridge_engines.sd_server.binary import probe
from weighbridge_engines.supervisor.ports import free_loopback_port
from weighbridge_proto.channel import open_channel
from weighbridge_proto.ledger.v1 import ledger_service_pb2, ledger_service_pb2_grpc

from benchmarks.measure import Comparison, quantile
from services.engines.standins.sd.program import HOW_TO_GET_IT, real_sd_server, write_standin
from tests.harness import Suite, running_suite, wait_until
from tests.images import ImageEngine, ImageModel, answers, ask_directly, made_of_parts, port_of, sd_server_of, told

MODELS = Path(".cache/models")
MIB = 2**20

ROUNDS = 9
LOADS = 5
CANCELS = 5
"""The tiny model takes a second or more for each image on two cores, so this is minutes."""

RENDERS = 10
"""Before the peak is read: what sd-server keeps of one render may grow with the next."""

SIDES_PX = (64, 256, 512)

OVERHEAD_MS = 30.0
OVERHEAD_SHARE = 0.02
"""What an image through the suite may take more than a direct one: one of these and the other."""

LONG_SIDE_PX = 256
LONG_STEPS = 100
LONG_BATCH = 8
"""So long a render that one which is cancelled early in it is not waited for, on a fast machine either."""


async def _render_s(engine: ImageEngine, model: ImageModel, side_px: int) -> float:
    start = time.perf_counter()
    heard = await told(engine.generate(model, side_px=side_px))
    assert len(heard.images) == 1, heard.kinds
    return time.perf_counter() - start


async def _direct_s(port: int, side_px: int) -> float:
    start = time.perf_counter()
    [_] = await asyncio.to_thread(ask_directly, port, "/sdapi/v1/txt2img", width=side_px, height=side_px)
    return time.perf_counter() - start


async def _images(suite: Suite, engine: ImageEngine, model: ImageModel) -> Comparison:
    side_px = SIDES_PX[0]
    ours, baseline = [], []
    await _load(engine, model, side_px)
    port = port_of(sd_server_of(suite))
    for number in range(-1, ROUNDS):
        samples = await _render_s(engine, model, side_px), await _direct_s(port, side_px)
        if number >= 0:
            ours.append(samples[0] * 1e3)
            baseline.append(samples[1] * 1e3)
    await engine.unload()
    allowed = 1 + OVERHEAD_SHARE + OVERHEAD_MS / quantile(baseline, 0.5)
    return Comparison(
        f"time of an image through the suite ({side_px} x {side_px}, 1 step)", "ms", ours,
        "the same request to the same sd-server over HTTP", baseline,
        f"at most {allowed:.2f}: 2 % and {OVERHEAD_MS:.0f} ms more", lambda ratio: ratio <= allowed,
    )  # fmt: skip


async def _load(engine: ImageEngine, model: ImageModel, side_px: int) -> None:
    """Load, and return when it is READY."""
    async for event in engine.load(model, side_px=side_px):
        ready = event.HasField("ready")
    assert ready


@contextmanager
def _by_hand(program: Path, words: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """An sd-server as a person starts it, that answers."""
    port = free_loopback_port()
    with tempfile.TemporaryDirectory() as adapters:
        started = subprocess.Popen(
            [str(program), *words, "--listen-port", str(port), "--lora-model-dir", adapters],
            env=probe(program).environ(),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_until(lambda: answers(port), what="sd-server to answer")
            yield started, port
        finally:
            started.kill()
            started.wait()


def _launch_words(process: psutil.Process) -> list[str]:
    """What the suite started sd-server with, without where it listens and looks for adapters."""
    words = process.cmdline()
    return words[next(at for at, word in enumerate(words) if word.startswith("--")) : words.index("--listen-ip")]


async def _loads(suite: Suite, engine: ImageEngine, model: ImageModel, program: Path) -> tuple[Comparison, list[str]]:
    side_px, ours, baseline = SIDES_PX[0], [], []
    for number in range(-1, LOADS):
        start = time.perf_counter()
        await _load(engine, model, side_px)
        loaded_s = time.perf_counter() - start
        words = _launch_words(sd_server_of(suite))
        await engine.unload()
        start = time.perf_counter()
        with _by_hand(program, words):
            by_hand_s = time.perf_counter() - start
        if number >= 0:
            ours.append(loaded_s * 1e3)
            baseline.append(by_hand_s * 1e3)
    comparison = Comparison(
        "LoadModel until READY", "ms", ours, "sd-server started by hand until it answers", baseline, ""
    )
    return comparison, words


async def _cancels(engine: ImageEngine, model: ImageModel, program: Path, words: list[str]) -> Comparison:
    """From the cancellation of a long render to nothing being loaded any more, against SIGKILL by hand."""
    ours, baseline = [], []
    for number in range(-1, CANCELS):
        rendering = engine.generate(model, side_px=LONG_SIDE_PX, steps=LONG_STEPS, batch=LONG_BATCH)
        async for event in rendering:
            if event.progress.phase == "sampling" and event.progress.done > 1:
                break
        start = time.perf_counter()
        rendering.cancel()
        # It is answered when the engine's process is gone and its lease released.
        await engine.unload()
        stopped_s = time.perf_counter() - start
        killed_s = await asyncio.to_thread(_killed_s, program, words)
        if number >= 0:
            ours.append(stopped_s * 1e3)
            baseline.append(killed_s * 1e3)
    return Comparison(
        "cancelled render until the engine is gone and its lease released", "ms", ours,
        "SIGKILL to sd-server by hand until it is gone", baseline, "",
    )  # fmt: skip


def _killed_s(program: Path, words: list[str]) -> float:
    with _by_hand(program, words) as (started, port), ThreadPoolExecutor(1) as pool:
        size = {"width": LONG_SIDE_PX, "height": LONG_SIDE_PX, "batch_size": LONG_BATCH}
        asked = pool.submit(ask_directly, port, "/sdapi/v1/txt2img", steps=LONG_STEPS, **size)
        before_s = psutil.Process(started.pid).cpu_times().user
        wait_until(lambda: psutil.Process(started.pid).cpu_times().user > before_s, what="the render to begin")
        start = time.perf_counter()
        started.kill()
        started.wait()
        killed_s = time.perf_counter() - start
        assert isinstance(asked.exception(), OSError), "it was killed in the render"
    return killed_s


async def _peak(suite: Suite, engine: ImageEngine, model: ImageModel, side_px: int) -> Comparison:
    """What the plan says and what the engine recorded with the ledger."""
    await _load(engine, model, side_px)
    for _ in range(RENDERS):
        await _render_s(engine, model, side_px)
    await engine.unload()
    async with open_channel(f"unix:{suite.run_dir}/ledger.sock") as channel:
        ledger = ledger_service_pb2_grpc.LedgerServiceStub(channel)
        listed = await ledger.ListObservations(ledger_service_pb2.ListObservationsRequest(page_size=1))
    [observed] = listed.observations
    allowed_bytes = 0.05 * observed.peak_bytes + 64 * MIB
    holds = abs(observed.planned_bytes - observed.peak_bytes) <= allowed_bytes
    return Comparison(
        f"planned peak of {side_px} x {side_px}", "MiB", [observed.planned_bytes / MIB],
        f"the measured one after {RENDERS} renders", [observed.peak_bytes / MIB],
        "within 5 % and 64 MiB", lambda ratio: holds,
    )  # fmt: skip


def run() -> Iterator[Comparison]:
    """Renders, loads and cancellations in turn with the same by hand; peaks of three sizes."""
    model = made_of_parts(MODELS.absolute())
    real = real_sd_server()
    if real is None:
        print(f"SKIPPED with the real sd-server, and memory altogether: {HOW_TO_GET_IT}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        program = real or write_standin(Path(folder))
        print(f"with {'the real sd-server' if real else 'the stand-in of sd-server'}", flush=True)
        settings = {"WEIGHBRIDGE_LEDGER_MACHINE": "unified:8", "WEIGHBRIDGE_ENGINES_SD_SERVER": str(program)}
        with running_suite(model.path.parent, "sd", **settings) as suite, asyncio.Runner() as runner:
            channel = open_channel(f"unix:{suite.run_dir}/engine-sd.sock")
            engine = ImageEngine(runner.run(channel.__aenter__()))
            yield runner.run(_images(suite, engine, model))
            loads, words = runner.run(_loads(suite, engine, model, program))
            yield loads
            yield runner.run(_cancels(engine, model, program, words))
            for side_px in SIDES_PX if real else ():
                yield runner.run(_peak(suite, engine, model, side_px))
            runner.run(channel.__aexit__(None, None, None))
            assert suite.stop() == 0

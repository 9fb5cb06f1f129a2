"""Measures what the runtime's process takes beside the model's own arrays, for fit's calibration.

``python -m weighbridge_engines.mlx_qwen.runtime.measure MODEL_DIR [--prompt-tokens 1000] [--json]`` starts a fresh
runtime, looks at it from outside after each step, and prints bytes. Peaks of the resident set are the kernel's own
(VmHWM, reset before each step where the kernel allows it); proportional sizes (PSS) are sampled, so their peaks may be
missed by a little.
"""

import argparse
import contextlib
import json
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from weighbridge_engines.mlx_qwen.runtime.harness import StartedRuntime, started_runtime
from weighbridge_engines.mlx_qwen.runtime.memory import peak_from_status

_SAMPLE_PERIOD_S = 0.02
_WORD = " word"


@dataclass(frozen=True)
class Step:
    """The process after one step, in bytes; peaks are within the step. allocator_* are MLX's own counters."""

    step: str
    rss: int
    pss: int
    rss_peak: int
    pss_peak: int
    allocator_active: int
    allocator_cache: int
    allocator_peak: int
    kv: int


def measure(folder: Path, prompt_tokens: int) -> list[Step]:
    """Starts a runtime, loads the model, answers with 32 tokens to a short and to a long prompt, and unloads."""
    steps: list[Step] = []
    with started_runtime(log=None) as runtime:

        def step(name: str, work: Callable[[], int]) -> None:
            with _watched(runtime.process.pid) as peaks:
                kv = work()
            memory = runtime.memory()
            rss, pss = _sizes(runtime.process.pid)
            steps.append(
                Step(
                    name,
                    rss,
                    pss,
                    max(rss, peaks["rss"]),
                    max(pss, peaks["pss"]),
                    memory.active_bytes,
                    memory.allocator_cache_bytes,
                    memory.peak_active_bytes,
                    kv,
                )
            )

        def load() -> int:
            runtime.load(folder, context_tokens=prompt_tokens + 1024, prefill_step_tokens=256)
            return 0

        def unload() -> int:
            runtime.unload()
            return 0

        step("started, everything imported", lambda: 0)
        step("model loaded", load)
        step("32 tokens to a short prompt", lambda: _answer(runtime, "Tell me a story."))
        long_prompt = _WORD * prompt_tokens
        step(f"32 tokens to about {prompt_tokens} prompt tokens", lambda: _answer(runtime, long_prompt))
        step("unloaded", unload)
    return steps


def _answer(runtime: StartedRuntime, prompt: str) -> int:
    return runtime.answer(prompt, max_output_tokens=32).finished.usage.cache_bytes


def _sizes(pid: int) -> tuple[int, int]:
    memory = psutil.Process(pid).memory_full_info()
    return int(memory.rss), int(getattr(memory, "pss", memory.uss))


@contextlib.contextmanager
def _watched(pid: int) -> Iterator[dict[str, int]]:
    """Peaks of a process while the block runs."""
    peaks = {"rss": 0, "pss": 0}
    done = threading.Event()
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM to the present size

    def sample() -> None:
        while True:
            with contextlib.suppress(psutil.Error):
                rss, pss = _sizes(pid)
                peaks["rss"], peaks["pss"] = max(peaks["rss"], rss), max(peaks["pss"], pss)
            if done.wait(_SAMPLE_PERIOD_S):
                return

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield peaks
    finally:
        done.set()
        sampler.join()
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
            peaks["rss"] = max(peaks["rss"], peak_from_status(status) or 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m weighbridge_engines.mlx_qwen.runtime.measure", description="Measure the MLX runtime's process."
    )
    parser.add_argument("model", type=Path, help="a model's folder")
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="about how long the long prompt is")
    parser.add_argument("--json", action="store_true", help="print JSON")
    wanted = parser.parse_args(arguments)
    steps = measure(wanted.model, wanted.prompt_tokens)
    if wanted.json:
        machine = {"system": platform.platform(), "python": platform.python_version(), "cpus": psutil.cpu_count()}
        print(json.dumps({"machine": machine, "steps": [asdict(step) for step in steps]}, indent=1))
        return 0
    names = [name for name in asdict(steps[0]) if name != "step"]
    print(f"{'':42}" + "".join(f"{name:>18}" for name in names))
    for step in steps:
        values = asdict(step)
        print(f"{step.step:42}" + "".join(f"{values[name]:>18,}" for name in names))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The only module that imports MLX and mlx-lm. Import them and use them on the owner thread alone."""

import contextlib
import gc
import importlib
import resource
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from weighbridge_engines.mlx_qwen.runtime.memory import MlxMemory, return_free_heap


@dataclass(frozen=True)
class Mlx:
    """What the runtime uses of MLX and mlx-lm. The values are untyped because neither library carries types."""

    core: Any
    generate_step: Callable[..., Generator[tuple[int, Any], None, None]]
    generation_stream: Any
    make_prompt_cache: Callable[[Any], list[Any]]
    make_sampler: Callable[..., Any]
    make_logits_processors: Callable[..., list[Any]]
    load_model: Callable[..., tuple[Any, dict[str, Any]]]
    load_tokenizer: Callable[..., Any]
    tree_flatten: Callable[[Any], list[tuple[str, Any]]]
    version: str
    lm_version: str

    @property
    def on_metal(self) -> bool:
        """Whether the default device is a Metal GPU."""
        return bool(self.core.metal.is_available()) and self.core.default_device() == self.core.gpu

    @property
    def device_name(self) -> str:
        """The device as MLX names it, or its architecture where it gives no name."""
        info = self.core.device_info()
        return str(info.get("device_name") or info.get("architecture") or "unknown")

    def apply_limits(self, *, memory_bytes: int, cache_bytes: int) -> None:
        """Sets MLX's own limits. memory_bytes 0 leaves MLX's default; cache_bytes 0 keeps no freed buffer.

        The memory limit is a guideline in MLX (on CPU an allocation above it succeeds), so it stands beside the plan
        and replaces nothing. Wired memory exists on Metal only; it is held at the plan instead of the device's whole
        working set, which would take memory from every other program.
        """
        self.core.set_cache_limit(cache_bytes)
        if memory_bytes <= 0:
            return
        self.core.set_memory_limit(memory_bytes)
        if self.on_metal:
            working_set = self.core.device_info().get("max_recommended_working_set_size")
            self.core.set_wired_limit(min(memory_bytes, int(working_set)) if working_set else memory_bytes)

    def memory(self) -> MlxMemory:
        """What MLX's allocator holds now, keeps for reuse, and has held at most."""
        return MlxMemory(
            active_bytes=int(self.core.get_active_memory()),
            cache_bytes=int(self.core.get_cache_memory()),
            peak_bytes=int(self.core.get_peak_memory()),
        )

    def reclaim(self) -> None:
        """Waits for what is still computing, then gives freed buffers back to the system."""
        self.core.synchronize(self.generation_stream)
        gc.collect()
        self.core.clear_cache()
        return_free_heap()

    def end_thread(self) -> None:
        """The owner thread's last call: without it the process can abort at exit, when streams are torn down late."""
        self.reclaim()
        self.core.clear_streams()


def import_mlx() -> Mlx:
    """Imports MLX and mlx-lm on the calling thread, which owns them from then on. Raises ImportError."""
    with _file_limit_untouched(), _torch_unseen():
        # By name, so that the type checker reads the same Any whether MLX is installed or not.
        core: Any = importlib.import_module("mlx.core")
        utils: Any = importlib.import_module("mlx.utils")
        lm: Any = importlib.import_module("mlx_lm")
        lm_generate: Any = importlib.import_module("mlx_lm.generate")
        lm_cache: Any = importlib.import_module("mlx_lm.models.cache")
        lm_sampling: Any = importlib.import_module("mlx_lm.sample_utils")
        lm_tokenizer: Any = importlib.import_module("mlx_lm.tokenizer_utils")
        lm_utils: Any = importlib.import_module("mlx_lm.utils")
    return Mlx(
        core=core,
        generate_step=lm_generate.generate_step,
        generation_stream=lm_generate.generation_stream,
        make_prompt_cache=lm_cache.make_prompt_cache,
        make_sampler=lm_sampling.make_sampler,
        make_logits_processors=lm_sampling.make_logits_processors,
        load_model=lm_utils.load_model,
        load_tokenizer=lm_tokenizer.load,
        tree_flatten=utils.tree_flatten,
        version=str(core.__version__),
        lm_version=str(lm.__version__),
    )


@contextlib.contextmanager
def _torch_unseen() -> Iterator[None]:
    """Keeps transformers, which mlx-lm takes its tokenizers from, from importing torch where that is installed.

    Nothing here needs it, and it costs each worker 180 MiB and a second or more (transformers 5.24, torch 2.13).
    transformers asks once, and remembers.
    """
    seen = "torch" in sys.modules
    if not seen:
        sys.modules["torch"] = None  # type: ignore[assignment]  # None: Python's own way to say that there is none
    try:
        yield
    finally:
        if not seen:
            sys.modules.pop("torch", None)


@contextlib.contextmanager
def _file_limit_untouched() -> Iterator[None]:
    """Keeps the process's limits on open files while mlx-lm is imported.

    mlx-lm (0.32) lowers soft and hard limit to 2048 and 4096 on import. A process without privileges cannot raise a
    hard limit again, so the call is withheld instead of undone.
    """
    set_limit = resource.setrlimit

    def all_but_files(which: int, limits: tuple[int, int]) -> None:
        if which != resource.RLIMIT_NOFILE:
            set_limit(which, limits)

    resource.setrlimit = all_but_files
    try:
        yield
    finally:
        resource.setrlimit = set_limit

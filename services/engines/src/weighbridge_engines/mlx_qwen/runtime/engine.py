"""What the owner thread holds and does: MLX, at most one model, and one piece of work at a time."""

from collections.abc import Callable
from typing import TypeVar

import structlog
from weighbridge_common.logs import describe_error
from weighbridge_proto.errors import RequestError

from weighbridge_engines.mlx_qwen.runtime import generation, loading, refusals
from weighbridge_engines.mlx_qwen.runtime.generation import CancelledError, Event, Request
from weighbridge_engines.mlx_qwen.runtime.loading import LoadCancelledError, LoadedModel, LoadProgress, LoadSpec
from weighbridge_engines.mlx_qwen.runtime.memory import MemoryState
from weighbridge_engines.mlx_qwen.runtime.mlx import Mlx
from weighbridge_engines.mlx_qwen.runtime.outbox import Outbox
from weighbridge_engines.mlx_qwen.runtime.owner import Cancellation

_log = structlog.get_logger(__name__)

T = TypeVar("T")

# What MLX says when an allocation fails (an exception on CPU; on Metal the process may be gone before it can say it).
_ALLOCATION_FAILED = ("unable to allocate", "failed to allocate", "maximum allowed buffer size", "insufficient memory")


class Engine:
    """Everything here except ``memory_state`` belongs to the owner thread.

    Every piece of work ends the same way: what it held is dropped, computing has stopped, freed buffers are given
    back and the memory is published; only then is its outbox closed. So a call that has ended holds nothing any more.
    """

    def __init__(self) -> None:
        self._mlx: Mlx | None = None
        self._model: LoadedModel | None = None
        self._loaded_for: Cancellation | None = None
        self.memory_state = MemoryState()
        """What was last published. Replaced as a whole, so any thread may read it."""

    def open(self, mlx: Mlx) -> None:
        """Takes MLX, just imported on this thread."""
        self._mlx = mlx
        self._publish()

    def close(self) -> None:
        """Drops the model and ends MLX on this thread."""
        self._model = self._loaded_for = None
        if self._mlx is not None:
            self._mlx.end_thread()

    def load(self, spec: LoadSpec, cancellation: Cancellation, out: Outbox[LoadProgress]) -> None:
        """Loads a model. Fails through out; nothing of the model is held then."""

        def work(mlx: Mlx) -> None:
            if self._model is not None:
                raise refusals.model_already_loaded(self._model.name)

            def emit(progress: LoadProgress) -> None:
                self._publish()
                out.put(progress)

            model = loading.load(mlx, spec, cancellation, emit)
            if cancellation.requested:
                raise LoadCancelledError
            self._model, self._loaded_for = model, cancellation

        self._serve(work, out)

    def generate(self, request: Request, out: Outbox[Event]) -> None:
        """Computes an answer. Fails through out; the engine goes on."""

        def work(mlx: Mlx) -> None:
            if self._model is None:
                raise refusals.no_model_loaded()
            generation.answer(mlx, self._model, request, out.put, self._publish)

        self._serve(work, out)

    def abandon(self, cancellation: Cancellation) -> None:
        """Drops the model if it was loaded by the call that this flag belongs to."""
        if self._mlx is not None and self._loaded_for is cancellation:
            self._model = self._loaded_for = None
            self._mlx.reclaim()
            self._publish()

    def unload(self, out: Outbox[None]) -> None:
        """Drops the model. Unloading nothing is not an error."""

        def work(_mlx: Mlx) -> None:
            self._model = self._loaded_for = None

        self._serve(work, out)

    def _serve(self, work: Callable[[Mlx], None], out: Outbox[T]) -> None:
        assert self._mlx is not None, "jobs come after open()"
        failure = _outcome(work, self._mlx)
        self._mlx.reclaim()
        self._publish()
        out.close(failure)

    def _publish(self, kv_bytes: int = 0) -> None:
        assert self._mlx is not None
        self.memory_state = MemoryState(self._mlx.memory(), kv_bytes)


def _outcome(work: Callable[[Mlx], None], mlx: Mlx) -> RequestError | None:
    """Does the work and says how it failed, if it did.

    The exception itself must not survive this function: its traceback holds the frames, and they hold the caches.
    """
    try:
        work(mlx)
    except (CancelledError, LoadCancelledError):
        return None
    except RequestError as refused:
        return RequestError.from_failure(refused.failure)
    except MemoryError:
        return refusals.out_of_memory()
    except Exception as error:
        if any(sign in str(error).lower() for sign in _ALLOCATION_FAILED):
            return refusals.out_of_memory()
        # Never the exception's text: it may quote what the request said.
        _log.error("request_failed", **describe_error(error, with_text=False))
        return refusals.engine_error(type(error).__name__)
    return None

"""Background tasks that somebody owns: none is lost, none fails unseen, none outlives its owner."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

import structlog

from weighbridge_common.logs import describe_error

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class TaskOwner:
    """Starts tasks and ends them all when it is closed."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run ``work`` in the background. If it fails, that is logged under ``name`` and ends nothing else."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def aclose(self) -> None:
        """Cancel what still runs and wait until it has ended."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background_task_failed", task=task.get_name(), **describe_error(error))


async def to_its_end(work: Awaitable[T]) -> T:
    """Await ``work``, also when cancelled: the cancellation goes on when it has ended. For short work that must not be
    left half done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel ``task`` and return when it has ended, however it ended.

    Raises:
        asyncio.CancelledError: the caller itself was cancelled meanwhile.
    """
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # looked at, so that the loop does not complain about it

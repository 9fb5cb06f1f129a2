"""Reading beside the event loop: how many at once, and what a caller who leaves leaves behind."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from weighbridge_fit import reading
from weighbridge_fit.describe import ReadingStopped
from weighbridge_fit.models_root import ModelsRoot


async def test_a_caller_who_leaves_keeps_its_turn_until_its_thread_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, read_on = threading.Semaphore(0), threading.Event()
    at_once = most = 0

    def describe(path: Path, admit: object, stopped: Callable[[], bool]) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        begun.release()
        assert read_on.wait(10)
        at_once -= 1
        assert stopped()
        raise ReadingStopped

    monkeypatch.setattr(reading, "describe", describe)
    reader = reading.HeaderReader(ModelsRoot(tmp_path), max_concurrent=1)
    leaving = [asyncio.create_task(reader.read(tmp_path)) for _ in range(3)]
    await asyncio.to_thread(begun.acquire)
    for task in leaving:
        task.cancel()
    for _ in range(10):  # enough for whoever waits to take a turn that is free
        await asyncio.sleep(0)
    next_one = asyncio.create_task(reader.read(tmp_path))
    for _ in range(10):
        await asyncio.sleep(0)
    next_one.cancel()
    read_on.set()
    await asyncio.wait({*leaving, next_one})
    assert all(task.cancelled() for task in (*leaving, next_one))
    assert most == 1

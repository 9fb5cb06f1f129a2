import asyncio
import os
import threading

import pytest
from weighbridge_engines.mlx_qwen.runtime import lifeline, memory
from weighbridge_engines.mlx_qwen.runtime.outbox import Outbox
from weighbridge_engines.mlx_qwen.runtime.owner import OwnerThread


async def collect(out):
    return [item async for batch in out.batches() for item in batch]


async def test_an_outbox_keeps_the_order_and_loses_nothing():
    out = Outbox(asyncio.get_running_loop())
    count = 5000

    def produce():
        for number in range(count):
            out.put(number)
        out.close()

    thread = threading.Thread(target=produce)
    thread.start()
    assert await collect(out) == list(range(count))
    thread.join()


async def test_items_that_wait_come_as_one_batch():
    out = Outbox(asyncio.get_running_loop())
    for number in range(3):
        out.put(number)
    out.close()
    assert [batch async for batch in out.batches()] == [[0, 1, 2]]


async def test_an_error_comes_after_the_items_before_it():
    out = Outbox(asyncio.get_running_loop())
    out.put("text")
    out.close(ValueError("broken"))
    seen = []
    with pytest.raises(ValueError, match="broken"):
        async for batch in out.batches():
            seen += batch
    assert seen == ["text"]


def test_putting_into_a_closed_loop_is_harmless():
    loop = asyncio.new_event_loop()
    out = Outbox(loop)
    loop.close()
    out.put(1)
    out.close()


def owner(events, fatal):
    return OwnerThread(
        set_up=lambda: events.append("set up"), tear_down=lambda: events.append("tear down"), on_fatal=fatal.append
    )


def test_jobs_run_in_order_on_one_thread_between_set_up_and_tear_down():
    events, fatal, threads = [], [], set()

    def job(name):
        events.append(name)
        threads.add(threading.current_thread())

    thread = owner(events, fatal)
    thread.start()
    for name in ("one", "two", "three"):
        thread.submit(lambda name=name: job(name))
    thread.stop()
    assert events == ["set up", "one", "two", "three", "tear down"]
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    assert fatal == []


def test_an_escaped_error_tears_down_and_is_told():
    events, fatal = [], []
    error = RuntimeError("defect")

    def fail():
        raise error

    thread = owner(events, fatal)
    thread.start()
    thread.submit(fail)
    thread.submit(lambda: events.append("after"))
    thread.stop()
    assert events == ["set up", "tear down"]
    assert fatal == [error]


def test_stopping_a_thread_that_never_started_returns():
    owner([], []).stop()


def test_pipes_are_lifelines_and_files_are_not(tmp_path):
    reading, writing = os.pipe()
    try:
        assert lifeline.is_lifeline(reading)
    finally:
        os.close(reading)
        os.close(writing)
    with (tmp_path / "file").open("wb") as file:
        assert not lifeline.is_lifeline(file.fileno())
    assert not lifeline.is_lifeline(reading)


def test_the_watcher_reacts_to_the_end_and_not_to_data():
    reading, writing = os.pipe()
    gone = threading.Event()
    watcher = lifeline.watch(reading, gone.set)
    os.write(writing, b"data")
    assert not gone.is_set()
    os.close(writing)
    watcher.join(30)
    assert gone.is_set()
    os.close(reading)


def test_the_peak_is_read_from_the_kernels_status():
    assert memory.peak_from_status("Name:\tx\nVmPeak:\t  900 kB\nVmHWM:\t  123 kB\nVmRSS:\t 100 kB\n") == 123 * 1024
    assert memory.peak_from_status("Name:\tx\n") is None


def test_the_peak_is_never_below_the_present():
    now = memory.process_memory()
    assert now.peak_bytes >= now.resident_bytes > 0

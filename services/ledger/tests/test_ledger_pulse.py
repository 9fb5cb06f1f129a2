"""What health checks are told: whether the ledger gets on with its work, and not merely whether it answers.

Elsewhere a router's queue stood still for good while its health check said that all was well (llama.cpp 28829).
"""

import asyncio
import threading

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from weighbridge_ledger.service import pulse, sweep
from weighbridge_ledger.service.pulse import STALLED_LOOKS, Pulse

PATIENCE_S = 30
"""A bound for tests that would hang, not an expectation."""

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def until(condition, what: str) -> None:
    """Wait for something that another task does; the bound is for a test that would hang."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never happened: {what}")


class Watched:
    """A pulse that is felt when the test says so, and what it has told health checks."""

    def __init__(self, ledger) -> None:
        self._keeper = ledger.servicer._keeper
        self.told: list[bool] = []
        self.pulse = Pulse(self._keeper, self._tell)

    async def _tell(self, serving: bool) -> None:
        self.told.append(serving)

    async def look(self, times: int, *, sweeping: bool = True) -> None:
        for _ in range(times):
            if sweeping:  # as the background does ten times between two looks
                self._keeper.sweeps += 1
            await self.pulse.look()


async def test_a_ledger_at_rest_gets_on(ledger) -> None:
    watched = Watched(ledger)
    await watched.look(3 * STALLED_LOOKS)
    assert watched.told == []


async def test_a_disk_that_does_not_come_back_is_a_standstill_until_it_does(ledger) -> None:
    watched = Watched(ledger)
    ledger.store.gate.clear()
    call = ledger.admit(10)
    await until(lambda: ledger.committed == 10, "the grant is decided")
    await watched.look(STALLED_LOOKS)
    assert watched.told == []
    await watched.look(1)
    assert (watched.told, watched.pulse.stalled) == ([False], ("disk",))
    ledger.store.gate.set()
    assert (await call.read()).HasField("granted")
    await watched.look(1)
    assert (watched.told, watched.pulse.stalled) == ([False, True], ())


async def test_a_full_disk_is_no_standstill(ledger) -> None:
    """It refuses claims and says so, and holders go on: a restart would help nobody."""
    watched = Watched(ledger)
    ledger.store.fail_with = "database or disk is full"
    await ledger.failure(ledger.admit(10).read())
    await watched.look(3 * STALLED_LOOKS)
    assert watched.told == []


async def test_deaths_that_nobody_comes_to_see_are_a_standstill(new_ledger, tmp_path) -> None:
    """A look at a process that does not return: until it does nothing dead is freed."""
    ledger = new_ledger(tmp_path)
    looking, returns = threading.Event(), threading.Event()

    def hangs(process) -> bool:
        looking.set()
        returns.wait(30)
        return True

    ledger._is_alive = hangs
    async with ledger.serve():
        await ledger.active(10, 1, 11)
        await until(looking.is_set, "a sweep looks at the processes")
        watched = Watched(ledger)
        await watched.look(STALLED_LOOKS + 1, sweeping=False)
        assert (watched.told, watched.pulse.stalled) == ([False], ("sweep",))
        before = ledger.servicer._keeper.sweeps
        returns.set()
        await until(lambda: ledger.servicer._keeper.sweeps > before, "the sweep has come to its end")
        await watched.look(1, sweeping=False)
        assert watched.told == [False, True]


async def test_a_claim_that_waits_beyond_its_deadline_is_a_standstill(ledger) -> None:
    """Whatever else is well: the queue itself is looked at."""
    await ledger.active(20)
    waiting = ledger.admit(10, 2, max_wait={"seconds": 60})
    assert (await waiting.read()).HasField("queued")
    watched = Watched(ledger)
    await watched.look(3 * STALLED_LOOKS)
    assert watched.told == []
    book = ledger.servicer._keeper.book
    next(iter(book._queue)).deadline = ledger.time - 1.0  # and no timer of the book knows of it
    await watched.look(STALLED_LOOKS)
    assert (watched.told, watched.pulse.stalled) == ([False], ("queue",))
    waiting.cancel()
    await until(lambda: book.queue_depth == 0, "the claim is gone")
    await watched.look(1)
    assert watched.told == [False, True]


async def test_a_ledger_that_was_stopped_and_continued_is_not_taken_for_one_that_stands_still(ledger) -> None:
    """Looks are counted, not seconds: it looks once at what has not moved meanwhile."""
    watched = Watched(ledger)
    await watched.look(STALLED_LOOKS)
    ledger.time += 3600
    await watched.look(1, sweeping=False)
    await watched.look(STALLED_LOOKS)
    assert watched.told == []


async def test_a_health_check_hears_of_a_standstill_and_of_its_end(
    new_ledger, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "SWEEP_PERIOD_S", 0.001)
    monkeypatch.setattr(pulse, "LOOK_PERIOD_S", 0.05)
    async with new_ledger(tmp_path).serve() as ledger, asyncio.timeout(PATIENCE_S):
        watch = health_pb2_grpc.HealthStub(ledger.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        ledger.store.gate.clear()
        call = ledger.admit(10)
        assert (await watch.read()).status == NOT_SERVING
        ledger.store.gate.set()
        assert (await watch.read()).status == SERVING
        assert (await call.read()).HasField("granted")
        watch.cancel()

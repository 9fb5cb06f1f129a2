"""What the committer owes its callers when something beside the store goes wrong."""

import asyncio

import pytest
from weighbridge_ledger.book.records import PutCounter
from weighbridge_ledger.service import committer
from weighbridge_ledger.service.committer import Batch, Committer
from weighbridge_ledger.store.interface import StoreError
from weighbridge_ledger.store.memory import MemoryStore

PATIENCE_S = 20


async def test_who_reads_and_who_waits_are_answered_although_a_listener_fails():
    def broken(batch: Batch, error: StoreError | None) -> None:
        raise RuntimeError("a listener's own fault")

    told = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    ledger = Committer(MemoryStore(), broken)
    async with asyncio.timeout(PATIENCE_S):
        ledger.enqueue([PutCounter(1)], [])
        reading = asyncio.ensure_future(ledger.read(lambda store: store.last_observation()))
        assert await ledger.durable() is None
        assert await reading == 0
        await ledger.aclose()
    assert {str(error) for error in told} == {"a listener's own fault"}, "and it is not hushed up"


async def test_who_waits_is_answered_although_the_log_fails(monkeypatch: pytest.MonkeyPatch):
    class FullDisk:
        def error(self, *args: object, **more: object) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(committer, "_log", FullDisk())
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    store = MemoryStore()
    store.fail_with = "disk full"
    ledger = Committer(store, lambda batch, error: None)
    async with asyncio.timeout(PATIENCE_S):
        ledger.enqueue([PutCounter(1)], [])
        assert isinstance(await ledger.durable(), StoreError)
        store.fail_with = None
        assert await ledger.durable() is None
        await ledger.aclose()

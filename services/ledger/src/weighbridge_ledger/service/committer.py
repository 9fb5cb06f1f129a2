"""Commit, then tell (rule 5): one thread writes, many decisions share one sync, and none is abandoned.

While the thread writes one batch, the next one gathers on the event loop: so with 32 calls in flight a disk sync serves
many of them, and a lone call waits for exactly one. Only whole batches pass between the two, so nothing is locked.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
from weighbridge_common.logs import describe_error

from weighbridge_ledger.book.events import Event
from weighbridge_ledger.book.records import (
    DropEnded,
    DropLease,
    DropTicket,
    PutCounter,
    PutEnded,
    PutLease,
    PutTicket,
    PutWishes,
)
from weighbridge_ledger.store.interface import AnyWrite, Store, StoreError

T = TypeVar("T")

HAND_OVER_S = 0.001
"""The event loop waits at most this long for the thread to take a batch."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Batch:
    """Decisions that are committed together. The thread reads `writes`, `reads` and `probe`, once they are handed over;
    the rest is the event loop's."""

    writes: list[AnyWrite] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    waiters: list[asyncio.Future[StoreError | None]] = field(default_factory=list)
    reads: list[tuple[Callable[[Store], Any], asyncio.Future[Any]]] = field(default_factory=list)
    probe: bool = False
    """Whether to find out if there is room again, once the writes are on disk."""


class Committer:
    """Owns the store and the only thread that touches it. All methods are called on the event loop.

    Args:
        store: opened, and not used by anybody else from now on.
        on_batch: called on the event loop when a batch is on disk (error None) or could not be written. What could not
            is tried again in front of the next batch, so nothing that was decided later is ever on disk without it.
    """

    def __init__(self, store: Store, on_batch: Callable[[Batch, StoreError | None], None]) -> None:
        self._store = store
        self._on_batch = on_batch
        self._loop = asyncio.get_running_loop()
        self._at_work: Batch | None = None
        """With the thread."""
        self._gathering: Batch | None = None
        """What was decided meanwhile."""
        self._handed_over: queue.SimpleQueue[tuple[Batch | None, threading.Lock]] = queue.SimpleQueue()
        self._crowded = False
        """Whether more than one call waited for the last batch."""
        self._closing = False
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self.failing = False
        """Whether new claims must be refused: a batch could not be written, and since then it was not found out that
        there is room for one again. That something small could be written, such as the end of a lease, says nothing."""
        self._behind = False
        """Whether something was decided that is not on disk: the last batch could not be written."""
        self.batches = 0
        """Batches that have ended, written or not."""
        threading.Thread(target=self._work, name="ledger-store", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether everything taken up so far is on disk and told."""
        return self.at_rest and not self._behind

    @property
    def at_rest(self) -> bool:
        """Whether nothing is being written."""
        return self._latest() is None

    def enqueue(self, writes: Sequence[AnyWrite], events: Sequence[Event]) -> None:
        """Take a decision up for writing. Cannot be cancelled from here on."""
        if not writes and not events:
            return
        if not writes and self.idle:
            self._on_batch(Batch(events=list(events)), None)
            return
        batch = self._gather()
        batch.writes.extend(writes)
        batch.events.extend(events)
        self._hand_over()

    async def durable(self) -> StoreError | None:
        """Wait until everything taken up so far is on disk; an error if it could not be written.

        While the last batch could not be written, this tries again: a repeated verb that finds its work already done in
        memory must not be answered as if it were on disk.
        """
        batch = self._latest()
        if batch is None:
            if not self._behind:
                return None
            batch = self._gather()
            self._hand_over()
        waiter: asyncio.Future[StoreError | None] = self._loop.create_future()
        batch.waiters.append(waiter)
        return await waiter

    def retry(self) -> None:
        """Try again to write what could not be written, and find out whether there is room for more than that."""
        if self.failing:
            self._gather().probe = True
            self._hand_over()

    async def read(self, query: Callable[[Store], T]) -> T:
        """Run a query on the store, after everything taken up so far."""
        result: asyncio.Future[T] = self._loop.create_future()
        self._gather().reads.append((query, result))
        self._hand_over()
        return await result

    async def aclose(self) -> None:
        """Write what is left and close the store."""
        self._closing = True
        self._hand_over()
        await asyncio.shield(self._closed)

    def _latest(self) -> Batch | None:
        """The batch whose end is the end of everything taken up so far; None: all of it has ended."""
        return self._gathering or self._at_work

    def _gather(self) -> Batch:
        if self._gathering is None:
            self._gathering = Batch()
        return self._gathering

    def _hand_over(self) -> None:
        if self._at_work is not None:
            return
        taken = threading.Lock()
        taken.acquire()
        if self._gathering is not None:
            self._at_work, self._gathering = self._gathering, None
            self._handed_over.put((self._at_work, taken))
            if not self._crowded:
                # The thread needs the interpreter for a moment, and from then on only the disk. It would get it when
                # this loop has nothing more to do: what a lone call makes of its grant meanwhile would come before the
                # write and not beside it (70 of 950 µs, November 2026). With many calls there is always more to do.
                taken.acquire(timeout=HAND_OVER_S)
        elif self._closing:
            self._handed_over.put((None, taken))

    # -- the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        unwritten: dict[Hashable, AnyWrite] = {}
        while True:
            batch, taken = self._handed_over.get()
            taken.release()
            if batch is None:
                break
            error = self._write(batch, unwritten)
            has_room = error is None and batch.probe and self._has_room()
            answers = [(future, *self._answer(query)) for query, future in batch.reads]
            self._loop.call_soon_threadsafe(self._finish, batch, error, has_room, answers)
        if unwritten:
            self._write(Batch(), unwritten)
        self._store.close()
        self._loop.call_soon_threadsafe(self._closed.set_result, None)

    def _write(self, batch: Batch, unwritten: dict[Hashable, AnyWrite]) -> StoreError | None:
        if not batch.writes and not unwritten:
            return None
        try:
            self._store.commit([*unwritten.values(), *batch.writes] if unwritten else batch.writes)
        except Exception as error:  # whatever it is, the thread must go on and the callers must be told
            for write in batch.writes:
                # The latest write of a record stands for the earlier ones: a full disk must not fill the memory.
                unwritten.pop(_record_of(write), None)
                unwritten[_record_of(write)] = write
            return error if isinstance(error, StoreError) else StoreError(repr(error))
        unwritten.clear()
        return None

    def _has_room(self) -> bool:
        try:
            self._store.probe()
        except Exception:  # whatever it is, there is no room; the next commit says what it is
            return False
        return True

    def _answer(self, query: Callable[[Store], Any]) -> tuple[Any, Exception | None]:
        try:
            return query(self._store), None
        except Exception as error:  # it belongs to the caller, not to the thread
            return None, error

    def _finish(
        self,
        batch: Batch,
        error: StoreError | None,
        has_room: bool,
        answers: list[tuple[asyncio.Future[Any], Any, Exception | None]],
    ) -> None:
        failed_before, self.failing = self.failing, error is not None or (self.failing and not has_room)
        self._behind = error is not None
        self.batches += 1
        self._crowded = len(batch.waiters) > 1
        # Answers are set first, so that the calls go on before whatever else the listeners put off; they run only after
        # this returns, and find what the listeners have noted.
        for waiter in batch.waiters:
            if not waiter.done():
                waiter.set_result(error)
        for future, value, problem in answers:
            if not future.done():
                if problem is None:
                    future.set_result(value)
                else:
                    future.set_exception(problem)
        try:
            self._on_batch(batch, error)
        finally:
            # Not before: what the listeners decided has gathered, and goes to the disk together.
            self._at_work = None
            self._hand_over()
        if error is not None and not failed_before:
            _log.error("store_unwritable", **describe_error(error))
        elif failed_before and not self.failing:
            _log.info("store_writable_again")


def _record_of(write: AnyWrite) -> Hashable:
    match write:
        case PutLease(lease):
            return "lease", lease.lease_id
        case DropLease(lease_id):
            return "lease", lease_id
        case PutTicket(ticket):
            return "ticket", ticket.request_id
        case DropTicket(request_id):
            return "ticket", request_id
        case PutEnded(ended):
            return "ended", ended.lease_id
        case DropEnded(lease_id):
            return "ended", lease_id
        case PutCounter() | PutWishes():
            return type(write).__name__
        case _:
            return "observation", write.observation.number

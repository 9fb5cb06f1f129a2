"""The one owner of the book: runs verbs one at a time on the event loop, commits what they leave, then tells it."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from weighbridge_ledger.book import Book, Event, EventKind, Lease, LeaseState, Moment, Refused
from weighbridge_ledger.service.clock import Clock
from weighbridge_ledger.service.committer import Batch, Committer
from weighbridge_ledger.service.failures import error_of, store_unavailable
from weighbridge_ledger.store.interface import AnyWrite, Store, StoreError

T = TypeVar("T")

Listener = Callable[[Sequence[Event]], None]
Verb = Callable[[Book, Moment], T]

UNTOLD_LIMIT = 65_536
"""Events held back while the store cannot be written: beyond that the oldest are dropped, which watchers see as a gap
in nothing but time (each event carries its lease whole)."""


class Keeper:
    """Verbs run synchronously and so never interleave. Listeners hear of an event once it is on disk."""

    def __init__(self, book: Book, store: Store, clock: Clock) -> None:
        self.book = book
        self.clock = clock
        self.committer = Committer(store, self._on_batch)
        self._listeners: list[Listener] = []
        self._unkept_listeners: list[Callable[[str], None]] = []
        self._untold: list[Event] = []
        self._told: dict[str, Lease] = {}
        self.sweeps = 0
        """Looks for deaths and deadlines that came to their end."""

    def take_as_told(self) -> None:
        """What the book holds is what everybody may know: after a restart, and whenever nothing is being written."""
        views = (self.book.view(lease_id) for lease_id in self.book.lease_ids())
        self._told = {view.lease.lease_id: view.lease for view in views if view is not None}

    def told_leases(self) -> list[Lease]:
        """The leases as the events told so far leave them, in the order of asking.

        The book itself may be ahead by what is being written. Listed from there, a watch would see a lease end that it
        was never shown, and be told of a grant after the one that took its place.
        """
        if self.committer.idle and not self._untold:
            self.take_as_told()
        return sorted(self._told.values(), key=lambda lease: lease.sequence)

    def listen(self, listener: Listener) -> None:
        """Call `listener` with events, in order, after they were committed."""
        self._listeners.append(listener)

    def listen_unkept(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the lease of a grant that could not be committed and was taken back."""
        self._unkept_listeners.append(listener)

    def run(self, verb: Verb[T], extra: Sequence[AnyWrite] = ()) -> T:
        """Run one verb now. What it decided is being written when this returns, and goes on being written whatever
        happens to the caller.

        Raises:
            RequestError: the book refused.
        """
        try:
            return verb(self.book, self.clock())
        except Refused as refused:
            raise error_of(refused) from None
        finally:
            drained = self.book.drain()
            self.committer.enqueue((*drained.writes, *extra) if extra else drained.writes, drained.events)

    async def settled(self) -> None:
        """Wait until everything decided so far is on disk.

        Raises:
            RequestError: STORE_UNAVAILABLE.
        """
        if await self.committer.durable() is not None:
            raise store_unavailable()

    async def settled_for_reading(self) -> None:
        """Wait like `settled`, but let people look while the disk is full: what they see then is in memory only."""
        if not self.committer.failing:
            await self.settled()

    async def decide(self, verb: Verb[T], extra: Sequence[AnyWrite] = ()) -> T:
        """Run one verb and return its answer when it may be told: after the commit.

        Raises:
            RequestError: the book refused, or STORE_UNAVAILABLE.
        """
        answer = self.run(verb, extra)
        await self.settled()
        return answer

    def refuse_if_unwritable(self) -> None:
        """A disk that could not be written a moment ago takes no new claims.

        Raises:
            RequestError: STORE_UNAVAILABLE.
        """
        if self.committer.failing:
            raise store_unavailable()

    async def aclose(self) -> None:
        """Write what is left and close the store."""
        await self.committer.aclose()

    def _on_batch(self, batch: Batch, error: StoreError | None) -> None:
        if error is None:
            events = self._untold + batch.events if self._untold else batch.events
            self._untold = []
            self._note_told(events)
            if events:
                for listener in self._listeners:
                    listener(events)
            return
        self._untold = (self._untold + batch.events)[-UNTOLD_LIMIT:]
        for event in batch.events:
            if event.kind is EventKind.GRANTED and event.lease is not None:
                lease_id = event.lease.lease_id
                self.run(lambda book, now, lease_id=lease_id: book.withdraw(lease_id, now))  # type: ignore[misc]
                for unkept in self._unkept_listeners:
                    unkept(lease_id)

    def _note_told(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.lease is None:
                continue
            if event.lease.state is LeaseState.RELEASED:
                self._told.pop(event.lease.lease_id, None)
            else:
                self._told[event.lease.lease_id] = event.lease

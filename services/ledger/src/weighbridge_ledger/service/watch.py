"""Every change in order, for those who watch: a bounded ring, resumable by (epoch, revision).

A watcher is a place in the ring and no queue of its own. However many watch, and however slowly, the ledger keeps the
ring and nothing else: 512 watchers with a queue of 1024 messages each would be half a million.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import grpc
from weighbridge_proto.errors import RequestError
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

from weighbridge_ledger.book import Event, EventKind
from weighbridge_ledger.service import failures

RING_EVENTS = 4096
"""Changes that can be resumed from, and that one watcher may be behind before it is dropped. At ten changes a second,
seven minutes of absence."""

KINDS = {
    EventKind.QUEUED: pb.CHANGE_KIND_QUEUED,
    EventKind.RECLAIMING: pb.CHANGE_KIND_RECLAIMING,
    EventKind.GRANTED: pb.CHANGE_KIND_GRANTED,
    EventKind.ACTIVATED: pb.CHANGE_KIND_ACTIVATED,
    EventKind.LOADED: pb.CHANGE_KIND_LOADED,
    EventKind.SUSPECTED: pb.CHANGE_KIND_SUSPECTED,
    EventKind.ATTACHED: pb.CHANGE_KIND_ATTACHED,
    EventKind.RESIZED: pb.CHANGE_KIND_RESIZED,
    EventKind.VACATING: pb.CHANGE_KIND_VACATING,
    EventKind.OVERDUE: pb.CHANGE_KIND_OVERDUE,
    EventKind.RELEASED: pb.CHANGE_KIND_RELEASED,
    EventKind.CEILINGS_CHANGED: pb.CHANGE_KIND_CEILINGS,
}
"""What watchers are told. A holder that is asked for optional bytes back is its own affair: nothing has changed."""

Render = Callable[[Event, int], pb.WatchResponse]
Snapshot = Callable[[], pb.WatchSnapshot]


@dataclass(slots=True)
class _Change:
    event: Event
    message: pb.WatchResponse | None = None
    """Made once for all watchers, when the first one needs it."""


class WatchHub:
    """Numbers changes and hands them to watchers.

    Args:
        epoch: the ledger's epoch.
        render: an event and its revision as a message.
        snapshot: the leases and the capacity as they stand.
        now: seconds since the epoch.
    """

    def __init__(self, epoch: str, render: Render, snapshot: Snapshot, now: Callable[[], float]) -> None:
        self._epoch = epoch
        self._render = render
        self._snapshot = snapshot
        self._now = now
        self._ring: deque[_Change] = deque(maxlen=RING_EVENTS)
        self._watchers: set[asyncio.Event] = set()
        """One for each watcher: set when there may be something for it."""
        self._stopping = False
        self.revision = 0

    def on_events(self, events: Sequence[Event]) -> None:
        """Number events and wake watchers. O(1) for each while nobody watches: messages are made for watchers only."""
        for event in events:
            if event.kind not in KINDS:
                continue
            self.revision += 1
            change = _Change(event)
            self._ring.append(change)
            if self._watchers:
                # Now, and not when a watcher comes to it: a capacity is shown as it is after its change.
                change.message = self._render(event, self.revision)
        for watcher in self._watchers:
            watcher.set()

    async def watch(self, epoch: str, revision: int) -> AsyncGenerator[pb.WatchResponse, None]:
        """The changes after `revision` of `epoch`; without an epoch a snapshot and the changes after it.

        Raises:
            RequestError: REVISION_COMPACTED, WATCHER_TOO_SLOW, LEDGER_STOPPING.
        """
        if self._stopping:
            raise failures.stopping()
        if epoch:
            self._check_kept(epoch, revision)
        woken = asyncio.Event()
        self._watchers.add(woken)
        try:
            if not epoch:
                # In one step, so that no change is missing between the snapshot and what follows it.
                revision = self.revision
                yield self._first()
            while True:
                while revision < self.revision:
                    message = self._message_after(revision)
                    revision += 1
                    yield message
                if self._stopping:
                    raise failures.stopping()
                woken.clear()
                await woken.wait()
        finally:
            self._watchers.discard(woken)

    def stop(self) -> None:
        """End every watch: the ledger is stopping."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.set()

    @property
    def _oldest(self) -> int:
        """The least revision after which everything is kept."""
        return self.revision - len(self._ring)

    def _first(self) -> pb.WatchResponse:
        first = pb.WatchResponse(
            epoch=self._epoch, revision=self.revision, kind=pb.CHANGE_KIND_SNAPSHOT, snapshot=self._snapshot()
        )
        first.event_time.FromNanoseconds(int(self._now() * 1e9))
        return first

    def _message_after(self, revision: int) -> pb.WatchResponse:
        if revision < self._oldest:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "WATCHER_TOO_SLOW",
                f"The watcher fell more than {RING_EVENTS} changes behind, and the next one for it is no longer kept. "
                "Watch again from a snapshot.",
                metadata={"epoch": self._epoch, "oldest_revision": self._oldest, "revision": revision},
            )
        change = self._ring[revision - self._oldest]
        if change.message is None:
            change.message = self._render(change.event, revision + 1)
        return change.message

    def _check_kept(self, epoch: str, revision: int) -> None:
        if epoch != self._epoch or not self._oldest <= revision <= self.revision:
            raise RequestError(
                grpc.StatusCode.OUT_OF_RANGE,
                "REVISION_COMPACTED",
                "The changes after that point are no longer kept, or it belongs to an earlier run of the ledger. Watch "
                "again from a snapshot.",
                metadata={"epoch": self._epoch, "oldest_revision": self._oldest, "revision": self.revision},
            )

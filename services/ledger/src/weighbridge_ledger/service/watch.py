"""Every change in order, for those who watch: a bounded ring, resumable by (epoch, revision)."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

import grpc
from weighbridge_proto.errors import RequestError
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

from weighbridge_ledger.book import Event
from weighbridge_ledger.service import failures

RING_EVENTS = 4096
"""Changes that can be resumed from. At ten changes a second, seven minutes of absence."""

WATCHER_BEHIND = 1024
"""Changes that one watcher may be behind before it is dropped: memory is bounded, and it can resume from the ring."""

_STOP = object()

Render = Callable[[Event, int], pb.WatchResponse]
Snapshot = Callable[[], pb.WatchSnapshot]


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
        self._ring: deque[Event] = deque(maxlen=RING_EVENTS)
        self._watchers: set[_Watcher] = set()
        self._stopping = False
        self.revision = 0

    def on_events(self, events: Sequence[Event]) -> None:
        """Number events and hand them out. O(1) for each while nobody watches: messages are made for watchers only."""
        for event in events:
            self.revision += 1
            self._ring.append(event)
            if self._watchers:
                message = self._render(event, self.revision)
                for watcher in list(self._watchers):
                    watcher.offer(message)

    async def watch(self, epoch: str, revision: int) -> AsyncGenerator[pb.WatchResponse, None]:
        """The changes after `revision` of `epoch`; without an epoch a snapshot and the changes after it.

        Raises:
            RequestError: REVISION_COMPACTED, WATCHER_TOO_SLOW, LEDGER_STOPPING.
        """
        backlog = self._backlog(epoch, revision)
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            for message in backlog:
                yield message
            while True:
                item = await watcher.queue.get()
                if item is _STOP:
                    raise failures.stopping()
                assert isinstance(item, pb.WatchResponse)
                yield item
                if watcher.dropped and watcher.queue.empty():
                    raise RequestError(
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        "WATCHER_TOO_SLOW",
                        f"The watcher fell more than {WATCHER_BEHIND} changes behind. Watch again from the last "
                        "revision that arrived.",
                    )
        finally:
            self._watchers.discard(watcher)

    def stop(self) -> None:
        """End every watch: the ledger is stopping."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.queue.put_nowait(_STOP)

    def _backlog(self, epoch: str, revision: int) -> list[pb.WatchResponse]:
        if self._stopping:
            raise failures.stopping()
        if not epoch:
            first = pb.WatchResponse(epoch=self._epoch, revision=self.revision, snapshot=self._snapshot())
            first.event_time.FromNanoseconds(int(self._now() * 1e9))
            return [first]
        oldest = self.revision - len(self._ring)
        if epoch != self._epoch or not oldest <= revision <= self.revision:
            raise RequestError(
                grpc.StatusCode.OUT_OF_RANGE,
                "REVISION_COMPACTED",
                "The changes after that point are no longer kept, or it belongs to an earlier run of the ledger. Watch "
                "again from a snapshot.",
                metadata={"epoch": self._epoch, "oldest_revision": oldest, "revision": self.revision},
            )
        missed = list(self._ring)[revision - oldest :]
        return [self._render(event, revision + 1 + index) for index, event in enumerate(missed)]


class _Watcher:
    def __init__(self) -> None:
        # One more than offered, so that the stop always has room.
        self.queue: asyncio.Queue[object] = asyncio.Queue(WATCHER_BEHIND + 1)
        self.dropped = False

    def offer(self, message: pb.WatchResponse) -> None:
        if not self.dropped:
            if self.queue.qsize() >= WATCHER_BEHIND:
                self.dropped = True
            else:
                self.queue.put_nowait(message)

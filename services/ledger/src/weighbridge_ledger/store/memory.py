"""A store without a disk, for tests and what-ifs: the same contract except that it dies with its process."""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from weighbridge_ledger.book.records import (
    DropEnded,
    DropLease,
    DropTicket,
    Ended,
    PutCounter,
    PutEnded,
    PutLease,
    PutTicket,
    PutWishes,
    Snapshot,
    Ticket,
)
from weighbridge_ledger.book.states import Lease
from weighbridge_ledger.store.interface import (
    OBSERVATIONS_KEPT,
    AnyWrite,
    Observation,
    PutObservation,
    StoreError,
)


class MemoryStore:
    """Keeps everything in dictionaries. `fail_with` makes the next commits fail, as a full disk would."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._tickets: dict[str, Ticket] = {}
        self._ended: dict[str, Ended] = {}
        self._observations: dict[int, Observation] = {}
        self._rest = Snapshot()
        self._id = uuid.uuid4().hex[:12]
        self._epochs = 0
        self.fail_with: str | None = None
        self.commits = 0

    def begin_epoch(self) -> str:
        """See Store."""
        self._epochs += 1
        return f"{self._id}.{self._epochs}"

    def load(self) -> Snapshot:
        """See Store."""
        return replace(
            self._rest,
            leases=tuple(self._leases.values()),
            tickets=tuple(self._tickets.values()),
            ended=tuple(self._ended.values()),
        )

    def commit(self, writes: Sequence[AnyWrite]) -> None:
        """See Store."""
        if self.fail_with is not None:
            raise StoreError(self.fail_with)
        self.commits += 1
        for write in writes:
            match write:
                case PutLease(lease):
                    self._leases[lease.lease_id] = lease
                case DropLease(lease_id):
                    self._leases.pop(lease_id, None)
                case PutTicket(ticket):
                    self._tickets[ticket.request_id] = ticket
                case DropTicket(request_id):
                    self._tickets.pop(request_id, None)
                case PutEnded(ended):
                    self._ended[ended.lease_id] = ended
                case DropEnded(lease_id):
                    self._ended.pop(lease_id, None)
                case PutCounter(counter):
                    self._rest = replace(self._rest, counter=max(self._rest.counter, counter))
                case PutWishes(limit_bytes, allow_spill):
                    self._rest = replace(self._rest, limit_bytes=limit_bytes, allow_spill=allow_spill)
                case PutObservation(observation, unless_recorded):
                    self._observe(observation, unless_recorded=unless_recorded)

    def probe(self) -> None:
        """See Store."""
        if self.fail_with is not None:
            raise StoreError(self.fail_with)

    def last_observation(self) -> int:
        """See Store."""
        return max(self._observations, default=0)

    def observations(
        self, model_digest: str, engine_build: str, shape: str, before: int | None, limit: int
    ) -> list[Observation]:
        """See Store."""
        matching = (
            self._observations[number]
            for number in sorted(self._observations, reverse=True)
            if before is None or number < before
        )
        return list(
            islice(
                (
                    one
                    for one in matching
                    if model_digest in ("", one.model_digest)
                    and engine_build in ("", one.engine_build)
                    and shape in ("", one.shape)
                ),
                limit,
            )
        )

    def close(self) -> None:
        """See Store."""

    def _observe(self, observation: Observation, *, unless_recorded: bool) -> None:
        lease_id = observation.lease_id
        earlier = [one.number for one in self._observations.values() if lease_id and one.lease_id == lease_id]
        if earlier and unless_recorded:
            return
        for number in earlier:
            del self._observations[number]
        self._observations[observation.number] = observation
        for number in [one for one in self._observations if one <= observation.number - OBSERVATIONS_KEPT]:
            del self._observations[number]

"""Measured peaks, by launch, beside what was planned, claimed and granted for it: what fit learns from.

They are kept, and change no lease. Holders tell them. What a holder does not know of its own lease, or could not say
because it died, the ledger adds from the book.
"""

from collections.abc import Sequence
from dataclasses import replace

from weighbridge_proto.errors import invalid_argument
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

from weighbridge_ledger.book import Event, EventKind, Lease
from weighbridge_ledger.book.states import Observed
from weighbridge_ledger.service import messages
from weighbridge_ledger.service.keeper import Keeper
from weighbridge_ledger.store.interface import Observation, PutObservation

PAGE_SIZE, MAX_PAGE_SIZE = 100, 1000


class ObservationDesk:
    """Numbers observations and keeps them in the store."""

    def __init__(self, keeper: Keeper, node_id: str, last_number: int) -> None:
        self._keeper = keeper
        self._node_id = node_id
        self._last_number = last_number
        keeper.listen(self.on_events)

    async def record(self, message: lease_pb2.Observation) -> lease_pb2.Observation:
        """Keep one, in place of what was said of the same lease before.

        Raises:
            RequestError: INVALID_ARGUMENT, STORE_UNAVAILABLE.
        """
        observation = self._checked(message)
        self._keeper.refuse_if_unwritable()
        view = self._keeper.book.view(observation.lease_id) if observation.lease_id else None
        if view is not None:
            observation = _completed(observation, view.lease)
        kept = self._put(observation)
        await self._keeper.settled()
        return messages.observation_message(kept)

    def on_events(self, events: Sequence[Event]) -> None:
        """Keep what a lease that ends is known to have taken, unless its holder has said that itself.

        The holder may have crashed, and those are the launches that a plan has most to learn from.
        """
        for event in events:
            if event.kind is EventKind.RELEASED and event.lease is not None and event.observed is not None:
                observation = self._last_seen(event.lease, event.observed, event.wall)
                if observation is not None:
                    self._put(observation, unless_recorded=True)

    async def list_page(self, request: pb.ListObservationsRequest) -> pb.ListObservationsResponse:
        """Latest first.

        Raises:
            RequestError: INVALID_ARGUMENT.
        """
        size = page_size(request.page_size)
        before = page_token(request.page_token)
        found = await self._keeper.committer.read(
            lambda store: store.observations(
                request.model_digest, request.engine_build, request.shape, before, size + 1
            )
        )
        response = pb.ListObservationsResponse(observations=[messages.observation_message(one) for one in found[:size]])
        if len(found) > size:
            response.next_page_token = str(found[size - 1].number)
        return response

    def _put(self, observation: Observation, *, unless_recorded: bool = False) -> Observation:
        self._last_number += 1
        kept = replace(observation, number=self._last_number)
        self._keeper.committer.enqueue((PutObservation(kept, unless_recorded),), ())
        return kept

    def _last_seen(self, lease: Lease, observed: Observed, wall: float) -> Observation | None:
        """None: of a launch that nothing can be learnt from, because it never came to its peak or names no weights."""
        peak = _peak_bytes(observed)
        purpose = lease.purpose
        if not (lease.loaded_wall and purpose.model_digest and peak):
            return None
        seen = Observation(
            purpose.model_digest,
            purpose.engine_build,
            purpose.shape,
            planned_bytes=0,
            granted_bytes=0,
            peak_bytes=peak,
            load_s=0.0,
            observed_wall=wall,
            node_id=self._node_id,
            lease_id=lease.lease_id,
        )
        return _completed(seen, lease)

    def _checked(self, message: lease_pb2.Observation) -> Observation:
        if not message.model_digest:
            raise invalid_argument("observation.model_digest", "must say which weights were measured")
        for name in ("model_digest", "engine_build", "shape", "lease_id"):
            if len(getattr(message, name)) > 4 * messages.MAX_TEXT:
                raise invalid_argument(f"observation.{name}", f"must have at most {4 * messages.MAX_TEXT} characters")
        for name in ("planned_bytes", "claimed_bytes", "granted_bytes", "peak_bytes"):
            if getattr(message, name) < 0:
                raise invalid_argument(f"observation.{name}", "must not be negative")
        if message.peak_bytes == 0:
            raise invalid_argument("observation.peak_bytes", "must say what was measured")
        observed = message.observe_time.ToNanoseconds() / 1e9 if message.HasField("observe_time") else 0.0
        return Observation(
            message.model_digest,
            message.engine_build,
            message.shape,
            message.planned_bytes,
            message.granted_bytes,
            message.peak_bytes,
            max(0.0, message.load_time.ToNanoseconds() / 1e9),
            observed or self._keeper.clock().wall,
            self._node_id,
            message.lease_id,
            claimed_bytes=message.claimed_bytes,
        )


def _completed(observation: Observation, lease: Lease) -> Observation:
    """With what the book knows of the lease in the place of what is not said (0)."""
    return replace(
        observation,
        planned_bytes=observation.planned_bytes or max(0, lease.purpose.planned_peak_bytes),
        claimed_bytes=observation.claimed_bytes or lease.claim.total_bytes,
        granted_bytes=observation.granted_bytes or lease.charge.total_bytes,
        load_s=observation.load_s or lease.load_s,
    )


def _peak_bytes(observed: Observed) -> int:
    """The peak of everything together: each place's, or what is in use there where its holder tells no peak."""
    devices = dict(observed.devices)
    for device, peak in observed.device_peaks:
        devices[device] = max(devices.get(device, 0), peak)
    return max(observed.host_bytes, observed.host_peak_bytes) + sum(devices.values())


def page_size(asked: int) -> int:
    """How many to return.

    Raises:
        RequestError: INVALID_ARGUMENT.
    """
    if asked < 0:
        raise invalid_argument("page_size", "must not be negative; leave it out for the default")
    return min(asked or PAGE_SIZE, MAX_PAGE_SIZE)


def page_token(token: str) -> int | None:
    """Where the page begins.

    Raises:
        RequestError: INVALID_ARGUMENT.
    """
    if not token:
        return None
    if not token.isascii() or not token.isdigit() or len(token) > 18:
        raise invalid_argument("page_token", "is none that this ledger gave out")
    return int(token)

"""Measured peaks, by launch: what fit learns from. They are kept, and change no lease."""

from dataclasses import replace

from weighbridge_proto.errors import invalid_argument
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

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

    async def record(self, message: lease_pb2.Observation) -> lease_pb2.Observation:
        """Keep one.

        Raises:
            RequestError: INVALID_ARGUMENT, STORE_UNAVAILABLE.
        """
        observation = self._checked(message)
        self._keeper.refuse_if_unwritable()
        self._last_number += 1
        kept = replace(observation, number=self._last_number)
        self._keeper.committer.enqueue((PutObservation(kept),), ())
        await self._keeper.settled()
        return messages.observation_message(kept)

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

    def _checked(self, message: lease_pb2.Observation) -> Observation:
        if not message.model_digest:
            raise invalid_argument("observation.model_digest", "must say which weights were measured")
        for name in ("model_digest", "engine_build", "shape", "lease_id"):
            if len(getattr(message, name)) > 4 * messages.MAX_TEXT:
                raise invalid_argument(f"observation.{name}", f"must have at most {4 * messages.MAX_TEXT} characters")
        for name in ("planned_bytes", "granted_bytes", "peak_bytes"):
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
        )


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

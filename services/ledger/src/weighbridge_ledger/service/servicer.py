"""LedgerService: messages in, verbs of the book, messages out. No rule stands here."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import grpc
from weighbridge_common import processes
from weighbridge_common.tasks import TaskOwner
from weighbridge_proto.errors import RequestError, invalid_argument
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2_grpc
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

from weighbridge_ledger.book import Event, Lease, LeaseState, Reason
from weighbridge_ledger.book.book import LeaseView
from weighbridge_ledger.book.records import PutWishes
from weighbridge_ledger.machine.capacity import assemble
from weighbridge_ledger.machine.messages import InvalidMachineError, capacity_to_proto, machine_from_proto
from weighbridge_ledger.service import lease_messages, messages, times
from weighbridge_ledger.service.admit import AdmitDesk
from weighbridge_ledger.service.keepalive import KeepAliveDesk
from weighbridge_ledger.service.keeper import Keeper
from weighbridge_ledger.service.machine_desk import MachineDesk, Wishes
from weighbridge_ledger.service.metrics import LedgerMetrics
from weighbridge_ledger.service.observations import ObservationDesk, page_size, page_token
from weighbridge_ledger.service.pulse import Pulse, SetServing
from weighbridge_ledger.service.sweep import IsAlive, sweep_for_ever
from weighbridge_ledger.service.vacating import Vacating
from weighbridge_ledger.service.watch import KINDS, WatchHub

if TYPE_CHECKING:
    from weighbridge_proto.memory.v1.machine_pb2 import Capacity as CapacityMessage

    Context = grpc.aio.ServicerContext[object, object]


class LedgerServicer(ledger_service_pb2_grpc.LedgerServiceServicer):
    """Serves one book.

    Args:
        keeper: the owner of the book, with everything restored.
        machine: the machine beside it.
        epoch: the name of this run.
        last_observation: the highest number of an observation so far.
        is_alive: how to ask whether a process lives.
    """

    def __init__(
        self,
        keeper: Keeper,
        machine: MachineDesk,
        epoch: str,
        last_observation: int,
        is_alive: IsAlive = processes.is_alive,
    ) -> None:
        self._keeper = keeper
        self._machine = machine
        self._epoch = epoch
        self._is_alive = is_alive
        self._node_id = machine.node_id
        self._wishing = asyncio.Lock()
        self._metrics = LedgerMetrics(keeper)
        self._watch = WatchHub(epoch, self._render, self._snapshot, lambda: keeper.clock().wall)
        keeper.listen(self._watch.on_events)
        self._admit = AdmitDesk(keeper, self._node_id)
        self._vacating = Vacating(keeper.book)
        self._keep_alive = KeepAliveDesk(keeper, self._vacating)
        self._observations = ObservationDesk(keeper, self._node_id, last_observation)
        self._tasks = TaskOwner()

    def start(self, stopping: asyncio.Event, set_serving: SetServing | None = None) -> None:
        """Begin to sweep and to measure; end long streams when `stopping` is set; tell health checks by `set_serving`
        whether the ledger gets on."""
        self._tasks.start(sweep_for_ever(self._keeper, self._is_alive), "sweep")
        self._tasks.start(self._machine.measure_for_ever(self._keeper), "measure")
        self._tasks.start(self._machine.watch_holds_for_ever(self._keeper), "holds")
        self._tasks.start(self._stop_streams(stopping), "stop_streams")
        if set_serving is not None:
            self._tasks.start(Pulse(self._keeper, set_serving).look_for_ever(), "pulse")

    async def aclose(self) -> None:
        """End the background work, write what is left, close the store."""
        await self._tasks.aclose()
        await self._keeper.aclose()

    # -- the machine -----------------------------------------------------------------------------------------------

    async def GetCapacity(self, request: pb.GetCapacityRequest, context: "Context") -> pb.GetCapacityResponse:  # noqa: N802
        """See the contract."""
        self._refuse_other_node(request.node_id)
        if request.HasField("machine"):
            try:
                machine, limit_bytes = machine_from_proto(request.machine)
            except InvalidMachineError as error:
                raise invalid_argument(f"machine.{error.field}", error.description) from error
            return pb.GetCapacityResponse(capacity=capacity_to_proto(assemble(machine, limit_bytes=limit_bytes)))
        await self._machine.measure(self._keeper)
        await self._keeper.settled_for_reading()
        return pb.GetCapacityResponse(capacity=self._capacity())

    async def SetLimit(self, request: pb.SetLimitRequest, context: "Context") -> pb.SetLimitResponse:  # noqa: N802
        """See the contract."""
        self._refuse_other_node(request.node_id)
        if request.HasField("limit_bytes") and request.limit_bytes <= 0:
            raise invalid_argument("limit_bytes", "must be more than 0; leave it out for the automatic limit")
        # One at a time: what the second one would go back to, might be what the first one could not keep.
        async with self._wishing:
            self._keeper.refuse_if_unwritable()
            before = self._machine.wishes
            spill = request.spill_allowed if request.HasField("spill_allowed") else before.allow_spill
            try:
                self._apply_wishes(Wishes(request.limit_bytes if request.HasField("limit_bytes") else None, spill))
                await self._keeper.settled()
            except RequestError:
                # Not kept, so not in force: and what is written when the disk is well again is what was before.
                self._apply_wishes(before)
                raise
        return pb.SetLimitResponse(capacity=self._capacity())

    # -- asking ----------------------------------------------------------------------------------------------------

    async def Admit(self, request: pb.AdmitRequest, context: "Context") -> AsyncIterator[pb.AdmitResponse]:  # noqa: N802
        """See the contract."""
        try:
            self._refuse_other_node(request.node_id)
            ask = messages.ask_of(request, context.time_remaining())
            if request.validate_only:
                yield await self._admit.preview(ask)
                return
            # Closed in this task, not when the garbage collector comes by: the end of the call frees its grant.
            async with contextlib.aclosing(self._admit.admit(ask)) as responses:
                async for response in responses:
                    yield response
        except RequestError as error:
            self._metrics.refused(error.failure.reason)
            raise

    # -- holding ---------------------------------------------------------------------------------------------------

    async def ActivateLease(self, request: pb.ActivateLeaseRequest, context: "Context") -> pb.ActivateLeaseResponse:  # noqa: N802
        """See the contract."""
        process = messages.process_of("process", request.process)
        engines = messages.processes_of("engine_processes", request.engine_processes)
        lease = await self._keeper.decide(
            lambda book, now: book.activate(request.lease_id, request.secret, process, engines, now)
        )
        return pb.ActivateLeaseResponse(lease=self._message(lease))

    async def AttachLease(self, request: pb.AttachLeaseRequest, context: "Context") -> pb.AttachLeaseResponse:  # noqa: N802
        """See the contract."""
        process = messages.process_of("process", request.process)
        lease, secret = await self._keeper.decide(
            lambda book, now: book.attach(request.lease_id, process, request.secret, now)
        )
        return pb.AttachLeaseResponse(lease=self._message(lease), secret=secret)

    async def KeepAlive(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.KeepAliveRequest], context: "Context"
    ) -> AsyncIterator[pb.KeepAliveResponse]:
        """See the contract."""
        async with contextlib.aclosing(self._keep_alive.serve(request_iterator)) as responses:
            async for response in responses:
                yield response

    async def BeginUse(self, request: pb.BeginUseRequest, context: "Context") -> pb.BeginUseResponse:  # noqa: N802
        """See the contract."""
        if len(request.use_id) > messages.MAX_TEXT:
            raise invalid_argument("use_id", f"must have at most {messages.MAX_TEXT} characters")
        use = self._keeper.run(lambda book, now: book.begin_use(request.lease_id, request.secret, request.use_id, now))
        return pb.BeginUseResponse(use_id=use)

    async def EndUse(self, request: pb.EndUseRequest, context: "Context") -> pb.EndUseResponse:  # noqa: N802
        """See the contract."""
        uses = self._keeper.run(lambda book, now: book.end_use(request.lease_id, request.secret, request.use_id, now))
        return pb.EndUseResponse(uses=uses)

    async def ResizeLease(self, request: pb.ResizeLeaseRequest, context: "Context") -> pb.ResizeLeaseResponse:  # noqa: N802
        """See the contract."""
        claim = messages.claim_of("claim", request.claim)
        exclusive = request.exclusive if request.HasField("exclusive") else None
        lease = await self._keeper.decide(
            lambda book, now: book.resize(request.lease_id, request.secret, claim, now, exclusive)
        )
        return pb.ResizeLeaseResponse(lease=self._message(lease))

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: "Context") -> pb.ReleaseLeaseResponse:  # noqa: N802
        """See the contract."""
        if request.operator_override:
            lease = await self._keeper.decide(
                lambda book, now: book.release_by_operator(request.lease_id, self._is_alive, now)
            )
        else:
            lease = await self._keeper.decide(
                lambda book, now: book.release(request.lease_id, request.secret, self._is_alive, now)
            )
        return pb.ReleaseLeaseResponse(lease=self._message(lease))

    # -- looking ---------------------------------------------------------------------------------------------------

    async def GetLease(self, request: pb.GetLeaseRequest, context: "Context") -> pb.GetLeaseResponse:  # noqa: N802
        """See the contract."""
        await self._keeper.settled_for_reading()
        view = self._keeper.book.view(request.lease_id)
        if view is None:
            _refuse_unknown(request.lease_id)
        return pb.GetLeaseResponse(lease=self._view_message(view))

    async def ListLeases(self, request: pb.ListLeasesRequest, context: "Context") -> pb.ListLeasesResponse:  # noqa: N802
        """See the contract."""
        self._refuse_other_node(request.node_id)
        size = page_size(request.page_size)
        after = page_token(request.page_token) or 0
        await self._keeper.settled_for_reading()
        book = self._keeper.book
        views = [
            view
            for lease_id in book.lease_ids(include_released=request.include_released, after=after, most=size + 1)
            if (view := book.view(lease_id)) is not None
        ]
        response = pb.ListLeasesResponse(leases=[self._view_message(view) for view in views[:size]])
        if len(views) > size:
            response.next_page_token = str(views[size - 1].lease.sequence)
        return response

    async def Watch(self, request: pb.WatchRequest, context: "Context") -> AsyncIterator[pb.WatchResponse]:  # noqa: N802
        """See the contract."""
        self._refuse_other_node(request.node_id)
        await self._keeper.settled_for_reading()
        async with contextlib.aclosing(self._watch.watch(request.epoch, request.revision)) as responses:
            async for response in responses:
                yield response

    async def RecordObservation(  # noqa: N802
        self, request: pb.RecordObservationRequest, context: "Context"
    ) -> pb.RecordObservationResponse:
        """See the contract."""
        return pb.RecordObservationResponse(observation=await self._observations.record(request.observation))

    async def ListObservations(  # noqa: N802
        self, request: pb.ListObservationsRequest, context: "Context"
    ) -> pb.ListObservationsResponse:
        """See the contract."""
        self._refuse_other_node(request.node_id)
        return await self._observations.list_page(request)

    def _refuse_other_node(self, node_id: str) -> None:
        """One ledger owns one machine: what is asked of another must not happen on this one."""
        if node_id not in ("", self._node_id):
            raise RequestError(
                grpc.StatusCode.NOT_FOUND,
                "NODE_NOT_FOUND",
                f"This ledger owns the machine {self._node_id}, not the one that was named. Leave the name out, or ask "
                "that machine's ledger.",
                metadata={"node_id": node_id, "owned_node_id": self._node_id},
            )

    # -- messages --------------------------------------------------------------------------------------------------

    def _message(self, lease: Lease) -> lease_pb2.Lease:
        """The lease as it stands, or as it ended."""
        view = self._keeper.book.view(lease.lease_id)
        return self._view_message(LeaseView(lease) if view is None else view)

    def _view_message(self, view: LeaseView) -> lease_pb2.Lease:
        book = self._keeper.book
        waiting = book.waiting_for(view.lease.lease_id) if view.queue_position else None
        reasons = () if waiting is None else waiting[2]
        why = self._vacating.end_reason(view.lease) if view.lease.state is LeaseState.VACATING else None
        return lease_messages.lease_message(view, self._keeper.clock(), self._node_id, reasons, why)

    def _capacity(self) -> "CapacityMessage":
        return self._machine.capacity(self._keeper.book, self._epoch, self._watch.revision, self._keeper.clock())

    def _snapshot(self) -> pb.WatchSnapshot:
        return pb.WatchSnapshot(leases=map(self._as_told, self._keeper.told_leases()), capacity=self._capacity())

    def _as_told(self, lease: Lease) -> lease_pb2.Lease:
        """A lease as it was told, with what else is known of it if it still is that."""
        view = self._keeper.book.view(lease.lease_id)
        return self._view_message(view if view is not None and view.lease == lease else LeaseView(lease))

    def _render(self, event: Event, revision: int) -> pb.WatchResponse:
        message = pb.WatchResponse(
            epoch=self._epoch, revision=revision, kind=KINDS[event.kind], event_time=times.timestamp(event.wall)
        )
        if event.lease is None:
            message.capacity.CopyFrom(self._capacity())
            return message
        cause = "" if event.cause is None else event.cause.value
        view = LeaseView(event.lease, cause=cause, released_wall=event.wall if cause else 0.0)
        now = self._keeper.book.view(event.lease.lease_id) if event.lease.state is LeaseState.QUEUED else None
        if now is not None:
            view = replace(view, level=now.level, replaces=now.replaces)
        message.lease.CopyFrom(self._view_message(view))
        return message

    def _apply_wishes(self, wishes: Wishes) -> None:
        self._machine.wishes = wishes
        ceilings = self._machine.ceilings()
        kept = PutWishes(wishes.limit_bytes, wishes.allow_spill)
        self._keeper.run(lambda book, now: book.set_ceilings(ceilings, now), (kept,))

    async def _stop_streams(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._admit.stop()
        self._keep_alive.stop()
        self._watch.stop()


def _refuse_unknown(lease_id: str) -> NoReturn:
    raise RequestError(
        grpc.StatusCode.NOT_FOUND,
        Reason.LEASE_NOT_FOUND.value,
        "There is no such lease, or it ended too long ago to be remembered.",
        metadata={"lease_id": lease_id},
    )

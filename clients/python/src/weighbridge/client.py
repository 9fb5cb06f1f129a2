"""The suite's services as an asyncio program calls them."""

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import grpc
from weighbridge_proto import targets
from weighbridge_proto.channel import open_channel
from weighbridge_proto.fit.v1 import fit_service_pb2, fit_service_pb2_grpc, plan_pb2, weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2, ledger_service_pb2_grpc
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge.engine_client import Engine
from weighbridge.engine_client import chat_message as chat_message  # where programs look for it
from weighbridge.failures import CallError, answered
from weighbridge.models import looks_like_path, model_at, model_named, path_here
from weighbridge.reach import CALL_TIMEOUT_S, HEALTH_SERVICES, reach, serving

if TYPE_CHECKING:
    from weighbridge_proto.fit.v1.fit_service_pb2_grpc import FitServiceAsyncStub
    from weighbridge_proto.ledger.v1.ledger_service_pb2_grpc import LedgerServiceAsyncStub

_UNFINISHED_LOOKUPS = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)

OBSERVATIONS_PAGE = 1000
"""As many as the ledger lists at once."""

T = TypeVar("T")


class Suite:
    """The services of one machine, each connected when it is first needed.

    Use it as ``async with Suite() as suite``. Every method raises :class:`CallError` when the call fails; a cancelled
    task cancels its call, and a cancelled call leaves nothing behind.

    Args:
        environ: where the targets are looked up (``WEIGHBRIDGE_RUN_DIR``, ``WEIGHBRIDGE_LEDGER_TARGET``, ...); None:
            this process's environment.
        services: targets that go before those, by service name (``ledger``, ``fit``, ``engine-mlx``).
        patience_s: how long to wait for a service that does not listen yet, such as one being restarted. 0: not.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        services: Mapping[str, str] | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self._services = dict(services or {})
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.patience_s = patience_s

    async def __aenter__(self) -> "Suite":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection; calls in flight are cancelled."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    def target(self, name: str) -> str:
        """Where service ``name`` is expected.

        Raises:
            ValueError: no such service, or the run folder's path is too long for a socket.
        """
        return self._services.get(name) or targets.target(name, self._environ)

    def channel(self, name: str) -> grpc.aio.Channel:
        """The channel to service ``name``, for calls that this class has no method for."""
        if name not in self._channels:
            self._channels[name] = open_channel(self.target(name))
        return self._channels[name]

    async def reach(self, name: str, patience_s: float | None = None) -> None:
        """Return once service ``name`` accepts connections; ``patience_s`` instead of the suite's own.

        Raises:
            CallError: it does not (reason UNREACHABLE).
        """
        known = self._channels.get(name)
        if known is not None and known.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            # It waits out a back-off and tells no attempts: a new channel knows at once whether somebody answers.
            del self._channels[name]
            await known.close()
        await reach(self.channel(name), name, self.target(name), self.patience_s if patience_s is None else patience_s)

    async def health(self, name: str) -> Mapping[str, bool]:
        """Whether each gRPC service of the process ``name`` says SERVING."""
        await self.reach(name)
        channel = self.channel(name)
        return {service: await serving(channel, service) for service in HEALTH_SERVICES[name]}

    # ---- fit

    @property
    def fit(self) -> "FitServiceAsyncStub":
        """Every rpc of FitService."""
        return fit_service_pb2_grpc.FitServiceStub(self.channel("fit"))

    async def resolve_model(self, text: str) -> weights_pb2.ModelRef:
        """The model that a person means by ``text``.

        A file or folder that exists here comes first; else a catalogue id, if the catalogue has it; else a path under
        the service's models root.
        """
        if (found := path_here(text)) is not None:
            return model_at(found)
        if looks_like_path(text):
            return model_at(text)
        try:
            await self.reach("fit")
            request = fit_service_pb2.GetModelRequest(catalog_id=text)
            await answered(self.fit.GetModel(request, timeout=CALL_TIMEOUT_S), "fit")
        except CallError as failed:
            if failed.failure.code in _UNFINISHED_LOOKUPS:
                return model_at(text)
            raise
        return model_named(text)

    async def describe_weights(
        self, model: weights_pb2.ModelRef, *, include_tensors: bool = False
    ) -> fit_service_pb2.DescribeWeightsResponse:
        """What the weights of ``model`` hold, from their headers alone; every tensor too, if asked."""
        request = fit_service_pb2.DescribeWeightsRequest(model=model, include_tensors=include_tensors)
        return await self._call("fit", lambda: self.fit.DescribeWeights(request, timeout=CALL_TIMEOUT_S))

    async def plan_model(
        self,
        model: weights_pb2.ModelRef,
        *,
        workload: plan_pb2.Workload | None = None,
        options: plan_pb2.EngineOptions | None = None,
        machine: machine_pb2.Machine | None = None,
        engine_kind: "plan_pb2.EngineKind.ValueType" = plan_pb2.ENGINE_KIND_UNSPECIFIED,
        check_current_leases: bool = False,
    ) -> fit_service_pb2.PlanModelResponse:
        """Plan, requirement and verdict of ``model`` on ``machine`` (None: the one that the ledger owns)."""
        request = fit_service_pb2.PlanModelRequest(
            model=model,
            engine_kind=engine_kind,
            workload=workload,
            options=options,
            machine=machine,
            check_current_leases=check_current_leases,
        )
        return await self._call("fit", lambda: self.fit.PlanModel(request, timeout=CALL_TIMEOUT_S))

    async def solve_context(
        self,
        model: weights_pb2.ModelRef,
        *,
        slots: int = 1,
        options: plan_pb2.EngineOptions | None = None,
        machine: machine_pb2.Machine | None = None,
    ) -> fit_service_pb2.SolveContextResponse:
        """The largest context of ``model`` that still runs, with its plan; the call fails with MODEL_WONT_RUN if none
        does."""
        request = fit_service_pb2.SolveContextRequest(model=model, slots=slots, options=options, machine=machine)
        return await self._call("fit", lambda: self.fit.SolveContext(request, timeout=CALL_TIMEOUT_S))

    async def solve_size(
        self,
        model: weights_pb2.ModelRef,
        *,
        aspect: tuple[int, int] = (1, 1),
        frames: int = 0,
        options: plan_pb2.EngineOptions | None = None,
        machine: machine_pb2.Machine | None = None,
    ) -> fit_service_pb2.SolveSizeResponse:
        """The largest picture of ``model`` in this ``aspect`` (width, height) that still runs, with its plan; the call
        fails with MODEL_WONT_RUN if none does."""
        request = fit_service_pb2.SolveSizeRequest(
            model=model,
            aspect_width=aspect[0],
            aspect_height=aspect[1],
            frames=frames,
            options=options,
            machine=machine,
        )
        return await self._call("fit", lambda: self.fit.SolveSize(request, timeout=CALL_TIMEOUT_S))

    async def get_model(self, catalog_id: str) -> fit_service_pb2.GetModelResponse:
        """One entry of the catalogue."""
        request = fit_service_pb2.GetModelRequest(catalog_id=catalog_id)
        return await self._call("fit", lambda: self.fit.GetModel(request, timeout=CALL_TIMEOUT_S))

    async def list_models(
        self, use: "fit_service_pb2.ModelUse.ValueType" = fit_service_pb2.MODEL_USE_UNSPECIFIED
    ) -> fit_service_pb2.ListModelsResponse:
        """The catalogue: every page in one response."""

        def page(token: str) -> Awaitable[fit_service_pb2.ListModelsResponse]:
            request = fit_service_pb2.ListModelsRequest(use=use, page_token=token)
            return self.fit.ListModels(request, timeout=CALL_TIMEOUT_S)

        whole = await self._call("fit", partial(page, ""))
        token = whole.next_page_token
        while token:
            more = await self._call("fit", partial(page, token))
            whole.models.extend(more.models)
            token = more.next_page_token
        whole.next_page_token = ""
        return whole

    async def check_pull(
        self, catalog_id: str, machine: machine_pb2.Machine | None = None
    ) -> fit_service_pb2.CheckPullResponse:
        """Whether a download may start: the call fails with MODEL_WONT_RUN if the model could not run here."""
        request = fit_service_pb2.CheckPullRequest(catalog_id=catalog_id, machine=machine)
        return await self._call("fit", lambda: self.fit.CheckPull(request, timeout=CALL_TIMEOUT_S))

    async def list_fits(
        self,
        *,
        use: "fit_service_pb2.ModelUse.ValueType" = fit_service_pb2.MODEL_USE_UNSPECIFIED,
        quality: "plan_pb2.QualityTier.ValueType" = plan_pb2.QUALITY_TIER_UNSPECIFIED,
        machine: machine_pb2.Machine | None = None,
        catalog_ids: Sequence[str] = (),
    ) -> fit_service_pb2.ListFitsResponse:
        """The catalogue on one machine, every model with its verdict: every page in one response."""

        def page(token: str) -> Awaitable[fit_service_pb2.ListFitsResponse]:
            request = fit_service_pb2.ListFitsRequest(
                use=use, quality=quality, machine=machine, catalog_ids=catalog_ids, page_token=token
            )
            return self.fit.ListFits(request, timeout=CALL_TIMEOUT_S)

        whole = await self._call("fit", partial(page, ""))
        token = whole.next_page_token
        while token:
            more = await self._call("fit", partial(page, token))
            whole.fits.extend(more.fits)
            token = more.next_page_token
        whole.next_page_token = ""
        return whole

    # ---- ledger

    @property
    def ledger(self) -> "LedgerServiceAsyncStub":
        """Every rpc of LedgerService."""
        return ledger_service_pb2_grpc.LedgerServiceStub(self.channel("ledger"))

    async def capacity(self, machine: machine_pb2.Machine | None = None) -> ledger_service_pb2.GetCapacityResponse:
        """What the machine can hold and what is committed; with ``machine``, the ceilings of that what-if."""
        request = ledger_service_pb2.GetCapacityRequest(machine=machine)
        return await self._call("ledger", lambda: self.ledger.GetCapacity(request, timeout=CALL_TIMEOUT_S))

    async def set_limit(
        self, limit_bytes: int | None, spill_allowed: bool | None = None
    ) -> ledger_service_pb2.SetLimitResponse:
        """Set the person's limit over everything; None: automatic. Nobody is evicted by it.

        ``spill_allowed`` says whether a second model may spill from a card into host memory; None leaves that as it is.
        """
        request = ledger_service_pb2.SetLimitRequest(limit_bytes=limit_bytes, spill_allowed=spill_allowed)
        return await self._call("ledger", lambda: self.ledger.SetLimit(request, timeout=CALL_TIMEOUT_S))

    async def free(self, lease_id: str) -> ledger_service_pb2.ReleaseLeaseResponse:
        """An operator's word that the processes of a lease are gone: its bytes are free at once.

        Raises:
            CallError: FAILED_PRECONDITION PROCESS_ALIVE while the ledger sees one of them alive; NOT_FOUND
                LEASE_NOT_FOUND.
        """
        request = ledger_service_pb2.ReleaseLeaseRequest(lease_id=lease_id, reason="OPERATOR", operator_override=True)
        return await self._call("ledger", lambda: self.ledger.ReleaseLease(request, timeout=CALL_TIMEOUT_S))

    async def leases(self, *, include_released: bool = False) -> ledger_service_pb2.ListLeasesResponse:
        """All leases, oldest first: every page in one response."""

        def page(token: str) -> Awaitable[ledger_service_pb2.ListLeasesResponse]:
            request = ledger_service_pb2.ListLeasesRequest(page_token=token, include_released=include_released)
            return self.ledger.ListLeases(request, timeout=CALL_TIMEOUT_S)

        leases: list[lease_pb2.Lease] = []
        token = ""
        while True:
            response = await self._call("ledger", partial(page, token))
            leases.extend(response.leases)
            token = response.next_page_token
            if not token:
                return ledger_service_pb2.ListLeasesResponse(leases=leases)

    async def observations(
        self, *, model_digest: str = "", engine_build: str = "", shape: str = "", limit: int | None = 100
    ) -> Sequence[lease_pb2.Observation]:
        """Measured peaks of these weights, this build and this shape (empty: any), latest first, at most ``limit``;
        None: all."""

        def page(token: str, size: int) -> Awaitable[ledger_service_pb2.ListObservationsResponse]:
            request = ledger_service_pb2.ListObservationsRequest(
                model_digest=model_digest, engine_build=engine_build, shape=shape, page_size=size, page_token=token
            )
            return self.ledger.ListObservations(request, timeout=CALL_TIMEOUT_S)

        found: list[lease_pb2.Observation] = []
        token = ""
        while limit is None or len(found) < limit:
            size = OBSERVATIONS_PAGE if limit is None else min(OBSERVATIONS_PAGE, limit - len(found))
            response = await self._call("ledger", partial(page, token, size))
            found.extend(response.observations)
            token = response.next_page_token
            if not token:
                break
        return found

    # ---- engines

    def engine(self, kind: str) -> Engine:
        """The engine service of ``kind``: ``mlx``, ``sd`` or ``ds4``.

        Raises:
            ValueError: there is no such engine.
        """
        return Engine(self, kind)

    async def _call(self, name: str, start: Callable[[], Awaitable[T]]) -> T:
        await self.reach(name)
        return await answered(start(), name)

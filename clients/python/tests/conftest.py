"""A suite of fake servicers on real sockets, in a thread of its own so that the command's event loop is its own."""

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from weighbridge.reach import HEALTH_SERVICES
from weighbridge_proto.engines.v1 import (
    chat_service_pb2,
    chat_service_pb2_grpc,
    engine_service_pb2,
    engine_service_pb2_grpc,
    image_service_pb2_grpc,
)
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import fit_service_pb2, fit_service_pb2_grpc, plan_pb2, weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2, ledger_service_pb2_grpc
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

from clients.python.tests.client_fake_images import FakeImages, FakeImageState

GIB = 1 << 30
MIB = 1 << 20

LINES = [
    # (component, phase, low, expected, high): amounts that do not round to neat hundredths.
    ("model", "resident", 96_123_457, 96_123_457, 96_123_457),
    ("kv_cache", "resident", 94_371_841, 94_371_841, 94_371_841),
    ("process", "resident", 180_000_001, 200_000_001, 230_000_001),
    ("prefill", "prefill", 31_000_007, 40_000_007, 55_000_007),
    ("decode", "decode", 1_000_003, 2_000_003, 3_000_003),
]


def plan_response(verdict: int = requirement_pb2.VERDICT_RUNS) -> fit_service_pb2.PlanModelResponse:
    """A plan whose total is the sum of its resident lines and of its largest phase (prefill), worked out here."""
    total = [
        96_123_457 + 94_371_841 + low + prefill
        for low, prefill in ((180_000_001, 31_000_007), (200_000_001, 40_000_007), (230_000_001, 55_000_007))
    ]
    return fit_service_pb2.PlanModelResponse(
        requirement=requirement_pb2.Requirement(
            lines=[
                requirement_pb2.RequirementLine(
                    component=component,
                    phase=phase,
                    place=requirement_pb2.Place(kind=requirement_pb2.PLACE_KIND_HOST),
                    low_bytes=low,
                    expected_bytes=expected,
                    high_bytes=high,
                    source=requirement_pb2.FIGURE_SOURCE_DERIVED,
                    basis=f"basis of {component}",
                )
                for component, phase, low, expected, high in LINES
            ],
            total=requirement_pb2.ByteRange(low_bytes=total[0], expected_bytes=total[1], high_bytes=total[2]),
            peak_phase="prefill",
        ),
        assessment=requirement_pb2.Assessment(verdict=verdict, reason="It needs what it needs.", help=["Try less."]),
        claim=requirement_pb2.Claim(host_bytes=total[1]),
        model_name="tiny",
        model_digest="d" * 64,
        engine_kind=plan_pb2.ENGINE_KIND_MLX,
        workload=plan_pb2.Workload(chat=plan_pb2.ChatWorkload(context_tokens=4096, slots=1)),
        capacity=capacity_response(0).capacity,
    )


def capacity_response(committed: int) -> ledger_service_pb2.GetCapacityResponse:
    return ledger_service_pb2.GetCapacityResponse(
        capacity=machine_pb2.Capacity(
            node_id="node",
            pool=machine_pb2.POOL_KIND_CPU,
            source=machine_pb2.MACHINE_SOURCE_DETECTED,
            total_ram_bytes=32 * GIB,
            host=machine_pb2.Ceiling(automatic_bytes=24 * GIB, effective_bytes=24 * GIB, committed_bytes=committed),
            total=machine_pb2.Ceiling(automatic_bytes=24 * GIB, effective_bytes=24 * GIB, committed_bytes=committed),
        )
    )


def lease(lease_id: str = "lease-1", charged: int = 512 * MIB) -> lease_pb2.Lease:
    made = lease_pb2.Lease(lease_id=lease_id, state=lease_pb2.LEASE_STATE_ACTIVE)
    made.holder.name = "engine-mlx"
    made.purpose.model_name = "tiny"
    made.charge.host_bytes = charged
    return made


class FakeState:
    """What the fakes answer, and what they were asked. Tests set and read it from their own thread."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.failures: dict[str, RequestError] = {}
        self.plan = plan_response()
        self.plan_for: Any = None
        """Called with a request for a plan, in place of `plan`; a RequestError that it returns is answered."""
        self.entry = fit_service_pb2.CatalogModel()
        self.fits = fit_service_pb2.ListFitsResponse()
        self.models: list[fit_service_pb2.CatalogModel] = []
        """What the catalogue lists; empty: the models of `fits`."""
        self.leases = [lease()]
        self.observations: list[lease_pb2.Observation] = []
        self.committed = 512 * MIB
        self.limit: int | None = None
        self.watches: list[list[ledger_service_pb2.WatchResponse | RequestError]] = []
        """What each Watch call tells, one after the other; then it waits for what `tell` says."""
        self.watchers: list[asyncio.Queue[ledger_service_pb2.WatchResponse]] = []
        self.watched = threading.Event()
        self.catalog: set[str] = set()
        self.answer = ["The capital ", "is Paris."]
        self.deltas: list[chat_service_pb2.ChatDelta] = []
        """What an answer is made of, in place of the texts of `answer`."""
        self.ended_in_thinking = False
        self.engine_kind = plan_pb2.ENGINE_KIND_MLX
        self.draining = 0
        """Requests that were given up and that each engine still works on."""
        self.asked_while_draining = threading.Event()
        """Set when an engine told of them."""
        self.waits: list[engine_service_pb2.LoadModelResponse] = []
        """What a load tells between its plan and its admission."""
        self.rests: list[chat_service_pb2.ChatWaiting] = []
        """What an answer tells before it begins."""
        self.hang_after_answer = False
        self.hanging = threading.Event()
        self.cancelled = threading.Event()
        self.images = FakeImageState()
        self.runtime = ("mlx-lm 0.32.2", "")
        """What each engine says of its runtime, and why it cannot be started."""

    async def ask(self, method: str, request: Any, context: Any) -> None:
        self.requests.append(request)
        if failed := self.failures.get(method):
            await context.abort_with_status(failed.failure.to_grpc_status())

    def asked(self, kind: type) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]


class FakeFit(fit_service_pb2_grpc.FitServiceServicer):
    def __init__(self, state: FakeState) -> None:
        self.state = state

    async def DescribeWeights(self, request: Any, context: Any) -> fit_service_pb2.DescribeWeightsResponse:  # noqa: N802
        await self.state.ask("DescribeWeights", request, context)
        facts = weights_pb2.WeightFacts(
            name="tiny",
            format=weights_pb2.WEIGHT_FORMAT_SAFETENSORS,
            file_bytes=1_000_100,
            tensor_bytes=1_000_000,
            tensor_count=3,
            architecture="qwen3",
            model_digest="d" * 64,
            precisions=[
                weights_pb2.PrecisionTally(dtype="BF16", tensor_count=3, element_count=500_000, bytes=1_000_000)
            ],
        )
        return fit_service_pb2.DescribeWeightsResponse(facts=facts)

    async def PlanModel(self, request: Any, context: Any) -> fit_service_pb2.PlanModelResponse:  # noqa: N802
        await self.state.ask("PlanModel", request, context)
        if self.state.plan_for is None:
            return self.state.plan
        made = self.state.plan_for(request)
        if isinstance(made, RequestError):
            await context.abort_with_status(made.failure.to_grpc_status())
        return made

    async def ListFits(self, request: Any, context: Any) -> fit_service_pb2.ListFitsResponse:  # noqa: N802
        await self.state.ask("ListFits", request, context)
        # One model to a page, so that callers must follow the tokens.
        at = int(request.page_token or 0)
        whole = self.state.fits
        page = fit_service_pb2.ListFitsResponse(
            capacity=whole.capacity, fits=whole.fits[at : at + 1], notes=whole.notes
        )
        page.next_page_token = str(at + 1) if at + 1 < len(whole.fits) else ""
        return page

    async def CheckPull(self, request: Any, context: Any) -> fit_service_pb2.CheckPullResponse:  # noqa: N802
        await self.state.ask("CheckPull", request, context)
        assessment = requirement_pb2.Assessment(verdict=requirement_pb2.VERDICT_RUNS, reason="It fits.")
        return fit_service_pb2.CheckPullResponse(assessment=assessment, assessed=True, model=self.state.entry)

    async def GetModel(self, request: Any, context: Any) -> fit_service_pb2.GetModelResponse:  # noqa: N802
        if request.catalog_id not in self.state.catalog:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
        return fit_service_pb2.GetModelResponse(model=self.state.entry)

    async def ListModels(self, request: Any, context: Any) -> fit_service_pb2.ListModelsResponse:  # noqa: N802
        await self.state.ask("ListModels", request, context)
        # One model to a page, as lists of fits are.
        at = int(request.page_token or 0)
        models = self.state.models or [
            fit_service_pb2.CatalogModel(catalog_id=fit.catalog_id) for fit in self.state.fits.fits
        ]
        following = str(at + 1) if at + 1 < len(models) else ""
        return fit_service_pb2.ListModelsResponse(
            models=models[at : at + 1], next_page_token=following, notes=self.state.fits.notes
        )

    async def SolveContext(self, request: Any, context: Any) -> fit_service_pb2.SolveContextResponse:  # noqa: N802
        await self.state.ask("SolveContext", request, context)
        return fit_service_pb2.SolveContextResponse(context_tokens=8192, plan=self.state.plan)

    async def SolveSize(self, request: Any, context: Any) -> fit_service_pb2.SolveSizeResponse:  # noqa: N802
        await self.state.ask("SolveSize", request, context)
        return fit_service_pb2.SolveSizeResponse(width_px=1600, height_px=900, plan=self.state.plan)


class FakeLedger(ledger_service_pb2_grpc.LedgerServiceServicer):
    def __init__(self, state: FakeState) -> None:
        self.state = state

    async def GetCapacity(self, request: Any, context: Any) -> ledger_service_pb2.GetCapacityResponse:  # noqa: N802
        await self.state.ask("GetCapacity", request, context)
        return self.capacity()

    def capacity(self) -> ledger_service_pb2.GetCapacityResponse:
        response = capacity_response(self.state.committed)
        if self.state.limit is not None:
            for ceiling in (response.capacity.host, response.capacity.total):
                ceiling.limit_bytes = self.state.limit
                ceiling.effective_bytes = min(ceiling.automatic_bytes, self.state.limit)
        return response

    async def SetLimit(self, request: Any, context: Any) -> ledger_service_pb2.SetLimitResponse:  # noqa: N802
        await self.state.ask("SetLimit", request, context)
        self.state.limit = request.limit_bytes if request.HasField("limit_bytes") else None
        return ledger_service_pb2.SetLimitResponse(capacity=self.capacity().capacity)

    async def ReleaseLease(self, request: Any, context: Any) -> ledger_service_pb2.ReleaseLeaseResponse:  # noqa: N802
        await self.state.ask("ReleaseLease", request, context)
        return ledger_service_pb2.ReleaseLeaseResponse()

    async def Watch(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[ledger_service_pb2.WatchResponse]:
        await self.state.ask("Watch", request, context)
        later: asyncio.Queue[ledger_service_pb2.WatchResponse] = asyncio.Queue()
        self.state.watchers.append(later)
        self.state.watched.set()
        for told in self.state.watches.pop(0) if self.state.watches else ():
            if isinstance(told, RequestError):
                await context.abort_with_status(told.failure.to_grpc_status())
            else:
                yield told
        while True:
            yield await later.get()

    async def Admit(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[ledger_service_pb2.AdmitResponse]:
        await self.state.ask("Admit", request, context)
        try:
            yield ledger_service_pb2.AdmitResponse(queued=ledger_service_pb2.AdmitQueued(position=1))
            granted = ledger_service_pb2.AdmitGranted(lease=lease(), secret="s")
            yield ledger_service_pb2.AdmitResponse(granted=granted)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.state.cancelled.set()
            raise

    async def ListLeases(self, request: Any, context: Any) -> ledger_service_pb2.ListLeasesResponse:  # noqa: N802
        await self.state.ask("ListLeases", request, context)
        # One lease to a page, so that callers must follow the tokens.
        at = int(request.page_token or 0)
        following = str(at + 1) if at + 1 < len(self.state.leases) else ""
        return ledger_service_pb2.ListLeasesResponse(leases=self.state.leases[at : at + 1], next_page_token=following)

    async def ListObservations(self, request: Any, context: Any) -> ledger_service_pb2.ListObservationsResponse:  # noqa: N802
        await self.state.ask("ListObservations", request, context)
        # As the ledger pages: latest first, at most a thousand at once.
        matching = [one for one in self.state.observations if request.model_digest in ("", one.model_digest)]
        at, size = int(request.page_token or 0), min(request.page_size or 100, 1000)
        following = str(at + size) if at + size < len(matching) else ""
        return ledger_service_pb2.ListObservationsResponse(
            observations=matching[at : at + size], next_page_token=following
        )


class FakeEngine(engine_service_pb2_grpc.EngineServiceServicer):
    def __init__(self, state: FakeState) -> None:
        self.state = state

    def engine(self) -> engine_service_pb2.Engine:
        version, why_not = self.state.runtime
        engine = engine_service_pb2.Engine(
            kind=self.state.engine_kind,
            runtime_version=version,
            available=not why_not,
            unavailable_reason=why_not,
            state=engine_service_pb2.ENGINE_STATE_READY,
            requests_draining=self.state.draining,
        )
        engine.model.model_name = "tiny"
        engine.model.lease.CopyFrom(lease())
        engine.model.load_time.FromMilliseconds(1500)
        return engine

    async def GetEngine(self, request: Any, context: Any) -> engine_service_pb2.GetEngineResponse:  # noqa: N802
        await self.state.ask("GetEngine", request, context)
        if self.state.draining:
            self.state.asked_while_draining.set()
        return engine_service_pb2.GetEngineResponse(engine=self.engine())

    async def LoadModel(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[engine_service_pb2.LoadModelResponse]:
        planned = engine_service_pb2.LoadPlanned(plan=self.state.plan)
        yield engine_service_pb2.LoadModelResponse(planned=planned)
        await self.state.ask("LoadModel", request, context)
        for event in self.state.waits:
            yield event
        yield engine_service_pb2.LoadModelResponse(admitted=engine_service_pb2.LoadAdmitted(lease=lease()))
        starting = engine_service_pb2.LoadStarting(phase="weights", fraction=0.5)
        yield engine_service_pb2.LoadModelResponse(starting=starting)
        yield engine_service_pb2.LoadModelResponse(ready=engine_service_pb2.LoadReady(engine=self.engine()))

    async def UnloadModel(self, request: Any, context: Any) -> engine_service_pb2.UnloadModelResponse:  # noqa: N802
        await self.state.ask("UnloadModel", request, context)
        return engine_service_pb2.UnloadModelResponse(unloaded=self.engine().model)


class FakeChat(chat_service_pb2_grpc.ChatServiceServicer):
    def __init__(self, state: FakeState) -> None:
        self.state = state

    async def Chat(self, request: Any, context: Any) -> AsyncIterator[chat_service_pb2.ChatResponse]:  # noqa: N802
        try:
            for waiting in self.state.rests:
                yield chat_service_pb2.ChatResponse(waiting=waiting)
            yield chat_service_pb2.ChatResponse(started=chat_service_pb2.ChatStarted(model_name="tiny"))
            if self.state.draining:
                # Nothing comes until somebody has asked why.
                await asyncio.to_thread(self.state.asked_while_draining.wait, 60)
            for delta in self.state.deltas or [chat_service_pb2.ChatDelta(text=text) for text in self.state.answer]:
                yield chat_service_pb2.ChatResponse(delta=delta)
            await self.state.ask("Chat", request, context)
            if self.state.hang_after_answer:
                self.state.hanging.set()
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.state.cancelled.set()
            raise
        finished = chat_service_pb2.ChatFinished(
            reason=chat_service_pb2.FINISH_REASON_STOP, ended_in_thinking=self.state.ended_in_thinking
        )
        finished.usage.prompt_tokens = 12
        finished.usage.output_tokens = 21
        finished.usage.time_to_first_token.FromMilliseconds(250)
        finished.usage.generation_time.FromMilliseconds(500)
        yield chat_service_pb2.ChatResponse(finished=finished)


class FakeSuite:
    """The fakes on the sockets of one run folder."""

    def __init__(self, run_dir: Path, engines: tuple[str, ...] = ("mlx",)) -> None:
        self.run_dir = run_dir
        self.state = FakeState()
        self._names = ("fit", "ledger", *(f"engine-{kind}" for kind in engines))
        self.environ = {"WEIGHBRIDGE_RUN_DIR": str(run_dir), "PATH": os.environ["PATH"], "HOME": str(run_dir)}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._servers: list[grpc.aio.Server] = []
        self._starting: list[asyncio.Future[None]] = []

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)

    def stop(self) -> None:
        async def end() -> None:
            for server in self._servers:
                await server.stop(None)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def tell(self, change: ledger_service_pb2.WatchResponse) -> None:
        """Tell everybody who watches."""

        def put() -> None:
            for watcher in self.state.watchers:
                watcher.put_nowait(change)

        self._loop.call_soon_threadsafe(put)

    def stop_serving(self) -> None:
        """The services go away as if killed; the folder and what the fakes know stay."""

        async def end() -> None:
            while self._servers:
                await self._servers.pop().stop(None)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)

    def serve_again(self) -> None:
        """The services come back."""
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)

    def serve_soon(self, name: str) -> None:
        """One more service comes up; for what is called in the loop of the fakes."""
        self._starting.append(asyncio.ensure_future(self._serve_one(name)))

    async def _serve(self) -> None:
        for name in self._names:
            await self._serve_one(name)

    async def _serve_one(self, name: str) -> None:
        server = grpc.aio.server()
        if name == "fit":
            fit_service_pb2_grpc.add_FitServiceServicer_to_server(FakeFit(self.state), server)
        elif name == "ledger":
            ledger_service_pb2_grpc.add_LedgerServiceServicer_to_server(FakeLedger(self.state), server)
        else:
            engine_service_pb2_grpc.add_EngineServiceServicer_to_server(FakeEngine(self.state), server)
            chat_service_pb2_grpc.add_ChatServiceServicer_to_server(FakeChat(self.state), server)
            image_service_pb2_grpc.add_ImageServiceServicer_to_server(FakeImages(self.state), server)
        healths = health.aio.HealthServicer()
        for service in HEALTH_SERVICES[name]:
            await healths.set(service, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(healths, server)
        server.add_insecure_port(f"unix:{self.run_dir / name}.sock")
        await server.start()
        self._servers.append(server)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A private folder whose path leaves room for sockets; pytest's own may be too long."""
    folder = Path(tempfile.mkdtemp(prefix="wb-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def run_dir(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder of this test, for this process and its children, with no other setting of weighbridge."""
    for name in list(os.environ):
        if name.startswith("WEIGHBRIDGE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WEIGHBRIDGE_RUN_DIR", str(short_dir))
    return short_dir


@pytest.fixture
def unstarted_suite(run_dir: Path) -> FakeSuite:
    """A fake suite in the run folder of this test, which the test starts and stops itself."""
    return FakeSuite(run_dir)


@pytest.fixture
def fake_suite(unstarted_suite: FakeSuite) -> Iterator[FakeSuite]:
    """A running fake suite in the run folder of this test."""
    unstarted_suite.start()
    yield unstarted_suite
    unstarted_suite.stop()


@pytest.fixture
def image_suite(run_dir: Path) -> Iterator[FakeSuite]:
    """A running fake suite that has an engine for images too."""
    suite = FakeSuite(run_dir, ("mlx", "sd"))
    suite.start()
    yield suite
    suite.stop()


@pytest.fixture
def ds4_suite(run_dir: Path) -> Iterator[FakeSuite]:
    """A running fake suite that has an engine for DeepSeek-class chats too."""
    suite = FakeSuite(run_dir, ("mlx", "ds4"))
    suite.start()
    yield suite
    suite.stop()

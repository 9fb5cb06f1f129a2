"""A ledger and a fit over real channels, for tests of an engine host; and one suite of it all."""

# ruff: noqa: N802, ASYNC110 # rpcs are named as in the contract; tests poll

import asyncio
import contextlib
import json
import os
import signal
import sys
import uuid
from pathlib import Path

import grpc
from weighbridge_common.server import start_server
from weighbridge_common.settings import ServiceSettings
from weighbridge_engines.host.clock import Clock
from weighbridge_engines.host.footprint import Probe
from weighbridge_engines.host.service import build_engine_service
from weighbridge_engines.mlx_qwen.kind import MlxKind
from weighbridge_engines.settings import EngineSettings
from weighbridge_proto.channel import open_channel
from weighbridge_proto.engines.v1 import (
    chat_service_pb2,
    chat_service_pb2_grpc,
    engine_service_pb2,
    engine_service_pb2_grpc,
)
from weighbridge_proto.errors import RequestError, RpcFailure
from weighbridge_proto.fit.v1 import fit_service_pb2, fit_service_pb2_grpc, plan_pb2, weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2, ledger_service_pb2_grpc
from weighbridge_proto.memory.v1 import requirement_pb2

FAKE_RUNTIME = Path(__file__).with_name("fake_runtime.py")
CLAIM_BYTES = 1_000_000_000
S = grpc.StatusCode


async def eventually(condition, timeout_s=10.0):
    """Wait until ``condition()`` holds; fail if it does not within ``timeout_s``."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def process_exists(pid):
    """Whether ``pid`` runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


class FakeLedger(ledger_service_pb2_grpc.LedgerServiceServicer):
    """Grants at once or when told; keeps what it was asked. Leases survive its restart, secrets do not."""

    def __init__(self):
        self.leases = {}
        self.secrets = {}
        self.admits = []
        self.released = []
        self.uses_begun = 0
        self.observations = []
        self.observed = []
        self.load_complete = set()
        self.grant = asyncio.Event()
        self.grant.set()
        self.activate_gate = asyncio.Event()
        self.activate_gate.set()
        self.use_gate = asyncio.Event()
        self.use_gate.set()
        self.refuse_growth = False
        self.growths_refused = 0
        self.attached = 0
        self.stopping = False
        self.refuse_use = None
        self.forget_all = False
        self.term_s = 30.0
        self.streams = set()

    @property
    def committed(self):
        return sum(
            lease.charge.host_bytes
            for lease in self.leases.values()
            if lease.state not in (lease_pb2.LEASE_STATE_QUEUED, lease_pb2.LEASE_STATE_RELEASED)
        )

    @property
    def active(self):
        return [lease for lease in self.leases.values() if lease.state == lease_pb2.LEASE_STATE_ACTIVE]

    def restart(self):
        """What a restart does to secrets and streams; the server is restarted by the suite."""
        self.secrets = {lease_id: uuid.uuid4().hex for lease_id in self.leases}
        self.streams.clear()

    def vacate(self, lease_id):
        self.leases[lease_id].state = lease_pb2.LEASE_STATE_VACATING
        reason = RpcFailure(S.ABORTED, "RECLAIMED", "Somebody needs it.").to_message()
        for stream in self.streams:
            stream.put_nowait(
                ledger_service_pb2.KeepAliveResponse(
                    lease_id=lease_id, vacate=ledger_service_pb2.VacateRequested(reason=reason)
                )
            )

    def _check(self, lease_id, secret):
        lease = self.leases.get(lease_id)
        if lease is None or self.forget_all or lease.state == lease_pb2.LEASE_STATE_RELEASED:
            raise RequestError(S.NOT_FOUND, "LEASE_NOT_FOUND", "No such lease.")
        if self.secrets[lease_id] != secret:
            raise RequestError(S.PERMISSION_DENIED, "LEASE_SECRET_MISMATCH", "Another secret.")
        return lease

    async def Admit(self, request, context):
        self.admits.append(request)
        if self.stopping:
            raise RequestError(S.UNAVAILABLE, "LEDGER_STOPPING", "Stopping.")
        lease = lease_pb2.Lease(
            lease_id=uuid.uuid4().hex, state=lease_pb2.LEASE_STATE_QUEUED, holder=request.holder, node_id="node-1"
        )
        lease.purpose.CopyFrom(request.purpose)
        self.leases[lease.lease_id] = lease
        try:
            if not self.grant.is_set():
                yield ledger_service_pb2.AdmitResponse(
                    queued=ledger_service_pb2.AdmitQueued(lease_id=lease.lease_id, position=1)
                )
                await self.grant.wait()
            lease.state = lease_pb2.LEASE_STATE_GRANTED
            lease.charge.host_bytes = request.claim.host_bytes
            secret = self.secrets[lease.lease_id] = uuid.uuid4().hex
            yield ledger_service_pb2.AdmitResponse(granted=ledger_service_pb2.AdmitGranted(lease=lease, secret=secret))
            while lease.state == lease_pb2.LEASE_STATE_GRANTED:
                await asyncio.sleep(0.005)
        finally:
            if lease.state in (lease_pb2.LEASE_STATE_QUEUED, lease_pb2.LEASE_STATE_GRANTED):
                lease.state = lease_pb2.LEASE_STATE_RELEASED

    async def ActivateLease(self, request, context):
        await self.activate_gate.wait()
        lease = self._check(request.lease_id, request.secret)
        lease.state = lease_pb2.LEASE_STATE_ACTIVE
        lease.engine_processes.extend(request.engine_processes)
        return ledger_service_pb2.ActivateLeaseResponse(lease=lease)

    async def AttachLease(self, request, context):
        lease = self.leases.get(request.lease_id)
        if lease is None or self.forget_all or lease.state == lease_pb2.LEASE_STATE_RELEASED:
            raise RequestError(S.NOT_FOUND, "LEASE_NOT_FOUND", "No such lease.")
        assert request.process == lease.holder.process
        if request.secret and request.secret != self.secrets[request.lease_id]:
            raise RequestError(S.PERMISSION_DENIED, "LEASE_SECRET_MISMATCH", "Another secret.")
        self.attached += 1
        secret = self.secrets[request.lease_id] = uuid.uuid4().hex
        return ledger_service_pb2.AttachLeaseResponse(lease=lease, secret=secret)

    async def KeepAlive(self, request_iterator, context):
        outbox = asyncio.Queue()
        self.streams.add(outbox)

        async def read():
            async for request in request_iterator:
                await outbox.put(self._renew(request))
            await outbox.put(None)

        reading = asyncio.create_task(read())
        try:
            while (response := await outbox.get()) is not None:
                yield response
        finally:
            reading.cancel()
            self.streams.discard(outbox)

    def _renew(self, request):
        response = ledger_service_pb2.KeepAliveResponse(lease_id=request.lease_id)
        try:
            lease = self._check(request.lease_id, request.secret)
            if request.HasField("observed"):
                self.observed.append(request.observed)
                if request.observed.host_bytes > lease.charge.host_bytes:
                    if self.refuse_growth:
                        told = {
                            "observed_bytes": request.observed.host_bytes,
                            "granted_bytes": lease.charge.host_bytes,
                        }
                        self.growths_refused += 1
                        raise RequestError(S.RESOURCE_EXHAUSTED, "OUT_OF_GRANT", "It holds more.", metadata=told)
                    lease.charge.host_bytes = request.observed.host_bytes
        except RequestError as error:
            response.failure.CopyFrom(error.failure.to_message())
            return response
        if request.load_complete:
            self.load_complete.add(request.lease_id)
        response.renewed.term.FromNanoseconds(int(self.term_s * 1e9))
        response.renewed.charge.CopyFrom(lease.charge)
        return response

    async def BeginUse(self, request, context):
        lease = self._check(request.lease_id, request.secret)
        if lease.state == lease_pb2.LEASE_STATE_VACATING or self.refuse_use == request.lease_id:
            raise RequestError(S.FAILED_PRECONDITION, "LEASE_VACATING", "Asked to vacate.")
        lease.uses += 1
        self.uses_begun += 1
        await self.use_gate.wait()
        return ledger_service_pb2.BeginUseResponse(use_id=request.use_id)

    async def EndUse(self, request, context):
        lease = self._check(request.lease_id, request.secret)
        lease.uses -= 1
        return ledger_service_pb2.EndUseResponse(uses=lease.uses)

    async def ReleaseLease(self, request, context):
        lease = self._check(request.lease_id, request.secret)
        living = [p.pid for p in lease.engine_processes if process_exists(p.pid)]
        assert not living, f"released while {living} live"
        lease.state = lease_pb2.LEASE_STATE_RELEASED
        self.released.append(request.reason)
        return ledger_service_pb2.ReleaseLeaseResponse(lease=lease)

    async def RecordObservation(self, request, context):
        self.observations.append(request.observation)
        return ledger_service_pb2.RecordObservationResponse(observation=request.observation)


class FakeFit(fit_service_pb2_grpc.FitServiceServicer):
    """Plans any path: the digest is its name, the shape its workload. Of its catalogue nothing is on disk."""

    def __init__(self):
        self.plans = []
        self.slots = 1

    async def PlanModel(self, request, context):
        self.plans.append(request)
        name = request.model.path or request.model.catalog_id
        if name == "missing":
            raise RequestError(S.NOT_FOUND, "MODEL_NOT_FOUND", "No such model.")
        plan = fit_service_pb2.PlanModelResponse(
            claim=requirement_pb2.Claim(host_bytes=CLAIM_BYTES),
            model_digest=f"digest-{name.removeprefix('also-')}",
            model_name=name,
            engine_kind=plan_pb2.ENGINE_KIND_MLX,
            shape=f"context={request.workload.chat.context_tokens or 4096}",
            resolved_path="" if request.model.catalog_id else f"/models/{name.removeprefix('also-')}",
        )
        plan.launch.mlx.slots = self.slots
        plan.requirement.total.expected_bytes = CLAIM_BYTES
        plan.assessment.verdict = requirement_pb2.VERDICT_WONT_RUN if name == "huge" else requirement_pb2.VERDICT_RUNS
        plan.assessment.reason = "It fits." if name != "huge" else "It needs 900 GiB."
        return plan


class Suite:
    """Ledger, fit and one engine host in this process, its runtime a real child process."""

    def __init__(self, run_dir: Path, behaviour=None, clock=None, held_bytes=None, **settings):
        self.run_dir = run_dir
        self.ledger = FakeLedger()
        self.fit = FakeFit()
        self.behaviour = behaviour or {}
        self.held_bytes = held_bytes or (lambda: 500_000_000)
        self._clock = clock
        self._settings = settings
        self._plain = ServiceSettings(run_dir=str(run_dir), grace_s=0)

    async def __aenter__(self):
        self._ledger_server = await self._start_ledger()
        self._fit_server = await start_server(self._plain, "fit", self._build_fit)
        settings = EngineSettings(
            run_dir=str(self.run_dir),
            **{"stop_grace_s": 1.0, "footprint_period_s": 0.02, "grace_s": 5, **self._settings},
        )
        kind = MlxKind(
            command=(sys.executable, str(FAKE_RUNTIME)),
            environ={"FAKE_RUNTIME": json.dumps(self.behaviour)},
            kernels=self.run_dir / "kernels",
        )
        probe = Probe(footprint=lambda pid: self.held_bytes(), peak=lambda pid: None)

        async def build(context):
            self.service = await build_engine_service(context, kind, settings, clock=self._clock, probe=probe)
            return self.service

        self.server = await start_server(settings, "engine-mlx", build)
        self.channel = open_channel(self.server.target)
        self.engine = engine_service_pb2_grpc.EngineServiceStub(self.channel)
        self.chats = chat_service_pb2_grpc.ChatServiceStub(self.channel)
        return self

    async def __aexit__(self, *exc):
        await self.channel.close()
        await self.server.stop(0)
        await self._fit_server.stop(0)
        if self._ledger_server is not None:
            await self._ledger_server.stop(0)

    @property
    def host(self):
        return self.service.host

    @property
    def engine_pids(self):
        """Guards and engines that leases name and that live."""
        return [p.pid for lease in self.ledger.leases.values() for p in lease.engine_processes if process_exists(p.pid)]

    def load(self, name="a", **fields):
        return self.engine.LoadModel(
            engine_service_pb2.LoadModelRequest(model=weights_pb2.ModelRef(path=name), **fields)
        )

    async def load_all(self, name="a", **fields):
        return [event async for event in self.load(name, **fields)]

    def chat(self, prompt="hello", model="a"):
        request = chat_service_pb2.ChatRequest(
            messages=[
                chat_service_pb2.ChatMessage(
                    role=chat_service_pb2.ROLE_USER, parts=[chat_service_pb2.ContentPart(text=prompt)]
                )
            ]
        )
        if model:
            request.model.path = model
        return self.chats.Chat(request)

    async def chat_all(self, prompt="hello", model="a"):
        return [event async for event in self.chat(prompt, model)]

    async def get(self):
        return (await self.engine.GetEngine(engine_service_pb2.GetEngineRequest())).engine

    async def unload(self, force=False):
        return await self.engine.UnloadModel(engine_service_pb2.UnloadModelRequest(force=force))

    async def nothing_left(self):
        """Neither process nor lease."""
        await eventually(lambda: not self.engine_pids and self.ledger.committed == 0)
        assert not list(self.run_dir.glob("mlx-*"))

    async def stop_ledger(self):
        await self._ledger_server.stop(0)
        self._ledger_server = None

    async def restart_ledger(self):
        if self._ledger_server is not None:
            await self.stop_ledger()
        self.ledger.restart()
        self._ledger_server = await self._start_ledger()

    async def _start_ledger(self):
        async def build(context):
            context.add(ledger_service_pb2_grpc.add_LedgerServiceServicer_to_server, self.ledger)

        return await start_server(self._plain, "ledger", build)

    async def _build_fit(self, context):
        context.add(fit_service_pb2_grpc.add_FitServiceServicer_to_server, self.fit)


async def failure_of(call):
    """The failure that a stream or a coroutine ends with."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.RpcError as error:
        return RpcFailure.from_rpc_error(error)
    raise AssertionError("it did not fail")


async def until_event(call, kind):
    """Read a stream up to an event of this kind."""
    async for event in call:
        if event.WhichOneof("event") == kind:
            return event
    raise AssertionError(f"no {kind}")


def kill(pid, number=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kinds(events):
    return [event.WhichOneof("event") for event in events]


class ManualClock:
    """A clock that moves when told; sleepers wake when their time has come. Retries of a second or less just pass."""

    def __init__(self):
        self.now_s = 1000.0
        self._sleepers = []

    def clock(self):
        return Clock(monotonic=lambda: self.now_s, wall=lambda: 1_800_000_000.0 + self.now_s, sleep=self._sleep)

    async def _sleep(self, seconds):
        if seconds <= 1:
            await asyncio.sleep(seconds)
            return
        future = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now_s + seconds, future))
        await future

    def advance(self, seconds):
        self.now_s += seconds
        due = [entry for entry in self._sleepers if entry[0] <= self.now_s]
        self._sleepers = [entry for entry in self._sleepers if entry[0] > self.now_s]
        for _, future in due:
            if not future.done():
                future.set_result(None)

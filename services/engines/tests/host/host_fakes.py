"""A ledger and a fit over real channels, for tests of an engine host; and one suite of it all."""

# ruff: noqa: N802, ASYNC110 # rpcs are named as in the contract; tests poll

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import grpc
from fake_ledger import FakeLedger, process_exists
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
from weighbridge_proto.ledger.v1 import ledger_service_pb2_grpc
from weighbridge_proto.memory.v1 import requirement_pb2

FAKE_RUNTIME = Path(__file__).with_name("fake_runtime.py")
CLAIM_BYTES = 1_000_000_000
S = grpc.StatusCode


async def eventually(condition, timeout_s=10.0):
    """Wait until ``condition()`` holds; fail if it does not within ``timeout_s``."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


class FakeFit(fit_service_pb2_grpc.FitServiceServicer):
    """Plans any path: the digest is its name, the shape its workload. Of its catalogue nothing is on disk."""

    def __init__(self):
        self.plans = []
        self.slots = 1
        self.optional_bytes = 0

    async def PlanModel(self, request, context):
        self.plans.append(request)
        name = request.model.path or request.model.catalog_id
        if name == "missing":
            raise RequestError(S.NOT_FOUND, "MODEL_NOT_FOUND", "No such model.")
        plan = fit_service_pb2.PlanModelResponse(
            claim=requirement_pb2.Claim(host_bytes=CLAIM_BYTES, optional_host_bytes=self.optional_bytes),
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

    def __init__(self, run_dir: Path, behaviour=None, clock=None, held_bytes=None, kind=None, fit=None, **settings):
        self.run_dir = run_dir
        self.ledger = FakeLedger()
        self.fit = fit or FakeFit()
        self.kind = kind or MlxKind(
            command=(sys.executable, str(FAKE_RUNTIME)),
            environ={"FAKE_RUNTIME": json.dumps(behaviour or {})},
            kernels=run_dir / "kernels",
        )
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
        probe = Probe(footprint=lambda pid: self.held_bytes(), peak=lambda pid: None)

        async def build(context):
            self.service = await build_engine_service(context, self.kind, settings, clock=self._clock, probe=probe)
            return self.service

        self.server = await start_server(settings, f"engine-{self.kind.name}", build)
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

    def chat_request(self, prompt="hello", model="a"):
        request = chat_service_pb2.ChatRequest(
            messages=[
                chat_service_pb2.ChatMessage(
                    role=chat_service_pb2.ROLE_USER, parts=[chat_service_pb2.ContentPart(text=prompt)]
                )
            ]
        )
        if model:
            request.model.path = model
        return request

    def chat(self, prompt="hello", model="a"):
        return self.chats.Chat(self.chat_request(prompt, model))

    async def chat_all(self, prompt="hello", model="a"):
        return [event async for event in self.chat(prompt, model)]

    async def get(self):
        return (await self.engine.GetEngine(engine_service_pb2.GetEngineRequest())).engine

    async def unload(self, force=False):
        return await self.engine.UnloadModel(engine_service_pb2.UnloadModelRequest(force=force))

    async def nothing_left(self):
        """Neither process nor lease."""
        await eventually(lambda: not self.engine_pids and self.ledger.committed == 0)
        assert not list(self.run_dir.glob(f"{self.kind.name}-*"))

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

    async def pass_a_sleep(self, seconds):
        """Let so much time pass as somebody sleeps for, once they do."""
        await eventually(lambda: any(due == self.now_s + seconds for due, _ in self._sleepers))
        self.advance(seconds)

    def advance(self, seconds):
        self.now_s += seconds
        due = [entry for entry in self._sleepers if entry[0] <= self.now_s]
        self._sleepers = [entry for entry in self._sleepers if entry[0] > self.now_s]
        for _, future in due:
            if not future.done():
                future.set_result(None)

"""Puts an engine service together for its process."""

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

from weighbridge_common import processes
from weighbridge_common.server import ServerContext
from weighbridge_common.tasks import TaskOwner
from weighbridge_proto import targets
from weighbridge_proto.channel import open_channel
from weighbridge_proto.engines.v1 import chat_service_pb2_grpc, engine_service_pb2_grpc, image_service_pb2_grpc
from weighbridge_proto.ledger.v1 import lease_pb2

from weighbridge_engines.host.clock import Clock
from weighbridge_engines.host.engine_host import EngineHost
from weighbridge_engines.host.footprint import Probe
from weighbridge_engines.host.kind import Kind
from weighbridge_engines.host.lease import LeasePolicy
from weighbridge_engines.host.ledger import LedgerGateway
from weighbridge_engines.host.plans import Planner
from weighbridge_engines.host.residency import ResidencyPolicy, Surroundings
from weighbridge_engines.host.servicers import ChatServicer, EngineServicer, ImageServicer, NoImages
from weighbridge_engines.settings import EngineSettings
from weighbridge_engines.supervisor import cgroup
from weighbridge_engines.supervisor.budget import RestartBudget
from weighbridge_engines.supervisor.output import RingLog
from weighbridge_engines.supervisor.records import ProcessRecord


class EngineService:
    """What an engine process builds and gives back."""

    def __init__(self, host: EngineHost, tasks: TaskOwner, channels: contextlib.AsyncExitStack) -> None:
        self.host = host
        self._tasks = tasks
        self._channels = channels

    async def aclose(self) -> None:
        """See :class:`weighbridge_common.server.AsyncClosable`."""
        try:
            await self.host.aclose()
        finally:
            await self._tasks.aclose()
            await self._channels.aclose()


async def build_engine_service(
    context: ServerContext,
    kind: Kind,
    settings: EngineSettings,
    *,
    clock: Clock | None = None,
    probe: Probe | None = None,
) -> EngineService:
    """Register the services of one engine and end what an earlier process of this service left.

    Args:
        clock, probe: other than the real ones, for tests.

    Raises:
        OSError: the run folder cannot be used.
    """
    clock, probe = clock or Clock(), probe or Probe()
    environ = {**os.environ, **({"WEIGHBRIDGE_RUN_DIR": settings.run_dir} if settings.run_dir else {})}
    run_dir = targets.run_dir(environ)
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    me = processes.current()
    record = ProcessRecord(run_dir / f"{context.name}.processes.json", me)
    await record.reap()
    _remove_stale_workspaces(run_dir, kind.name)

    async with contextlib.AsyncExitStack() as opened:
        ledger_channel = await opened.enter_async_context(open_channel(targets.target("ledger", environ)))
        fit_channel = await opened.enter_async_context(open_channel(targets.target("fit", environ)))
        policy = LeasePolicy(
            term_s=settings.lease_term_s,
            patience_s=settings.ledger_patience_s,
            fences_itself={"on": True, "off": False}.get(settings.fence_when_silent),
        )
        holder = lease_pb2.Holder(
            name=context.name, process=me.to_message(), memory_limit_bytes=cgroup.memory_limit_bytes() or 0
        )
        around = Surroundings(
            kind=kind,
            run_dir=run_dir,
            log=RingLog(now=clock.wall),
            record=record,
            policy=policy_of(settings, kind),
            clock=clock,
            probe=probe,
        )
        host = EngineHost(
            around,
            await asyncio.to_thread(kind.describe),
            Planner(fit_channel, kind.engine_kind, settings.ledger_patience_s, clock, kind.complete_options),
            LedgerGateway(ledger_channel, holder, policy, settings.ledger_patience_s, clock),
            RestartBudget(),
            settings.idle_timeout_s or None,
        )
        context.add(engine_service_pb2_grpc.add_EngineServiceServicer_to_server, EngineServicer(host, context.stopping))
        context.add(chat_service_pb2_grpc.add_ChatServiceServicer_to_server, ChatServicer(host))
        context.add(image_service_pb2_grpc.add_ImageServiceServicer_to_server, _image_servicer(host))
        tasks = TaskOwner()
        tasks.start(_stop_with(context.stopping, host), "engine-stopping")
        return EngineService(host, tasks, opened.pop_all())


def policy_of(settings: EngineSettings, kind: Kind) -> ResidencyPolicy:
    """The figures of a residency. A time that somebody has set is taken as it is; a default is raised to what the kind
    of engine needs."""
    start_timeout_s, stop_grace_s = settings.start_timeout_s, settings.stop_grace_s
    if "start_timeout_s" not in settings.model_fields_set:
        start_timeout_s = max(start_timeout_s, kind.least_start_timeout_s)
    if "stop_grace_s" not in settings.model_fields_set:
        stop_grace_s = max(stop_grace_s, kind.least_stop_grace_s)
    return ResidencyPolicy(
        start_timeout_s=start_timeout_s,
        stop_grace_s=stop_grace_s,
        queue_limit=settings.queue_limit,
        footprint_period_s=settings.footprint_period_s,
    )


def _image_servicer(host: EngineHost) -> image_service_pb2_grpc.ImageServiceServicer:
    if not host.around.kind.does_images:
        return NoImages(host)
    from weighbridge_engines.host.images import Images  # pictures need Pillow, which only such an engine brings

    return ImageServicer(Images(host).generate)


async def _stop_with(stopping: asyncio.Event, host: EngineHost) -> None:
    await stopping.wait()
    host.begin_stop()


def _remove_stale_workspaces(run_dir: Path, kind: str) -> None:
    # Only one service of a kind serves from a run folder, and its engines are gone by now.
    for folder in run_dir.glob(f"{kind}-??????"):
        shutil.rmtree(folder, ignore_errors=True)

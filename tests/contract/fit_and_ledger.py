"""The real ledger and the real fit in one process, over real channels, for one declared machine."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weighbridge_common import processes
from weighbridge_common.server import start_server
from weighbridge_fit.service import build
from weighbridge_fit.settings import FitSettings
from weighbridge_ledger.service.app import build_ledger
from weighbridge_ledger.settings import LedgerSettings
from weighbridge_proto.channel import open_channel
from weighbridge_proto.fit.v1 import fit_service_pb2_grpc
from weighbridge_proto.ledger.v1 import ledger_service_pb2, ledger_service_pb2_grpc
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2


@dataclass
class Pair:
    """Stubs of both services."""

    fit: Any
    ledger: Any

    async def machine(self) -> machine_pb2.Machine:
        """The ledger's own machine as a what-if would name it."""
        capacity = (await self.ledger.GetCapacity(ledger_service_pb2.GetCapacityRequest())).capacity
        return machine_pb2.Machine(
            node_id=capacity.node_id,
            pool=capacity.pool,
            ram_bytes=capacity.total_ram_bytes,
            devices=[card.device for card in capacity.devices],
            limit_bytes=capacity.total.limit_bytes,
            platform=capacity.platform,
        )

    async def hold(self, claim: requirement_pb2.Claim) -> None:
        """Takes a claim and holds it, as an engine does."""
        me = processes.current().to_message()
        call = self.ledger.Admit(
            ledger_service_pb2.AdmitRequest(holder={"name": "holder", "process": me}, claim=claim), timeout=30
        )
        granted = (await call.read()).granted
        await self.ledger.ActivateLease(
            ledger_service_pb2.ActivateLeaseRequest(lease_id=granted.lease.lease_id, secret=granted.secret, process=me),
            timeout=30,
        )


@contextlib.asynccontextmanager
async def serving(folder: Path, spec: str, *, with_ledger: bool = True) -> AsyncIterator[Pair]:
    """Both services on a declared machine; models are under `models` in the folder, manifests under `manifests`."""
    for name in ("models", "manifests", "data"):
        (folder / name).mkdir(exist_ok=True)
    ledger_settings = LedgerSettings(
        listen=f"unix:{folder}/ledger.sock", data_dir=folder / "data", machine=spec, grace_s=0.5
    )
    fit_settings = FitSettings(
        listen=f"unix:{folder}/fit.sock",
        models_root=folder / "models",
        catalog_folder=folder / "manifests",
        ledger_target=f"unix:{folder}/ledger.sock",
        grace_s=0.5,
    )
    async with contextlib.AsyncExitStack() as stack:
        if with_ledger:
            await stack.enter_async_context(await start_server(ledger_settings, "ledger", build_ledger))
        fit = await stack.enter_async_context(await start_server(fit_settings, "fit", build))
        to_fit = await stack.enter_async_context(open_channel(fit.target))
        to_ledger = await stack.enter_async_context(open_channel(f"unix:{folder}/ledger.sock"))
        yield Pair(fit_service_pb2_grpc.FitServiceStub(to_fit), ledger_service_pb2_grpc.LedgerServiceStub(to_ledger))

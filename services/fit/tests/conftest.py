"""Fixtures of the tests that reach the service over a real channel."""

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors.numpy import save_file
from weighbridge_common.server import start_server
from weighbridge_fit.service import build
from weighbridge_fit.settings import FitSettings
from weighbridge_proto.channel import open_channel
from weighbridge_proto.fit.v1 import fit_service_pb2_grpc
from weighbridge_proto.ledger.v1 import ledger_service_pb2_grpc

# The fakes lie beside the tests, and pytest's importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from fit_fakes import CONFIG, FakeLedger


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Qwen3 under the models root."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    save_file({"model.w": np.zeros((64, 64), np.float16)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def manifests(tmp_path: Path) -> Path:
    """The folder of the user's own manifests."""
    folder = tmp_path / "manifests"
    folder.mkdir()
    return folder


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[FakeLedger]:
    server = grpc.aio.server()
    fake = FakeLedger()
    ledger_service_pb2_grpc.add_LedgerServiceServicer_to_server(fake, server)
    server.add_insecure_port(f"unix:{tmp_path}/ledger.sock")
    await server.start()
    yield fake
    await server.stop(None)


@pytest.fixture
async def fit(tmp_path: Path, model: Path, manifests: Path) -> AsyncIterator[Any]:
    settings = FitSettings(
        listen=f"unix:{tmp_path}/fit.sock",
        models_root=model.parent,
        catalog_folder=manifests,
        ledger_target=f"unix:{tmp_path}/ledger.sock",
        ledger_timeout_s=5.0,
    )
    async with await start_server(settings, "fit", build) as running, open_channel(running.target) as channel:
        yield fit_service_pb2_grpc.FitServiceStub(channel)

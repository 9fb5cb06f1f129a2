"""An engine service as a process of its own, its runtime the fake one."""

import os
import sys
from pathlib import Path

from weighbridge_common.server import run_service
from weighbridge_common.settings import load
from weighbridge_engines.host.footprint import Probe
from weighbridge_engines.host.service import build_engine_service
from weighbridge_engines.mlx_qwen.kind import MlxKind
from weighbridge_engines.settings import EngineSettings

settings = load(EngineSettings)
kind = MlxKind(
    command=(sys.executable, str(Path(__file__).with_name("fake_runtime.py"))),
    environ={"FAKE_RUNTIME": os.environ.get("FAKE_RUNTIME", "{}")},
    kernels=Path(os.environ["WEIGHBRIDGE_RUN_DIR"]) / "kernels",
)
probe = Probe(footprint=lambda pid: 500_000_000)
run_service(settings, "engine-mlx", lambda context: build_engine_service(context, kind, settings, probe=probe))
